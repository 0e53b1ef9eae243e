"""Answers over a connection that may go away: watched while they are made, streamed as events.

May import `utils`, `server.bounds` and `server.errors`. Invariant: when the client is gone, the
work for it is cancelled and its generators are closed, which aborts its requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.utils import init_logger

from .bounds import KEEP_ALIVE_SECONDS
from .errors import ApiError, internal

logger = init_logger(__name__)

T = TypeVar("T")

CLIENT_GONE = 499  # for the log; nobody reads it
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect what should arrive at once
]
DONE = b"data: [DONE]\n\n"


def event(body: Any, name: str | None = None) -> bytes:
    """One server-sent event with a JSON body."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + msgspec.json.encode(body) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; `ApiError` 499 if the client goes away before."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(CLIENT_GONE, "the client is gone")
    finally:
        await _cancel(task, watch)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. An error before the first event is an ordinary answer with its status.

    events: whole events; closed at the end, whatever the reason. A comment is sent when nothing
    else was for `KEEP_ALIVE_SECONDS`. A client that does not read is `connection`'s business.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events
        self._has_begun = False
        self._sent_at = 0.0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client is gone."""
        writer = asyncio.ensure_future(self._write(scope, send))
        watch = asyncio.ensure_future(self._watch(receive, send))
        try:
            await asyncio.wait({writer, watch}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            else:
                scope.setdefault("state", {})["is_gone"] = True
        finally:
            await _cancel(writer, watch)
            await self._events.aclose()

    async def _write(self, scope: Scope, send: Send) -> None:
        try:
            async for data in self._events:
                await self._send(send, data)
        except Exception as error:
            if not self._has_begun:
                raise  # becomes an ordinary answer
            if not isinstance(error, ApiError):
                request_id = scope["state"]["request_id"]
                logger.exception("%s failed", request_id)
                error = internal(request_id)
            await self._send(send, event(error.body))
        await self._begin(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def _send(self, send: Send, data: bytes) -> None:
        self._is_sending = True
        await self._begin(send)
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending, self._sent_at = False, time.monotonic()

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Ends when the client is gone."""
        gone = asyncio.ensure_future(_gone(receive))
        self._sent_at = time.monotonic()
        try:
            while not gone.done():
                await asyncio.wait({gone}, timeout=KEEP_ALIVE_SECONDS)
                is_idle = time.monotonic() - self._sent_at >= KEEP_ALIVE_SECONDS
                if is_idle and not self._is_sending and not gone.done():
                    await self._send(send, b": keep-alive\n\n")
        finally:
            await _cancel(gone)
