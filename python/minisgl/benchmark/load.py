"""The run: users who ask one question after the other, or requests that arrive at a rate.

May import `utils`. Invariant: a run ends with every request that was sent in `records`, whether it
was answered, failed or cut.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.utils.openai_api import ServerError

from .http_client import HttpClient
from .measure import Record
from .workload import Workload, poisson_arrivals

MAX_USERS = 4096
MAX_OPEN_REQUESTS = 4096
PAUSE_AFTER_ERROR_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. Exactly one of `users` and `rate` is given.

    num_requests: None for as many as `duration` seconds allow. fields: what every body carries
    (model, temperature, ...). timeout: seconds for one answer.
    """

    workload: Workload
    is_chat: bool
    fields: dict[str, Any] = field(default_factory=dict)
    users: int | None = None
    rate: float | None = None
    num_requests: int | None = None
    duration: float | None = None
    timeout: float = 600.0
    seed: int = 0

    def body(self, index: int) -> bytes:
        """The body of request number `index`."""
        fields = {**self.fields, **self.workload[index].body(self.is_chat)}
        if fields.get("temperature"):
            fields.setdefault("seed", self.seed + index)
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode({**fields, **stream})

    @property
    def path(self) -> str:
        """Where the requests go, below the server's prefix."""
        return "/chat/completions" if self.is_chat else "/completions"


class Load:
    """One run of a plan. `records` may be read while it runs."""

    def __init__(self, client: HttpClient, plan: Plan) -> None:
        self.client = client
        self.plan = plan
        self.records: list[Record] = []
        self.num_running = 0
        self.num_done = 0
        self.num_failed = 0
        self.start = self.end = time.perf_counter()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End the run now; requests under way are cut, and count as far as they came."""
        self._stop.set()

    async def run(self) -> None:
        """Send everything and wait for the answers, or for `stop`."""
        self.start = time.perf_counter()
        work = asyncio.create_task(self._users() if self.plan.users else self._arrivals())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            work.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
            self.end = time.perf_counter()
        if not work.cancelled():
            work.result()

    def _numbers(self) -> Iterator[int]:
        """Numbers of requests until there are enough or the time is up."""
        count = self.plan.num_requests
        for index in itertools.count() if count is None else range(count):
            if self.plan.duration and time.perf_counter() - self.start >= self.plan.duration:
                return
            yield index

    async def _users(self) -> None:
        numbers = self._numbers()

        async def user() -> None:
            for index in numbers:
                body = self.plan.body(index)
                record = await self._send(Record(index, time.perf_counter()), body)
                if record.error is not None:  # a dead server is no reason to spin
                    await asyncio.sleep(PAUSE_AFTER_ERROR_SECONDS)

        async with _Tasks() as tasks:
            for _ in range(self.plan.users or 0):
                tasks.start(user())

    async def _arrivals(self) -> None:
        assert self.plan.rate is not None
        moments = poisson_arrivals(self.plan.rate, self.plan.seed)
        async with _Tasks() as tasks:
            for index, moment in zip(self._numbers(), moments):
                if self.plan.duration and moment >= self.plan.duration:
                    break
                body, due = self.plan.body(index), self.start + moment
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.start(self._send(Record(index, due), body))

    async def _send(self, record: Record, body: bytes) -> Record:
        self.records.append(record)
        self.num_running += 1
        try:
            if self.num_running > MAX_OPEN_REQUESTS:
                record.fail("not sent", f"{MAX_OPEN_REQUESTS} requests were under way")
                return record
            answer = self.client.stream(self.plan.path, body, record.take)
            await asyncio.wait_for(answer, self.plan.timeout)
            record.close(time.perf_counter())
        except asyncio.TimeoutError:
            record.fail("timeout", f"no complete answer within {self.plan.timeout:g} s")
        except ServerError as error:
            kind = "connection" if error.is_lasting else "stream"
            record.fail(kind if error.status is None else str(error.status), str(error))
        finally:
            self.num_running -= 1
            self.num_done += 1
            self.num_failed += record.error is not None
        return record


class _Tasks:
    """Tasks that all have ended when the block has: by themselves, or cancelled as the block is."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def __aenter__(self) -> _Tasks:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        try:
            if kind is None:
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
