"""What is said about torch in more than one place. Imports torch; loaded only when asked for."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "half": torch.float16,
    "float": torch.float32,
}
KV_DTYPES = {**DTYPES, "int16": torch.int16, "int8": torch.int8}
# What K and V are stored in where the native kernels run and nothing else is said.
AUTO_KV_DTYPE = torch.int16


def resolve_dtype(
    dtype: Any,
    default: torch.dtype = torch.float32,
    field: str = "dtype (--dtype)",
    names: Mapping[str, torch.dtype] = DTYPES,
) -> torch.dtype:
    """The torch dtype meant by a name or a dtype object; "auto" and None mean `default`.

    field: what a `ConfigError` calls it. names: those there are.
    """
    if dtype is None or dtype == "auto":
        return default
    if isinstance(dtype, torch.dtype) and dtype in names.values():
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in names:
        raise ConfigError(f"{field} must be auto, {', '.join(names)}, got {dtype!r}")
    return names[name]


@contextmanager
def torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default dtype of new float tensors inside the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def zeros_as_used(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A zeroed tensor that, on a CPU, takes memory only where it is written, in small pages.

    Raises `MemoryError` where even the promise of so much memory is refused.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes == 0:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {num_bytes} bytes of memory") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # What is used of a KV pool lies in as many places as there are layers: with huge pages,
        # the first token would take 2 MB for each, and the time to zero them.
        block.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(block, dtype=dtype).view(tuple(shape))
