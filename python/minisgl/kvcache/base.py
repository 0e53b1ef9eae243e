"""The contracts of the KV pool and of the prefix caches, and the small results they return.

A pool stores K and V in pages and never asks whose they are. A prefix cache remembers which token
sequences have their KV in which locations and never touches K or V. `CacheManager` (scheduler) is
the only code that moves a page between the two. May import torch only.

Invariant: what a prefix cache returns from `evict` or `reset` it no longer knows, and what it keeps
it never changes. A location is a token's slot, `page * page_size + offset`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class BaseKVCachePool(ABC):
    """K and V of every layer, in pages.

    Attributes: `num_layers`, `num_pages` (the dummy page included), `page_size`, `dtype`, `device`.
    """

    num_layers: int
    num_pages: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def k_cache(self, index: int) -> torch.Tensor:
        """K of one layer, `(pages, page_size, heads, dim)`, writable, as stored."""

    @abstractmethod
    def v_cache(self, index: int) -> torch.Tensor:
        """V of one layer, `(pages, page_size, heads, dim)`, writable, as stored."""

    @abstractmethod
    def k_scale(self, index: int) -> torch.Tensor | None:
        """What the codes of one layer's K are times, float32 `(pages * page_size, heads)`,
        writable; None where K and V are floats."""

    @abstractmethod
    def v_scale(self, index: int) -> torch.Tensor | None:
        """What the codes of one layer's V are times, like `k_scale`."""

    @abstractmethod
    def store_kv(
        self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int
    ) -> None:
        """Store n tokens' K and V, flat or `(n, heads, dim)`, at the n locations `out_loc`."""

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, as `read_pages` gives them."""

    @abstractmethod
    def read_pages(self, pages: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """A copy of whole pages (page numbers, not locations): uint8 `(len(pages), page_bytes)`."""

    @abstractmethod
    def write_pages(self, pages: torch.Tensor | Sequence[int], data: torch.Tensor) -> None:
        """Write back what `read_pages` of a pool of the same shape gave."""


@dataclass(frozen=True)
class BaseCacheHandle(ABC):
    """A cached prefix of `cached_len` tokens. Only a locked handle is safe from eviction."""

    cached_len: int

    @abstractmethod
    def get_matched_indices(self) -> torch.Tensor:
        """The prefix's locations, `(cached_len,)`, freshly allocated or never written again."""


class SizeInfo(NamedTuple):
    """Cached tokens that an eviction could free, and those that locks protect."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All cached tokens."""
        return self.evictable_size + self.protected_size


class MatchResult(NamedTuple):
    """The longest cached prefix that was found, not yet locked."""

    cuda_handle: Any


class InsertResult(NamedTuple):
    """`cached_len` tokens were cached before; `handle` covers all that is cached now, unlocked."""

    cached_len: int
    handle: Any


class CachedPrefix(NamedTuple):
    """A cached prefix spelled out: its tokens, their locations, int32 both, and its salt."""

    ids: npt.NDArray[np.int32]
    indices: torch.Tensor
    salt: str


class BasePrefixCache(ABC):
    """Which token sequences have their KV where.

    Ids are CPU int32 tensors (arrays and lists work); salts are separate worlds. Nothing here is
    thread-safe: one scheduler owns one cache.
    """

    @property
    @abstractmethod
    def size_info(self) -> SizeInfo:
        """The cached tokens by state."""

    @abstractmethod
    def match_prefix(self, input_ids: torch.Tensor, salt: str = "") -> MatchResult:
        """The longest page-aligned cached prefix of `input_ids`; counts as a use of it."""

    @abstractmethod
    def insert_prefix(
        self, input_ids: torch.Tensor, indices: torch.Tensor, salt: str = ""
    ) -> InsertResult:
        """Cache the whole pages of a sequence whose KV is at `indices`; both are copied.

        The first `InsertResult.cached_len` tokens were cached already: their given locations are
        not taken and stay the caller's, as does the tail past `handle.cached_len`.
        """

    @abstractmethod
    def lock_handle(self, handle: BaseCacheHandle, unlock: bool = False) -> None:
        """Protect a prefix from eviction, or take one protection back; locks count."""

    def shared_lens(self, handles: Sequence[BaseCacheHandle | None]) -> list[int]:
        """Of each prefix, how many tokens lie in the prefix of a handle before it in the list."""
        return [0] * len(handles)

    @abstractmethod
    def evict(
        self, size: int, on_evict: Callable[[CachedPrefix], None] | None = None
    ) -> torch.Tensor:
        """Forget at least `size` tokens, least recently used first; returns all their locations.

        `RuntimeError` if fewer are evictable; 0 gives an empty tensor. on_evict: called with each
        prefix that loses its end, as it was before.
        """

    def reset(self) -> torch.Tensor:
        """Forget everything that is not locked; returns its locations."""
        return self.evict(self.size_info.evictable_size)

    def prefixes(self) -> Iterator[CachedPrefix]:
        """Every cached prefix that no longer one begins with, least recently used first."""
        return iter(())

    @abstractmethod
    def resident_indices(self) -> torch.Tensor:
        """Every location the cache holds, in no particular order."""

    @abstractmethod
    def check_integrity(self, handles: Iterable[BaseCacheHandle] | None = None) -> None:
        """`RuntimeError` naming the first broken invariant (I4, I5).

        handles: one entry for each lock in force; without it reference counts are only compared
        with each other.
        """
