"""`share_prefixes`: prompts that come together compute what they share once."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.params import FinishReason

from tests.scheduler.simulated import NAN, VOCAB_SIZE, Sim, alone

both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
page_sizes = pytest.mark.parametrize("page_size", [1, 4, 16])
SYSTEM = [(7 * i) % VOCAB_SIZE for i in range(32)]
PROMPTS = [[*SYSTEM, 90 + uid, 60 - uid, uid, 5] for uid in range(4)]


def make(page_size: int = 1, **config: Any) -> Sim:
    config = {"share_prefixes": 8, "max_len": 256, **config}
    return Sim(num_pages=512 // page_size, page_size=page_size, **config)


def prefills(sim: Sim) -> list[dict[int, int]]:
    """Prompt tokens that each prefill batch computes, by uid."""
    return [computed for phase, computed in sim.batches if phase == "prefill"]


def check_answers(sim: Sim, *uids: int) -> None:
    for uid in uids:
        assert sim.tokens(uid) == alone(PROMPTS[uid], 3), uid


@both_loops
@page_sizes
def test_a_new_prefix_is_computed_by_the_first_and_hit_by_the_others(
    page_size: int, overlap: bool
) -> None:
    sim = make(page_size, overlap=overlap)
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3)
    sim.turn()
    assert sim.waiting == [1, 2, 3]
    assert sim.records[0].head_waits_for == "shared prefix"
    sim.drain()
    assert prefills(sim) == [{0: 36}, {1: 4, 2: 4, 3: 4}]
    check_answers(sim, 0, 1, 2, 3)


def test_without_the_option_each_computes_it() -> None:
    sim = make(share_prefixes=0)
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3)
    sim.drain()
    assert prefills(sim) == [{0: 36, 1: 36, 2: 36, 3: 36}]


@both_loops
def test_a_naive_cache_never_lets_anybody_wait(overlap: bool) -> None:
    sim = make(cache_type="naive", overlap=overlap)
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3)
    sim.drain()
    assert prefills(sim) == [{0: 36, 1: 36, 2: 36, 3: 36}]
    check_answers(sim, 0, 1, 2, 3)


@pytest.mark.parametrize(("page_size", "num_shared"), [(1, 8), (4, 8), (16, 16)])
def test_less_than_so_many_tokens_in_whole_pages_are_not_worth_a_wait(
    page_size: int, num_shared: int
) -> None:
    for length, num_batches in ((num_shared - 1, 1), (num_shared, 2)):
        sim = make(page_size)
        for uid in range(2):
            sim.submit(uid, [*SYSTEM[:length], 90 + uid, *range(20)], max_tokens=3)
        sim.drain()
        assert len(prefills(sim)) == num_batches, length


def test_a_prompts_last_token_is_never_shared() -> None:
    for length, num_batches in ((8, 1), (9, 2)):  # of 8 tokens, 7 could be hit
        sim = make()
        for uid in range(2):
            sim.submit(uid, SYSTEM[:length], max_tokens=3)
        sim.drain()
        assert len(prefills(sim)) == num_batches, length


def test_what_is_cached_already_does_not_count() -> None:
    sim = make()
    sim.submit(9, SYSTEM, max_tokens=1)
    sim.drain()
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3)
    sim.drain()
    assert prefills(sim)[1:] == [{0: 4, 1: 4, 2: 4, 3: 4}]


def test_different_salts_share_nothing_and_do_not_wait() -> None:
    sim = make()
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3, salt="ab"[uid % 2])
    sim.drain()
    assert prefills(sim) == [{0: 36, 1: 36}, {2: 4, 3: 4}]
    check_answers(sim, 0, 1, 2, 3)


@both_loops
def test_nobody_overtakes_one_that_waits(overlap: bool) -> None:
    sim = make(overlap=overlap)
    for uid, prompt in enumerate([PROMPTS[0], PROMPTS[1], [99] * 9]):
        sim.submit(uid, prompt, max_tokens=3)
    sim.drain()
    assert prefills(sim) == [{0: 36}, {1: 4, 2: 9}]


@both_loops
def test_running_requests_decode_while_one_waits_for_what_is_in_flight(overlap: bool) -> None:
    sim = make(overlap=overlap)
    sim.submit(9, [50, 51], max_tokens=9)
    sim.turn(2)
    for uid, prompt in enumerate(PROMPTS[:2]):
        sim.submit(uid, prompt, max_tokens=3)
    sim.turn(3)
    phases = [phase for phase, _ in sim.batches[2:]]
    assert phases == (["prefill", "decode", "prefill"] if overlap else ["prefill"] * 2 + ["decode"])
    sim.drain()
    assert prefills(sim)[1:] == [{0: 36}, {1: 4}]


@both_loops
@page_sizes
def test_a_request_that_arrives_between_two_chunks_hits_what_they_have_computed(
    page_size: int, overlap: bool
) -> None:
    sim = make(page_size, overlap=overlap, max_extend_tokens=16)
    sim.submit(0, PROMPTS[0], max_tokens=3)
    sim.turn()
    sim.submit(1, PROMPTS[1], max_tokens=3)
    sim.drain()
    assert prefills(sim)[:2] == [{0: 16}, {0: 16}]
    assert sum(computed.get(1, 0) for computed in prefills(sim)) == 4
    check_answers(sim, 0, 1)


@both_loops
@page_sizes
def test_the_chunks_of_an_aborted_request_stay_for_the_others(
    page_size: int, overlap: bool
) -> None:
    sim = make(page_size, overlap=overlap, max_extend_tokens=16)
    sim.submit(0, PROMPTS[0], max_tokens=3)
    sim.submit(1, PROMPTS[1], max_tokens=3)
    sim.turn()
    sim.abort(0)
    sim.drain()
    assert sum(computed.get(1, 0) for computed in prefills(sim)) == 20
    assert sim.of(0) == []
    check_answers(sim, 1)


@both_loops
@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("budget", [16, 1000])
def test_whenever_the_first_is_aborted_the_others_go_on(
    turns: int, budget: int, overlap: bool
) -> None:
    sim = make(4, overlap=overlap, max_extend_tokens=budget)
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3)
    sim.turn(turns)
    sim.abort(0)
    sim.drain()
    check_answers(sim, 1, 2, 3)


@both_loops
def test_bad_logits_of_the_first_are_not_shared_and_the_next_one_leads(overlap: bool) -> None:
    sim = make(overlap=overlap)
    sim.engine.scripts[0] = [NAN]
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3)
    sim.drain()
    assert prefills(sim) == [{0: 36}, {1: 36}, {2: 4, 3: 4}]
    assert [reply.finish_reason for reply in sim.of(0)] == [FinishReason.ERROR]
    check_answers(sim, 1, 2, 3)


@both_loops
def test_bad_logits_of_a_chunk_keep_it_out_of_the_cache(overlap: bool) -> None:
    sim = make(overlap=overlap, max_extend_tokens=16)
    sim.engine.scripts[0] = [NAN]  # of every chunk
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3)
    sim.turn(2)
    assert sim.scheduler.cache_manager.prefix_cache.size_info.total_size == 0
    sim.drain()
    assert sum(computed.get(1, 0) for computed in prefills(sim)) == 36
    check_answers(sim, 1, 2, 3)


def test_an_aborted_request_with_a_bad_chunk_leaves_nothing_behind() -> None:
    sim = make(share_prefixes=0, max_extend_tokens=16)
    sim.engine.scripts[0] = [NAN]
    sim.submit(0, PROMPTS[0], max_tokens=3)
    sim.turn()
    sim.abort(0)
    sim.drain()
    assert sim.scheduler.cache_manager.prefix_cache.size_info.total_size == 0


@both_loops
def test_a_step_of_the_first_that_fails_lets_the_next_one_lead(overlap: bool) -> None:
    sim = make(overlap=overlap)
    sim.engine.fails = lambda batch: batch.reqs[0].uid == 0
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3)
    sim.drain()
    assert [reply.finish_reason for reply in sim.of(0)] == [FinishReason.ERROR]
    assert prefills(sim) == [{0: 36}, {1: 36}, {2: 4, 3: 4}]
    check_answers(sim, 1, 2, 3)


@both_loops
def test_prompts_that_fail_one_after_the_other_hold_nobody_up_for_long(overlap: bool) -> None:
    sim = make(num_rows=40, overlap=overlap)
    for uid in range(30):
        sim.engine.scripts[uid] = [NAN]
        sim.submit(uid, PROMPTS[0], max_tokens=3)
    sim.submit(30, PROMPTS[0], max_tokens=3)
    sim.turn(2 * 31 + 1)
    assert len(sim.of(30)) >= 1
    sim.drain()
    assert sim.tokens(30) == alone(PROMPTS[0], 3)


@both_loops
def test_a_later_chunk_that_fails_leaves_the_good_ones(overlap: bool) -> None:
    sim = make(overlap=overlap, max_extend_tokens=12)
    sim.engine.fails = lambda batch: batch.reqs[0].uid == 0 and batch.reqs[0].cached_len == 24
    for uid, prompt in enumerate(PROMPTS):
        sim.submit(uid, prompt, max_tokens=3)
    sim.drain()
    assert [reply.finish_reason for reply in sim.of(0)] == [FinishReason.ERROR]
    # Under overlap the row was given back while the second chunk was in flight.
    assert sum(computed.get(1, 0) for computed in prefills(sim)) == (24 if overlap else 12)
    check_answers(sim, 1, 2, 3)
