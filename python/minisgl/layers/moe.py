"""The experts of one layer; which of them a token meets is decided by the router's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.core import get_global_ctx
from minisgl.distributed import DistributedCommunicator, current_tp_info
from minisgl.kernel.program import CannotRecord
from minisgl.quant import Experts
from minisgl.utils import div_even

from .base import BaseOP, native_parts

if TYPE_CHECKING:
    from minisgl.kernel.program import Buffer, Recorder


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

    def record(self, program: Recorder, x: Buffer, gating: Buffer) -> Buffer:
        """As `forward`, on one rank."""
        if self._tp_size > 1:
            raise CannotRecord("tensor parallelism needs the ranks between its steps")
        gate_up, down = (
            [native_parts(matrices[expert]) for expert in range(matrices.shape[0])]
            for matrices in (self.gate_up_proj, self.down_proj)
        )
        return program.experts(x, gating, gate_up, down, self._top_k, self._renormalize)
