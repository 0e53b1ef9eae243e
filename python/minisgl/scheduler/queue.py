"""Who is tried next: the queue's order, and ageing, which bounds how often anyone is overtaken.

The queue itself stands in the order of arrival. An order is a pure function of it and of how many
tokens of a prompt are cached. Invariant: a request that has been overtaken `max_overtaken` times is
tried before all others, and nobody starts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .utils import PendingReq

MAX_LOOKAHEAD = 16  # longest-prefix compares as many, skip looks past as many, in a step

CachedLen = Callable[[PendingReq], int]
Order = Callable[[Sequence[PendingReq], CachedLen], Sequence[PendingReq]]


def fcfs(waiting: Sequence[PendingReq], cached_len: CachedLen) -> Sequence[PendingReq]:
    """First come, first served; the first that does not fit stops the others."""
    return waiting


def skip(waiting: Sequence[PendingReq], cached_len: CachedLen) -> Sequence[PendingReq]:
    """First come, first served among those that fit."""
    return waiting


def priority(waiting: Sequence[PendingReq], cached_len: CachedLen) -> Sequence[PendingReq]:
    """The largest priority first; equal ones as they came."""
    return sorted(waiting, key=lambda pending: -pending.priority)


def longest_prefix(waiting: Sequence[PendingReq], cached_len: CachedLen) -> Sequence[PendingReq]:
    """Of the first to come, the one with the most cached tokens."""
    compared = sorted(waiting[:MAX_LOOKAHEAD], key=lambda pending: -cached_len(pending))
    return [*compared, *waiting[MAX_LOOKAHEAD:]]


ORDERS: dict[str, Order] = {
    "fcfs": fcfs,
    "skip": skip,
    "priority": priority,
    "longest-prefix": longest_prefix,
}


class Turns:
    """One pass over the queue under an order with ageing; `candidates` are tried one by one.

    queue: those that wait, as they came; a half-computed prompt stands at its head and goes on
    first. `overtake` must be told of each that starts.
    """

    def __init__(
        self,
        queue: Sequence[PendingReq],
        order: Order,
        max_overtaken: int,
        cached_len: CachedLen,
    ) -> None:
        self.skips = order is skip
        self.candidates = queue
        self._queue = queue
        self._max_overtaken = max_overtaken
        self._may_overtake = order is not fcfs
        self._started: set[PendingReq] = set()
        self._first_aged: PendingReq | None = None
        if self._may_overtake:
            halves = [p for p in queue if p.chunked_req is not None]
            aged = [p for p in queue if p.chunked_req is None and self._is_aged(p)]
            rest = [p for p in queue if p.chunked_req is None and not self._is_aged(p)]
            self._first_aged = aged[0] if aged else None
            self.candidates = [*halves, *aged, *order(rest, cached_len)]

    def may_start(self, pending: PendingReq) -> bool:
        """Whether it would overtake nobody who must not be overtaken once more."""
        aged = self._first_aged
        if aged is None or pending is aged:
            return True
        return self._queue.index(pending) < self._queue.index(aged)

    def overtake(self, pending: PendingReq) -> None:
        """Note that `pending` starts, or goes on: those who came before it have waited longer."""
        if not self._may_overtake:
            return
        self._started.add(pending)
        for other in self._queue[: self._queue.index(pending)]:
            other.num_overtaken += other not in self._started
        waiting = (p for p in self._queue if p not in self._started)
        self._first_aged = next((p for p in waiting if self._is_aged(p)), None)

    def _is_aged(self, pending: PendingReq) -> bool:
        return pending.num_overtaken >= self._max_overtaken
