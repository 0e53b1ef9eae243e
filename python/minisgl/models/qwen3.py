"""Llama with norms on the heads of Q and K, whose size is free (arXiv:2505.09388)."""

from __future__ import annotations

from .architecture import Architecture
from .qwen2 import qwen_windows

ARCHITECTURE = Architecture(
    defaults={"head_dim": 128, "sliding_window": 4096},
    qk_norm=True,
    windows=qwen_windows,
)
