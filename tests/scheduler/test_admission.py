"""The policies as pure functions, against a count of pages, one by one, in every small world."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from benchmark.admission import STOPS, Load, compare, ratios
from hypothesis import given
from hypothesis import strategies as st

from minisgl.kvcache import BaseCacheHandle, RadixPrefixCache
from minisgl.scheduler.admission import (
    LAG,
    PageDemand,
    Promises,
    conservative,
    optimistic,
    peak,
    peak_pages,
)

from tests.sim.world import WorldConfig


@dataclass
class Pool:
    """A pool whose cache holds the tokens 0, 1, 2, ..., and one of them per location."""

    num_pages: int
    page_size: int = 1
    available_pages: int = 0

    def __post_init__(self) -> None:
        self.prefix_cache = RadixPrefixCache("cpu", self.page_size)
        ids = torch.arange(64, dtype=torch.int32)
        self.prefix_cache.insert_prefix(ids, ids)

    def prefix(self, num_tokens: int) -> BaseCacheHandle:
        """The first tokens of what is cached, in whole pages."""
        handle: BaseCacheHandle = self.prefix_cache.match_prefix(
            torch.arange(num_tokens)
        ).cuda_handle
        return handle


Small = tuple[int, int, int]  # tokens stored, tokens to come, tokens of it that are shared


def demand(pool: Pool, small: Small) -> PageDemand:
    tokens, rest, shared = small
    prefix = pool.prefix(shared)
    return PageDemand.of_holder(tokens, tokens + rest + 1, prefix, pool.page_size)


def peak_of(demands: Sequence[PageDemand], pool: Pool) -> int:
    *others, last = demands
    return peak_pages(last, Promises(others), pool)


def count_pages(reqs: Sequence[Small], page_size: int) -> int:
    """The most pages in use at any step if everybody goes on, page by page."""
    most = 0
    for step in range(max(rest for _, rest, _ in reqs) + LAG + 1):
        pages: set[Any] = set()
        for i, (tokens, rest, shared) in enumerate(reqs):
            if step <= rest + LAG:
                num_pages = -(-(tokens + min(step, rest)) // page_size)
                num_shared = shared // page_size
                pages |= {("shared", page) for page in range(num_shared)}
                pages |= {(i, page) for page in range(num_shared, num_pages)}
        most = max(most, len(pages))
    return most


@pytest.mark.parametrize("page_size", [1, 2])
def test_in_every_small_world_the_peak_is_bounded_and_nearly_met(page_size: int) -> None:
    pool = Pool(4, page_size)
    kinds = [
        (tokens, rest, shared)
        for tokens, rest, shared in itertools.product((1, 2, 4), (0, 1, 3), (0, 2))
        if shared < tokens
    ]
    demands = {kind: demand(pool, kind) for kind in kinds}
    for num_reqs in (1, 2, 3):
        for reqs in itertools.combinations_with_replacement(kinds, num_reqs):
            bound = peak_of([demands[kind] for kind in reqs], pool)
            exact = count_pages(reqs, page_size)
            assert exact <= bound <= exact + num_reqs, f"{reqs} need {exact}, not {bound}"


def test_one_that_is_about_to_end_makes_room_for_one_that_has_just_begun() -> None:
    pool = Pool(20, available_pages=8)
    old, new = demand(pool, (12, 2, 0)), demand(pool, (4, 12, 0))
    assert peak_of([old, new], pool) == (12 + 3) + (4 + 3)  # one step after the old one's last
    assert not conservative(new, Promises([old]), pool) and not peak(new, Promises([old]), pool)
    assert peak(new, Promises([old]), Pool(22, available_pages=10))
    assert not conservative(new, Promises([old]), Pool(22, available_pages=10))


def test_a_shared_page_is_charged_until_its_last_holder_ends() -> None:
    pool = Pool(64)
    short, long = demand(pool, (10, 1, 8)), demand(pool, (9, 20, 8))
    assert peak_of([short, long], pool) == max((10 + 2) + (1 + 2), 9 + 21)
    assert peak_of([long, short], pool) == peak_of([short, long], pool)


def test_one_alone_that_fits_at_its_longest_is_admitted_also_after_a_hit() -> None:
    for page_size, cached in itertools.product((1, 4), (0, 8)):
        pool = Pool(16 // page_size, page_size)
        for input_len in range(cached + 1, 16):
            new = PageDemand.of_candidate(input_len, 16 - input_len, pool.prefix(cached), page_size)
            assert peak(new, Promises(), pool)


def test_conservative_lets_all_worst_cases_meet_and_peak_admits_what_it_admits() -> None:
    promised = Promises([PageDemand(held=2, worst=5), PageDemand(held=4, worst=4)])
    for policy in (conservative, peak):
        assert policy(PageDemand(0, 7), promised, Pool(10, available_pages=10))
    assert not conservative(PageDemand(0, 8), promised, Pool(10, available_pages=10))


@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.integers(1, 99), st.integers(0, 120), st.integers(0, 50)),
        max_size=9,
    ),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), max_size=3),
    st.sampled_from([1, 2, 16]),
    st.sampled_from([0, 1, 7]),
)
def test_promises_in_columns_are_the_demands_one_by_one(
    holders: list[tuple[int, int, int, int]],
    newcomers: list[tuple[int, int]],
    page_size: int,
    pace: int,
) -> None:
    pool = Pool(64, page_size)
    lens = [
        (cached, max(cached, prompt) + rest, prompt, unused)
        for cached, rest, prompt, unused in holders
    ]
    demands = [
        PageDemand.of_holder(
            cached, longest, None, page_size, prompt_len=prompt, pace=pace, unused=unused
        )
        for cached, longest, prompt, unused in lens
    ]
    columns = [list(column) for column in zip(*lens)] or [[], [], [], []]
    promises = Promises.of_holders(*columns, [None] * len(lens), page_size, pace)
    for input_len, output_len in newcomers:
        demands.append(
            PageDemand.of_candidate(input_len + 1, output_len, pool.prefix(input_len), page_size)
        )
        promises.append(demands[-1])
    assert promises.growth == sum(demand.growth for demand in demands)
    assert promises.ints.T.tolist() == [
        [d.held, d.worst, d.tokens, d.until, d.unused] for d in demands
    ]
    assert promises.prefixes == [demand.prefix for demand in demands]


@pytest.mark.parametrize("overlap", [False, True])
def test_peak_runs_more_at_once_and_needs_fewer_steps(overlap: bool) -> None:
    config = WorldConfig(num_pages=2_000, num_rows=64, budget=512, overlap=overlap)
    results = compare(Load(config, num_requests=80, shortest=10, longest=102))
    base, bold = results["conservative"], results["peak"]
    assert bold.mean_running > 1.2 * base.mean_running
    assert bold.num_steps < 0.85 * base.num_steps


def test_optimistic_goes_by_the_likely_end_and_admits_what_peak_admits() -> None:
    pool = Pool(20, available_pages=12)
    old = PageDemand.of_holder(8, 8 + 10 + 1, pool.prefix(0), 1, unused=8)
    new = PageDemand.of_candidate(6, 10, pool.prefix(0), 1, unused=7)
    promised = Promises([old])
    assert not peak(new, promised, pool) and optimistic(new, promised, pool)
    assert peak_pages(new, promised, pool, is_likely=True) == (8 + 3) + (6 + 3)
    assert not optimistic(new, promised, Pool(19, available_pages=11))
    for available, expected in ((30, True), (29, False)):
        sure = Promises([PageDemand.of_holder(8, 19, pool.prefix(0), 1)])
        newcomer = PageDemand.of_candidate(6, 14, pool.prefix(0), 1)
        assert peak(newcomer, sure, Pool(24, available_pages=available)) == expected
        assert optimistic(newcomer, sure, Pool(24, available_pages=available)) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_optimistic_needs_fewer_steps_where_answers_stop_early(overlap: bool) -> None:
    config = WorldConfig(num_pages=2_000, num_rows=64, budget=512, overlap=overlap)
    load = Load(config, num_requests=120, shortest=10, longest=102, stops=STOPS, check_every=4)
    _, steps, recomputed = ratios(compare(load), "optimistic")
    assert steps < 0.75 and recomputed < 0.05  # a cold start weighs more in a small load
