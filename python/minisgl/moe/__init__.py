"""Mixtures of experts: routing and the backends that run the experts.

May import `quant`, `kernel`, `utils` and the interface of `attention`.
"""

from __future__ import annotations

import torch

from minisgl.utils.errors import ConfigError

from .base import BaseMoeBackend, route
from .torch_backend import TorchMoeBackend

__all__ = ["BaseMoeBackend", "TorchMoeBackend", "create_moe_backend", "route"]


def create_moe_backend(name: str, device: torch.device | str = "cpu") -> BaseMoeBackend:
    """The backend called `name`: "torch", "fused" (Triton, CUDA only), or "auto"."""
    on_cuda = torch.device(device).type == "cuda"
    if name == "torch" or (name == "auto" and not on_cuda):
        return TorchMoeBackend()
    if name in ("auto", "fused"):
        from .fused import FusedMoeBackend

        return FusedMoeBackend()
    raise ConfigError(
        f"unknown moe backend (--moe-backend) {name!r}: use one of auto, fused, torch"
    )
