"""What a scheduler does with a second tier, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.message import FlushMsg, UserMsg
from minisgl.params import SamplingParams
from minisgl.scheduler import prefixes

from tests.scheduler.simulated import Sim, alone

FIRST, OTHER = list(range(10, 22)), list(range(50, 62))
PAGE_BYTES = 2 * 4  # of the simulated engine: int32 tokens


def sim(num_slots: int = 100, num_pages: int = 8, **config: Any) -> Sim:
    """Pages of two tokens; room for one prompt of twelve and its answer, and not for another."""
    return Sim(num_pages, 2, kv_spill_bytes=num_slots * PAGE_BYTES, **config)


def pushed_out(**config: Any) -> Sim:
    """FIRST was answered, and is in the second tier alone."""
    world = sim(**config)
    for uid, prompt in enumerate((FIRST, OTHER)):
        world.submit(uid, prompt, 3)
        world.drain()
    assert cached(world, FIRST) == 0
    return world


def cached(world: Sim, ids: list[int]) -> int:
    """How many tokens of `ids` the first tier has."""
    cache = world.scheduler.cache_manager.prefix_cache
    return int(cache.match_prefix(torch.tensor(ids, dtype=torch.int32)).cuda_handle.cached_len)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_pushed_out_comes_back_and_is_not_computed(overlap: bool) -> None:
    world = pushed_out(overlap=overlap)
    world.submit(2, FIRST, 3)
    world.turn()
    assert world.batches[-1] == ("prefill", {2: 2}), "the last page, which is never taken whole"
    assert cached(world, FIRST) >= 10, "what came back is cached at once"
    world.drain()
    assert world.tokens(2) == alone(FIRST, 3)


def test_what_comes_back_costs_nothing_of_the_token_budget() -> None:
    world = pushed_out(max_extend_tokens=2)
    world.submit(2, FIRST, 3)
    world.turn()
    assert world.batches[-1] == ("prefill", {2: 2})
    assert len(world.tokens(2)) == 1, "one step, not six chunks"


def test_the_second_of_a_batch_finds_what_the_first_one_brought_back() -> None:
    world = sim(num_pages=14)
    for uid, prompt in enumerate((FIRST, OTHER, [*OTHER[:-1], 1], [7] * 26)):
        world.submit(uid, prompt, 1)
        world.drain()
    assert cached(world, FIRST) == 0
    world.submit(4, FIRST, 1)
    world.submit(5, [*FIRST[:-1], 1], 1)
    world.turn()
    assert world.batches[-1] == ("prefill", {4: 2, 5: 2})
    world.drain()
    assert world.tokens(4) == alone(FIRST, 1)
    assert world.tokens(5) == alone([*FIRST[:-1], 1], 1)


def test_a_spilled_hit_counts_as_a_miss_for_admission() -> None:
    world = pushed_out()
    world.submit(2, OTHER, 3)  # holds five of eight pages and may come to need three more
    world.turn()
    world.submit(3, FIRST[:4], 1)  # two pages, both in the second tier
    world.turn()
    assert world.waiting == [3] and cached(world, FIRST) == 0
    world.drain()
    assert world.tokens(3) == alone(FIRST[:4], 1)


def test_a_tier_that_fails_makes_the_prompt_be_computed() -> None:
    world = pushed_out()
    spill: Any = world.scheduler.cache_manager.spill

    def fail(slots: Any) -> None:
        raise OSError("disk")

    spill._memory.read = fail
    world.submit(2, FIRST, 3)
    world.drain()
    assert world.tokens(2) == alone(FIRST, 3) and spill.num_slots == 0
    world.submit(3, OTHER, 3)
    world.drain()
    assert world.tokens(3) == alone(OTHER, 3)


def test_a_flush_message_forgets_both_tiers() -> None:
    world = pushed_out()
    world.inbox += [FlushMsg(), UserMsg(2, FIRST, SamplingParams(max_tokens=3))]
    world.turn()
    assert world.batches[-1] == ("prefill", {2: 12})
    assert world.scheduler.cache_manager.spill.num_free_slots == 100  # type: ignore[union-attr]


def test_a_long_prefix_is_saved_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = sim(num_pages=20)
    world.submit(0, FIRST, 3)
    world.submit(1, [*FIRST[:4], 3, 3, 3, 3], 1)
    world.drain()
    monkeypatch.setattr(prefixes, "MAX_PIECE_BYTES", 3 * PAGE_BYTES)
    manager, engine = world.scheduler.cache_manager, world.engine
    records = list(prefixes.list_records(manager, engine))
    assert [(r.first, len(r.ids)) for r in records] == [(0, 6), (6, 8), (4, 10), (10, 14)]
    world.scheduler.save_prefixes(tmp_path / "kv")
    fresh = sim(num_pages=20)
    assert fresh.scheduler.load_prefixes(tmp_path / "kv") == 18
    assert cached(fresh, FIRST) == 12
    fresh.scheduler.cache_manager.check_integrity()
