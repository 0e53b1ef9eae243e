"""The prefix cache that caches nothing: every prompt is computed in full. Imports `base` only.

It is the reference that the radix cache is compared with. Invariant: it never holds a location.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .base import (
    BaseCacheHandle,
    BasePrefixCache,
    CachedPrefix,
    InsertResult,
    MatchResult,
    SizeInfo,
)


@dataclass(frozen=True)
class NaiveCacheHandle(BaseCacheHandle):
    """The empty prefix."""

    empty: torch.Tensor

    def get_matched_indices(self) -> torch.Tensor:
        """No locations."""
        return self.empty


class NaivePrefixCache(BasePrefixCache):
    """Matches nothing, keeps nothing."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._empty = torch.empty(0, dtype=torch.int32, device=self.device)
        self._handle = NaiveCacheHandle(0, self._empty)

    @property
    def size_info(self) -> SizeInfo:
        """Always `(0, 0)`."""
        return SizeInfo(0, 0)

    def match_prefix(self, input_ids: torch.Tensor, salt: str = "") -> MatchResult:
        """The empty prefix."""
        return MatchResult(self._handle)

    def insert_prefix(
        self, input_ids: torch.Tensor, indices: torch.Tensor, salt: str = ""
    ) -> InsertResult:
        """Takes nothing: all of `indices` stays the caller's."""
        return InsertResult(0, self._handle)

    def lock_handle(self, handle: BaseCacheHandle, unlock: bool = False) -> None:
        """Nothing to protect."""

    def evict(
        self, size: int, on_evict: Callable[[CachedPrefix], None] | None = None
    ) -> torch.Tensor:
        """Empty for 0, else a `RuntimeError`."""
        if size > 0:
            raise RuntimeError(f"cannot evict {size} tokens: the naive cache holds none")
        return self._empty

    def resident_indices(self) -> torch.Tensor:
        """No locations."""
        return self._empty

    def check_integrity(self, handles: Iterable[BaseCacheHandle] | None = None) -> None:
        """Every handle must be empty."""
        if any(handle.cached_len for handle in handles or ()):
            raise RuntimeError("integrity: the naive cache gave out a handle that is not empty")
