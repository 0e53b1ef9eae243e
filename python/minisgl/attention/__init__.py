"""Attention backends: "torch" runs anywhere, "native" on a CPU where the extension is there, and
"auto" takes the best of them; others register themselves under their name.

May import `kvcache`, `quant`, `distributed` and what lies below them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.core import Context
from minisgl.utils import Registry
from minisgl.utils.errors import ConfigError

from .base import BaseAttnBackend, BaseAttnMetadata
from .native_backend import NativeAttnBackend, can_run
from .torch_backend import TorchAttnBackend

__all__ = [
    "ATTENTION_BACKENDS",
    "BaseAttnBackend",
    "BaseAttnMetadata",
    "NativeAttnBackend",
    "TorchAttnBackend",
    "create_attention_backend",
]

ATTENTION_BACKENDS: Registry[Callable[[Context, torch.device], BaseAttnBackend]] = Registry(
    "attention_backend (--attention-backend)"
)


@ATTENTION_BACKENDS.register("torch")
def _create_torch(ctx: Context, device: torch.device) -> BaseAttnBackend:
    return TorchAttnBackend(ctx)


@ATTENTION_BACKENDS.register("native")
def _create_native(ctx: Context, device: torch.device) -> BaseAttnBackend:
    if device.type != "cpu":
        raise ConfigError(f'attention backend "native" runs on a CPU, not on {device}')
    try:
        return NativeAttnBackend(ctx)
    except ImportError as error:
        raise ConfigError(f'attention backend "native" is not in this build: {error}') from error


@ATTENTION_BACKENDS.register("auto")
def _create_best(ctx: Context, device: torch.device) -> BaseAttnBackend:
    return NativeAttnBackend(ctx) if can_run(ctx, device) else TorchAttnBackend(ctx)


def create_attention_backend(
    name: str, ctx: Context, device: torch.device | str = "cpu"
) -> BaseAttnBackend:
    """The backend called `name` on the pool and page table of `ctx`.

    `ConfigError` if it is unknown, or cannot read the pool. Integers are read on a CPU only.
    """
    device = torch.device(device)
    backend = ATTENTION_BACKENDS[name](ctx, device)
    dtype = ctx.kv_cache.k_cache(0).dtype
    is_integer = not dtype.is_floating_point
    if (is_integer and device.type != "cpu") or not backend.can_read(dtype):
        raise ConfigError(
            f"{type(backend).__name__} on {device.type} cannot read K and V of {dtype}: choose "
            "another kv_dtype (--kv-dtype), such as float16"
        )
    return backend
