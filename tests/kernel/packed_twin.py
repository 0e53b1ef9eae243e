"""What products of packed weights with quantised activations are, in numpy, from the bytes.

Formats with a unit (q4, q4m) add integers: here they are read as csrc/format.h and docs/kernels.md
describe them, so that the layout is checked as well. The others are plain sums of what weights and
activations stand for.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch

from minisgl.quant.packed import PackedWeight

ROWS, GROUP, SPAN, LINE = 16, 32, 8, 64


class Units(NamedTuple):
    """codes: less 8, `(rows, groups, 32)`; scales, minimums `(rows, groups)`; units `(rows,)`."""

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray
    units: np.ndarray

    def values(self) -> np.ndarray:
        """The weight in float64 `(rows, columns padded to 32)`."""
        whole = self.codes * self.scales[..., None] + 8 * self.minimums[..., None]
        return (whole * self.units[:, None, None].astype(float)).reshape(len(self.units), -1)


def read_units(weight: PackedWeight) -> Units:
    """Takes a weight of format q4 or q4m apart."""
    rows, columns = weight.shape
    groups, panels = -(-columns // GROUP), -(-rows // ROWS)
    memory = (ctypes.c_uint8 * weight.nbytes).from_address(weight.native.address)
    panel = np.frombuffer(memory, np.uint8).reshape(panels, -1)
    units = panel[:, -4 * ROWS :].copy().view(np.float32).reshape(-1)
    block = panel[:, : -4 * ROWS].reshape(panels, groups, -1)
    lines = block[..., : 4 * LINE].reshape(panels, groups, 4, ROWS, 4)
    vectors = np.concatenate([lines & 15, lines >> 4], axis=2)  # vector v: columns 4v to 4v + 3
    codes = vectors.transpose(0, 3, 1, 2, 4).reshape(panels * ROWS, groups, GROUP)
    whole = block[..., 4 * LINE :].copy().view(np.int16).reshape(panels, groups, ROWS, -1)
    parts = whole.transpose(0, 2, 1, 3).reshape(panels * ROWS, groups, -1).astype(np.int64)
    minimums = parts[..., 1] if weight.format == "q4m" else np.zeros_like(parts[..., 0])
    cut = slice(0, rows)
    return Units(codes[cut].astype(np.int64) - 8, parts[cut, :, 0], minimums[cut], units[cut])


def _groups(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes `(tokens, groups, 32)` and float32 scales `(tokens, groups)`."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).reshape(x.shape[0], -1, GROUP)
    amax = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(amax, 127) / amax  # of a plain 127 torch takes the reciprocal
    codes = torch.round(groups * torch.where(amax > 0, inverse, 0))
    return codes.numpy().astype(np.int64), (amax / 127)[..., 0].numpy()


def twin_activations(x: torch.Tensor) -> torch.Tensor:
    """What the quantised activations stand for, in float64 `(tokens, columns)`."""
    codes, scales = _groups(x)
    values = (codes * scales[..., None].astype(float)).reshape(len(x), -1)
    return torch.from_numpy(values)[:, : x.shape[1]]


def _scaled(whole: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return (whole[None] * factor[:, None] + (1 << 14)) >> 15


def twin_matmul(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    """The product in float64 `(tokens, rows)`."""
    codes, scales = _groups(x)
    tokens, groups, _ = codes.shape
    if weight.format not in ("q4", "q4m"):
        return twin_activations(x) @ weight.dequantize().double().T
    w = read_units(weight)
    total = np.zeros((tokens, weight.shape[0]))
    for first in range(0, groups, SPAN):
        span = slice(first, first + SPAN)
        largest = scales[:, span].max(1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = scales[:, span] * (np.float32(32767) / largest)
        factor = np.floor(np.where(largest > 0, share, np.float32(0)) + np.float32(0.5))
        factor = factor.astype(np.int64)
        sums = np.einsum("tgc,rgc->trg", codes[:, span], w.codes[:, span])
        eighths = 8 * codes[:, span].sum(-1)[:, None] - (sums < 0)  # a borrow of the lower half
        scaled = sums * _scaled(w.scales[:, span], factor)
        scaled += eighths * _scaled(w.minimums[:, span], factor)
        whole = scaled.sum(-1)
        assert np.abs(whole).max(initial=0) < 2**31
        total += whole * (largest * (32768 / 32767))
    return torch.from_numpy(total * w.units)
