"""The experts of one layer; which of them a token meets is decided by the router's logits."""

from __future__ import annotations

import torch

from minisgl.core import get_global_ctx
from minisgl.distributed import DistributedCommunicator, current_tp_info
from minisgl.quant import Experts
from minisgl.utils import div_even

from .base import BaseOP


class MoELayer(BaseOP):
    """Gated MLPs, of which each token uses `top_k`; every rank holds a slice of every expert."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        renormalize: bool,
    ) -> None:
        self._tp_size = current_tp_info().size
        self._top_k = top_k
        self._renormalize = renormalize
        self._comm = DistributedCommunicator()
        local = div_even(intermediate_size, self._tp_size)
        self.gate_up_proj: Experts = torch.empty(num_experts, 2 * local, hidden_size)
        self.down_proj: Experts = torch.empty(num_experts, hidden_size, local)

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) and (tokens, experts) to (tokens, hidden)."""
        y = get_global_ctx().moe_backend.forward(
            x, self.gate_up_proj, self.down_proj, router_logits, self._top_k, self._renormalize
        )
        return self._comm.all_reduce(y) if self._tp_size > 1 else y
