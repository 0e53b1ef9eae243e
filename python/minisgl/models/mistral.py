"""Llama whose layers may see only a window of tokens (arXiv:2310.06825)."""

from __future__ import annotations

from .blocks import CausalLM


class MistralForCausalLM(CausalLM):
    """`model_type` "mistral"."""
