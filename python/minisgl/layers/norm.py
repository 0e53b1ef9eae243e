"""Root mean square norms."""

from __future__ import annotations

import torch

from minisgl.kernel.torch_ops import fused_add_rmsnorm, rmsnorm

from .base import BaseOP


class RMSNorm(BaseOP):
    """`x / rms(x) * weight` over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = torch.empty(size)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., size) to the same."""
        return rmsnorm(x, self.weight, self._eps)

    def forward_inplace(self, x: torch.Tensor) -> None:
        """Normalise `x` in place."""
        x.copy_(rmsnorm(x, self.weight, self._eps))


class RMSNormFused(BaseOP):
    """A norm that also adds its input to the residual stream."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = torch.empty(size)
        self._eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, residual); both tensors given are overwritten. Without a residual `x` is it."""
        if residual is None:
            return rmsnorm(x, self.weight, self._eps), x
        fused_add_rmsnorm(x, residual, self.weight, self._eps)
        return x, residual
