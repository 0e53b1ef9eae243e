"""Cached prefixes in a file: a plain binary format that survives nothing but being left alone.

    magic (12 bytes)  fingerprint (32)  digest (32)
    record, record, ... each:
        salt bytes, tokens, first token, data bytes (uint32, uint32, uint32, uint64, little-endian)
        salt (UTF-8)  token ids (int32)  KV of the tokens from the first one on  digest (32)
    an end: four zeros and a digest

A digest (SHA-256) covers what is before it and the digest before that, so that nothing can be
changed, cut off, moved or put in unnoticed. The fingerprint says whose KV it is: it is compared,
never understood. Nothing is believed before its digest has been seen.

May import `core`. Invariant: `read_records` yields exactly what `write_records` was given, or stops
with `PrefixFileError`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

MAGIC = b"minisgl-kv\x00\x01"
FINGERPRINT_BYTES = 32
DIGEST_BYTES = 32
MAX_RECORD_BYTES = 1 << 31
_HEAD = struct.Struct("<IIIQ")
_END = _HEAD.pack(0, 0, 0, 0)


class PrefixFileError(Exception):
    """The file is damaged, or not one of this engine's; the message says which."""


class PrefixRecord(NamedTuple):
    """A prefix, and the KV of its tokens from `first` on; those before it came earlier.

    ids: int32 `(tokens,)`. data: uint8, flat.
    """

    salt: str
    ids: npt.NDArray[np.int32]
    first: int
    data: npt.NDArray[np.uint8]


def write_records(
    path: str | os.PathLike[str], fingerprint: bytes, records: Iterable[PrefixRecord]
) -> None:
    """Write a whole file and put it in the place of an older one; `OSError` leaves that alone."""
    folder, name = os.path.split(os.path.abspath(path))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}-", delete=False) as file:
        try:
            digest = _write(file, b"", MAGIC, fingerprint)
            for salt, ids, first, data in records:
                name_bytes = salt.encode(errors="surrogatepass")
                head = _HEAD.pack(len(name_bytes), len(ids), first, data.nbytes)
                digest = _write(file, digest, head, name_bytes, ids.data, data.data)
            _write(file, digest, _END)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read_records(path: str | os.PathLike[str], fingerprint: bytes) -> Iterator[PrefixRecord]:
    """The records of a file, each checked before it is given out.

    Raises `PrefixFileError` where the file is not what was written by an engine with this
    fingerprint, `OSError` where it cannot be read.
    """
    with open(path, "rb") as file:
        rest = os.fstat(file.fileno()).st_size
        start = file.read(len(MAGIC) + FINGERPRINT_BYTES)
        if start[: len(MAGIC)] != MAGIC:
            raise PrefixFileError("it is no file of saved prefixes")
        digest = _check(file, b"", start)
        if start[len(MAGIC) :] != fingerprint:
            raise PrefixFileError("it was saved by another model, or with other settings")
        while True:
            head = file.read(_HEAD.size)
            if head == _END:
                _check(file, digest, head)
                if file.read(1):
                    raise PrefixFileError("it goes on after its end")
                return
            if len(head) < _HEAD.size:
                raise PrefixFileError("it is cut off")
            salt_bytes, num_tokens, first, num_bytes = _HEAD.unpack(head)
            size = salt_bytes + 4 * num_tokens + num_bytes
            if size > min(rest, MAX_RECORD_BYTES):
                raise PrefixFileError("it is damaged")
            body = memoryview(bytearray(file.read(size)))
            digest = _check(file, digest, head, body)
            ids_end = salt_bytes + 4 * num_tokens
            salt = bytes(body[:salt_bytes]).decode(errors="surrogatepass")
            ids = np.frombuffer(bytes(body[salt_bytes:ids_end]), np.int32).copy()
            data = np.frombuffer(body[ids_end:], np.uint8)
            yield PrefixRecord(salt, ids, first, data)


def _write(file: IO[bytes], previous: bytes, *parts: bytes | memoryview) -> bytes:
    """Append parts and the digest that covers them, which is returned."""
    for part in parts:
        file.write(part)
    digest = _digest(previous, *parts)
    file.write(digest)
    return digest


def _check(file: IO[bytes], previous: bytes, *parts: bytes | memoryview) -> bytes:
    digest = _digest(previous, *parts)
    if file.read(DIGEST_BYTES) != digest:
        raise PrefixFileError("it is damaged")
    return digest


def _digest(previous: bytes, *parts: bytes | memoryview) -> bytes:
    total = hashlib.sha256(previous)
    for part in parts:
        total.update(part)
    return total.digest()
