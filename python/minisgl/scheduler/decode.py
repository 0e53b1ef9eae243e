"""The running set: requests whose prompt is computed and that may generate more."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from minisgl.core import Batch, Req
from minisgl.utils import OrderedSet


class DecodeManager:
    """Keeps running requests in the order in which their prompts were completed."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._running: OrderedSet[Req] = OrderedSet()

    @property
    def running_reqs(self) -> OrderedSet[Req]:
        """The running requests, oldest first."""
        return self._running

    @running_reqs.setter
    def running_reqs(self, reqs: Iterable[Req]) -> None:
        self._running = OrderedSet(reqs)

    @property
    def runnable(self) -> bool:
        """Whether there is anything to decode."""
        return len(self._running) > 0

    @property
    def inflight_tokens(self) -> int:
        """An upper bound on the tokens that running requests may still take from the pool."""
        return sum(req.remain_len + self.page_size - 1 for req in self._running)

    def filter_reqs(self, reqs: Collection[Req]) -> None:
        """After a forward: take in those of `reqs` that go on, drop those that cannot."""
        for req in reqs:
            if req.can_decode:
                self._running.add(req)
            else:
                self._running.discard(req)

    def remove_req(self, req: Req) -> None:
        """Drop `req` if it is running."""
        self._running.discard(req)

    def abort_req(self, uid: int) -> Req | None:
        """Drop the running request `uid` and return it, None if there is none."""
        for req in self._running:
            if req.uid == uid:
                self._running.discard(req)
                return req
        return None

    def schedule_next_batch(self) -> Batch | None:
        """Every running request, None if there is none."""
        return Batch(list(self._running), "decode") if self._running else None
