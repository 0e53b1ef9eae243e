"""Admission: may one more request start, given what is promised to those that hold pages?

A policy is a pure function of what each request holds and may come to need. The theorem that
`conservative` and `peak` keep: if they say yes, no later allocation of any admitted request fails.
docs/scheduling.md proves it. The clock of the latter is the decode step: every running request is
in every decode or mixed batch and advances by one token in it, and only there. A prompt that is
computed meanwhile joins late. Whatever computes several tokens of an answer in a step breaks that.
`optimistic` keeps less: what it admits gets its first step. For the others `preempt` makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

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
    def likely_until(self) -> int:
        """The last decode step that will likely find its pages in use."""
        return self.until - self.unused

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
        cached_len: int,
        max_device_len: int,
        prefix: BaseCacheHandle | None,
        page_size: int,
        *,
        prompt_len: int = 0,
        pace: int = 0,
        unused: int = 0,
    ) -> PageDemand:
        """The demand of a request with pages; its very last token is never stored.

        prompt_len: given if the prompt is computed only up to `cached_len`.
        """
        tokens = max(cached_len, prompt_len)
        held, worst = div_ceil(cached_len, page_size), div_ceil(max_device_len - 1, page_size)
        until = max_device_len - 1 - tokens + most_steps_late(tokens - cached_len, pace) + LAG
        return cls(held, worst, tokens, until, prefix, unused)


def most_steps_late(num_missing: int, pace: int) -> int:
    """How many decode steps can pass at most before `num_missing` prompt tokens are computed.

    pace: at least as many of them are computed from one such step to the next; 0: no such step
    comes in between. The first and the last stretch may be shorter.
    """
    return div_ceil(num_missing, pace) + 2 if pace and num_missing else 0


class Pool(Protocol):
    """What a policy sees of the pool: a `CacheManager`."""

    num_pages: int
    page_size: int
    prefix_cache: BasePrefixCache

    @property
    def available_pages(self) -> int:
        """Pages that are free, or cached and unlocked."""
        ...


AdmissionPolicy = Callable[[PageDemand, Sequence[PageDemand], Pool], bool]


def conservative(candidate: PageDemand, promised: Sequence[PageDemand], pool: Pool) -> bool:
    """Admit only if everybody's worst case fits at the same time."""
    growth = candidate.growth + sum([demand.growth for demand in promised])
    return growth <= pool.available_pages


def peak(candidate: PageDemand, promised: Sequence[PageDemand], pool: Pool) -> bool:
    """Admit if the pages in use fit at every later step, and whenever `conservative` does."""
    if conservative(candidate, promised, pool):
        return True
    return peak_pages([*promised, candidate], pool) <= pool.num_pages


def optimistic(candidate: PageDemand, promised: Sequence[PageDemand], pool: Pool) -> bool:
    """Admit if the pages in use are likely to fit at every later step, and whenever `peak` does."""
    if conservative(candidate, promised, pool):
        return True
    likely = attrgetter("likely_until")
    return peak_pages([*promised, candidate], pool, until_of=likely) <= pool.num_pages


def peak_pages(
    demands: Sequence[PageDemand],
    pool: Pool,
    until_of: Callable[[PageDemand], int] = attrgetter("until"),
) -> int:
    """At most so many pages are in use at any later step, if everybody goes on to the end.

    Between two ends use only grows, so it is highest at the last step before an end. A shared page
    is charged to its last holder. Pages begun are rounded up together, at most one a request.
    """
    latest_first = sorted(demands, key=until_of, reverse=True)
    shared = pool.prefix_cache.shared_lens([demand.prefix for demand in latest_first])
    until = np.array([until_of(demand) for demand in latest_first], dtype=np.int64)
    tokens = np.array([demand.tokens for demand in latest_first], dtype=np.int64)
    tokens += pool.page_size - 1 - np.array(shared, dtype=np.int64)
    in_use = tokens.cumsum() + until * np.arange(1, len(until) + 1)
    return int(in_use.max()) // pool.page_size


POLICIES: dict[str, AdmissionPolicy] = {
    "conservative": conservative,
    "peak": peak,
    "optimistic": optimistic,
}
