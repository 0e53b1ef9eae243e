"""Every history of a few events in worlds so small that everything collides.

Prompts share prefixes, pages are scarce, and each event is followed by one turn of the loop or by
none, so all interleavings up to the depth are covered.
"""

from __future__ import annotations

import itertools

import pytest

from .world import World, WorldConfig

EVENTS = ("same", "other", "longer", "abort first", "abort last", "turn", "two turns")
SHORT_DEPTH, LONG_DEPTH = 3, 5

CONFIGS = [
    WorldConfig(page_size=1, num_pages=9, num_rows=2, budget=3, overlap=True, vocab_size=3),
    WorldConfig(page_size=2, num_pages=5, num_rows=2, budget=100, overlap=True, vocab_size=3),
    WorldConfig(page_size=2, num_pages=4, num_rows=3, budget=3, overlap=False, vocab_size=3),
    WorldConfig(
        page_size=1,
        num_pages=24,
        num_rows=3,
        budget=3,
        overlap=True,
        vocab_size=3,
        share_prefixes=1,
    ),
    WorldConfig(
        page_size=1, num_pages=9, num_rows=2, budget=3, overlap=True, vocab_size=3, spill_pages=5
    ),
    WorldConfig(
        page_size=2,
        num_pages=7,
        num_rows=3,
        budget=4,
        overlap=True,
        vocab_size=3,
        mixed_chunk=2,
        queue_order="skip",
        max_overtaken=1,
        share_prefixes=1,
    ),
    WorldConfig(
        page_size=1,
        num_pages=12,
        num_rows=2,
        budget=2,
        vocab_size=3,
        max_prefill_streak=1,
        queue_order="longest-prefix",
        max_overtaken=1,
        max_queued=2,
    ),
]
# Two or three requests in four pages, one of which can end while another grows.
TINY_SHORT_DEPTH, TINY_LONG_DEPTH = 4, 6
TINY = [
    WorldConfig(
        num_pages=4,
        num_rows=3,
        vocab_size=3,
        overlap=overlap,
        spill_pages=spill_pages,
        **sizes,
        **policy,
    )
    for overlap in (False, True)
    for sizes in (
        {"page_size": 1, "budget": 2},
        {"page_size": 2, "budget": 8},
        {"page_size": 1, "budget": 2, "mixed_chunk": 1, "queue_order": "skip"},
        {"page_size": 2, "budget": 1, "max_prefill_streak": 1},
    )
    for spill_pages in (0, 3)
    for policy in ({"admission": "peak"}, {"admission": "optimistic", "admission_share": 0.001})
]
TINY_EVENTS = {"short": ([2], 1), "long": ([1], 3), "shared": ([1, 2, 1], 1)}


def play(config: WorldConfig, history: tuple[str, ...]) -> None:
    world = World(config)
    num_uids = 0
    for event in history:
        if event == "abort first":
            world.abort(0)
        elif event == "abort last":
            world.abort(max(num_uids - 1, 0))
        elif event in ("turn", "two turns"):
            for _ in range(1 + (event == "two turns")):
                world.step()
        else:
            prompt = {"same": [1, 2, 1, 2], "other": [1, 2, 2], "longer": [1, 2, 1, 2, 1]}[event]
            world.submit(num_uids, prompt, 3, ignore_eos=event != "other")
            num_uids += 1
    world.drain()


def play_all(config: WorldConfig, depth: int) -> None:
    for history in itertools.product(EVENTS, repeat=depth):
        if history[0] in ("same", "other", "longer", "abort first"):  # others begin idle
            try:
                play(config, history)
            except Exception as error:
                raise AssertionError(f"{history} in {config}") from error


configs = pytest.mark.parametrize(
    "config",
    CONFIGS,
    ids=["chunks", "pages", "normal", "shared", "spilled", "mixed", "streak"],
)


@configs
def test_every_short_history_holds(config: WorldConfig) -> None:
    play_all(config, SHORT_DEPTH)


def play_tiny(config: WorldConfig, history: tuple[str, ...]) -> int:
    """Returns how many were preempted."""
    world, num_uids = World(config, checks_all=False), 0
    for event in history:
        if event in TINY_EVENTS:
            prompt, max_tokens = TINY_EVENTS[event]
            max_tokens *= config.page_size
            world.submit(num_uids, prompt, max_tokens, ignore_eos=event != "shared")
            num_uids += 1
        elif event == "abort":
            world.abort(max(num_uids - 2, 0))
        else:
            world.step()
    world.drain()
    return world.counts["preempted"]


tiny = pytest.mark.parametrize(
    "config",
    TINY,
    ids=lambda c: (
        f"{c.admission}-{c.page_size}-{c.mixed_chunk}-{c.max_prefill_streak}-{c.overlap}"
        f"-{c.spill_pages}"
    ),
)


@tiny
def test_three_requests_in_four_pages(config: WorldConfig) -> None:
    play_all_tiny(config, TINY_SHORT_DEPTH)


@pytest.mark.slow
@tiny
def test_three_requests_in_four_pages_for_longer(config: WorldConfig) -> None:
    play_all_tiny(config, TINY_LONG_DEPTH)


def play_all_tiny(config: WorldConfig, depth: int) -> None:
    num_preempted = 0
    for history in itertools.product((*TINY_EVENTS, "abort", "turn"), repeat=depth):
        num_submits = sum(event in TINY_EVENTS for event in history)
        if history[0] in TINY_EVENTS and 2 <= num_submits <= 3:
            try:
                num_preempted += play_tiny(config, history)
            except Exception as error:
                raise AssertionError(f"{history} in {config}") from error
    if not config.mixed_chunk:  # else three steps of delay are room enough for these answers
        assert (num_preempted > 0) == (config.admission == "optimistic")


@pytest.mark.slow
@configs
def test_every_longer_history_holds(config: WorldConfig) -> None:
    play_all(config, LONG_DEPTH)
