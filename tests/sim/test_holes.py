"""The two holes of the reference implementation, and other histories worth telling step by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minisgl.params import FinishReason
from minisgl.scheduler.scheduler import MAX_EARLY_ABORTS

from .driver import Case, run_case
from .engine import Violation
from .mutants import MUTANTS
from .replay import load, play, save, shrink
from .world import World, WorldConfig


def two_equal_prompts(overlap: bool, page_size: int) -> World:
    """Two equal prompts in one batch, then one that takes the pages their duplicates gave back."""
    config = WorldConfig(
        page_size=page_size,
        num_pages=48 // page_size,
        num_rows=3,
        budget=100,
        overlap=overlap,
        vocab_size=9,
    )
    world = World(config)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    world.submit(0, prompt, 8, ignore_eos=True)
    world.submit(1, prompt, 8, ignore_eos=True)
    world.step()
    return world


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_row_is_pointed_at_the_cache_before_its_duplicates_are_freed(
    overlap: bool, page_size: int
) -> None:
    world = two_equal_prompts(overlap, page_size)
    world.step()
    first, second = (world.engine.table[row, :12].tolist() for row in (0, 1))
    assert first == second, "both rows must name the one copy that is left"
    world.submit(2, [8, 8, 8, 8, 8, 8, 8, 8, 8], 8, ignore_eos=True)  # reuses what was freed
    world.drain()
    assert [len(world.book[uid].answer) for uid in (0, 1, 2)] == [8, 8, 8]


@pytest.mark.parametrize("overlap", [False, True])
def test_without_the_re_pointing_a_request_reads_what_another_writes(overlap: bool) -> None:
    world = two_equal_prompts(overlap, 1)
    with pytest.MonkeyPatch.context() as patch:
        world = World(world.config)
        MUTANTS["drop_the_repointing"](world, patch)
        world.check = lambda: None  # type: ignore[method-assign]  # the shadow KV alone must see it
        for uid in (0, 1):
            world.submit(uid, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], 8, ignore_eos=True)
        world.step()
        world.step()
        for uid in (2, 3, 4):
            world.submit(uid, [8] * (9 + uid), 8, ignore_eos=True)
        with pytest.raises(Violation, match="I13"):
            world.drain()
    assert "spells" in world.engine.violations[0]


def test_two_requests_of_a_page_and_a_bit_do_not_both_get_into_three_pages() -> None:
    config = WorldConfig(page_size=16, num_pages=3, num_rows=2, budget=1000, vocab_size=9)
    world = World(config)
    for uid in (0, 1):  # 17 + 1 tokens are two pages each; 36 tokens would fit into 48
        world.submit(uid, [uid + 1] * 17, 1, ignore_eos=True)
    world.step()
    assert world.engine.started == [0] and len(world.queue) == 1
    world.drain()
    assert [world.book[uid].reason for uid in (0, 1)] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_may_come_at_any_turn_and_more_than_once(overlap: bool) -> None:
    for turn, twice, budget in itertools.product(range(14), (False, True), (2, 100)):
        config = WorldConfig(num_pages=40, num_rows=2, budget=budget, overlap=overlap)
        world = World(config)
        world.submit(0, [1, 2, 3, 4, 1, 2], 5, ignore_eos=True)
        world.submit(1, [1, 2, 3, 4, 4], 5, ignore_eos=True)
        for _ in range(turn):
            world.step()
        world.abort(0)
        if twice:
            world.step()
            world.abort(0)
        world.drain()
        assert world.book[1].reason is FinishReason.LENGTH
        assert world.book[0].reason in (FinishReason.ABORT, FinishReason.LENGTH)


def test_an_abort_that_overtakes_its_submit_wins() -> None:
    world = World(WorldConfig())
    world.abort(0)
    world.step()
    world.submit(0, [1, 2], 3)
    world.submit(1, [1, 2], 3, ignore_eos=True)
    world.drain()
    assert world.book[0].answer == [] and len(world.book[1].answer) == 3
    assert not world.scheduler._early_aborts


def test_a_failed_request_is_not_shared() -> None:
    world = World(WorldConfig(num_pages=30, vocab_size=9))
    world.submit(0, [1, 2, 3, 4], 4, nan_after=0)
    world.drain()
    assert world.book[0].reason is FinishReason.ERROR
    assert world.scheduler.cache_manager.prefix_cache.size_info.total_size == 0
    world.submit(1, [1, 2, 3, 4], 4, ignore_eos=True)
    world.drain()
    assert world.book[1].reason is FinishReason.LENGTH


def test_the_list_of_early_aborts_is_bounded() -> None:
    world = World(WorldConfig())
    for uid in range(MAX_EARLY_ABORTS + 1):
        world.abort(uid)
    world.step()
    assert len(world.scheduler._early_aborts) == MAX_EARLY_ABORTS
    world.submit(1, [1, 2], 3)
    world.drain()
    assert world.book[1].answer == []


def fail_the_kth_allocation(world: World, k: int) -> Iterator[int]:
    """Raise in the k-th allocation of pages, whichever request it is for; counts the calls."""
    manager, calls = world.scheduler.cache_manager, itertools.count()
    allocate = manager._allocate

    def failing(needed_pages: int) -> torch.Tensor:
        if next(calls) == k:
            world.engine.failing_uids.update(range(5))
            raise MemoryError("told to fail")
        return allocate(needed_pages)

    manager._allocate = failing  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_if_the_kth_allocation_fails_its_batch_ends_and_the_rest_goes_on(
    page_size: int, overlap: bool
) -> None:
    for k in range(12):
        config = WorldConfig(
            page_size=page_size, num_pages=64 // page_size, budget=7, overlap=overlap
        )
        world = World(config)
        calls = fail_the_kth_allocation(world, k)
        for uid in range(5):
            world.submit(uid, [1, 2, 3, 4, 1, 2, uid % 2, 3, 4], 6, ignore_eos=True)
        world.drain()
        reasons = [world.book[uid].reason for uid in range(5)]
        assert FinishReason.LENGTH in reasons
        assert (FinishReason.ERROR in reasons) == (next(calls) > k)


@pytest.mark.parametrize("overlap", [False, True])
def test_everything_can_be_reset_at_any_turn(overlap: bool) -> None:
    for turn in range(12):
        world = World(WorldConfig(num_pages=40, budget=4, overlap=overlap))
        for uid in range(4):
            world.submit(uid, [1, 2, 3, uid, 2, 1], 3, ignore_eos=True)
        for _ in range(turn):
            world.step()
        world.reset()
        world.submit(9, [1, 2, 3, 4], 3, ignore_eos=True)
        world.drain()
        assert world.book[9].reason is FinishReason.LENGTH


def test_what_a_reset_cuts_off_in_flight_is_not_shared() -> None:
    world = World(WorldConfig(num_pages=20, budget=4, overlap=True, vocab_size=9))
    world.submit(0, [7, 7, 7], 4, nan_after=0)
    world.step()
    world.reset()  # before anybody has seen that the logits were bad
    assert world.scheduler.cache_manager.prefix_cache.size_info.total_size == 0
    world.submit(1, [7, 7, 7, 1], 3, ignore_eos=True)
    world.drain()
    assert world.book[1].reason is FinishReason.LENGTH


def test_a_failing_case_names_itself() -> None:
    case = Case(1, page_size=2, overlap=True, num_steps=50)
    assert Case.from_json(case.to_json()) == case
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Violation) as caught:
        run_case(case, prepare=lambda world: MUTANTS["free_twice"](world, patch))
    assert case.to_json() in str(caught.value)


def test_a_failure_shrinks_to_a_short_history_that_can_be_replayed(tmp_path: Path) -> None:
    def breaks(world: World) -> None:
        MUTANTS["keep_the_old_lock"](world, patch)

    with pytest.MonkeyPatch.context() as patch:
        case = Case(3, page_size=2, num_steps=60)
        with pytest.raises(Violation) as caught:
            run_case(case, prepare=breaks)
        config, history = caught.value.config, caught.value.history
        short = shrink(config, history, prepare=breaks)
        save(tmp_path / "found.json", config, short)
        assert len(short) < len(history) and load(tmp_path / "found.json") == (config, short)
        with pytest.raises(Violation):
            play(config, short, prepare=breaks)
    play(config, short)
