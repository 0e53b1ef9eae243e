"""Llama with norms on the heads of Q and K, whose size is free (arXiv:2505.09388)."""

from __future__ import annotations

from .blocks import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """`model_type` "qwen3"."""
