"""What every layer is: an object whose public tensors are its weights, named by their path.

Attributes that start with an underscore are no weights. A weight is a `torch.Tensor`, or a `Weight`
that multiplies in its own format, or one for each expert; a layer reads its attribute at each call,
so replacing it takes effect at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from minisgl.kernel.program import CannotRecord
from minisgl.quant import ExpertWeights, FloatWeight, Matrix, StackedWeight, Weight, as_weight
from minisgl.quant.packed import PackedWeight

Parameter = torch.Tensor | Weight | ExpertWeights
T = TypeVar("T", bound="BaseOP")


def native_parts(weight: Matrix) -> list[Any]:
    """The tensors and native packed matrices that a recorded product reads, from top to bottom."""
    weight = as_weight(weight)
    if isinstance(weight, StackedWeight):
        return [part for stacked in weight.parts for part in native_parts(stacked)]
    if isinstance(weight, FloatWeight):
        return [weight.tensor]
    if isinstance(weight, PackedWeight):
        return [weight.native]
    raise CannotRecord(f"{type(weight).__name__} has no native product")


class BaseOP(ABC):
    """A layer, or a tree of layers."""

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""

    def slots(self, prefix: str = "") -> Iterator[tuple[str, BaseOP, str]]:
        """(path, owner, attribute name) of every weight, in the order of definition."""
        for name, value in vars(self).items():
            if name.startswith("_"):
                continue
            if isinstance(value, Parameter):
                yield prefix + name, self, name
            elif isinstance(value, BaseOP):
                yield from value.slots(f"{prefix}{name}.")

    def state_dict(self) -> dict[str, Parameter]:
        """All weights by path."""
        return {path: getattr(owner, name) for path, owner, name in self.slots()}

    def ignored_keys(self, prefix: str = "") -> set[str]:
        """Paths that a checkpoint may hold although no layer has them (a stored tied head)."""
        ignored: set[str] = set()
        for name, value in vars(self).items():
            if not name.startswith("_") and isinstance(value, BaseOP):
                ignored |= value.ignored_keys(f"{prefix}{name}.")
        return ignored

    def load_state_dict(self, state_dict: Mapping[str, Parameter]) -> None:
        """Replace all weights; `RuntimeError` names keys that are missing, extra or misshapen."""
        slots = list(self.slots())
        missing = [path for path, _, _ in slots if path not in state_dict]
        if missing:
            raise RuntimeError(f"missing keys in state_dict: {', '.join(missing)}")
        known = {path for path, _, _ in slots} | self.ignored_keys()
        extra = [key for key in state_dict if key not in known]
        if extra:
            raise RuntimeError(f"unexpected keys in state_dict: {', '.join(extra)}")
        for path, owner, name in slots:
            old, new = tuple(getattr(owner, name).shape), tuple(state_dict[path].shape)
            if old != new:
                raise RuntimeError(f"{path} has the shape {new}, the model needs {old}")
        for path, owner, name in slots:
            setattr(owner, name, state_dict[path])


class StateLessOP(BaseOP):
    """A layer without weights."""

    def slots(self, prefix: str = "") -> Iterator[tuple[str, BaseOP, str]]:
        """Nothing."""
        return iter(())


class OPList(BaseOP, Generic[T]):
    """Layers in a row; each one's path is its index."""

    def __init__(self, ops: Sequence[T]) -> None:
        self.op_list = list(ops)

    def slots(self, prefix: str = "") -> Iterator[tuple[str, BaseOP, str]]:
        """The weights of all layers."""
        for index, op in enumerate(self.op_list):
            yield from op.slots(f"{prefix}{index}.")

    def ignored_keys(self, prefix: str = "") -> set[str]:
        """What the layers ignore."""
        return set().union(*(op.ignored_keys(f"{prefix}{i}.") for i, op in enumerate(self.op_list)))

    def forward(self, x: Any) -> Any:
        """One after the other."""
        for op in self.op_list:
            x = op.forward(x)
        return x
