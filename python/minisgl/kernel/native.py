"""The native CPU kernels (`minisgl._native`, built from `csrc/`) behind checks that never crash.

Kernels take addresses. This module is the only one that hands them out: it checks type, device,
shape and stride, keeps the tensors alive during the call, and raises `TypeError` or `ValueError`
for anything else. The extension loads at the first use; `available()` asks whether there is one.
May import `env` and `utils`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from minisgl.env import ENV
from minisgl.utils.errors import ConfigError

# Numbers that csrc/matmul.h and csrc/format.h give to kinds of floats and to formats.
FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMATS = {"q4": 0, "q4m": 1, "q5": 2, "q5m": 3, "q6": 4, "q8": 5}


@cache
def load() -> ModuleType:
    """The extension module, set up once; `ImportError` if this installation was built without."""
    _native = import_module("minisgl._native")
    threads = ENV.NUM_THREADS.value or _num_usable_cpus()
    _native.set_num_threads(threads)
    if forced := ENV.ISA.value:
        if forced not in _native.available_isas():
            choices = ", ".join(_native.available_isas())
            raise ConfigError(f"{ENV.ISA.name}={forced} does not run here: use {choices}")
        _native.set_isa(forced)
    return _native


def available() -> bool:
    """True if the extension can be imported here."""
    try:
        load()
    except ImportError:
        return False
    return True


def _num_usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, min(256, len(os.sched_getaffinity(0))))
    return max(1, min(256, os.cpu_count() or 1))


def available_isas() -> list[str]:
    """Instruction sets that this machine can run, from "portable" to the fastest."""
    return load().available_isas()


def isa() -> str:
    """The instruction set in force."""
    return load().isa()


def set_isa(name: str) -> None:
    """Use the kernels of `name` from now on; `ValueError` if the machine cannot run them."""
    load().set_isa(name)


def num_threads() -> int:
    """Threads that share one operation, the caller included."""
    return load().num_threads()


def set_num_threads(n: int) -> None:
    """Set `num_threads()`; between 1 and 256."""
    load().set_num_threads(n)


def set_spin_us(us: int) -> None:
    """How long an idle worker spins before it sleeps, in microseconds."""
    load().set_spin_us(us)


def _check_matrix(name: str, x: Any, columns: int | None = None) -> torch.Tensor:
    """`x` as a float32 CPU matrix whose rows are contiguous."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        raise TypeError(f"{name} must be float32 on the CPU, not {x.dtype} on {x.device}")
    if x.dim() != 2 or (columns is not None and x.shape[1] != columns):
        wanted = "any" if columns is None else columns
        raise ValueError(f"{name} must be (tokens, {wanted}), not {tuple(x.shape)}")
    return x


def _input(x: Any, columns: int | None = None) -> torch.Tensor:
    x = _check_matrix("x", x, columns)
    # Rows may lie apart, not their elements.
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _output(out: torch.Tensor | None, tokens: int, rows: int) -> torch.Tensor:
    if out is None:
        return torch.empty((tokens, rows))
    _check_matrix("out", out, rows)
    if out.shape[0] != tokens:
        raise ValueError(f"out must have {tokens} rows, not {out.shape[0]}")
    if tokens and ((rows > 1 and out.stride(1) != 1) or (tokens > 1 and out.stride(0) < rows)):
        raise ValueError(f"out must have contiguous, disjoint rows; its strides are {out.stride()}")
    return out


def pack_gguf(
    parts: Sequence[tuple[np.ndarray, int]], ggml_type: int, shape: tuple[int, int]
) -> Any:
    """A native packed matrix of `shape` (out, in) from GGUF tensors, one on top of the other.

    parts: the uint8 bytes of each, and in how many heads its rows are interleaved (0: in none).
    """
    for raw, _ in parts:
        if raw.dtype != np.uint8:
            raise TypeError(f"raw GGUF data must be uint8, not {raw.dtype}")
    kept = [(np.ascontiguousarray(raw), num_heads) for raw, num_heads in parts]
    sources = [(raw.ctypes.data, raw.nbytes, num_heads) for raw, num_heads in kept]
    return load().packed_from_gguf(sources, int(ggml_type), *shape)


def pack_float(tensor: torch.Tensor, fmt: str) -> Any:
    """A native packed matrix of format "q4m" or "q8" from a float matrix (out, in)."""
    if tensor.dtype not in FLOAT_KINDS or tensor.device.type != "cpu":
        raise TypeError(f"cannot pack {tensor.dtype} on {tensor.device}")
    if tensor.dim() != 2:
        raise ValueError(f"cannot pack a tensor of shape {tuple(tensor.shape)}")
    if tensor.stride(1) != 1 or tensor.stride(0) < tensor.shape[1]:
        tensor = tensor.contiguous()
    rows, columns = tensor.shape
    kind = FLOAT_KINDS[tensor.dtype]
    address, stride = tensor.data_ptr(), tensor.stride(0)
    return load().packed_from_float(address, kind, stride, FORMATS[fmt], rows, columns)


def quantize(x: torch.Tensor) -> Any:
    """Native 8-bit activations of `x` (tokens, columns)."""
    x = _input(x)
    return load().quantize(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0))


def matmul(weight: Any, x: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ W^T` as (tokens, out); x is a float32 matrix or what `quantize` returned."""
    native = load()
    if isinstance(x, native.Activations):
        out = _output(out, x.tokens, weight.rows)
        native.multiply(weight, x, out.data_ptr(), out.stride(0))
        return out
    x = _input(x, weight.columns)
    tokens = x.shape[0]
    out = _output(out, tokens, weight.rows)
    native.linear(weight, x.data_ptr(), tokens, x.stride(0), out.data_ptr(), out.stride(0))
    return out


def matmul_many(
    weights: Sequence[Any], x: Any, outs: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The products of the same x with several weights, all threads working on all of them."""
    native = load()
    if not isinstance(x, native.Activations):
        x = quantize(x)
    given = outs if outs is not None else [None] * len(weights)
    if len(given) != len(weights):
        raise ValueError(f"{len(weights)} weights but {len(given)} outputs")
    results = [_output(out, x.tokens, w.rows) for w, out in zip(weights, given, strict=True)]
    jobs = tuple(
        (w, out.data_ptr(), out.stride(0)) for w, out in zip(weights, results, strict=True)
    )
    native.multiply_many(x, jobs)
    return results


def rows(weight: Any, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a packed matrix as float32, shape (*ids.shape, columns); `IndexError` if outside."""
    if ids.device.type != "cpu" or ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise TypeError(f"row ids must be integers on the CPU, not {ids.dtype} on {ids.device}")
    flat = ids.reshape(-1).to(torch.int64).contiguous()
    out = torch.empty((flat.shape[0], weight.columns))
    load().gather_rows(weight, flat.data_ptr(), flat.shape[0], out.data_ptr())
    return out.reshape(*ids.shape, weight.columns)


def matmul_float(
    weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight^T` in float32, for a float32, bfloat16 or float16 weight (out, in)."""
    if weight.dtype not in FLOAT_KINDS or weight.device.type != "cpu":
        raise TypeError(f"cannot multiply by {weight.dtype} on {weight.device}")
    if weight.dim() != 2 or (weight.shape[1] > 1 and weight.stride(1) != 1):
        raise ValueError("the weight must be a matrix with contiguous rows")
    rows, columns = weight.shape
    x = _input(x, columns)
    out = _output(out, x.shape[0], rows)
    load().float_product(
        FLOAT_KINDS[weight.dtype],
        weight.data_ptr(),
        weight.stride(0),
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        rows,
        x.shape[0],
        columns,
    )
    return out
