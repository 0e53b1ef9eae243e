"""Root mean square norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.kernel.torch_ops import fused_add_rmsnorm, rmsnorm

from .base import BaseOP

if TYPE_CHECKING:
    from minisgl.kernel.program import Buffer, Recorder


class RMSNorm(BaseOP):
    """`x / rms(x) * (weight + offset)` over the last dimension."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        self.weight = torch.empty(size)
        self._eps = eps
        self._offset = offset

    @property
    def scale(self) -> torch.Tensor:
        """What normed rows are multiplied by: the weight itself, where nothing is added."""
        return self.weight.float() + self._offset if self._offset else self.weight

    @property
    def eps(self) -> float:
        """What is added to the mean square."""
        return self._eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., size) to the same."""
        return rmsnorm(x, self.scale, self._eps)

    def forward_inplace(self, x: torch.Tensor) -> None:
        """Normalise `x` in place."""
        x.copy_(rmsnorm(x, self.scale, self._eps))

    def record(self, program: Recorder, x: Buffer) -> Buffer:
        """As `forward`."""
        return program.rms_norm(x, self.scale, self._eps)


class RMSNormFused(RMSNorm):
    """A norm that also adds its input to the residual stream."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, residual); both tensors given are overwritten. Without a residual `x` is it."""
        if residual is None:
            return rmsnorm(x, self.scale, self._eps), x
        fused_add_rmsnorm(x, residual, self.scale, self._eps)
        return x, residual

    def record(  # type: ignore[override]
        self, program: Recorder, x: Buffer, residual: Buffer | None = None
    ) -> tuple[Buffer, Buffer]:
        """As `forward`."""
        if residual is None:
            return program.rms_norm(x, self.scale, self._eps), x
        program.add_rms_norm(x, residual, self.scale, self._eps)
        return x, residual
