"""Random histories in random worlds (I1 to I13), and the seeds that once failed.

The short tier runs with `make test`, the long one with `make test-all`; `make fuzz` goes on for as
long as it is told to. A failure prints its case; `python -m tests.sim.fuzz --case LINE` shrinks it
to a history in tests/sim/seeds/, which is replayed here for ever.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from minisgl.scheduler import conservative, peak

from .driver import Case, run_case
from .replay import SEEDS, load, play
from .world import World

PAGE_SIZES = (1, 2, 3, 4, 16, 64)
SHORT_STEPS, LONG_STEPS, STEPS_PER_CASE = 10_000, 100_000, 500
KEPT = sorted(SEEDS.glob("*.json"))


def run_tier(first: int, num_steps: int, page_size: int, cache_type: str, overlap: bool) -> None:
    for seed in range(first, first + num_steps // STEPS_PER_CASE):
        case = Case(
            seed,
            page_size,
            cache_type,
            overlap,
            STEPS_PER_CASE,
            shares=seed % 2 == 0,
            is_fair=seed % 3 > 0,
        )
        run_case(case, checks_all=False)


worlds = pytest.mark.parametrize("page_size", PAGE_SIZES)
caches = pytest.mark.parametrize("cache_type", ["radix", "naive"])
loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


@worlds
@caches
@loops
def test_every_property_holds(page_size: int, cache_type: str, overlap: bool) -> None:
    run_tier(0, SHORT_STEPS, page_size, cache_type, overlap)


@pytest.mark.slow
@worlds
@caches
@loops
def test_every_property_holds_for_long(page_size: int, cache_type: str, overlap: bool) -> None:
    run_tier(1_000_000, LONG_STEPS, page_size, cache_type, overlap)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_seed_that_failed_once_passes(path: Path) -> None:
    play(*load(path))


def watch(world: World, seen: Counter[str]) -> None:
    """Count what happens inside, so that the generator cannot go blind unnoticed."""
    manager = world.scheduler.cache_manager
    cache, queue = manager.prefix_cache, world.scheduler.prefill_manager
    evict, cache_req, schedule = cache.evict, manager.cache_req, queue.schedule_next_batch

    def counted_evict(size: int, on_evict=None):  # type: ignore[no-untyped-def]
        seen["evictions"] += size > 0
        return evict(size, on_evict)

    def counted_cache_req(req, *, finished, length=None):  # type: ignore[no-untyped-def]
        prompt_len = world.engine.scripts[req.uid].prompt_len
        seen["shared chunks"] += length is not None and length < prompt_len
        old, row = manager._locked_len(req), manager.page_table[req.table_idx].clone()
        cache_req(req, finished=finished, length=length)
        if not finished and bool((manager.page_table[req.table_idx] != row).any()):
            seen["re-pointed rows"] += 1
        seen["handed over"] += finished
        if not finished:
            seen["prefix grew"] += req.cache_handle.cached_len > old

    def counted_schedule(budget: int):  # type: ignore[no-untyped-def]
        batch = schedule(budget)
        seen[f"head waits for {queue.head_waits_for}"] += 1
        seen["overtaken"] += any(pending.num_overtaken for pending in queue.pending_list)
        for req in batch.reqs if batch else ():
            seen["chunks"] += not req.is_sampled
            seen["prefix hits"] += req.cache_handle.cached_len > 0
        return batch

    restore = manager.restore

    def counted_restore(ids, handle, salt):  # type: ignore[no-untyped-def]
        longer = restore(ids, handle, salt)
        seen["restored"] += longer.cached_len > handle.cached_len
        return longer

    def counted_step(record):  # type: ignore[no-untyped-def]
        seen["head waits for decode step"] += record.head_waits_for == "decode step"

    policy = queue.policy

    def counted_policy(*args):  # type: ignore[no-untyped-def]
        admits = policy(*args)
        by_peak = admits and not conservative(*args) and peak(*args)
        by_guess = admits and not conservative(*args) and not by_peak
        seen["admitted by the peak alone"] += by_peak
        seen["admitted by the peak though others decode"] += by_peak and queue.pace > 0
        seen["admitted by the guess alone"] += by_guess
        seen["admitted by the guess though others decode"] += by_guess and queue.pace > 0
        return admits

    manager.restore = counted_restore  # type: ignore[method-assign]
    world.scheduler.step_listeners.append(counted_step)
    queue.policy = counted_policy
    cache.evict = counted_evict  # type: ignore[method-assign]
    manager.cache_req = counted_cache_req  # type: ignore[method-assign]
    queue.schedule_next_batch = counted_schedule  # type: ignore[method-assign]


def test_the_generator_reaches_every_corner() -> None:
    seen: Counter[str] = Counter()
    for seed in range(48):
        case = Case(seed, (1, 2, 4)[seed % 3], "radix", seed % 2 == 0, 400)
        world = run_case(case, checks_all=False, prepare=lambda world: watch(world, seen))
        seen.update(world.counts)
    for corner in (
        "evictions",
        "re-pointed rows",
        "prefix hits",
        "prefix grew",
        "chunks",
        "head waits for table row",
        "head waits for pages",
        "head waits for token budget",
        "head waits for shared prefix",
        "shared chunks",
        "admitted by the peak alone",
        "restored",
        "loaded tokens",
        "preempted",
        "admitted by the guess alone",
        "idle",
        "stop",
        "length",
        "error",
        "abort",
        "abort early",
        "abort in flight",
        "abort half-prefilled",
        "mixed",
        "overtaken",
        "head waits for decode step",
        "overloaded",
        "timeout",
        "admitted by the peak though others decode",
        "admitted by the guess though others decode",
        "preempted though others decode",
    ):
        assert seen[corner] >= 20, f"{corner}: {seen}"
    assert seen["reset"] > 0
