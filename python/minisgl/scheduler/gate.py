"""Where requests with a constraint wait until it is compiled, so that nobody waits with them.

It stands before the queue, on rank 0 alone, between what arrives and what all ranks act on: when
something is compiled is a matter of clocks, and only what is ready becomes a message. Invariant:
messages that wait for nothing keep their order, and each leaves once or was called off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from minisgl.core import Constraint, ErrorKind, FinishReason
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    BatchBackendMsg,
    DetokenizeMsg,
    ExpireBackendMsg,
    UserMsg,
)

from .intake import DEADLINE_PASSED

MAX_COMPILING = 256
NO_TOKEN = -1


class ConstraintGate:
    """Holds requests back.

    compile: begins, and gives a future that is done when a request can be checked without waiting.
    refuse: sends the reply of a request that finds the gate full.
    """

    def __init__(
        self,
        compile: Callable[[Constraint], Future[Any]],
        refuse: Callable[[DetokenizeMsg], None],
    ) -> None:
        self._compile = compile
        self._refuse = refuse
        self._held: dict[int, tuple[UserMsg, Future[Any]]] = {}

    def __len__(self) -> int:
        """How many are held: while there are any, look again soon, though nothing arrives."""
        return len(self._held)

    def pass_on(self, messages: Iterable[BaseBackendMsg]) -> list[BaseBackendMsg]:
        """What to act on now: those whose constraint has been compiled, then what arrived."""
        ready = [uid for uid, (_, future) in self._held.items() if future.done()]
        out: list[BaseBackendMsg] = [self._held.pop(uid)[0] for uid in ready]
        for msg in messages:
            self._one(msg, out)
        return out

    def _one(self, msg: BaseBackendMsg, out: list[BaseBackendMsg]) -> None:
        if isinstance(msg, BatchBackendMsg):
            for item in msg.data:
                self._one(item, out)
        elif isinstance(msg, UserMsg) and msg.sampling_params.constraint is not None:
            self._take_in(msg, msg.sampling_params.constraint, out)
        elif isinstance(msg, AbortBackendMsg) and msg.uid in self._held:
            del self._held[msg.uid]
        elif isinstance(msg, ExpireBackendMsg) and msg.uid in self._held:
            del self._held[msg.uid]
            self._end(msg.uid, DEADLINE_PASSED, ErrorKind.TIMEOUT)
        else:
            out.append(msg)

    def _take_in(self, msg: UserMsg, constraint: Constraint, out: list[BaseBackendMsg]) -> None:
        future = self._compile(constraint)
        if future.done():
            out.append(msg)
        elif len(self._held) < MAX_COMPILING:
            self._held[msg.uid] = msg, future
        else:
            text = f"{MAX_COMPILING} requests wait for their constraints already: try again later"
            self._end(msg.uid, text, ErrorKind.OVERLOADED)

    def _end(self, uid: int, text: str, kind: ErrorKind) -> None:
        error = FinishReason.ERROR
        self._refuse(DetokenizeMsg(uid, NO_TOKEN, True, error, error=text, error_kind=kind))
