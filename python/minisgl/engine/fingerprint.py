"""Whose KV is it? One digest of everything that decides the bytes of a cached token.

The weights count by their content: every byte of the files that they were loaded from, so that two
trainings of one model never share anything. What is written down besides are the settings that
change the numbers, and the code that computes them.
"""

from __future__ import annotations

import hashlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import minisgl
from minisgl.kernel import native
from minisgl.layers.rope_scaling import rope_kind
from minisgl.utils.gguf import split_parts

if TYPE_CHECKING:
    from .engine import Engine

LAYOUT = 1  # counts up when the meaning of a page's bytes changes
CHUNK_BYTES = 16 << 20


def fingerprint_kv(engine: Engine) -> bytes:
    """32 bytes; equal ones mean that a token after the same tokens has the same page bytes.

    Reads the model's files once more. Random weights are like no others, not even themselves.
    """
    config, model = engine.config, engine.model_config
    is_longrope = rope_kind(model.rotary_config.scaling) == "longrope"
    settings = [
        LAYOUT,
        minisgl.__version__,
        torch.__version__,
        engine.device.type,
        type(engine.attn_backend).__name__,
        engine.dtype,
        engine.kv_dtype,
        config.quant,
        config.page_size,
        engine.page_bytes,
        model,
        engine.max_seq_len if is_longrope else None,  # it chooses the angles
        config.tp_info,
    ]
    files = _weight_files(Path(engine.model_path))
    if engine.device.type == "cpu" and native.available():
        files.append(Path(str(native.load().__file__)))
    digest = hashlib.sha256(repr(settings).encode())
    if config.use_dummy_weight:
        digest.update(secrets.token_bytes(32))
    for file in files:
        digest.update(_hash_file(file))
    return digest.digest()


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    return [Path(part) for part in split_parts(str(path))]


def _hash_file(file: Path) -> bytes:
    """A digest of the digests of its chunks, which several threads compute."""

    def hash_chunk(start: int) -> bytes:
        with open(file, "rb") as opened:
            opened.seek(start)
            return hashlib.sha256(opened.read(CHUNK_BYTES)).digest()

    with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as pool:
        parts = pool.map(hash_chunk, range(0, file.stat().st_size, CHUNK_BYTES))
        return hashlib.sha256(b"".join(parts)).digest()
