"""Rotary position embedding: tables of cos and sin, and the rotation in place.

One object per set of numbers is shared by all layers and engines of the process. Tables are float32
and grow with the positions that occur on a CPU; on CUDA they are built whole, once, because reading
a maximum back would stall the stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from minisgl.kernel.torch_ops import rotate_

from .base import StateLessOP
from .rope_scaling import original_length, rope_frequencies, rope_kind

MIN_TABLE = 1024
_device: list[torch.device] = []
_shared: dict[tuple[Any, ...], RotaryEmbedding] = {}


def set_rope_device(device: torch.device | str) -> None:
    """Where tables of cos and sin are built first; they follow the positions they are used with."""
    _device[:] = [torch.device(device)]


class RotaryEmbedding(StateLessOP):
    """Turns q and k by their positions."""

    def __init__(
        self,
        head_dim: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        assert 0 < rotary_dim <= head_dim and rotary_dim % 2 == 0, (rotary_dim, head_dim)
        self._head_dim = head_dim
        self._rotary_dim = rotary_dim
        self._max_position = max_position
        self._base = base
        self._scaling = dict(scaling) if scaling else None
        if self._scaling is not None:
            self._scaling.setdefault("max_position_embeddings", max_position)
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def within(self, num_positions: int) -> RotaryEmbedding:
        """The one for a context of so many positions: `longrope` has another for a short one."""
        original = original_length(self._scaling)
        is_long = rope_kind(self._scaling) == "longrope" and self._max_position > original
        if not is_long or num_positions > original:
            return self
        return get_rope(self._head_dim, self._rotary_dim, original, self._base, self._scaling)

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate `q` and `k` in place and return them: (tokens, heads * dim) or by head."""
        cos, sin = self.cos_sin(positions)
        for x in (q, k):
            rotate_(x.view(len(positions), -1, self._head_dim), cos, sin)
        return q, k

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 (tokens, 1, rotary_dim / 2) each."""
        cos, sin = self._table(positions)
        return (
            cos.index_select(0, positions).unsqueeze(1),
            sin.index_select(0, positions).unsqueeze(1),
        )

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions below `length` on the CPU, float32 (length, rotary_dim / 2)."""
        cos, sin = self._table(torch.tensor([length - 1], device="cpu"))
        return cos[:length], sin[:length]

    def _table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        device = positions.device
        table = self._tables.get(device)
        if device.type != "cpu":
            return table or self._build(self._max_position, device)
        needed = int(positions.max()) + 1 if len(positions) else 1
        if table is not None and needed <= len(table[0]):
            return table
        length = MIN_TABLE
        while length < needed:
            length *= 2
        return self._build(length, device)

    def _build(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies, factor = rope_frequencies(
            self._rotary_dim, self._max_position, self._base, self._scaling
        )
        if frequencies.dim() == 2:  # by position
            frequencies, factor = rope_frequencies(
                self._rotary_dim, length, self._base, self._scaling
            )
        steps = torch.arange(length, dtype=torch.float32, device="cpu").unsqueeze(1)
        # Not torch's: the first cos of a process, if large enough for threads, may come from a
        # kernel of MKL that has half the digits (https://github.com/pytorch/pytorch/issues/188792).
        angles = (steps * frequencies).double().numpy()
        cos, sin = (
            torch.from_numpy((of_angles * factor).astype(np.float32)).to(device)
            for of_angles in (np.cos(angles), np.sin(angles))
        )
        self._tables[device] = (cos, sin)
        return cos, sin


def get_rope(
    head_dim: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    rope_scaling: Mapping[str, Any] | None = None,
) -> RotaryEmbedding:
    """The shared rotary embedding with these numbers; `rope_scaling` has Hugging Face's keys."""
    scaling = json.dumps(dict(rope_scaling), sort_keys=True) if rope_scaling else ""
    key = (head_dim, rotary_dim, max_position, base, scaling)
    if key not in _shared:
        _shared[key] = RotaryEmbedding(head_dim, rotary_dim, max_position, base, rope_scaling)
        if _device and _device[0].type != "cpu":
            _shared[key]._build(max_position, _device[0])
    return _shared[key]
