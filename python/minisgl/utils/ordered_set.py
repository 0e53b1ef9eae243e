"""A set that iterates in the order of insertion, so that no decision depends on hashes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import TypeVar

T = TypeVar("T")


class OrderedSet(MutableSet[T]):
    """All operations of a set; iteration follows insertion."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items: dict[T, None] = dict.fromkeys(items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, value: T) -> None:
        """Add `value` at the end; where it is already there, it keeps its place."""
        self._items[value] = None

    def discard(self, value: T) -> None:
        """Remove `value` if it is there."""
        self._items.pop(value, None)

    def update(self, values: Iterable[T]) -> None:
        """Add all of `values`."""
        self._items.update(dict.fromkeys(values))

    def __repr__(self) -> str:
        return f"OrderedSet({list(self._items)!r})"
