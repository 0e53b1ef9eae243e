"""Weights that stay quantised: codes of 4, 5, 6 or 8 bits in groups of 32, multiplied as they are.

The layout (drawn in docs/kernels.md) belongs to the native kernels; here it is an opaque object
with a shape. Activations are quantised to 8 bits per token and group, once for all weights that
share them. May import `kernel` and `utils`.

Invariant: a row of a product depends on that token and the weight alone, to the bit: not on the
other tokens, the number of threads or the instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minisgl.kernel import native
from minisgl.utils import align_ceil, div_ceil

from .weight import Weight

# GGUF type numbers that can be packed, with the format each becomes.
GGUF_FORMATS = {
    2: "q4",  # Q4_0
    3: "q4m",  # Q4_1
    6: "q5",  # Q5_0
    7: "q5m",  # Q5_1
    8: "q8",  # Q8_0
    12: "q4m",  # Q4_K
    13: "q5m",  # Q5_K
    14: "q6",  # Q6_K
}
FLOAT_FORMATS = {4: "q4m", 8: "q8"}
_GROUP_BYTES = {"q4": 18, "q4m": 20, "q5": 22, "q5m": 24, "q6": 28, "q8": 34}  # of a row
_UNIT_BYTES = {"q4": 4, "q4m": 4}  # of a row


def packed_bytes(packed_format: str, shape: tuple[int, int]) -> int:
    """`nbytes` of a matrix of `shape` (out, in) in a format; the layout is in docs/kernels.md."""
    num_rows, num_groups = align_ceil(shape[0], 16), div_ceil(shape[1], 32)
    row_bytes = num_groups * _GROUP_BYTES[packed_format] + _UNIT_BYTES.get(packed_format, 0)
    return num_rows * row_bytes


class QuantizedActivations:
    """Tokens in 8 bits, ready for any packed weight with as many input features."""

    __slots__ = ("native",)

    def __init__(self, handle: Any) -> None:
        self.native = handle

    @property
    def shape(self) -> tuple[int, int]:
        """(tokens, in_features)."""
        return (self.native.tokens, self.native.columns)


def quantize_activations(x: torch.Tensor) -> QuantizedActivations:
    """Quantise float32 `x` (tokens, in_features) once, for several weights."""
    return QuantizedActivations(native.quantize(x))


class PackedWeight(Weight):
    """A matrix in the packed layout; made by `from_gguf` or `from_float`, never changed."""

    def __init__(self, handle: Any) -> None:
        self.native = handle
        self._shape = (handle.rows, handle.columns)

    @classmethod
    def from_gguf(cls, raw: np.ndarray, ggml_type: int, shape: tuple[int, int]) -> PackedWeight:
        """Repack the uint8 bytes of a GGUF tensor of `shape` (out, in).

        Codes and scales are those of the file; scales of 4-bit codes are rounded to 12 bits or more
        of the largest in their row (docs/kernels.md).

        `ValueError` for a type outside `GGUF_FORMATS` or a size that does not fit the shape.
        """
        return cls.from_gguf_parts([(raw, 0)], ggml_type, shape)

    @classmethod
    def from_gguf_parts(
        cls, parts: Sequence[tuple[np.ndarray, int]], ggml_type: int, shape: tuple[int, int]
    ) -> PackedWeight:
        """`from_gguf` of tensors on top of each other, their rows read where they lie.

        parts: the bytes of each, and in how many heads its rows are interleaved (0: in none).
        """
        return cls(native.pack_gguf(parts, ggml_type, shape))

    @classmethod
    def from_float(cls, tensor: torch.Tensor, bits: int) -> PackedWeight:
        """Round a float32, bfloat16 or float16 matrix (out, in) to groups of 4 or 8 bits."""
        if bits not in FLOAT_FORMATS:
            raise ValueError(f"floats can be packed to {sorted(FLOAT_FORMATS)} bits, not {bits}")
        return cls(native.pack_float(tensor, FLOAT_FORMATS[bits]))

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self._shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minimums."""
        return self.native.nbytes

    @property
    def format(self) -> str:
        """q4, q5, q6, q8: scale times (code - offset); q4m, q5m: scale times code plus minimum."""
        return self.native.format

    def prepare(self, x: torch.Tensor) -> QuantizedActivations:
        """`x` in 8 bits, to be shared by all packed weights that it meets."""
        return quantize_activations(x)

    def matmul(
        self, x: torch.Tensor | QuantizedActivations, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x @ W^T` as float32 (tokens, out_features); the rows of `out` may lie apart."""
        operand = x.native if type(x) is QuantizedActivations else x
        return native.matmul(self.native, operand, out)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by id (any shape) as float32, exactly as they are stored."""
        return native.rows(self.native, ids)

    def dequantize(self) -> torch.Tensor:
        """The whole matrix as float32."""
        return self.rows(torch.arange(self._shape[0]))

    def __repr__(self) -> str:
        return f"PackedWeight({self.format}, {self._shape[0]}x{self._shape[1]})"


def matmul_many(
    weights: Sequence[PackedWeight],
    x: torch.Tensor | QuantizedActivations,
    outs: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Multiply the same `x` by several weights in one go: less waiting between small products."""
    operand = x.native if isinstance(x, QuantizedActivations) else x
    return native.matmul_many([weight.native for weight in weights], operand, outs)
