"""Small helpers that every layer may use. May import `minisgl.env` only.

What needs torch, ZeroMQ or the network is loaded when it is first asked for, so that processes
without a model stay small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .arith import align_ceil, align_down, div_ceil, div_even
from .logger import init_logger
from .ordered_set import OrderedSet
from .registry import Registry

if TYPE_CHECKING:
    from .model_files import cached_load_hf_config
    from .mp import ZmqPubQueue, ZmqPullQueue, ZmqPushQueue, ZmqSubQueue
    from .torch_utils import (
        AUTO_KV_DTYPE,
        KV_DTYPES,
        resolve_dtype,
        torch_dtype,
        zeros_as_used,
    )

__all__ = [
    "AUTO_KV_DTYPE",
    "KV_DTYPES",
    "OrderedSet",
    "Registry",
    "ZmqPubQueue",
    "ZmqPullQueue",
    "ZmqPushQueue",
    "ZmqSubQueue",
    "align_ceil",
    "align_down",
    "cached_load_hf_config",
    "div_ceil",
    "div_even",
    "init_logger",
    "resolve_dtype",
    "torch_dtype",
    "zeros_as_used",
]

_HOMES = {
    "AUTO_KV_DTYPE": ".torch_utils",
    "KV_DTYPES": ".torch_utils",
    "ZmqPubQueue": ".mp",
    "ZmqPullQueue": ".mp",
    "ZmqPushQueue": ".mp",
    "ZmqSubQueue": ".mp",
    "cached_load_hf_config": ".model_files",
    "resolve_dtype": ".torch_utils",
    "torch_dtype": ".torch_utils",
    "zeros_as_used": ".torch_utils",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'minisgl.utils' has no attribute {name!r}")
