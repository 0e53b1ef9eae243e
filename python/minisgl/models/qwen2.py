"""Llama with a bias on Q, K and V; upper layers may see only a window (arXiv:2407.10671)."""

from __future__ import annotations

from .architecture import Architecture, Windows, no_windows, windows_of_kinds
from .metadata import Reader


def qwen_windows(read: Reader, num_layers: int) -> Windows:
    """Windows from layer `max_window_layers` on, if they are in use at all."""
    if not read.get("use_sliding_window", False) or read.get("sliding_window") is None:
        return no_windows(read, num_layers)
    first = read.get("max_window_layers", 28)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return windows_of_kinds(read, num_layers, kinds)


ARCHITECTURE = Architecture(
    defaults={"attention_bias": True, "sliding_window": 4096},
    o_proj_bias=False,
    windows=qwen_windows,
)
