"""A table of named implementations, with an error that lists the names there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from .errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to implementations of one kind of thing."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters what it decorates under `name`."""

        def enter(item: T) -> T:
            assert name not in self._items, f"{self.kind} {name!r} is registered twice"
            self._items[name] = item
            return item

        return enter

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise ConfigError(f"unknown {self.kind} {name!r}: use one of {', '.join(self.names())}")
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._items)
