"""GGUF blocks to floats, tensor by tensor, straight into their destination.

Blocks are expanded in chunks that stay in the cache, with torch's own threads. Layouts follow
ggml's `ggml-common.h`; the twin of each function is `gguf.quants.dequantize`, which also serves the
types that are not here. May import `kernel` and `utils`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from minisgl.utils.errors import UnsupportedModelError
from minisgl.utils.gguf import TENSOR_TYPES

CHUNK_ELEMENTS = 1 << 19
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_SIZES = {name: (items, num_bytes) for name, items, num_bytes in TENSOR_TYPES.values()}


def block_sizes(type_name: str) -> tuple[int, int]:
    """(weights per block, bytes per block)."""
    return _SIZES[type_name]


def dequantize_into(raw: torch.Tensor, type_name: str, out: torch.Tensor) -> None:
    """Write the weights that the blocks in `raw` stand for into `out`.

    raw: uint8, contiguous, any shape. out: any float type, contiguous, with as many elements as the
    blocks have weights.
    """
    if type_name in FLOAT_TYPES:
        out.view(-1).copy_(raw.reshape(-1).view(FLOAT_TYPES[type_name]))
        return
    items, num_bytes = block_sizes(type_name)
    blocks = raw.reshape(-1, num_bytes)
    flat = out.view(-1, items)
    assert len(flat) == len(blocks), (flat.shape, blocks.shape)
    expand = _EXPAND.get(type_name) or partial(_expand_elsewhere, type_name)
    step = CHUNK_ELEMENTS // items
    scratch = None
    if out.dtype != torch.float32:
        scratch = torch.empty(min(step, len(blocks)), items)
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        target = flat[start : start + step]
        if scratch is None:
            expand(chunk, target)
        else:
            expand(chunk, scratch[: len(chunk)])
            target.copy_(scratch[: len(chunk)])


def dequantize(raw: torch.Tensor, type_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The blocks in `raw` as a new tensor: float32, or the stored type of a float tensor."""
    out = torch.empty(shape, dtype=FLOAT_TYPES.get(type_name, torch.float32))
    dequantize_into(raw, type_name, out)
    return out


def _expand_elsewhere(type_name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as gguf_dequantize

        wide = gguf_dequantize(blocks.numpy(), GGMLQuantizationType[type_name])
    except (ImportError, KeyError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"GGUF tensors of type {type_name} cannot be read: {error}; "
            f"use one of {', '.join([*FLOAT_TYPES, *_EXPAND])}"
        ) from error
    out.copy_(torch.from_numpy(np.ascontiguousarray(wide)))


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 (blocks, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles_into(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Low halves of the bytes into the first half of `out`'s last dimension, high ones after."""
    width = packed.shape[-1]
    out[..., :width].copy_(packed & 15)
    out[..., width:].copy_(packed >> 4)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles_into(blocks[:, 2:], out)
    out.sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles_into(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """32 bits in 4 bytes per block to 16 or 0 each, uint8 (blocks, 32)."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).view(len(packed), 32) << 4


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles_into(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16.0).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles_into(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima, 6 bits each and 8 of each in 12 bytes, as float32 (blocks, 8)."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=1)
    minima = torch.cat([mid & 63, (high >> 4) | ((mid >> 2) & 48)], dim=1)
    return scales.float(), minima.float()


def _k_finish(blocks: torch.Tensor, codes: torch.Tensor) -> None:
    """Codes (blocks, 8, 32) to weights: `code * d * scale - dmin * minimum`, in place."""
    scales, minima = _k_scales(blocks[:, 4:16])
    codes.mul_((_half(blocks, 0) * scales).unsqueeze(-1))
    codes.sub_((_half(blocks, 2) * minima).unsqueeze(-1))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles_into(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 64))
    _k_finish(blocks, out.view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles_into(blocks[:, 48:].view(-1, 4, 32), out.view(-1, 4, 64))
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    codes = out.view(-1, 8, 32)
    codes.add_(((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4)
    _k_finish(blocks, codes)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    codes = out.view(-1, 2, 4, 32)
    low = blocks[:, :128].view(-1, 2, 64)
    _nibbles_into(low, codes.view(-1, 2, 128))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    codes.add_(((blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3) << 4).sub_(32.0)
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1))


_EXPAND: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
