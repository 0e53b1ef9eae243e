"""From a `model_type` to its class. A new one is its file, and a line here and in config."""

from __future__ import annotations

from minisgl.utils.errors import UnsupportedModelError

from .blocks import CausalLM
from .config import ModelConfig
from .llama import LlamaForCausalLM
from .mistral import MistralForCausalLM
from .qwen2 import Qwen2ForCausalLM
from .qwen3 import Qwen3ForCausalLM
from .qwen3_moe import Qwen3MoeForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
}


def create_model(config: ModelConfig) -> CausalLM:
    """A model with empty weights of the default dtype on the default device (also meta)."""
    if config.model_type not in MODELS:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} is not supported; supported: {', '.join(MODELS)}"
        )
    return MODELS[config.model_type](config)
