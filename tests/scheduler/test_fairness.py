"""Who is protected and who is next: mixed batches, streaks, queue orders, ageing, limits."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.core import ErrorKind, FinishReason
from minisgl.message import ExpireBackendMsg, UserMsg
from minisgl.params import SamplingParams
from minisgl.scheduler.admission import most_steps_late
from minisgl.scheduler.queue import MAX_LOOKAHEAD

from tests.scheduler.simulated import VOCAB_SIZE, Sim, alone

both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


def started(sim: Sim) -> list[int]:
    """The uids in the order in which their prompts were begun."""
    return list(dict.fromkeys(uid for _, computed in sim.batches for uid in computed))


# --- mixed batches ---


def with_a_long_prompt(overlap: bool = False, **config: Any) -> Sim:
    """Two requests that decode, then one of 10 tokens."""
    sim = Sim(overlap=overlap, **config)
    sim.submit(0, 3, max_tokens=9)
    sim.submit(1, 2, max_tokens=9)
    sim.turn(2)
    sim.submit(2, 10, max_tokens=3)
    return sim


@both_loops
def test_a_prompt_rides_in_the_steps_of_those_that_decode(overlap: bool) -> None:
    sim = with_a_long_prompt(overlap, mixed_chunk=4)
    sim.drain()
    assert sim.batches[:6] == [
        ("prefill", {0: 3, 1: 2}),
        ("decode", {0: 1, 1: 1}),
        ("mixed", {0: 1, 1: 1, 2: 4}),
        ("mixed", {0: 1, 1: 1, 2: 4}),
        ("mixed", {0: 1, 1: 1, 2: 2}),
        ("decode", {0: 1, 1: 1, 2: 1}),
    ]
    for uid, length in ((0, 3), (1, 2), (2, 10)):
        prompt = [(uid * 17 + i) % VOCAB_SIZE for i in range(length)]
        assert sim.tokens(uid) == alone(prompt, 3 if uid == 2 else 9)


def test_prompts_share_what_a_mixed_step_has_room_for() -> None:
    sim = with_a_long_prompt(mixed_chunk=6)
    sim.submit(3, 4)
    sim.submit(4, 3)
    sim.turn(3)
    assert sim.batches[2:] == [
        ("mixed", {0: 1, 1: 1, 2: 6}),
        ("mixed", {0: 1, 1: 1, 2: 4, 3: 2}),
        ("mixed", {0: 1, 1: 1, 2: 1, 3: 2, 4: 3}),
    ]


def test_where_nobody_decodes_prompts_have_their_whole_budget() -> None:
    sim = Sim(mixed_chunk=2, max_extend_tokens=5)
    sim.submit(0, 12, max_tokens=2)
    sim.turn(4)
    assert sim.batches == [("prefill", {0: n}) for n in (5, 5, 2)] + [("decode", {0: 1})]


def test_a_chunk_of_a_mixed_step_is_never_larger_than_the_budget() -> None:
    sim = with_a_long_prompt(mixed_chunk=100, max_extend_tokens=5)
    sim.turn(2)
    assert sim.batches[2:] == [("mixed", {0: 1, 1: 1, 2: 5})] * 2


def test_a_record_of_a_mixed_step_tells_its_prompt_tokens() -> None:
    sim = with_a_long_prompt(mixed_chunk=4)
    sim.turn(4)
    told = [(r.phase, r.num_tokens, r.num_prompt_tokens) for r in sim.records]
    assert told == [
        ("prefill", 5, 5), ("decode", 2, 0), ("mixed", 6, 4), ("mixed", 6, 4), ("mixed", 4, 2),
        ("decode", 3, 0),
    ]  # fmt: skip


@both_loops
def test_a_prompt_that_ends_in_a_mixed_step_is_cached_and_its_neighbours_are_not_yet(
    overlap: bool,
) -> None:
    sim = with_a_long_prompt(overlap, mixed_chunk=16)
    sim.turn(1 + overlap)
    cache = sim.scheduler.cache_manager.prefix_cache
    assert cache.size_info.total_size == 3 + 2 + 10
    sim.drain()


def test_a_mixed_step_that_fails_ends_its_own_requests_only() -> None:
    sim = with_a_long_prompt(mixed_chunk=4)
    sim.engine.fails = lambda batch: batch.phase == "mixed"
    sim.turn()
    sim.engine.fails = lambda batch: False
    assert [sim.of(uid)[-1].error_kind for uid in (0, 1, 2)] == [ErrorKind.FAILED] * 3
    sim.submit(5, 6, max_tokens=2)
    sim.drain()
    assert len(sim.tokens(5)) == 2


@both_loops
def test_a_request_may_end_in_any_way_while_its_prompt_rides(overlap: bool) -> None:
    sim = with_a_long_prompt(overlap, mixed_chunk=4)
    sim.turn()
    sim.abort(2)
    sim.drain()
    assert not sim.of(2) and len(sim.tokens(0)) == 9


# --- a bound on consecutive prefill batches ---


@pytest.mark.parametrize(("limit", "expected"), [(0, "pppppdd"), (1, "pdpdpdp"), (2, "ppdppdp")])
def test_those_that_decode_wait_for_so_many_prefill_batches_at_most(
    limit: int, expected: str
) -> None:
    sim = with_a_long_prompt(max_prefill_streak=limit, max_extend_tokens=5)
    sim.submit(3, 15, max_tokens=3)
    sim.turn(7)
    assert "".join(phase[0] for phase, _ in sim.batches[2:]) == expected


def test_the_head_of_the_queue_may_wait_for_a_decode_step() -> None:
    sim = with_a_long_prompt(max_prefill_streak=1, max_extend_tokens=5)
    sim.turn(2)
    assert [r.head_waits_for for r in sim.records[2:]] == [None, "decode step"]


@pytest.mark.parametrize("fields", [{"mixed_chunk": 3}, {"max_prefill_streak": 1}], ids=str)
@both_loops
def test_admission_by_the_peak_counts_a_prompt_that_joins_late(
    overlap: bool, fields: dict[str, int]
) -> None:
    def starts_at_once(num_pages: int, admission: str) -> bool:
        sim = Sim(num_pages, overlap=overlap, max_extend_tokens=3, admission=admission, **fields)
        sim.submit(0, 2, max_tokens=9)
        sim.turn(2)
        sim.submit(1, 7, max_tokens=14)
        sim.turn(2)
        starts = 1 in started(sim)
        sim.drain()  # had an allocation failed, there would be fewer tokens
        assert (len(sim.tokens(0)), len(sim.tokens(1))) == (9, 14)
        return starts

    least = {
        admission: next(n for n in range(21, 40) if starts_at_once(n, admission))
        for admission in ("conservative", "peak")
    }
    assert least["peak"] < least["conservative"]


@pytest.mark.parametrize(
    ("num_missing", "pace", "late"), [(0, 4, 0), (9, 0, 0), (8, 4, 4), (9, 4, 5)]
)
def test_how_late_a_prompt_may_be(num_missing: int, pace: int, late: int) -> None:
    assert most_steps_late(num_missing, pace) == late


# --- queue orders ---


def test_by_default_the_first_that_does_not_fit_stops_the_others() -> None:
    sim = crowded(queue_order="fcfs")
    assert started(sim) == [0] and sim.waiting == [1, 2, 3, 4]


def crowded(**config: Any) -> Sim:
    """20 pages, 12 of them promised: 1 and 3 (12 pages) do not fit beside 0, 2 and 4 (4) do."""
    sim = Sim(num_pages=20, **config)
    sim.submit(0, 4, max_tokens=8)
    sim.turn()
    for uid, length in ((1, 10), (2, 2), (3, 10), (4, 2)):
        sim.submit(uid, length, max_tokens=2)
    sim.turn()
    return sim


def test_skip_goes_past_what_does_not_fit_and_keeps_its_place() -> None:
    sim = crowded(queue_order="skip")
    assert started(sim) == [0, 2, 4] and sim.waiting == [1, 3]
    assert sim.records[-1].head_waits_for == "pages"
    sim.drain()
    assert started(sim) == [0, 2, 4, 1, 3]


@pytest.mark.parametrize(("max_overtaken", "order"), [(0, [0, 1, 2, 3, 4]), (1, [0, 2, 1, 4, 3])])
def test_nobody_is_overtaken_more_often_than_that(max_overtaken: int, order: list[int]) -> None:
    sim = crowded(queue_order="skip", max_overtaken=max_overtaken)
    sim.drain()
    assert started(sim) == order


def test_skip_looks_past_a_bounded_number_of_requests() -> None:
    for num_large, is_reached in ((MAX_LOOKAHEAD, True), (MAX_LOOKAHEAD + 1, False)):
        sim = Sim(num_pages=20, queue_order="skip")
        sim.submit(0, 4, max_tokens=8)
        sim.turn()
        for uid in range(1, num_large + 1):
            sim.submit(uid, 10, max_tokens=2)
        sim.submit(99, 2, max_tokens=2)
        sim.turn()
        assert (99 in started(sim)) == is_reached


def test_skip_does_not_go_past_a_table_that_is_full() -> None:
    sim = Sim(num_rows=1, queue_order="skip")
    for uid in range(3):
        sim.submit(uid, 3, max_tokens=2)
    sim.turn()
    assert started(sim) == [0] and sim.records[-1].head_waits_for == "table row"


def submit_with(sim: Sim, uid: int, priority: int) -> None:
    params = SamplingParams(max_tokens=2)
    sim.inbox.append(UserMsg(uid, [uid, uid, uid], params, priority=priority))


def test_the_largest_priority_is_first_and_equal_ones_as_they_came() -> None:
    sim = Sim(num_rows=1, queue_order="priority")
    for uid, priority in enumerate([0, 1, -1, 5, 1, 5]):
        submit_with(sim, uid, priority)
    sim.drain()
    assert started(sim) == [3, 5, 1, 4, 0, 2]


def test_a_low_priority_is_overtaken_so_often_and_then_is_next() -> None:
    sim = Sim(num_rows=1, queue_order="priority", max_overtaken=3)
    submit_with(sim, 0, 0)
    for uid in range(1, 9):
        submit_with(sim, uid, 1)
    sim.drain()
    assert started(sim) == [1, 2, 3, 0, 4, 5, 6, 7, 8]


def test_priorities_mean_nothing_where_the_order_is_first_come() -> None:
    sim = Sim(num_rows=1)
    for uid, priority in enumerate([0, 5, 1]):
        submit_with(sim, uid, priority)
    sim.drain()
    assert started(sim) == [0, 1, 2]


def test_the_longest_cached_prefix_is_first() -> None:
    sim = Sim(num_rows=1, queue_order="longest-prefix")
    base = list(range(30, 50))
    sim.submit(0, base, max_tokens=1)
    sim.drain()
    for uid, length in ((1, 0), (2, 5), (3, 19), (4, 5)):
        sim.submit(uid, [*base[:length], 60 + uid, 61], max_tokens=1)
    sim.drain()
    assert started(sim) == [0, 3, 2, 4, 1]


def test_a_half_computed_prompt_goes_on_whatever_the_order() -> None:
    sim = Sim(queue_order="priority", max_extend_tokens=4, num_rows=3)
    sim.submit(0, 9, max_tokens=2)
    sim.turn()
    submit_with(sim, 1, 9)
    sim.turn(2)
    assert sim.batches == [("prefill", {0: 4}), ("prefill", {0: 4}), ("prefill", {0: 1, 1: 3})]


# --- a full queue, and deadlines ---


def test_one_more_than_may_wait_is_refused_at_once() -> None:
    sim = Sim(num_rows=1, max_queued=2)
    sim.submit(0, 3, max_tokens=3)
    sim.turn()
    for uid in (1, 2, 3):
        sim.submit(uid, 3, max_tokens=3)
    sim.turn()
    (refusal,) = sim.of(3)
    assert refusal.finish_reason is FinishReason.ERROR
    assert refusal.error_kind is ErrorKind.OVERLOADED and "2 requests wait" in str(refusal.error)
    sim.abort(1)
    sim.submit(4, 3, max_tokens=3)
    sim.drain()
    assert [len(sim.tokens(uid)) for uid in (0, 1, 2, 4)] == [3, 0, 3, 3]


@both_loops
@pytest.mark.parametrize("turns", range(6))
def test_a_request_whose_deadline_passes_ends_with_that_wherever_it_is(
    overlap: bool, turns: int
) -> None:
    sim = Sim(overlap=overlap, max_extend_tokens=4, num_rows=2)
    sim.submit(0, 10, max_tokens=4)
    sim.submit(1, 3, max_tokens=4)
    sim.turn(turns)
    for uid in (0, 7, 0):
        sim.inbox.append(ExpireBackendMsg(uid))
    sim.turn()
    *tokens, last = sim.of(0)
    assert last.error_kind is ErrorKind.TIMEOUT and last.finish_reason is FinishReason.ERROR
    assert "deadline" in str(last.error) and all(not reply.finished for reply in tokens)
    sim.drain()
    assert sim.of(0)[-1] is last and len(sim.tokens(1)) == 4
    assert not sim.scheduler._early_aborts


def test_a_deadline_that_passes_after_the_end_changes_nothing() -> None:
    sim = Sim()
    sim.submit(0, 3, max_tokens=2)
    sim.drain()
    sim.inbox.append(ExpireBackendMsg(0))
    sim.turn()
    assert [reply.finish_reason for reply in sim.of(0)] == [None, FinishReason.LENGTH]
