"""The parts that models are made of: norms, linears, embeddings, rotary, attention, experts.

Layers are given numbers, never configs, and are aware of tensor parallelism. May import
`kvcache`, `quant`, `distributed` and below, and the interface of `attention`.
"""

from __future__ import annotations

from minisgl.kernel.torch_ops import gate_and_mul

from .attention import AttentionLayer
from .base import BaseOP, OPList, Parameter, StateLessOP, native_parts
from .embedding import ParallelLMHead, VocabParallelEmbedding, vocab_range
from .linear import (
    LinearColParallelMerged,
    LinearOProj,
    LinearQKVMerged,
    LinearReplicated,
    LinearRowParallel,
)
from .moe import MoELayer
from .norm import RMSNorm, RMSNormFused
from .rope_scaling import check_rope_scaling
from .rotary import RotaryEmbedding, get_rope, set_rope_device

__all__ = [
    "AttentionLayer",
    "BaseOP",
    "LinearColParallelMerged",
    "LinearOProj",
    "LinearQKVMerged",
    "LinearReplicated",
    "LinearRowParallel",
    "MoELayer",
    "OPList",
    "Parameter",
    "ParallelLMHead",
    "RMSNorm",
    "RMSNormFused",
    "RotaryEmbedding",
    "StateLessOP",
    "VocabParallelEmbedding",
    "check_rope_scaling",
    "get_rope",
    "set_rope_device",
    "native_parts",
    "gate_and_mul",
    "vocab_range",
]
