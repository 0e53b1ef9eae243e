"""Phi 3 and Phi 4: Llama with merged weights and long contexts by `longrope` (arXiv:2404.14219)."""

from __future__ import annotations

from .architecture import Architecture, same_window

ARCHITECTURE = Architecture(
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    windows=same_window,
)
