"""Llama whose layers may see only a window of tokens (arXiv:2310.06825)."""

from __future__ import annotations

from .architecture import Architecture, same_window

ARCHITECTURE = Architecture(defaults={"sliding_window": 4096}, windows=same_window)
