"""What happens to messages before the scheduler acts on them: checks, limits, deadlines.

`Deadlines` belongs to rank 0's side of the queue: it alone looks at a clock, and what it finds
becomes messages, so that all ranks, and a replay, see the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from minisgl.core import InvalidRequestError
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    BatchBackendMsg,
    DetokenizeMsg,
    ExpireBackendMsg,
    UserMsg,
)

NEVER = float("inf")
DEADLINE_PASSED = "the deadline passed before the answer was complete"


def check_request(msg: UserMsg, max_seq_len: int, vocab_size: int) -> None:
    """`InvalidRequestError` for a request that cannot run on this engine, ever."""
    ids = msg.input_ids
    if len(ids) == 0:
        raise InvalidRequestError("the prompt is empty: give at least one token", "prompt")
    if len(ids) >= max_seq_len:
        raise InvalidRequestError(
            f"the prompt has {len(ids)} tokens and the context holds {max_seq_len}, which leaves "
            f"no room for an answer: shorten it, or raise --max-seq-len-override or the KV pool",
            "prompt",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequestError(
            f"token id {wrong} is not in the vocabulary of {vocab_size}", "prompt"
        )
    msg.sampling_params.validate(vocab_size)


def clamp_max_tokens(msg: UserMsg, max_seq_len: int) -> UserMsg:
    """`msg` with `max_tokens` cut to what the context leaves; the caller's object stays as is."""
    room = max_seq_len - len(msg.input_ids)
    if msg.sampling_params.max_tokens <= room:
        return msg
    params = dataclasses.replace(msg.sampling_params, max_tokens=room)
    return dataclasses.replace(msg, sampling_params=params)


class Deadlines:
    """Turns deadlines that have passed into messages.

    now: seconds since the epoch. One scan costs what there are requests with a deadline, and comes
    only when the soonest has passed.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._deadlines: dict[int, float] = {}
        self._soonest = NEVER

    def __len__(self) -> int:
        """How many requests are watched."""
        return len(self._deadlines)

    def expire(self, msgs: Sequence[BaseBackendMsg]) -> list[BaseBackendMsg]:
        """`msgs`, and behind them an `ExpireBackendMsg` for each request whose time is up."""
        for msg in msgs:
            self._note(msg)
        if self._soonest == NEVER or (now := self._now()) < self._soonest:
            return list(msgs)
        late = [uid for uid, deadline in self._deadlines.items() if deadline <= now]
        for uid in late:
            del self._deadlines[uid]
        self._soonest = min(self._deadlines.values(), default=NEVER)
        return [*msgs, *(ExpireBackendMsg(uid) for uid in late)]

    def forget(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Drop the deadlines of requests that these replies end."""
        for reply in replies:
            if reply.finished:
                self._deadlines.pop(reply.uid, None)

    def _note(self, msg: BaseBackendMsg) -> None:
        if isinstance(msg, BatchBackendMsg):
            for item in msg.data:
                self._note(item)
        elif isinstance(msg, UserMsg) and msg.deadline is not None and msg.deadline < NEVER:
            self._deadlines[msg.uid] = msg.deadline
            self._soonest = min(self._soonest, msg.deadline)
        elif isinstance(msg, AbortBackendMsg):
            self._deadlines.pop(msg.uid, None)
