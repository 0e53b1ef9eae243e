"""Deadlines become messages behind those that arrived, by a clock that only rank 0 reads."""

from __future__ import annotations

from minisgl.core import FinishReason, SamplingParams
from minisgl.message import (
    AbortBackendMsg,
    BatchBackendMsg,
    DetokenizeMsg,
    ExpireBackendMsg,
    UserMsg,
)
from minisgl.scheduler import Deadlines


class Clock:
    """A clock that is set by hand, and counts how often it is read."""

    def __init__(self) -> None:
        self.now, self.num_reads = 100.0, 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now


def submit(uid: int, deadline: float | None = None) -> UserMsg:
    return UserMsg(uid, [1, 2], SamplingParams(), deadline=deadline)


def test_a_deadline_is_a_message_once_it_has_passed_and_only_once() -> None:
    clock = Clock()
    deadlines = Deadlines(clock)
    first, second = submit(1, 105.0), submit(2, 103.0)
    assert deadlines.expire([first, BatchBackendMsg([second])]) == [
        first,
        BatchBackendMsg([second]),
    ]
    clock.now = 103.0
    assert deadlines.expire([]) == [ExpireBackendMsg(2)]
    clock.now = 104.9
    assert deadlines.expire([]) == []
    clock.now = 105.0
    third = submit(3)
    assert deadlines.expire([third]) == [third, ExpireBackendMsg(1)]
    clock.now = 1e9
    assert deadlines.expire([]) == []


def test_one_that_comes_too_late_ends_behind_its_submit() -> None:
    msg = submit(1, 99.0)
    assert Deadlines(Clock()).expire([msg]) == [msg, ExpireBackendMsg(1)]


def test_what_has_ended_has_no_deadline_and_is_not_remembered() -> None:
    clock = Clock()
    deadlines = Deadlines(clock)
    deadlines.expire([submit(uid, 101.0) for uid in range(3)])
    deadlines.forget([DetokenizeMsg(0, 5, False), DetokenizeMsg(1, 5, True, FinishReason.STOP)])
    deadlines.expire([AbortBackendMsg(2)])
    assert list(deadlines._deadlines) == [0]
    clock.now = 102.0
    assert deadlines.expire([]) == [ExpireBackendMsg(0)]
    assert not deadlines._deadlines


def test_without_deadlines_the_clock_is_not_read_and_never_and_nan_are_none() -> None:
    clock = Clock()
    deadlines = Deadlines(clock)
    msgs = [submit(1), submit(2, float("inf")), submit(3, float("nan"))]
    assert deadlines.expire(msgs) == msgs
    assert clock.num_reads == 0 and not deadlines._deadlines
