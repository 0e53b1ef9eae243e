"""The scheduler's messages over ZeroMQ: rank 0 hears the world, the others hear rank 0.

Invariant: every rank acts on the same list of messages in the same turn of the loop, so rank 0
publishes one list a turn, also an empty one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from minisgl.message import (
    BaseBackendMsg,
    BaseTokenizerMsg,
    BatchBackendMsg,
    BatchTokenizerMsg,
    DetokenizeMsg,
    FromWire,
    to_wire,
)
from minisgl.scheduler import Deadlines
from minisgl.scheduler.gate import ConstraintGate
from minisgl.utils import ZmqPubQueue, ZmqPullQueue, ZmqPushQueue, ZmqSubQueue
from minisgl.utils.process import Addresses

HELD_SECONDS = 0.01  # how often the gate is looked at while nothing else happens


class PrimaryIO:
    """Rank 0: takes in requests, sends replies to the tokenizer that each request came from.

    before_receive: called at each turn, with whether it is going to wait. gate: where requests
    wait until their constraint is compiled.
    """

    def __init__(self, addresses: Addresses, num_tokenizers: int, num_ranks: int) -> None:
        self.before_receive: Callable[[bool], None] | None = None
        self.gate: ConstraintGate | None = None
        self._deadlines = Deadlines(time.time)
        self._inbox: ZmqPullQueue[BaseBackendMsg] = ZmqPullQueue(
            addresses.scheduler, True, FromWire(BaseBackendMsg)
        )
        self._tokenizers: list[ZmqPushQueue[BaseTokenizerMsg]] = [
            ZmqPushQueue(addresses.tokenizer(index), False, to_wire)
            for index in range(num_tokenizers)
        ]
        self._ranks: ZmqPubQueue[BaseBackendMsg] | None = None
        if num_ranks > 1:
            self._ranks = ZmqPubQueue(addresses.ranks, True, to_wire)
            self._ranks.wait_for_subscribers(num_ranks - 1)

    @property
    def num_held(self) -> int:
        """Entries about requests that have not ended, here and at the gate."""
        return len(self._deadlines) + (0 if self.gate is None else len(self.gate))

    def receive(self, blocking: bool) -> Sequence[BaseBackendMsg]:
        """All messages that have arrived; waits for one if `blocking`."""
        if self.before_receive is not None:
            self.before_receive(blocking)
        wait = None if blocking else 0.0
        if blocking and self.gate:
            wait = HELD_SECONDS
        messages = self._inbox.get_all(wait)
        messages = self._deadlines.expire(messages)
        if self.gate is not None:
            messages = self.gate.pass_on(messages)
        if self._ranks is not None:
            self._ranks.put(BatchBackendMsg(messages))
        return messages

    def send(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Hand the replies of one step to the tokenizers, one message for each."""
        self._deadlines.forget(replies)
        num = len(self._tokenizers)
        for index, tokenizer in enumerate(self._tokenizers):
            part = list(replies) if num == 1 else [r for r in replies if r.uid % num == index]
            if part:
                tokenizer.put(BatchTokenizerMsg(part))  # type: ignore[arg-type]

    def stop(self) -> None:
        """Close all sockets."""
        for queue in (self._inbox, self._ranks, *self._tokenizers):
            if queue is not None:
                queue.stop()


class FollowerIO:
    """Any other rank: acts on what rank 0 publishes, and tells nobody."""

    def __init__(self, addresses: Addresses) -> None:
        self._rank_0: ZmqSubQueue[BaseBackendMsg] = ZmqSubQueue(
            addresses.ranks, False, FromWire(BaseBackendMsg)
        )

    def receive(self, blocking: bool) -> Sequence[BaseBackendMsg]:
        """The next list of rank 0; waits for it, whatever is asked."""
        return [self._rank_0.get()]

    def send(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Nothing: rank 0 says it."""

    def stop(self) -> None:
        """Close the socket."""
        self._rank_0.stop()
