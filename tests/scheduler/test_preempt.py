"""Preemption, told step by step: who goes back into the queue, when, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.core import Batch, FinishReason
from minisgl.scheduler.prefill import MAX_PREEMPTIONS

from .simulated import NAN, Sim, alone

both_loops = pytest.mark.parametrize("overlap", [False, True])
EOS = 99


def crowded(overlap: bool = False, num_pages: int = 16, num_reqs: int = 2, **fields: Any) -> Sim:
    """Requests of 4 tokens with 8 to come, which start because hardly an answer is expected."""
    fields = {"admission": "optimistic", "admission_share": 0.001, "eos": [EOS], **fields}
    sim = Sim(num_pages=num_pages, max_len=64, overlap=overlap, **fields)
    for uid in range(num_reqs):
        sim.submit(uid, 4, 8)
    return sim


def turn_until_preempted(sim: Sim, bound: int = 50) -> None:
    preemptor = sim.scheduler.preemptor
    assert preemptor is not None
    while not preemptor.num_preemptions:
        sim.turn()
        bound -= 1
        assert bound, "nobody is ever preempted"


def prompt_of(uid: int, length: int = 4) -> list[int]:
    return [(uid * 17 + i) % 100 for i in range(length)]


def assert_as_if_alone(sim: Sim, *uids: int) -> None:
    for uid in uids:
        assert sim.tokens(uid) == alone(prompt_of(uid), 8)
        reasons = [reply.finish_reason for reply in sim.of(uid)]
        assert reasons == [None] * 7 + [FinishReason.LENGTH]


@both_loops
def test_the_newest_waits_and_goes_on_where_it_was(overlap: bool) -> None:
    sim = crowded(overlap)
    turn_until_preempted(sim)
    (pending,) = sim.scheduler.prefill_manager.pending_list
    num_said = len(sim.tokens(1))
    assert (pending.uid, pending.num_preemptions, pending.chunked_req) == (1, 1, None)
    assert pending.input_ids.tolist() == prompt_of(1) + sim.tokens(1)
    assert (pending.num_generated, pending.output_len) == (num_said, 8 - num_said)
    assert sim.batches[-1][1].keys() == {0} and sim.records[-1].num_preemptions == 1
    sim.drain()
    assert_as_if_alone(sim, 0, 1)
    resumed = [sizes[1] for phase, sizes in sim.batches if phase == "prefill"][-1]
    assert resumed < 4 + num_said, "nothing of it was in the cache"


@both_loops
def test_it_happens_at_the_step_that_lacks_a_page_and_not_before(overlap: bool) -> None:
    sim = crowded(overlap)  # after the prompts 4 + 4 pages, after each decode step 2 more: 16 at 4
    turn_until_preempted(sim)
    both = [sizes for phase, sizes in sim.batches if phase == "decode" and len(sizes) == 2]
    assert len(both) == 4


def test_of_several_the_newest_go_and_the_older_stands_before_the_newer() -> None:
    sim = crowded(num_pages=24, num_reqs=4)
    sim.turn()
    assert sim.batches[-1][1].keys() == {0, 1, 2, 3}
    preemptor, manager = sim.scheduler.preemptor, sim.scheduler.cache_manager
    assert preemptor is not None
    running = list(sim.scheduler.decode_manager.running_reqs)
    for req in running:
        req.device_len += 8  # pretend that each needs eight more pages at once
        req.num_ids += 8
        req._ids = torch.zeros(32, dtype=torch.int32).numpy()
    batch = Batch(running, "decode")
    preemptor.make_room(batch)
    assert sim.waiting == [2, 3] and [req.uid for req in batch.reqs] == [0, 1]
    assert manager.num_missing_pages(batch.reqs) <= manager.available_pages


def test_the_last_one_is_not_preempted_because_it_fits() -> None:
    sim = crowded(num_pages=12, num_reqs=1)
    sim.drain()
    assert sim.records[-1].num_preemptions == 0
    assert_as_if_alone(sim, 0)


@both_loops
def test_no_request_is_preempted_more_often_than_the_bound(overlap: bool) -> None:
    sim = crowded(overlap, num_pages=24, num_reqs=0)
    sim.submit(0, 4, 20)
    for uid in range(1, 13):
        sim.submit(uid, 4, 8)
    most: dict[int, int] = {}
    while sim.inbox or not sim.scheduler.is_idle:
        sim.turn()
        for pending in sim.scheduler.prefill_manager.pending_list:
            most[pending.uid] = pending.num_preemptions
    sim.drain()
    assert max(most.values()) <= MAX_PREEMPTIONS and 0 not in most
    assert sum(count > 1 for count in most.values()), "nobody came near the bound"
    assert_as_if_alone(sim, *range(1, 13))


def test_after_the_bound_it_starts_only_if_all_worst_cases_fit() -> None:
    sim = crowded(num_pages=20)
    sim.turn(2)
    preemptor = sim.scheduler.preemptor
    assert preemptor is not None
    newest = list(sim.scheduler.decode_manager.running_reqs)[-1]
    newest.pending.num_preemptions = MAX_PREEMPTIONS - 1  # type: ignore[union-attr]
    preemptor.preempt(newest)
    sim.turn()  # 0 has 6 and takes 5 more, 1 has 6 and takes 6 more: 23 > 20
    assert sim.waiting == [1] and sim.records[-1].head_waits_for == "pages"
    sim.drain()
    assert preemptor.num_preemptions == 1
    assert_as_if_alone(sim, 0, 1)


@both_loops
def test_under_overlap_who_has_ended_in_flight_makes_room_without_a_preemption(
    overlap: bool,
) -> None:
    sim = crowded(overlap)
    sim.engine.scripts[0] = [*alone(prompt_of(0), 4), EOS]  # ends in the step that fills the pool
    sim.drain()
    assert sim.records[-1].num_preemptions == 0
    assert sim.of(0)[-1].finish_reason is FinishReason.STOP
    assert_as_if_alone(sim, 1)


@both_loops
def test_an_eos_after_the_resume_is_reported_as_a_stop(overlap: bool) -> None:
    sim = crowded(overlap)
    sim.engine.scripts[1] = [*alone(prompt_of(1), 6), EOS]
    sim.drain()
    assert sim.records[-1].num_preemptions == 1
    assert sim.tokens(1) == [*alone(prompt_of(1), 6), EOS]
    assert sim.of(1)[-1].finish_reason is FinishReason.STOP


@both_loops
def test_an_abort_of_a_preempted_request_ends_it_for_good(overlap: bool) -> None:
    sim = crowded(overlap)
    turn_until_preempted(sim)
    num_said = len(sim.tokens(1))
    sim.abort(1)
    sim.drain()
    assert len(sim.tokens(1)) == num_said
    assert_as_if_alone(sim, 0)
    sim.submit(1, 4, 8)  # the uid is free
    sim.drain()
    assert len(sim.tokens(1)) == num_said + 8


@both_loops
def test_bad_logits_after_the_resume_end_it_with_an_error(overlap: bool) -> None:
    sim = crowded(overlap)
    sim.engine.scripts[1] = [*alone(prompt_of(1), 6), NAN]
    sim.drain()
    assert sim.records[-1].num_preemptions == 1
    assert len(sim.of(1)) == 7 and sim.of(1)[-1].finish_reason is FinishReason.ERROR
    assert_as_if_alone(sim, 0)


@both_loops
def test_if_the_step_that_was_short_fails_the_preempted_request_goes_on(overlap: bool) -> None:
    sim = crowded(overlap)
    sim.engine.fails = lambda batch: bool(sim.waiting)
    turn_until_preempted(sim)
    sim.engine.fails = lambda batch: False
    sim.drain()
    assert sim.of(0)[-1].finish_reason is FinishReason.ERROR
    assert_as_if_alone(sim, 1)


@both_loops
def test_a_reset_takes_a_preempted_request_out_of_the_queue(overlap: bool) -> None:
    sim = crowded(overlap)
    turn_until_preempted(sim)
    sim.scheduler.reset()
    sim.data = None
    assert sim.waiting == [] and sim.scheduler.is_idle
    sim.drain()
    sim.replies.clear()
    for uid in (0, 1):
        sim.submit(uid, 4, 8)
    sim.drain()
    assert_as_if_alone(sim, 0, 1)


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_half_prefilled_request_can_be_preempted(is_bad: bool) -> None:
    sim = crowded(num_pages=32, num_reqs=1, max_extend_tokens=4)
    sim.submit(1, 10, 8)
    sim.turn(2)
    (half,) = sim.scheduler.prefill_manager.half_prefilled
    assert half.uid == 1 and half.chunked_req is not None
    half.chunked_req.has_bad_kv = is_bad
    assert sim.scheduler.preemptor is not None
    sim.scheduler.preemptor.preempt(half.chunked_req)
    sim.scheduler.cache_manager.check_integrity()
    assert sim.waiting == [1] and half.chunked_req is None and half.num_generated == 0
    sim.drain()
    assert sim.tokens(1) == alone(prompt_of(1, 10), 8)
    assert sum(sizes.get(1, 0) for _, sizes in sim.batches) == 10 + 7 + (4 if is_bad else 0)
    told = sim.of(1)[0]  # what it finds of its own is no hit that a client should hear of
    assert (told.num_prompt_tokens, told.num_cached_tokens) == (10, 0)


def test_the_other_policies_never_preempt() -> None:
    for admission in ("conservative", "peak"):
        sim = Sim(num_pages=16, max_len=64, admission=admission)
        for uid in range(4):
            sim.submit(uid, 4, 8)
        sim.drain()
        assert sim.scheduler.preemptor is None and sim.records[-1].num_preemptions == 0


@both_loops
def test_a_server_learns_that_answers_are_short_and_runs_more_at_once(overlap: bool) -> None:
    sim = Sim(
        num_pages=60, num_rows=16, max_len=60, overlap=overlap, eos=[EOS], admission="optimistic"
    )
    for uid in range(40):
        sim.submit(uid, 4, 20)
        sim.engine.scripts[uid] = [*range(4), EOS]
    sim.drain()
    sizes = [len(sizes) for phase, sizes in sim.batches if phase == "decode"]
    assert sizes[0] == 60 // 24 and max(sizes) > 2 * sizes[0]
    assert sim.records[-1].num_preemptions == 0
