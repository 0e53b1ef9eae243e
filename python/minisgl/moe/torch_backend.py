"""Experts in plain torch: exact, on every device, one expert after the other.

Invariant: a token's experts are summed in the order of their weight, whatever else is in the batch.
"""

from __future__ import annotations

import torch

from minisgl.kernel.torch_ops import gate_and_mul
from minisgl.quant import Experts, as_weight

from .base import BaseMoeBackend, route


class TorchMoeBackend(BaseMoeBackend):
    """Gathers the tokens of each expert, multiplies, and adds each token's experts up."""

    def forward(
        self,
        x: torch.Tensor,
        w1: Experts,
        w2: Experts,
        gating: torch.Tensor,
        topk: int,
        renormalize: bool,
    ) -> torch.Tensor:
        """As `BaseMoeBackend.forward`."""
        weights, ids = route(gating, topk, renormalize)
        order = ids.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
        counts = torch.bincount(ids.flatten(), minlength=w1.shape[0]).tolist()
        results = x.new_empty(len(order), x.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            pairs = order[start : start + count]
            start += count
            hidden = as_weight(w1[expert]).matmul(x.index_select(0, pairs // topk))
            results[pairs] = as_weight(w2[expert]).matmul(gate_and_mul(hidden))
        scaled = results.view(len(x), topk, -1).float() * weights.unsqueeze(-1)
        total = scaled[:, 0].clone()
        for choice in range(1, topk):
            total += scaled[:, choice]
        return total.to(x.dtype)
