"""Floats to blocks of Q4_K and Q6_K, which the gguf package can read but not write.

Straight from the layouts in ggml's `ggml-common.h`; scales are those of the extremes.
"""

from __future__ import annotations

import gguf
import numpy as np

Q = gguf.GGMLQuantizationType


def quantize(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Float32 (..., columns) as uint8 (..., bytes), of any type that can be written."""
    encode = {Q.Q4_K: _q4_k, Q.Q6_K: _q6_k}.get(kind)
    if encode is None:
        return gguf.quants.quantize(array, kind)
    return encode(array.reshape(-1, 256).astype(np.float32)).reshape(*array.shape[:-1], -1)


def _half(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, 1e-6).astype(np.float16).reshape(-1, 1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    x = blocks.reshape(-1, 8, 32)
    low = np.maximum(-x.min(-1), 0)
    width = (x.max(-1) + low) / 15
    d, dmin = _half(width.max(-1) / 63), _half(low.max(-1) / 63)
    scales = np.rint(width / d).clip(1, 63).astype(np.uint8)
    minima = np.rint(low / dmin).clip(0, 63).astype(np.uint8)
    codes = (x + (dmin * minima.astype(np.float32))[..., None]) / (d * scales)[..., None]
    codes = np.rint(codes).clip(0, 15).astype(np.uint8)
    low_half, high_half = slice(0, 4), slice(4, 8)
    six_bits = [
        scales[:, low_half] | (scales[:, high_half] >> 4 << 6),
        minima[:, low_half] | (minima[:, high_half] >> 4 << 6),
        (scales[:, high_half] & 15) | (minima[:, high_half] << 4),
    ]
    nibbles = (codes[:, 0::2] | (codes[:, 1::2] << 4)).reshape(-1, 128)
    return np.hstack([d.view(np.uint8), dmin.view(np.uint8), *six_bits, nibbles])


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    x = blocks.reshape(-1, 16, 16)
    size = np.abs(x).max(-1) / 31
    d = _half(size.max(-1) / 127)
    scales = np.rint(size / d).clip(1, 127).astype(np.int8)
    codes = np.rint(x / (d * scales)[..., None]).clip(-32, 31) + 32
    codes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    nibbles = (codes[:, :, :2] & 15) | (codes[:, :, 2:] << 4)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    pairs = np.bitwise_or.reduce(codes >> 4 << shifts, axis=2)
    flat = [part.reshape(len(blocks), -1) for part in (nibbles, pairs, scales.view(np.uint8))]
    return np.hstack([*flat, d.view(np.uint8)])
