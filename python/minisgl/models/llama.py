"""Llama 2 and 3 and all that copied them: SmolLM2, TinyLlama, Yi (arXiv:2307.09288)."""

from __future__ import annotations

from .architecture import Architecture

ARCHITECTURE = Architecture(mlp_bias=True)
