"""Admission: may one more request start, given what is promised to those that hold pages?

A policy is a pure function of what each request holds and may come to need. The theorem that
`conservative` and `peak` keep: if they say yes, no later allocation of any admitted request fails.
docs/scheduling.md proves it. The clock of the latter is the decode step: every running request is
in every decode or mixed batch and advances by one token in it, and only there. A prompt that is
computed meanwhile joins late. Whatever computes several tokens of an answer in a step breaks that.
`optimistic` keeps less: what it admits gets its first step. For the others `preempt` makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minisgl.kvcache import BaseCacheHandle, BasePrefixCache
from minisgl.utils import div_ceil

# Under overlap a step is allocated before the results of the one before it give pages back.
LAG = 1


@dataclass(frozen=True, slots=True)
class PageDemand:
    """What one request holds and may come to need.

    held: pages that are its own or locked for it. worst: pages it holds at its longest. tokens:
    what it has stored when its prompt is computed. until: the last decode step (the next one is 1)
    that may find its pages in use. prefix: what it locks, or would lock. unused: so many of the
    steps until then it will likely not take. pace: as `most_steps_late` takes it.
    """

    held: int
    worst: int
    tokens: int = 0
    until: int = 0
    prefix: BaseCacheHandle | None = None
    unused: int = 0

    @property
    def growth(self) -> int:
        """Pages it may still take, in the worst case."""
        return max(self.worst - self.held, 0)

    @classmethod
    def of_candidate(
        cls,
        input_len: int,
        output_len: int,
        prefix: BaseCacheHandle,
        page_size: int,
        *,
        pace: int = 0,
        unused: int = 0,
    ) -> PageDemand:
        """The demand of a request that would start with `prefix` from the cache."""
        held, worst = prefix.cached_len // page_size, div_ceil(input_len + output_len, page_size)
        late = most_steps_late(input_len - prefix.cached_len, pace)
        return cls(held, worst, input_len, output_len - 1 + late + LAG, prefix, unused)

    @classmethod
    def of_holder(
        cls,
        cached_len: Any,
        max_device_len: Any,
        prefix: BaseCacheHandle | None,
        page_size: int,
        *,
        prompt_len: Any = 0,
        pace: int = 0,
        unused: Any = 0,
    ) -> PageDemand:
        """The demand of a request with pages; its very last token is never stored.

        prompt_len: given if the prompt is computed only up to `cached_len`. All lengths may be
        arrays, and so are the fields then.
        """
        tokens = np.maximum(cached_len, prompt_len)
        held, worst = div_ceil(cached_len, page_size), div_ceil(max_device_len - 1, page_size)
        until = max_device_len - 1 - tokens + most_steps_late(tokens - cached_len, pace) + LAG
        return cls(held, worst, tokens, until, prefix, unused)


def most_steps_late(num_missing: Any, pace: int) -> Any:
    """How many decode steps can pass at most before `num_missing` prompt tokens are computed.

    pace: at least as many of them are computed from one such step to the next; 0: no such step
    comes in between. The first and the last stretch may be shorter. Takes arrays too.
    """
    return (div_ceil(num_missing, pace) + 2) * (num_missing > 0) if pace else 0


class Promises:
    """The demands of all who hold pages, as columns: there may be thousands, at every step.

    growth: pages that they may still take, all together.
    """

    def __init__(self, demands: Iterable[PageDemand] = ()) -> None:
        self._ints: np.ndarray[Any, Any] = np.empty((5, 0), dtype=np.int64)
        self._new: list[tuple[int, int, int, int, int]] = []
        self.prefixes: list[BaseCacheHandle | None] = []
        self.growth = 0
        for demand in demands:
            self.append(demand)

    @classmethod
    def of_holders(
        cls,
        cached_lens: Sequence[int],
        max_device_lens: Sequence[int],
        prompt_lens: Sequence[int],
        unused: Sequence[int],
        prefixes: list[BaseCacheHandle | None],
        page_size: int,
        pace: int = 0,
    ) -> Promises:
        """`PageDemand.of_holder` of many, in one pass."""
        ints = np.array([cached_lens, max_device_lens, prompt_lens, unused], dtype=np.int64)
        cached, longest, prompts, less = ints
        many = PageDemand.of_holder(
            cached, longest, None, page_size, prompt_len=prompts, pace=pace, unused=less
        )
        promises = cls()
        promises._ints = np.stack([many.held, many.worst, many.tokens, many.until, less])
        promises.prefixes = prefixes
        promises.growth = np.maximum(many.worst - many.held, 0).sum().item()
        return promises

    @property
    def ints(self) -> np.ndarray[Any, Any]:
        """Rows of held, worst, tokens, until, unused, int64 `(5, n)`, in the order of arrival."""
        if self._new:
            new = np.array(self._new, dtype=np.int64).T
            self._ints, self._new = np.concatenate([self._ints, new], axis=1), []
        return self._ints

    def append(self, demand: PageDemand) -> None:
        """Add one more; constant time."""
        ints = (demand.held, demand.worst, demand.tokens, demand.until, demand.unused)
        self._new.append(ints)
        self.prefixes.append(demand.prefix)
        self.growth += demand.growth


class Pool(Protocol):
    """What a policy sees of the pool: a `CacheManager`."""

    num_pages: int
    page_size: int
    prefix_cache: BasePrefixCache

    @property
    def available_pages(self) -> int:
        """Pages that are free, or cached and unlocked."""
        ...


AdmissionPolicy = Callable[[PageDemand, Promises, Pool], bool]


def conservative(candidate: PageDemand, promised: Promises, pool: Pool) -> bool:
    """Admit only if everybody's worst case fits at the same time."""
    return candidate.growth + promised.growth <= pool.available_pages


def peak(candidate: PageDemand, promised: Promises, pool: Pool) -> bool:
    """Admit if the pages in use fit at every later step, and whenever `conservative` does."""
    if conservative(candidate, promised, pool):
        return True
    return peak_pages(candidate, promised, pool) <= pool.num_pages


def optimistic(candidate: PageDemand, promised: Promises, pool: Pool) -> bool:
    """Admit if the pages in use are likely to fit at every later step, and whenever `peak` does."""
    if conservative(candidate, promised, pool):
        return True
    return peak_pages(candidate, promised, pool, is_likely=True) <= pool.num_pages


def peak_pages(
    candidate: PageDemand, promised: Promises, pool: Pool, *, is_likely: bool = False
) -> int:
    """At most so many pages are in use at any later step, if everybody goes on to the end.

    is_likely: if everybody ends where answers like theirs do.
    Between two ends use only grows, so it is highest at the last step before an end. A shared page
    is charged to its last holder. Pages begun are rounded up together, at most one a request.
    """
    _, _, tokens, until, unused = promised.ints
    tokens, until = np.append(tokens, candidate.tokens), np.append(until, candidate.until)
    if is_likely:
        until -= np.append(unused, candidate.unused)
    prefixes = [*promised.prefixes, candidate.prefix]
    latest_first = np.argsort(-until, kind="stable")
    shared = pool.prefix_cache.shared_lens([prefixes[i] for i in latest_first.tolist()])
    until = until[latest_first]
    tokens = tokens[latest_first] + (pool.page_size - 1) - np.array(shared, dtype=np.int64)
    in_use = tokens.cumsum() + until * np.arange(1, len(until) + 1)
    return int(in_use.max()) // pool.page_size


POLICIES: dict[str, AdmissionPolicy] = {
    "conservative": conservative,
    "peak": peak,
    "optimistic": optimistic,
}
