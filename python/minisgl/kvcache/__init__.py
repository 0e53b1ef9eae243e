"""KV memory: the page pool that stores K and V, and the prefix caches that remember what is where.

Knows no model, takes plain numbers. May import `core`, `kernel`, `distributed`, `utils`. Who owns
a page is not decided here but in the scheduler's `CacheManager`; a cache only says what it holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.utils import Registry

from .base import (
    BaseCacheHandle,
    BaseKVCachePool,
    BasePrefixCache,
    CachedPrefix,
    InsertResult,
    MatchResult,
    SizeInfo,
)
from .mha_pool import MHAKVCache
from .naive_cache import NaivePrefixCache
from .radix_cache import RadixPrefixCache
from .spill import PagedEngine, SpillTier

__all__ = [
    "PREFIX_CACHES",
    "BaseCacheHandle",
    "BaseKVCachePool",
    "BasePrefixCache",
    "CachedPrefix",
    "InsertResult",
    "MHAKVCache",
    "MatchResult",
    "NaivePrefixCache",
    "PagedEngine",
    "RadixPrefixCache",
    "SizeInfo",
    "SpillTier",
    "create_kvcache_pool",
    "create_prefix_cache",
]

PREFIX_CACHES: Registry[Callable[[torch.device | str, int | None], BasePrefixCache]] = Registry(
    "cache type"
)


@PREFIX_CACHES.register("naive")
def _create_naive(device: torch.device | str, page_size: int | None) -> BasePrefixCache:
    return NaivePrefixCache(device)


@PREFIX_CACHES.register("radix")
def _create_radix(device: torch.device | str, page_size: int | None) -> BasePrefixCache:
    return RadixPrefixCache(device, page_size)


def create_prefix_cache(
    device: torch.device | str, type: str = "radix", page_size: int | None = None
) -> BasePrefixCache:
    """A prefix cache by name; `ConfigError` lists the names. page_size None: the context's."""
    return PREFIX_CACHES[type](device, page_size)


def create_kvcache_pool(
    num_kv_heads: int,
    num_layers: int,
    head_dim: int,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> BaseKVCachePool:
    """The KV pool of a model with these (global) numbers; the dummy page counts in `num_pages`."""
    return MHAKVCache(num_kv_heads, num_layers, head_dim, num_pages, page_size, dtype, device)
