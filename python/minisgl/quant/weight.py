"""The seam between layers and number formats: a matrix that knows how to multiply.

A linear layer asks its weight for `y = x @ W^T` and never looks inside. On a CPU the type of a
float weight is only how it is stored: arithmetic is float32. May import `kernel` and `utils`.

Invariant: `matmul` does not keep or change `x`, and the order of its sums over the input dimension
does not depend on the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

# Elements of a weight that are widened to float32 at a time: 1 MiB, which stays in the L2 cache.
BLOCK_ELEMENTS = 1 << 18


class Weight(ABC):
    """A matrix of `shape` (out_features, in_features)."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes it holds in memory."""

    @abstractmethod
    def matmul(self, x: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ W^T`, (tokens, out_features), into `out` if given.

        x: (tokens, in_features), or what `prepare` returned for it.
        """

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the matrix by id (any shape), as floats: what an embedding looks up."""

    def prepare(self, x: torch.Tensor) -> Any:
        """`x` in the form this weight multiplies fastest, to be shared by weights of one format."""
        return x


class FloatWeight(Weight):
    """A matrix of floats. It reads `tensor` at each call: writing into that takes effect."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dim() == 2, tensor.shape
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return (self.tensor.shape[0], self.tensor.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.tensor.nbytes

    def matmul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """In the tensor's type, or in that of `x` if it is wider."""
        if x.dtype != self.tensor.dtype:
            return self._matmul_widened(x, out)
        if out is None:
            return F.linear(x, self.tensor)
        return torch.mm(x, self.tensor.t(), out=out)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows, float32 on a CPU."""
        found = F.embedding(ids, self.tensor)
        return found.float() if found.device.type == "cpu" else found

    def _matmul_widened(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        num_rows, width = self.shape
        if out is None:
            out = x.new_empty(x.shape[0], num_rows)
        step = max(1, min(num_rows, BLOCK_ELEMENTS // width))
        wide = x.new_empty(step, width)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            block = wide[: stop - start]
            block.copy_(self.tensor[start:stop])
            torch.mm(x, block.t(), out=out[:, start:stop])
        return out


class StackedWeight(Weight):
    """Matrices of different formats on top of each other: q/k/v or gate/up of a mixed file."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        assert parts and len({part.shape[1] for part in parts}) == 1, [p.shape for p in parts]
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, int]:
        """(sum of out_features, in_features)."""
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def prepare(self, x: torch.Tensor) -> Any:
        """The form that the parts share; `x` itself if they are of different kinds."""
        return x if len({type(part) for part in self.parts}) > 1 else self.parts[0].prepare(x)

    def matmul(self, x: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Each part into its columns of the result."""
        if out is None:
            device = x.device if isinstance(x, torch.Tensor) else None
            dtype = x.dtype if isinstance(x, torch.Tensor) else None
            out = torch.empty(x.shape[0], self.shape[0], dtype=dtype, device=device)
        if isinstance(x, torch.Tensor):
            x = self.prepare(x)
        start = 0
        for part in self.parts:
            stop = start + part.shape[0]
            part.matmul(x, out[:, start:stop])
            start = stop
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Each id from the part that holds it."""
        found: torch.Tensor | None = None
        start = 0
        for part in self.parts:
            local = ids - start
            inside = (local >= 0) & (local < part.shape[0])
            some = part.rows(local[inside])
            if found is None:
                found = some.new_zeros((*ids.shape, self.shape[1]))
            found[inside] = some
            start += part.shape[0]
        assert found is not None
        return found


class ExpertWeights:
    """The matrices of a mixture of experts, a `Weight` for each; no matrix itself."""

    def __init__(self, experts: Sequence[Weight]) -> None:
        """`ValueError` if there are none or their shapes differ."""
        shapes = {expert.shape for expert in experts}
        if len(shapes) != 1:
            raise ValueError(f"experts must all have one shape, not {sorted(shapes)}")
        self.experts = tuple(experts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_experts, out_features, in_features)."""
        return (len(self.experts), *self.experts[0].shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(expert.nbytes for expert in self.experts)

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, expert: int) -> Weight:
        return self.experts[expert]


Matrix = torch.Tensor | Weight  # of 2 dimensions
Experts = torch.Tensor | ExpertWeights  # of 3 dimensions, experts first


def as_weight(matrix: Matrix) -> Weight:
    """`matrix` itself if it can multiply, else the float weight around the tensor."""
    return matrix if isinstance(matrix, Weight) else FloatWeight(matrix)
