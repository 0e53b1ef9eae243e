"""What is said about torch in more than one place. Imports torch; loaded only when asked for."""

from __future__ import annotations

from collections.abc import Iterator
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


def resolve_dtype(dtype: Any, default: torch.dtype = torch.float32) -> torch.dtype:
    """The torch dtype meant by a name or a dtype object; "auto" and None mean `default`."""
    if dtype is None or dtype == "auto":
        return default
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype (--dtype) must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[name]


@contextmanager
def torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default dtype of new float tensors inside the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
