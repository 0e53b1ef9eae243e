"""Qwen3 whose MLPs are mixtures of experts (arXiv:2505.09388)."""

from __future__ import annotations

from .blocks import CausalLM


class Qwen3MoeForCausalLM(CausalLM):
    """`model_type` "qwen3_moe"."""
