"""How requests end: aborts in every state, bad logits, failing steps, reset; all comes back."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.message import AbortBackendMsg, BatchBackendMsg
from minisgl.params import FinishReason
from minisgl.scheduler.scheduler import MAX_EARLY_ABORTS

from tests.scheduler.simulated import NAN, Sim, alone

both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


@both_loops
def test_an_abort_of_a_waiting_request_takes_it_out_of_the_queue(overlap: bool) -> None:
    sim = Sim(num_rows=1, overlap=overlap)
    for uid in range(3):
        sim.submit(uid, 4, max_tokens=3)
    sim.turn()
    assert sim.waiting == [1, 2]
    sim.abort(1)
    sim.turn()
    assert sim.waiting == [2]
    sim.drain()
    assert (len(sim.of(0)), sim.of(1), len(sim.of(2))) == (3, [], 3)


@both_loops
def test_an_abort_of_a_running_request_sends_nothing_more(overlap: bool) -> None:
    sim = Sim(overlap=overlap, cache_type="naive")
    sim.submit(0, 4, max_tokens=20)
    sim.submit(1, 4, max_tokens=9)
    sim.turn(4)
    num_replies = len(sim.of(0))
    assert num_replies == 4 - overlap
    sim.abort(0)
    sim.turn()
    assert len(sim.of(0)) == num_replies
    assert sim.free_rows == 7
    sim.drain()
    assert len(sim.of(0)) == num_replies
    assert sim.tokens(1) == alone([17, 18, 19, 20], 9)


def test_a_request_aborted_in_flight_keeps_its_row_until_its_batch_has_drained() -> None:
    sim = Sim(num_rows=1, overlap=True, cache_type="naive")
    sim.submit(0, 4, max_tokens=20)
    sim.submit(1, 3, max_tokens=2)
    sim.turn(2)  # a decode of request 0 is in flight
    assert [req.uid for req in sim.data[0].batch.reqs] == [0]
    scheduler: Any = sim.scheduler
    rows_when_scheduled: list[int] = []
    schedule = scheduler._schedule_next_batch
    scheduler._schedule_next_batch = lambda: (
        rows_when_scheduled.append(sim.free_rows),
        schedule(),
    )[1]
    sim.abort(0)
    sim.turn()
    assert rows_when_scheduled == [0]  # in flight: nobody may have the row yet
    assert sim.free_rows == 1 and sim.data is None
    assert len(sim.of(0)) == 1
    sim.drain()
    assert len(sim.of(0)) == 1 and len(sim.of(1)) == 2


def test_a_request_aborted_while_its_last_token_is_in_flight_sends_nothing_more() -> None:
    sim = Sim(overlap=True)
    sim.submit(0, 4, max_tokens=2)
    sim.turn(2)
    assert not sim.scheduler.decode_manager.runnable  # in no set any more, but in flight
    sim.abort(0)
    sim.drain()
    assert [reply.finished for reply in sim.of(0)] == [False]


@both_loops
def test_an_abort_between_two_chunks_gives_the_row_back(overlap: bool) -> None:
    sim = Sim(num_rows=2, overlap=overlap, max_extend_tokens=3)
    sim.submit(0, 9, max_tokens=3)
    sim.submit(1, 2, max_tokens=3)
    sim.turn()
    assert sim.scheduler.prefill_manager.pending_list[0].chunked_req is not None
    sim.abort(0)
    sim.turn()
    assert sim.waiting == [] and sim.free_rows == 1
    sim.drain()
    assert sim.of(0) == [] and sim.tokens(1) == alone([17, 18], 3)


@both_loops
def test_an_abort_after_the_last_chunk_was_launched(overlap: bool) -> None:
    sim = Sim(overlap=overlap, max_extend_tokens=3)
    sim.submit(0, 6, max_tokens=3)
    sim.turn(2)
    num_replies = len(sim.of(0))
    assert num_replies == 1 - overlap
    sim.abort(0)
    sim.drain()
    assert len(sim.of(0)) == num_replies


@both_loops
@pytest.mark.parametrize("turns", range(9))
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_abort_at_any_time_leaves_the_others_alone(
    overlap: bool, turns: int, page_size: int
) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 7]]
    sim = Sim(num_pages=64 // page_size, page_size=page_size, overlap=overlap, max_extend_tokens=5)
    for uid, prompt in enumerate(prompts):
        sim.submit(uid, prompt, max_tokens=4)
    sim.turn(turns)
    sim.abort(0)
    sim.abort(0)  # twice is as good as once
    sim.drain()
    for uid in (1, 2):
        assert sim.tokens(uid) == alone(prompts[uid], 4)
    assert sim.tokens(0) == alone(prompts[0], 4)[: len(sim.of(0))]


@both_loops
def test_an_abort_that_arrives_with_its_request_ends_it(overlap: bool) -> None:
    sim = Sim(overlap=overlap)
    sim.submit(0, 4)
    sim.abort(0)
    sim.inbox = [BatchBackendMsg(sim.inbox)]
    sim.drain()
    assert sim.replies == [] and sim.batches == []


@both_loops
def test_an_abort_that_overtakes_its_request_is_remembered_once(overlap: bool) -> None:
    sim = Sim(overlap=overlap)
    sim.abort(0)
    sim.turn(3)
    sim.submit(0, 4, max_tokens=2)
    sim.drain()
    assert sim.replies == [] and sim.batches == []
    sim.submit(0, 4, max_tokens=2)
    sim.drain()
    assert len(sim.of(0)) == 2


def test_the_memory_of_early_aborts_is_bounded() -> None:
    sim = Sim()
    sim.inbox = [AbortBackendMsg(uid) for uid in range(MAX_EARLY_ABORTS + 1)]
    sim.drain()
    assert len(sim.scheduler._early_aborts) == MAX_EARLY_ABORTS
    sim.submit(0, 4, max_tokens=1)  # the oldest was forgotten
    sim.submit(1, 4, max_tokens=1)
    sim.drain()
    assert (len(sim.of(0)), sim.of(1)) == (1, [])


def test_an_abort_of_a_draining_request_is_not_remembered() -> None:
    sim = Sim(overlap=True)
    sim.submit(0, 4, max_tokens=9)
    sim.turn(2)
    sim.abort(0)
    sim.abort(0)
    sim.drain()
    sim.submit(0, 4, max_tokens=2)
    sim.drain()
    assert len(sim.of(0)) == 1 + 2


# --- bad logits ---


@both_loops
@pytest.mark.parametrize("index", [0, 2, 3])
def test_bad_logits_in_one_row_end_only_that_request(overlap: bool, index: int) -> None:
    sim = Sim(overlap=overlap)
    sim.engine.scripts[1] = [*range(1, index + 1), NAN, 50, 51]
    for uid in range(3):
        sim.submit(uid, [4, 5, 6, uid], max_tokens=4)
    sim.drain()
    *before, last = sim.of(1)
    assert [reply.next_token for reply in before] == list(range(1, index + 1))
    assert (last.finished, last.finish_reason) == (True, FinishReason.ERROR)
    assert "NaN" in str(last.error)
    for uid in (0, 2):
        assert sim.tokens(uid) == alone([4, 5, 6, uid], 4)


def test_the_kv_of_a_request_with_bad_logits_is_not_shared() -> None:
    sim = Sim()
    sim.engine.scripts[0] = [NAN]
    sim.submit(0, [1, 2, 3, 4], max_tokens=4)
    sim.drain()
    assert sim.scheduler.cache_manager.prefix_cache.size_info == (0, 0)
    sim.submit(1, [1, 2, 3, 4], max_tokens=4)
    sim.drain()
    assert sim.batches[1] == ("prefill", {1: 4})


# --- failing steps ---


@both_loops
def test_a_failing_forward_ends_the_requests_of_its_batch_only(overlap: bool) -> None:
    sim = Sim(overlap=overlap)
    sim.submit(0, 4, max_tokens=6)
    sim.turn(2)
    sim.submit(1, 3, max_tokens=6)
    sim.submit(2, 3, max_tokens=6)
    sim.engine.fails = lambda batch: batch.is_prefill
    sim.turn()
    sim.engine.fails = lambda batch: False
    sim.drain()
    for uid in (1, 2):
        (reply,) = sim.of(uid)
        assert reply.finish_reason is FinishReason.ERROR
        assert "told to fail" in str(reply.error)
    assert sim.tokens(0) == alone([0, 1, 2, 3], 6)


@both_loops
@pytest.mark.parametrize("cache_type", ["radix", "naive"])
def test_a_failing_decode_gives_everything_back_and_the_next_request_runs(
    overlap: bool, cache_type: str
) -> None:
    sim = Sim(overlap=overlap, cache_type=cache_type)
    sim.submit(0, 4, max_tokens=6)
    sim.submit(1, 4, max_tokens=6)
    sim.turn(3)
    sim.engine.fails = lambda batch: True
    sim.turn()
    sim.engine.fails = lambda batch: False
    sim.drain()
    for uid in (0, 1):
        assert [reply.finish_reason for reply in sim.of(uid)][-1] is FinishReason.ERROR
        assert sum(reply.finished for reply in sim.of(uid)) == 1
    sim.submit(2, [0, 1, 2, 3], max_tokens=6)
    sim.drain()
    assert sim.tokens(2) == alone([0, 1, 2, 3], 6)


@both_loops
@pytest.mark.parametrize("failing_chunk", [0, 1, 2])
def test_a_failing_chunk_ends_its_request_and_no_more_of_it_is_computed(
    overlap: bool, failing_chunk: int
) -> None:
    sim = Sim(num_rows=1, overlap=overlap, max_extend_tokens=3)
    sim.submit(0, 8, max_tokens=3)
    sim.submit(1, 2, max_tokens=3)
    sim.turn(failing_chunk)
    sim.engine.fails = lambda batch: batch.reqs[0].uid == 0
    sim.drain()
    assert [reply.finish_reason for reply in sim.of(0)] == [FinishReason.ERROR]
    assert sum(0 in computed for _, computed in sim.batches) == failing_chunk + 1
    assert sim.tokens(1) == alone([17, 18], 3)


@pytest.mark.parametrize("method", ["prepare", "pad_batch", "sample"])
@both_loops
def test_an_engine_that_raises_elsewhere_ends_the_batch_too(method: str, overlap: bool) -> None:
    sim = Sim(overlap=overlap)
    engine: Any = sim.engine

    def fail(*args: Any) -> None:
        raise ValueError("broken")

    original = getattr(engine, method)
    setattr(engine, method, fail)
    sim.submit(0, 4)
    sim.turn(2)
    setattr(engine, method, original)
    sim.submit(1, 4, max_tokens=2)
    sim.drain()
    (reply,) = sim.of(0)
    assert reply.finish_reason is FinishReason.ERROR and "broken" in str(reply.error)
    assert len(sim.of(1)) == 2


# --- reset ---


@both_loops
@pytest.mark.parametrize("turns", range(7))
def test_reset_takes_everything_back_whatever_was_going_on(overlap: bool, turns: int) -> None:
    sim = Sim(num_rows=2, overlap=overlap, max_extend_tokens=6)
    for uid, max_tokens in enumerate([2, 4, 1, 3]):
        sim.submit(uid, 5, max_tokens=max_tokens)
    sim.abort(77)
    sim.turn(turns)
    sim.scheduler.reset()
    sim.data, sim.inbox = None, []
    assert sim.scheduler.is_idle and sim.free_rows == 2
    sim.scheduler.cache_manager.check_integrity()
    sim.submit(77, [1, 2, 3], max_tokens=3)
    sim.drain()
    assert sim.tokens(77) == alone([1, 2, 3], 3)


@both_loops
def test_a_forward_that_is_interrupted_leaves_nothing_behind_after_reset(overlap: bool) -> None:
    sim = Sim(overlap=overlap)
    sim.submit(0, 4)
    sim.turn(2)
    sim.submit(1, 4)

    def interrupt(batch: Any) -> bool:
        raise KeyboardInterrupt

    sim.engine.fails = interrupt
    with pytest.raises(KeyboardInterrupt):
        sim.turn()
    sim.engine.fails = lambda batch: False
    sim.scheduler.reset()
    sim.data = None
    assert sim.free_rows == 8
    sim.scheduler.cache_manager.check_integrity()
    assert sim.scheduler.cache_manager.num_owned_pages == 0
    sim.submit(2, [1, 2, 3], max_tokens=3)
    sim.drain()
    assert sim.tokens(2) == alone([1, 2, 3], 3)


def test_shutdown_ends_what_runs() -> None:
    sim = Sim()
    sim.submit(0, 4)
    sim.turn(2)
    sim.scheduler.shutdown()
    assert sim.free_rows == 8 and sim.scheduler.is_idle


def test_the_idle_check_raises_when_a_duplicate_was_not_freed() -> None:
    sim = Sim()
    cache: Any = sim.scheduler.cache_manager
    cache.cache_req = lambda req, **kwargs: _without_duplicates(cache, req, kwargs)
    for uid in range(2):
        sim.submit(uid, [1, 2, 3, 4], max_tokens=1)
    sim.scheduler.normal_loop()
    with pytest.raises(RuntimeError, match="integrity"):
        sim.scheduler.run_when_idle()


def _without_duplicates(cache: Any, req: Any, kwargs: dict[str, Any]) -> None:
    """Hand over as the cache does, but lose the range that another has cached meanwhile."""
    free = cache._free
    cache._free = lambda indices: None
    try:
        type(cache).cache_req(cache, req, **kwargs)
    finally:
        cache._free = free
