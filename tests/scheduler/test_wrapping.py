"""What users wrap is looked up on the instance at each call, and sees what the contract says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.simulated import Sim

both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


@both_loops
def test_each_turn_calls_receive_msg_once_and_first(overlap: bool) -> None:
    sim = Sim(overlap=overlap)
    calls: list[str] = []
    scheduler: Any = sim.scheduler
    receive, forward, send = scheduler.receive_msg, scheduler._forward, scheduler.send_result
    scheduler.receive_msg = lambda blocking=False: (calls.append("receive"), receive(blocking))[1]
    scheduler._forward = lambda data: (calls.append("forward"), forward(data))[1]
    scheduler.send_result = lambda replies: (calls.append("send"), send(replies))[1]
    sim.submit(0, 3, max_tokens=2)
    sim.turn(3)
    if overlap:
        assert calls == ["receive", "forward", "receive", "forward", "send", "receive", "send"]
    else:
        assert calls == ["receive", "forward", "send", "receive", "forward", "send", "receive"]


@both_loops
def test_forward_returns_after_the_accounting_and_before_results_are_processed(
    overlap: bool,
) -> None:
    sim = Sim(overlap=overlap, max_extend_tokens=4)
    scheduler: Any = sim.scheduler
    forward = scheduler._forward
    seen: list[tuple[Any, ...]] = []

    def wrapped(forward_input: Any) -> Any:
        batch = forward_input.batch
        assert (batch.size, batch.is_prefill) == (1, batch.phase == "prefill")
        (req,) = batch.reqs
        before = (req.extend_len, req.cached_len, len(req.input_ids))
        output = forward(forward_input)
        running = [r.uid for r in scheduler.decode_manager.running_reqs]
        seen.append((before, req.cached_len, req.device_len, len(req.input_ids), running))
        return output

    scheduler._forward = wrapped
    sim.submit(0, 6, max_tokens=3)
    sim.drain()
    lag = int(overlap)  # tokens the host does not know yet
    assert seen == [
        ((4, 0, 4), 4, 5, 4, []),
        ((2, 4, 6), 6, 7, 6, [0]),
        ((1, 6, 7 - lag), 7, 8, 7 - lag, [0]),
        ((1, 7, 8 - lag), 8, 9, 8 - lag, []),
    ]


def test_the_overlap_loop_is_given_the_batch_in_flight() -> None:
    sim = Sim(overlap=True)
    sim.submit(0, 3, max_tokens=2)
    assert sim.data is None
    sim.turn()
    assert [req.uid for req in sim.data[0].batch.reqs] == [0]
    assert sim.data[0].batch.phase == "prefill"
    sim.turn()
    assert sim.data[0].batch.phase == "decode"
    assert sim.tokens(0) != [] and len(sim.of(0)) == 1
    sim.turn()
    assert sim.data is None and len(sim.of(0)) == 2


def test_a_wrapped_allocate_sees_every_row() -> None:
    sim = Sim(num_rows=2)
    table: Any = sim.scheduler.table_manager
    rows: list[int] = []
    allocate = table.allocate
    table.allocate = lambda: rows.append(allocate()) or rows[-1]
    for uid in range(3):
        sim.submit(uid, 3, max_tokens=2)
    sim.drain()
    assert sorted(rows[:2]) == [0, 1] and len(rows) == 3


@both_loops
def test_the_other_steps_of_the_loop_are_looked_up_too(overlap: bool) -> None:
    sim = Sim(overlap=overlap)
    scheduler: Any = sim.scheduler
    calls: list[str] = []

    def wrap(name: str) -> None:
        original = getattr(scheduler, name)
        setattr(scheduler, name, lambda *args: (calls.append(name), original(*args))[1])

    for name in ("run_when_idle", "_prepare_batch", "_process_last_data"):
        wrap(name)
    sim.submit(0, 3, max_tokens=1)
    sim.turn(1 + overlap)
    expected = ["run_when_idle", "_prepare_batch", "_process_last_data"]
    assert calls == expected + ["_process_last_data"] * overlap
    sim.turn()
    assert calls[len(expected) + overlap :] == ["run_when_idle", "_process_last_data"]
