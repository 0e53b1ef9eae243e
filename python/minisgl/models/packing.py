"""Keeps quantised sources packed: the `pack` argument of `load_model_weights`.

The parts of one weight (q/k/v, gate/up) become one packed matrix if they have one type, else a
stack of packed matrices. Whatever cannot be packed is left to the loader, which makes floats of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from minisgl.quant import StackedWeight, Weight
from minisgl.quant.packed import GGUF_FORMATS, PackedWeight
from minisgl.utils import zeros_as_used
from minisgl.utils.gguf import TENSOR_TYPES

from .sources import BlockTensor, FloatTensor, SourceTensor
from .weights import Pack

_TYPE_IDS = {name: type_id for type_id, (name, _, _) in TENSOR_TYPES.items()}


def can_pack(part: SourceTensor) -> bool:
    """Whether it is quantised in a way that stays packed."""
    return isinstance(part, BlockTensor) and _type_id(part) in GGUF_FORMATS


def pack_stored(name: str, parts: Sequence[SourceTensor]) -> Weight | None:
    """The parts of a matrix packed as they are stored; None if any of them is not quantised so."""
    blocks = [part for part in parts if isinstance(part, BlockTensor)]
    if not all(map(can_pack, parts)):
        return None
    packed = [_pack_rows(list(same)) for _, same in groupby(blocks, key=_type_id)]
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
        is_vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        whole = parts[0].tensor() if len(parts) == 1 else _on_top(parts)
        return PackedWeight.from_float(whole, 8 if is_vocabulary else bits)

    return pack


def _on_top(parts: Sequence[SourceTensor]) -> torch.Tensor:
    """Float matrices on top of each other, in memory that goes back to the system at once.

    Through malloc, the holes that such copies leave between the packed weights stay with us.
    """
    dtype, num_rows = parts[0].tensor().dtype, [part.shape[0] for part in parts]
    whole = zeros_as_used((sum(num_rows), parts[0].shape[1]), dtype, "cpu")
    for part, rows in zip(parts, whole.split(num_rows)):
        stored = part.tensor().to(dtype).view(torch.uint8)
        rows.view(torch.uint8).numpy()[...] = stored.numpy()  # torch's threads would spin on
        part.release()
    return whole


def _type_id(part: BlockTensor) -> int:
    return _TYPE_IDS[part.type_name]


def _pack_rows(parts: list[BlockTensor]) -> PackedWeight:
    """Matrices of one type, on top of each other."""
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    stored = [(part.data.numpy(), part.num_heads) for part in parts]
    return PackedWeight.from_gguf_parts(stored, _type_id(parts[0]), shape)
