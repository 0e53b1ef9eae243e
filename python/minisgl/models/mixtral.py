"""Mistral whose MLPs are mixtures of experts (arXiv:2401.04088)."""

from __future__ import annotations

from .architecture import Architecture, same_window

ARCHITECTURE = Architecture(
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    renames={"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
    is_moe=True,
    windows=same_window,
)
