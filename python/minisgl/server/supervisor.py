"""The life of a server: start, serve, drain, end; and what happens when a child process dies.

Invariant: it ends in exactly one of two ways. After a signal: nothing new is taken, what runs has
`drain_seconds`, then all that is left gets an error; exit code 0. After the death of a child: every
request gets an error at once, /health says so for `LINGER_SECONDS`, exit code 1.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable

from minisgl.params import StartError
from minisgl.utils import init_logger

from .children import Children
from .frontend import Frontend

logger = init_logger(__name__)

WATCH_SECONDS = 0.2
LINGER_SECONDS = 2.0


class Supervisor:
    """Watches over `children` for `frontend`.

    exit_code: None while the server shall go on.
    """

    def __init__(self, frontend: Frontend, children: Children, drain_seconds: float) -> None:
        self.exit_code: int | None = None
        self._frontend = frontend
        self._children = children
        self._drain_seconds = drain_seconds
        self._signalled = asyncio.Event()
        self._over = asyncio.Event()
        frontend.processes = dict.fromkeys(children.names, "starting")

    def on_signal(self) -> None:
        """SIGTERM or SIGINT: end in good order; the second time at once."""
        if self._signalled.is_set():
            self._children.stop(in_order=False)
            os._exit(0)
        self._signalled.set()
        self._frontend.refuse_requests()

    async def start(self) -> bool:
        """Wait until all is ready; False if a signal came first. `StartError` if a child dies."""
        frontend = self._frontend
        while not frontend.is_started():
            if self._signalled.is_set():
                self.exit_code = 0
                return False
            if dead := self._children.dead():
                raise StartError(await self._why(dead))
            await _first(WATCH_SECONDS, frontend.changed(), self._signalled.wait())
        frontend.processes = dict.fromkeys(self._children.names, "ready")
        frontend.open_for_requests()
        return True

    async def _why(self, dead: dict[str, str]) -> str:
        """What the first that failed has to say; its message may still be on its way."""
        frontend = self._frontend
        for _ in range(5):
            if frontend.start_failure is not None:
                return frontend.start_failure.message
            await _first(0.1, frontend.changed())
        return "; ".join(f"the {name} {how} while it was starting" for name, how in dead.items())

    async def watch(self) -> None:
        """Until the server shall end; sets `exit_code`."""
        while not self._signalled.is_set():
            if dead := self._children.dead():
                await self._mourn(dead)
                return
            await _first(WATCH_SECONDS, self._signalled.wait())
        await self._drain()

    async def _mourn(self, dead: dict[str, str]) -> None:
        reason = "; ".join(f"the {name} {how}" for name, how in dead.items())
        logger.error("%s: every request ends, and so does the server", reason)
        self._frontend.processes = {**self._frontend.processes, **dead}
        self._frontend.fail(reason)
        await asyncio.sleep(LINGER_SECONDS)
        self.exit_code = 1

    async def _drain(self) -> None:
        frontend = self._frontend
        num = frontend.health().num_requests
        logger.info("shutting down: %d requests have %g s", num, self._drain_seconds)
        deadline = asyncio.get_running_loop().time() + self._drain_seconds
        while frontend.health().num_requests and not self._children.dead():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                break
            await _first(min(left, WATCH_SECONDS), frontend.changed())
        frontend.fail_requests("the server is shutting down")
        self.exit_code = 0


async def _first(seconds: float, *events: Awaitable[object]) -> None:
    """Wait for the first of `events`, at most so long."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
