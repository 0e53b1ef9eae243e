"""Random operations on the prefix caches, beside a model that is a plain list of sequences (I6).

The model keeps every resident page with its whole history and the tick of its last use. A page
may go only when nothing below it is resident, nothing locked needs it, and no page that may go is
less recent.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kvcache import BaseCacheHandle, create_prefix_cache
from minisgl.kvcache.radix_cache import RadixPrefixCache

Path = tuple[str, tuple[int, ...]]  # a salt, and the tokens from the start to the end of a page


@dataclass
class Model:
    """Every resident page: where it is and when it was last used. Locks are paths."""

    page_size: int
    tick: int = 0
    pages: dict[Path, list[int]] = field(default_factory=dict)
    used: dict[Path, int] = field(default_factory=dict)
    locks: list[Path] = field(default_factory=list)

    def paths(self, salt: str, tokens: list[int]) -> list[Path]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(salt, tuple(tokens[:end])) for end in ends]

    def match(self, salt: str, tokens: list[int]) -> list[int]:
        """The locations of the longest resident prefix; counts as a use."""
        self.tick += 1
        found: list[int] = []
        for path in self.paths(salt, tokens):
            if path not in self.pages:
                break
            self.used[path] = self.tick
            found += self.pages[path]
        return found

    def insert(self, salt: str, tokens: list[int], locations: list[int]) -> int:
        num_cached = len(self.match(salt, tokens))
        for path in self.paths(salt, tokens):
            end = len(path[1])
            if end > num_cached:
                self.pages[path] = locations[end - self.page_size : end]
                self.used[path] = self.tick
        return num_cached

    def is_locked(self, path: Path) -> bool:
        salt, tokens = path
        return any(s == salt and t[: len(tokens)] == tokens for s, t in self.locks)

    def protected_size(self) -> int:
        return self.page_size * sum(self.is_locked(path) for path in self.pages)

    def remove(self, locations: list[int]) -> None:
        """Take evicted pages out: no survivor may need them or be less recent and free to go."""
        gone = set(locations)
        assert len(gone) == len(locations)
        leaving = [path for path, where in self.pages.items() if where[0] in gone]
        assert sum(len(self.pages[path]) for path in leaving) == len(locations)
        for path in leaving:
            assert not self.is_locked(path)
        newest = max((self.used[path] for path in leaving), default=0)
        for path in leaving:
            del self.pages[path], self.used[path]
        for salt, tokens in self.pages:
            assert len(tokens) == self.page_size or (salt, tokens[: -self.page_size]) in self.pages
        for path in self.pages:
            is_leaf = not any(
                s == path[0] and t[: len(path[1])] == path[1] and len(t) > len(path[1])
                for s, t in self.pages
            )
            if is_leaf and not self.is_locked(path):
                assert self.used[path] >= newest


class Pair:
    """The cache and the model, driven together."""

    def __init__(self, page_size: int) -> None:
        self.cache = RadixPrefixCache("cpu", page_size)
        self.model = Model(page_size)
        self.handles: list[BaseCacheHandle] = []
        self.next_page = 0

    def insert(self, salt: str, tokens: list[int]) -> None:
        ps = self.model.page_size
        first = self.next_page * ps
        self.next_page += len(tokens) // ps + 1
        locations = list(range(first, first + len(tokens)))
        indices = torch.tensor(locations, dtype=torch.int32)
        result = self.cache.insert_prefix(torch.tensor(tokens, dtype=torch.int32), indices, salt)
        assert result.cached_len == self.model.insert(salt, tokens, locations)
        assert result.handle.cached_len == len(tokens) // ps * ps
        self._same(result.handle, salt, tokens)

    def match(self, salt: str, tokens: list[int]) -> BaseCacheHandle:
        found = self.model.match(salt, tokens)
        handle = self.cache.match_prefix(torch.tensor(tokens, dtype=torch.int32), salt).cuda_handle
        assert handle.get_matched_indices().tolist() == found
        assert handle.cached_len == len(found)
        return handle

    def lock(self, salt: str, tokens: list[int]) -> None:
        handle = self.match(salt, tokens)
        self.cache.lock_handle(handle)
        self.handles.append(handle)
        self.model.locks.append((salt, tuple(tokens[: handle.cached_len])))

    def unlock(self, which: int) -> None:
        if self.handles:
            which %= len(self.handles)
            self.cache.lock_handle(self.handles.pop(which), unlock=True)
            self.model.locks.pop(which)

    def evict(self, size: int) -> None:
        size = min(size, self.cache.size_info.evictable_size)
        freed = self.cache.evict(size).tolist()
        assert len(freed) >= size
        self.model.remove(freed)

    def check(self) -> None:
        ps = self.model.page_size
        protected = self.model.protected_size()
        assert self.cache.size_info == (len(self.model.pages) * ps - protected, protected)
        self.cache.check_integrity(self.handles)
        expected = sorted(at for where in self.model.pages.values() for at in where)
        assert sorted(self.cache.resident_indices().tolist()) == expected
        for handle, (salt, tokens) in zip(self.handles, self.model.locks):
            self._same(handle, salt, list(tokens))

    def _same(self, handle: BaseCacheHandle, salt: str, tokens: list[int]) -> None:
        where = [at for path in self.model.paths(salt, tokens) for at in self.model.pages[path]]
        assert handle.get_matched_indices().tolist() == where


tokens_st = st.lists(st.integers(0, 2), max_size=14)
salt_st = st.sampled_from(["", "", "", "a", "b"])
step_st = st.one_of(
    st.tuples(st.just("insert"), salt_st, tokens_st),
    st.tuples(st.just("match"), salt_st, tokens_st),
    st.tuples(st.just("lock"), salt_st, tokens_st),
    st.tuples(st.just("unlock"), st.integers(0, 5)),
    st.tuples(st.just("evict"), st.integers(0, 8)),
)


@settings(max_examples=200, deadline=None)
@given(page_size=st.sampled_from([1, 2, 3, 4]), steps=st.lists(step_st, max_size=25))
def test_any_sequence_of_operations_agrees_with_the_model(page_size: int, steps: list) -> None:  # type: ignore[type-arg]
    pair = Pair(page_size)
    for name, *args in steps:
        getattr(pair, name)(*args)
        pair.check()


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
def test_a_long_random_run_agrees_with_the_model(page_size: int) -> None:
    rng = random.Random(page_size)
    pair = Pair(page_size)
    for _ in range(400):
        salt = rng.choice(["", "", "a"])
        length = rng.randrange(6 * page_size)
        start = [rng.randrange(2)] * rng.randrange(length + 1)
        tokens = start + [rng.randrange(2) for _ in range(length - len(start))]
        name = rng.choice(["insert", "insert", "match", "lock", "unlock", "evict", "evict"])
        if name == "unlock":
            pair.unlock(rng.randrange(9))
        elif name == "evict":
            pair.evict(rng.randrange(5 * page_size))
        else:
            getattr(pair, name)(salt, tokens)
        pair.check()
    while pair.handles:
        pair.unlock(0)
    pair.evict(10**9)
    assert not pair.model.pages


def test_the_naive_cache_caches_nothing() -> None:
    cache = create_prefix_cache("cpu", type="naive", page_size=4)
    tokens = torch.arange(8, dtype=torch.int32)
    result = cache.insert_prefix(tokens, tokens)
    assert (result.cached_len, result.handle.cached_len) == (0, 0)
    handle = cache.match_prefix(tokens).cuda_handle
    assert handle.cached_len == 0 and handle.get_matched_indices().numel() == 0
    cache.lock_handle(handle)
    cache.lock_handle(handle, unlock=True)
    assert cache.size_info == (0, 0) and cache.resident_indices().numel() == 0
    assert cache.evict(0).numel() == 0 and cache.reset().numel() == 0
    with pytest.raises(RuntimeError, match="cannot evict 1"):
        cache.evict(1)
    cache.check_integrity([handle])


def test_an_unknown_cache_type_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"cache type 'lru': use one of naive, radix"):
        create_prefix_cache(device="cpu", type="lru")
