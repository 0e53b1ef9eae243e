"""Linear layers over `Weight.matmul`, whole or split across tensor-parallel ranks.

Column-parallel layers split the output (each rank computes its heads), row-parallel layers split
the input and add up over the ranks. A bias of a row-parallel layer is added once, after the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from minisgl.distributed import DistributedCommunicator, current_tp_info
from minisgl.kernel.program import CannotRecord
from minisgl.quant import Matrix, as_weight
from minisgl.utils import div_even

from .base import BaseOP, native_parts

if TYPE_CHECKING:
    from minisgl.kernel.program import Buffer, Recorder


class Linear(BaseOP):
    """`x @ weight^T + bias` on this rank's part of the weight."""

    def __init__(self, in_features: int, out_features: int, has_bias: bool = False) -> None:
        self.weight: Matrix = torch.empty(out_features, in_features)
        self.bias = torch.empty(out_features) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, in_features) to (tokens, out_features)."""
        y = as_weight(self.weight).matmul(x)
        return y if self.bias is None else y.add_(self.bias)

    def record(self, program: Recorder, x: Buffer) -> Buffer:
        """As `forward`, on one rank."""
        if current_tp_info().size > 1:
            raise CannotRecord("tensor parallelism needs the ranks between its steps")
        return program.linear(x, native_parts(self.weight), self.bias)


class LinearReplicated(Linear):
    """The same on every rank, such as the router of a mixture of experts."""


class LinearColParallelMerged(Linear):
    """Several matrices on top of each other, each split by output (gate and up)."""

    def __init__(
        self, in_features: int, out_features: Sequence[int], has_bias: bool = False
    ) -> None:
        size = current_tp_info().size
        super().__init__(in_features, sum(div_even(n, size) for n in out_features), has_bias)


class LinearQKVMerged(Linear):
    """Q, K and V on top of each other, split by head; KV heads are copied if there are too few."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_qo_heads: int,
        num_kv_heads: int,
        has_bias: bool = False,
    ) -> None:
        size = current_tp_info().size
        num_q = div_even(num_qo_heads, size)
        num_kv = div_even(num_kv_heads, size, allow_replicate=True)
        super().__init__(hidden_size, (num_q + 2 * num_kv) * head_dim, has_bias)


class LinearRowParallel(Linear):
    """Split by input; the ranks' results are added up (down projection)."""

    def __init__(self, in_features: int, out_features: int, has_bias: bool = False) -> None:
        self._tp_size = current_tp_info().size
        self._comm = DistributedCommunicator()
        super().__init__(div_even(in_features, self._tp_size), out_features, has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, this rank's in_features) to (tokens, out_features), the same on all ranks."""
        y = as_weight(self.weight).matmul(x)
        if self._tp_size > 1:
            y = self._comm.all_reduce(y)
        return y if self.bias is None else y.add_(self.bias)


class LinearOProj(LinearRowParallel):
    """The output projection of attention."""
