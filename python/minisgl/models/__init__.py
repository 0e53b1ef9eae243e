"""Models: their numbers, their architectures, and how their weights are loaded.

May import `layers`, `moe`, `attention` and below.
"""

from __future__ import annotations

from .blocks import CausalLM, create_model
from .config import ModelConfig, RotaryConfig
from .packing import pack_floats, pack_stored
from .sources import close_sources, load_model_config, open_source
from .weights import (
    Pack,
    check_weights,
    init_dummy_weights,
    load_model_weights,
    load_weight,
    shard_tensor,
)

__all__ = [
    "CausalLM",
    "ModelConfig",
    "Pack",
    "RotaryConfig",
    "check_weights",
    "close_sources",
    "create_model",
    "init_dummy_weights",
    "load_model_config",
    "load_model_weights",
    "load_weight",
    "open_source",
    "pack_floats",
    "pack_stored",
    "shard_tensor",
]
