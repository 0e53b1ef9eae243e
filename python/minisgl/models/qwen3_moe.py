"""Qwen3 whose MLPs are mixtures of experts (arXiv:2505.09388)."""

from __future__ import annotations

from .architecture import Architecture, Windows, no_windows, same_window
from .metadata import Reader


def _windows(read: Reader, num_layers: int) -> Windows:
    chosen = same_window if read.get("use_sliding_window", False) else no_windows
    return chosen(read, num_layers)


ARCHITECTURE = Architecture(
    defaults={"sliding_window": 4096}, qk_norm=True, is_moe=True, windows=_windows
)
