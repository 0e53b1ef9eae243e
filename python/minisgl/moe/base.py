"""The interface of a mixture of experts, and the routing that all implementations share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from minisgl.quant import Experts


class BaseMoeBackend(ABC):
    """Runs the experts that each token is routed to."""

    @abstractmethod
    def forward(
        self,
        x: torch.Tensor,
        w1: Experts,
        w2: Experts,
        gating: torch.Tensor,
        topk: int,
        renormalize: bool,
    ) -> torch.Tensor:
        """x (tokens, H), w1 (E, 2I, H), w2 (E, H, I), gating (tokens, E) to (tokens, H).

        Each expert's w1 is gate over up.
        """


def route(gating: torch.Tensor, topk: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, expert ids int64), both (tokens, topk), best first.

    The softmax is over all experts; with `renormalize` the chosen weights sum to 1.
    """
    weights, ids = gating.float().softmax(-1).topk(topk, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids
