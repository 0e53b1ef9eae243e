"""One turn after another: what is scheduled, computed, answered and given back, in both loops."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from minisgl.env import ENV
from minisgl.message import BatchBackendMsg, DetokenizeMsg, ExitMsg, UserMsg
from minisgl.params import FinishReason, SamplingParams
from minisgl.scheduler.prefill import ChunkedReq

from tests.scheduler.simulated import NAN, VOCAB_SIZE, Sim, alone

both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
both_caches = pytest.mark.parametrize("cache_type", ["radix", "naive"])


def test_the_example_every_user_knows_number_by_number() -> None:
    sim = Sim(num_pages=64, page_size=1, num_rows=8, max_len=128, cache_type="naive", eos=[7])
    for uid, length in enumerate([5, 5, 4, 15, 5]):
        sim.submit(uid, length, max_tokens=8, ignore_eos=True)
    sim.drain()
    trace = [
        (r.phase, list(r.uids), r.waiting, r.free_pages, r.reserved_tokens) for r in sim.records
    ]
    first, fifth = [0, 1, 2, 3], [4]
    assert trace == [
        ("prefill", first, 1, 35, 28),
        ("decode", first, 1, 31, 24),
        ("decode", first, 1, 27, 20),
        ("decode", first, 1, 23, 16),
        ("decode", first, 1, 19, 12),
        ("decode", first, 1, 15, 8),
        ("decode", first, 1, 11, 4),
        ("decode", first, 1, 7, 0),
        ("prefill", fifth, 0, 59, 7),
        ("decode", fifth, 0, 58, 6),
        ("decode", fifth, 0, 57, 5),
        ("decode", fifth, 0, 56, 4),
        ("decode", fifth, 0, 55, 3),
        ("decode", fifth, 0, 54, 2),
        ("decode", fifth, 0, 53, 1),
        ("decode", fifth, 0, 52, 0),
    ]
    assert sim.free_pages == 64
    sim.scheduler.cache_manager.check_integrity()
    assert sim.records[0].head_waits_for == "pages"


@both_loops
def test_prefill_comes_before_decode(overlap: bool) -> None:
    sim = Sim(overlap=overlap)
    sim.submit(0, 4, max_tokens=6)
    sim.turn(2)
    sim.submit(1, 3, max_tokens=6)
    sim.turn(2)
    assert sim.batches == [
        ("prefill", {0: 4}),
        ("decode", {0: 1}),
        ("prefill", {1: 3}),
        ("decode", {0: 1, 1: 1}),
    ]


@both_loops
def test_max_tokens_gives_exactly_that_many_replies_and_the_last_says_finished(
    overlap: bool,
) -> None:
    sim = Sim(overlap=overlap)
    for uid, max_tokens in enumerate([1, 2, 3, 9]):
        sim.submit(uid, 5 + uid, max_tokens=max_tokens)
    sim.drain()
    for uid, max_tokens in enumerate([1, 2, 3, 9]):
        replies = sim.of(uid)
        assert [r.finished for r in replies] == [False] * (max_tokens - 1) + [True]
        assert replies[-1].finish_reason is FinishReason.LENGTH
        assert all(reply.error is None for reply in replies)


@both_loops
@pytest.mark.parametrize("index", [0, 1, 3])
def test_the_reply_at_an_eos_carries_it_and_nothing_follows(overlap: bool, index: int) -> None:
    sim = Sim(overlap=overlap, eos=[7, 9])
    script = [1, 2, 3, 4, 5, 6]
    script[index] = 9
    sim.engine.scripts[0] = script
    sim.submit(0, 5, max_tokens=6)
    sim.submit(1, 5, max_tokens=6)
    sim.drain()
    assert sim.tokens(0) == script[: index + 1]
    assert [reply.finished for reply in sim.of(0)] == [False] * index + [True]
    assert sim.of(0)[-1].finish_reason is FinishReason.STOP
    assert len(sim.of(1)) == 6


@both_loops
def test_an_eos_as_the_last_token_is_a_stop(overlap: bool) -> None:
    sim = Sim(overlap=overlap, eos=[7])
    sim.engine.scripts[0] = [1, 2, 7]
    sim.submit(0, 5, max_tokens=3)
    sim.drain()
    assert sim.of(0)[-1] == DetokenizeMsg(0, 7, True, FinishReason.STOP)


@both_loops
def test_with_ignore_eos_an_eos_is_an_ordinary_token_also_as_the_last_one(overlap: bool) -> None:
    sim = Sim(overlap=overlap, eos=[7])
    sim.engine.scripts[0] = [7, 1, 7, 7]
    sim.submit(0, 5, max_tokens=4, ignore_eos=True)
    sim.drain()
    assert sim.tokens(0) == [7, 1, 7, 7]
    assert [reply.finished for reply in sim.of(0)] == [False, False, False, True]
    assert sim.of(0)[-1].finish_reason is FinishReason.LENGTH


@both_loops
def test_a_stop_token_ends_a_request_even_if_it_ignores_eos(overlap: bool) -> None:
    sim = Sim(overlap=overlap, eos=[7])
    sim.engine.scripts[0] = [7, 4, 1]
    sim.submit(0, 5, max_tokens=8, ignore_eos=True, stop_token_ids=[4])
    sim.drain()
    assert sim.tokens(0) == [7, 4]
    assert sim.of(0)[-1].finish_reason is FinishReason.STOP


def test_assigning_eos_token_id_replaces_the_whole_set() -> None:
    sim = Sim(eos=[7, 9])
    sim.scheduler.eos_token_id = 5
    sim.engine.scripts[0] = [7, 9, 5, 1]
    sim.submit(0, 5, max_tokens=4)
    sim.drain()
    assert sim.tokens(0) == [7, 9, 5]
    sim.scheduler.eos_token_id = [1, 2]
    assert sim.scheduler.eos_token_id == 1
    sim.engine.scripts[1] = [5, 7, 2, 3]
    sim.submit(1, 5, max_tokens=4)
    sim.drain()
    assert sim.tokens(1) == [5, 7, 2]
    sim.scheduler.eos_token_id = None
    sim.engine.scripts[2] = [5, 7, 2, 1]
    sim.submit(2, 5, max_tokens=4)
    sim.drain()
    assert sim.tokens(2) == [5, 7, 2, 1]


@both_loops
def test_max_tokens_too_large_is_cut_to_the_context_on_a_copy(overlap: bool) -> None:
    sim = Sim(max_len=20, overlap=overlap)
    params = sim.submit(0, 15, max_tokens=1000)
    before = copy.deepcopy(params)
    sim.drain()
    assert len(sim.of(0)) == 5
    assert params == before


@both_loops
def test_only_a_prompt_that_leaves_no_room_is_refused(overlap: bool) -> None:
    sim = Sim(max_len=20, overlap=overlap)
    for uid, length in enumerate([19, 20, 21]):
        sim.submit(uid, length, max_tokens=3)
    sim.drain()
    assert [(r.finished, r.finish_reason) for r in sim.of(0)] == [(True, FinishReason.LENGTH)]
    for uid in (1, 2):
        (reply,) = sim.of(uid)
        assert (reply.finished, reply.finish_reason) == (True, FinishReason.ERROR)
        assert "20" in str(reply.error) and "room" in str(reply.error)


def test_the_context_is_no_longer_than_the_pool() -> None:
    sim = Sim(num_pages=4, page_size=4, max_len=100)
    assert sim.engine.max_seq_len == 16
    sim.submit(0, 15, max_tokens=50)
    sim.submit(1, 16, max_tokens=1)
    sim.drain()
    assert (len(sim.of(0)), sim.of(1)[0].finish_reason) == (1, FinishReason.ERROR)


@pytest.mark.parametrize(
    ("ids", "params", "word"),
    [
        ([], {}, "empty"),
        ([3, VOCAB_SIZE], {}, "100"),
        ([3, -1], {}, "-1"),
        ([3], {"max_tokens": 0}, "max_tokens"),
        ([3], {"top_p": 0.0}, "top_p"),
        ([3], {"temperature": float("nan")}, "temperature"),
        ([3], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ([3], {"stop_token_ids": [-5]}, "stop_token_ids"),
    ],
)
def test_a_request_that_cannot_run_is_answered_with_an_error_and_no_work(
    ids: list[int], params: dict[str, Any], word: str
) -> None:
    sim = Sim()
    sim.submit(0, ids, **params)
    sim.submit(1, 4, max_tokens=2)
    sim.drain()
    (reply,) = sim.of(0)
    assert (reply.finished, reply.finish_reason) == (True, FinishReason.ERROR)
    assert word in str(reply.error)
    assert all(0 not in uids for _, uids in sim.batches)
    assert len(sim.of(1)) == 2


def test_two_requests_with_the_same_new_prompt_in_one_batch_both_compute_it() -> None:
    sim = Sim()
    for uid in range(2):
        sim.submit(uid, [1, 2, 3, 4, 5], max_tokens=3)
    sim.drain()
    assert sim.batches[0] == ("prefill", {0: 5, 1: 5})
    assert sim.tokens(0) == sim.tokens(1) == alone([1, 2, 3, 4, 5], 3)


@both_loops
def test_prefill_batches_use_the_whole_budget_until_the_prompts_are_done(overlap: bool) -> None:
    for page_size in (1, 4):
        sim = Sim(num_pages=40, page_size=page_size, overlap=overlap, max_extend_tokens=6)
        lengths = [5, 9, 1, 14, 2]
        for uid, length in enumerate(lengths):
            sim.submit(uid, length, max_tokens=2)
        sim.drain()
        sizes = [sum(computed.values()) for phase, computed in sim.batches if phase == "prefill"]
        assert sizes == [6, 6, 6, 6, 6, 1]
        assert sum(sizes) == sum(lengths)


@both_loops
def test_the_same_prompts_a_second_time_compute_one_token_each(overlap: bool) -> None:
    sim = Sim(num_pages=200, overlap=overlap)
    prompts = [[9, 8, 7, 6], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9], [5]]
    for round_number in range(2):
        sim.batches.clear()
        for i, prompt in enumerate(prompts):
            sim.submit(10 * round_number + i, prompt, max_tokens=3)
        sim.drain()
    assert sim.batches[0] == ("prefill", {10: 1, 11: 1, 12: 1, 13: 1})
    for i in range(4):
        assert sim.tokens(i) == sim.tokens(10 + i)


def test_with_larger_pages_the_second_time_computes_the_last_page() -> None:
    sim = Sim(num_pages=40, page_size=4)
    for uid in range(2):
        sim.submit(uid, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], max_tokens=3)
        sim.drain()
    assert [b for b in sim.batches if b[0] == "prefill"] == [
        ("prefill", {0: 10}),
        ("prefill", {1: 2}),
    ]


@both_loops
@both_caches
@pytest.mark.parametrize("page_size", [1, 4])
def test_tokens_do_not_depend_on_the_company(
    overlap: bool, cache_type: str, page_size: int
) -> None:
    sim = Sim(
        num_pages=96 // page_size,
        page_size=page_size,
        num_rows=3,
        overlap=overlap,
        cache_type=cache_type,
        max_extend_tokens=7,
    )
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3], [1, 2, 3, 4, 9, 9, 9, 9, 9], [1]]
    for uid, prompt in enumerate(prompts):
        sim.submit(uid, prompt, max_tokens=5 + uid)
    sim.drain()
    for uid, prompt in enumerate(prompts):
        assert sim.tokens(uid) == alone(prompt, 5 + uid)


@both_loops
def test_rows_and_pages_are_back_when_the_last_batch_is_processed(overlap: bool) -> None:
    sim = Sim(num_pages=30, num_rows=2, overlap=overlap, cache_type="naive")
    sim.submit(0, 5, max_tokens=2)
    sim.turn(2 + overlap)
    assert sim.of(0)[-1].finished
    assert (sim.free_rows, sim.free_pages) == (2, 30)
    assert not sim.scheduler.finished_reqs


def test_a_message_without_a_meaning_here_is_dropped() -> None:
    sim = Sim()
    sim.inbox.append(DetokenizeMsg(0, 1, True))  # type: ignore[arg-type]
    sim.submit(0, 3, max_tokens=1)
    sim.drain()
    assert len(sim.of(0)) == 1


@pytest.mark.parametrize(("value", "uses_overlap"), [(None, False), (True, False), (False, True)])
def test_overlap_on_a_cpu_is_off_unless_asked_for(value: bool | None, uses_overlap: bool) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = value
    assert Sim().scheduler.uses_overlap is uses_overlap


@pytest.mark.parametrize("disabled", [True, False])
def test_run_forever_ends_with_an_exit_message_and_loses_no_reply(disabled: bool) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = disabled
    sim = Sim()
    last_turn = [UserMsg(0, [1, 2, 3], SamplingParams(max_tokens=1)), ExitMsg()]
    inboxes: list[list[Any]] = [[], [BatchBackendMsg(last_turn)]]
    sim.receive = lambda blocking: inboxes.pop(0)  # type: ignore[method-assign]
    sim.scheduler.run_forever()
    assert [reply.finished for reply in sim.of(0)] == [True]


def test_a_chunk_answers_nothing() -> None:
    sim = Sim(max_extend_tokens=2)
    sim.engine.scripts[0] = [5, 6]
    sim.submit(0, 6, max_tokens=2)
    sim.turn()
    assert sim.replies == []
    assert isinstance(sim.scheduler.prefill_manager.pending_list[0].chunked_req, ChunkedReq)
    sim.drain()
    assert sim.tokens(0) == [5, 6]


def test_the_simulated_engine_notices_a_row_that_reads_foreign_tokens() -> None:
    sim = Sim()
    sim.submit(0, 4, max_tokens=4)
    sim.turn(2)
    sim.engine.shadow[sim.engine.page_table[0, 1].long()] = NAN
    with pytest.raises(AssertionError, match="reads"):
        sim.turn()
