"""Requests with a constraint wait aside until it is compiled; nobody else waits."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from minisgl.core import Constraint, ErrorKind
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    BatchBackendMsg,
    DetokenizeMsg,
    ExitMsg,
    ExpireBackendMsg,
    UserMsg,
)
from minisgl.params import SamplingParams
from minisgl.scheduler import gate as gate_module
from minisgl.scheduler.gate import ConstraintGate


class Desk:
    """A gate, its compiler, which is done when a test says so, and what was refused."""

    def __init__(self) -> None:
        self.futures: dict[Constraint, Future[Any]] = {}
        self.refused: list[DetokenizeMsg] = []
        self.gate = ConstraintGate(self.compile, self.refused.append)

    def compile(self, constraint: Constraint) -> Future[Any]:
        return self.futures.setdefault(constraint, Future())

    def finish(self, text: str) -> None:
        self.futures[Constraint("regex", text)].set_result(None)


def request(uid: int, regex: str | None = None) -> UserMsg:
    constraint = None if regex is None else Constraint("regex", regex)
    return UserMsg(uid, [1, 2], SamplingParams(constraint=constraint))


def uids(messages: list[BaseBackendMsg]) -> list[int]:
    return [msg.uid for msg in messages if isinstance(msg, UserMsg)]


def test_others_pass_while_a_constraint_is_compiled() -> None:
    desk = Desk()
    arrived = [request(0), request(1, "a"), BatchBackendMsg([request(2), request(3, "b")])]
    assert uids(desk.gate.pass_on(arrived)) == [0, 2]
    assert len(desk.gate) > 0
    assert desk.gate.pass_on([]) == []
    desk.finish("b")
    assert uids(desk.gate.pass_on([request(4)])) == [3, 4]
    desk.finish("a")
    assert uids(desk.gate.pass_on([])) == [1]
    assert len(desk.gate) == 0


def test_those_that_become_ready_together_leave_in_the_order_in_which_they_came() -> None:
    desk = Desk()
    assert desk.gate.pass_on([request(0, "a"), request(1, "b"), request(2, "a")]) == []
    desk.finish("b")
    desk.finish("a")
    assert uids(desk.gate.pass_on([request(3, "a")])) == [0, 1, 2, 3]


def test_one_that_waits_is_called_off_without_a_trace() -> None:
    desk = Desk()
    abort = AbortBackendMsg(0)
    assert desk.gate.pass_on([request(0, "a"), abort, AbortBackendMsg(9)]) == [AbortBackendMsg(9)]
    assert len(desk.gate) == 0
    desk.finish("a")
    assert desk.gate.pass_on([ExitMsg()]) == [ExitMsg()]


def test_the_deadline_of_one_that_waits_ends_it_here() -> None:
    desk = Desk()
    late = ExpireBackendMsg(0)
    assert desk.gate.pass_on([request(0, "a"), late, ExpireBackendMsg(9)]) == [ExpireBackendMsg(9)]
    assert [(r.uid, r.error_kind) for r in desk.refused] == [(0, ErrorKind.TIMEOUT)]
    assert desk.refused[0].finished and len(desk.gate) == 0


def test_a_bad_constraint_passes_and_is_refused_by_the_scheduler() -> None:
    desk = Desk()
    desk.gate.pass_on([request(0, "[")])
    desk.futures[Constraint("regex", "[")].set_result(ValueError("bad"))
    assert uids(desk.gate.pass_on([])) == [0]


def test_a_full_gate_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_COMPILING", 2)
    desk = Desk()
    assert desk.gate.pass_on([request(i, "a") for i in range(3)]) == []
    assert [(r.uid, r.error_kind) for r in desk.refused] == [(2, ErrorKind.OVERLOADED)]
    desk.finish("a")
    assert uids(desk.gate.pass_on([])) == [0, 1]
