"""Llama with a bias on Q, K and V; upper layers may see only a window (arXiv:2407.10671)."""

from __future__ import annotations

from .blocks import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """`model_type` "qwen2"."""
