"""Keeps quantised sources packed: the `pack` argument of `load_model_weights`.

The parts of one matrix (q/k/v, gate/up, those of one expert) become one packed matrix if they have
one type, else a stack of packed matrices. Whatever cannot be packed is left to the loader, which
makes floats of it. `loaded_bytes` tells beforehand what that comes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

import torch

from minisgl.quant import StackedWeight, Weight
from minisgl.quant.packed import FLOAT_FORMATS, GGUF_FORMATS, PackedWeight, packed_bytes
from minisgl.utils import zeros_as_used
from minisgl.utils.gguf import TENSOR_TYPES

from .sources import BlockTensor, FloatTensor, SourceTensor
from .weights import Pack, Slot

_TYPE_IDS = {name: type_id for type_id, (name, _, _) in TENSOR_TYPES.items()}


def pack_stored(name: str, parts: Sequence[SourceTensor]) -> Weight | None:
    """The parts of a matrix packed as they are stored; None if any of them is not quantised so."""
    packed = [_pack_rows(same) for same in _by_type(parts)]
    if not packed:
        return None
    return packed[0] if len(packed) == 1 else StackedWeight(packed)


def pack_floats(bits: int) -> Pack:
    """A `pack` argument that also rounds float matrices to groups of `bits` (4 or 8) bits.

    The embedding and the output head keep 8 bits; what is stored quantised stays as it is.
    """

    def pack(name: str, parts: Sequence[SourceTensor]) -> Weight | None:
        if (packed := pack_stored(name, parts)) is not None:
            return packed
        if not all(isinstance(part, FloatTensor) for part in parts):
            return None
        whole = parts[0].tensor() if len(parts) == 1 else _on_top(parts)
        return PackedWeight.from_float(whole, _bits_for(name, bits))

    return pack


def loaded_bytes(slot: Slot, dtype: torch.dtype, quant: str) -> int:
    """Bytes that a weight takes on a CPU with floats of `dtype`.

    quant: "none", "stored" (`pack_stored`), "q8" or "q4" (`pack_floats`).
    """
    parts = slot.ordered
    if len(parts[0].shape) == 1:
        return 4 * sum(part.shape[0] for part in parts)
    sizes = [_packed_bytes(slot.name, matrix, quant) for matrix in slot.matrices]
    if all(sizes):
        return sum(sizes)
    return dtype.itemsize * sum(prod(part.shape) for part in parts)


def _packed_bytes(name: str, parts: Sequence[SourceTensor], quant: str) -> int:
    """Of one matrix; 0 if it is not packed."""
    if quant == "none":
        return 0
    if groups := _by_type(parts):
        return sum(packed_bytes(GGUF_FORMATS[_type_id(same[0])], _shape(same)) for same in groups)
    if quant == "stored" or not all(isinstance(part, FloatTensor) for part in parts):
        return 0
    return packed_bytes(FLOAT_FORMATS[_bits_for(name, int(quant[1]))], _shape(parts))


def _bits_for(name: str, bits: int) -> int:
    return 8 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else bits


def _by_type(parts: Sequence[SourceTensor]) -> list[list[BlockTensor]]:
    """Neighbours of one type together; nothing if a part is not quantised so as to stay packed."""
    blocks = [p for p in parts if isinstance(p, BlockTensor) and _type_id(p) in GGUF_FORMATS]
    if len(blocks) < len(parts):
        return []
    return [list(same) for _, same in groupby(blocks, key=_type_id)]


def _shape(parts: Sequence[SourceTensor]) -> tuple[int, int]:
    """Of matrices on top of each other."""
    return (sum(part.shape[0] for part in parts), parts[0].shape[1])


def _on_top(parts: Sequence[SourceTensor]) -> torch.Tensor:
    """Float matrices on top of each other, in memory that goes back to the system at once.

    Through malloc, the holes that such copies leave between the packed weights stay with us.
    """
    dtype, num_rows = parts[0].tensor().dtype, [part.shape[0] for part in parts]
    whole = zeros_as_used(_shape(parts), dtype, "cpu")
    for part, rows in zip(parts, whole.split(num_rows)):
        stored = part.tensor().to(dtype).view(torch.uint8)
        rows.view(torch.uint8).numpy()[...] = stored.numpy()  # torch's threads would spin on
        part.release()
    return whole


def _type_id(part: BlockTensor) -> int:
    return _TYPE_IDS[part.type_name]


def _pack_rows(parts: list[BlockTensor]) -> PackedWeight:
    """Matrices of one type, on top of each other."""
    stored = [(part.data.numpy(), part.num_heads) for part in parts]
    return PackedWeight.from_gguf_parts(stored, _type_id(parts[0]), _shape(parts))
