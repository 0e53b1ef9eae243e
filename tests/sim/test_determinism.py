"""I12: a seed gives one trace, so do two ranks. I13: an answer depends on its prompt alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from minisgl.config import QUEUE_ORDERS

from .driver import Case, Driver, random_config, run_case
from .oracle import spell_out
from .world import World, WorldConfig


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_one_seed_gives_one_byte_identical_trace(page_size: int, overlap: bool) -> None:
    case = Case(7, page_size, "radix", overlap, 300)
    first, second = run_case(case), run_case(case)
    assert first.trace.digest() == second.trace.digest()
    assert (
        first.trace.digest() != run_case(Case(8, page_size, "radix", overlap, 300)).trace.digest()
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_two_ranks_that_are_fed_the_same_messages_give_the_same_trace(overlap: bool) -> None:
    case = Case(16, 2, "radix", overlap, 400)
    rng = random.Random(case.to_json())
    config = random_config(case, rng)
    leader, follower = World(config), World(config)
    driver = Driver(leader, rng, is_fair=case.is_fair)
    driver.fault_rate = 0.0  # faults of one rank alone are another matter
    for event in ("submit", "abort", "flush", "reset", "reload"):
        send_to_both(event, leader, follower)
    for step in range(case.num_steps):
        driver.step()
        follower.step()
        assert leader.trace.digest() == follower.trace.digest(), f"the ranks part at step {step}"
    assert leader.counts == follower.counts
    assert leader.counts["length"] + leader.counts["stop"] > 50


def send_to_both(event: str, leader: World, follower: World) -> None:
    """Whatever happens to the leader happens to the follower before its next turn."""
    lead, follow = getattr(leader, event), getattr(follower, event)

    def both(*args: Any, **kwargs: Any) -> None:
        lead(*args, **kwargs)
        follow(*args, **kwargs)

    setattr(leader, event, both)


def alone(prompt: list[int], max_tokens: int, vocab_size: int) -> list[int]:
    """The oracle: the same request, alone, with the naive cache."""
    config = WorldConfig(
        page_size=1,
        num_pages=256,
        num_rows=1,
        budget=256,
        cache_type="naive",
        vocab_size=vocab_size,
    )
    world = World(config)
    world.submit(0, prompt, max_tokens, ignore_eos=True)
    world.drain()
    return world.book[0].answer


def test_the_oracle_is_the_request_alone_with_the_naive_cache() -> None:
    rng = random.Random(5)
    for _ in range(20):
        vocab_size = rng.randint(2, 9)
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
        expected = spell_out(prompt, 12, vocab_size)[len(prompt) :].tolist()
        assert alone(prompt, 12, vocab_size) == expected


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_answers_do_not_depend_on_page_size_chunks_cache_overlap_sharing_or_neighbours(
    page_size: int,
) -> None:
    rng = random.Random(page_size)
    base = [rng.randrange(5) for _ in range(20)]
    prompts = [[*base[: rng.randint(1, 20)], rng.randrange(5)] for _ in range(12)]
    expected = [alone(prompt, 9, 5) for prompt in prompts]
    for cache_type in ("radix", "naive"):
        for overlap in (False, True):
            for budget, share_prefixes in itertools.product((1, 6, 1000), (0, 1, 5)):
                config = WorldConfig(
                    page_size=page_size,
                    num_pages=160 // page_size,
                    num_rows=5,
                    budget=budget,
                    cache_type=cache_type,
                    overlap=overlap,
                    share_prefixes=share_prefixes,
                )
                world = World(config)
                for uid, prompt in enumerate(prompts):
                    world.submit(uid, prompt, 9, ignore_eos=True)
                world.drain()
                assert [world.book[uid].answer for uid in range(12)] == expected


POLICIES: list[dict[str, Any]] = [
    {"mixed_chunk": chunk, "max_prefill_streak": streak, "queue_order": order, "max_overtaken": 2}
    for chunk, streak in ((0, 0), (0, 2), (1, 0), (5, 1))
    for order in QUEUE_ORDERS
]


@pytest.mark.parametrize("page_size", [1, 4])
def test_answers_do_not_depend_on_who_is_protected_and_who_is_next(page_size: int) -> None:
    rng = random.Random(page_size)
    base = [rng.randrange(5) for _ in range(20)]
    prompts = [[*base[: rng.randint(1, 20)], rng.randrange(5)] for _ in range(12)]
    expected = [alone(prompt, 9, 5) for prompt in prompts]
    for i, (policy, budget) in enumerate(itertools.product(POLICIES, (3, 1000))):
        config = WorldConfig(
            page_size,
            80 // page_size,
            5,
            budget,
            overlap=i % 4 > 1,
            admission=("peak", "conservative")[i % 3 // 2],
            **policy,
        )
        world = World(config, checks_all=False)
        for uid, prompt in enumerate(prompts):
            world.submit(uid, prompt, 9, ignore_eos=True, priority=uid % 3)
            world.step()
        world.drain()
        assert [world.book[uid].answer for uid in range(12)] == expected, config
