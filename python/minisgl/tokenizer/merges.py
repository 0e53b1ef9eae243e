"""The merges of a SentencePiece vocabulary, which stores only scores, and their cache.

Finding them takes a second for 260,000 pieces, so those of large vocabularies are kept in the
user's cache folder, under a hash of all that they depend on. Invariant: what is read there is
exactly what was once written, or it is computed anew. May import `utils`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from itertools import chain
from pathlib import Path

import numpy as np

from minisgl.utils.default_model import cache_dir

CACHED_FROM = 1 << 16  # pieces; fewer are as quick to work out
MAX_PIECE_CHARS = 128
_VERSION = b"merges 1"

Pairs = list[tuple[int, int]]


def merges_from_scores(pieces: list[str], scores: list[float], *, longest_left: bool) -> Pairs:
    """Pairs of ids in the order in which they merge: SentencePiece makes the best-scored piece.

    A piece with the score -inf takes part in no merge. Where several pairs give one piece they are
    ordered by id, or with `longest_left` as Gemma's published tokenizers are.
    """
    if len(pieces) < CACHED_FROM:
        return _find(pieces, scores, longest_left)
    digest = hashlib.sha256(_VERSION + bytes([longest_left]) + json.dumps(pieces).encode())
    digest.update(np.array(scores, np.float64).tobytes())
    file = cache_dir() / "merges" / digest.hexdigest()
    pairs = _read(file, len(pieces))
    if pairs is None:
        pairs = _find(pieces, scores, longest_left)
        _write(file, pairs)
    return pairs


def _find(pieces: list[str], scores: list[float], longest_left: bool) -> Pairs:
    ids = {piece: i for i, piece in enumerate(pieces) if scores[i] > -np.inf}
    find = ids.get
    found: list[tuple[float, int, int, int, int, int]] = []
    for piece, index in ids.items():
        score = -scores[index]
        for cut in range(1, min(len(piece), MAX_PIECE_CHARS)):
            left = find(piece[:cut])
            if left is not None and (right := find(piece[cut:])) is not None:
                lengths = (-cut, cut - len(piece)) if longest_left else (0, 0)
                found.append((score, *lengths, index, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _read(file: Path, num_pieces: int) -> Pairs | None:
    """What `_write` left there; None if there is nothing, or anything else."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, payload = content[:32], content[32:]
    if hashlib.sha256(payload).digest() != digest or len(payload) % 8:
        return None
    array = np.frombuffer(payload, "<i4")
    if len(array) and not 0 <= array.min() <= array.max() < num_pieces:
        return None
    flat = array.tolist()
    return list(zip(flat[::2], flat[1::2], strict=True))


def _write(file: Path, pairs: Pairs) -> None:
    """Under another name first, so that nobody reads half of it; a folder that is full or
    read-only costs the next start its second and nothing else."""
    payload = np.fromiter(chain.from_iterable(pairs), "<i4", 2 * len(pairs)).tobytes()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, file)
        except OSError:
            os.unlink(temporary)
            raise
