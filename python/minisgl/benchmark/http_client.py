"""HTTP/1.1 for a load generator: many streams at once, little work for each event.

May import `utils`. A general client spends 130 us of CPU on an event where this one spends 35, and
the generator often shares its processor with the server. Invariant: a connection carries one
exchange at a time, and goes back to the idle ones only after a complete answer.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

import httptools

from minisgl.utils.openai_api import (
    CONNECT_SECONDS,
    MAX_ANSWER_BYTES,
    MAX_EVENT_BYTES,
    Address,
    ServerError,
    parse_error,
)

TakeLine = Callable[[bytes, float], None]


class _Lost(Exception):
    """The connection ended before the answer did."""


class HttpClient:
    """Requests to one server. Connections are kept for the next request; `close` ends them all."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> bytes:
        """The body of GET `prefix + path`; `ServerError` if there is none."""
        return await self._exchange("GET", path, b"", None)

    async def stream(self, path: str, body: bytes, take: TakeLine) -> None:
        """POST `body` to `prefix + path`; `take(line, second)` gets each line as it arrives.

        second: on `time.perf_counter`. Raises `ServerError`, also what `take` raises. A task that
        is cancelled here closes its connection.
        """
        await self._exchange("POST", path, body, take)

    def close(self) -> None:
        """End the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, method: str, path: str, body: bytes, take: TakeLine | None) -> bytes:
        head = [f"{method} {self.address.prefix}{path} HTTP/1.1"]
        head += [f"{name}: {value}" for name, value in self.address.headers.items()]
        head += [f"content-length: {len(body)}", "accept: text/event-stream, application/json"]
        message = "\r\n".join(head).encode() + b"\r\n\r\n" + body
        while True:
            connection, is_fresh = await self._connection()
            try:
                answer = await connection.exchange(message, take)
            except _Lost as error:
                if is_fresh or connection.has_answered:
                    raise ServerError("the server closed the connection in mid-answer") from error
                continue  # it had been idle for too long: that says nothing about this request
            finally:
                connection.retire()
            if connection.is_reusable:
                self._idle.append(connection)
            if connection.status != 200:
                raise parse_error(connection.status, connection.headers, answer)
            return answer

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection, False
        made = asyncio.get_running_loop().create_connection(
            _Connection, self.address.host, self.address.port, ssl=self._tls
        )
        try:
            return (await asyncio.wait_for(made, CONNECT_SECONDS))[1], True
        except asyncio.TimeoutError as error:
            raise self.address.unreachable(TimeoutError("no answer")) from error
        except OSError as error:
            raise self.address.unreachable(error) from error


class _Connection(asyncio.Protocol):
    """One TCP connection and the answer that it carries now."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.has_answered = False
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[bytes] | None = None
        self._take: TakeLine | None = None

    async def exchange(self, message: bytes, take: TakeLine | None) -> bytes:
        """Send a request and wait for the end of its answer: the body that `take` did not get."""
        if self._transport is None or self._transport.is_closing():
            raise _Lost
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._take, self._body, self._second = take, b"", 0.0
        self.status, self.headers, self.has_answered, self.is_reusable = 0, {}, False, False
        self._transport.write(message)
        return await self._done

    def retire(self) -> None:
        """The exchange is over, well or badly: close what cannot carry another one."""
        if not self.is_reusable:
            self.close()

    def close(self) -> None:
        """Close without waiting."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: Exception | None = None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(self._body)
            else:
                self._done.set_exception(error)

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()  # nobody asked
            return
        self.has_answered = True
        self._second = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except ServerError as error:
            self._end(error)
        except httptools.HttpParserError as error:
            cause = error.__context__  # the parser wraps what its callbacks raise
            if isinstance(cause, ServerError):
                self._end(cause)
            else:
                self._end(ServerError("the server's answer is not HTTP/1.1"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        self._end(_Lost())

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._body += data
        if self._take is None or self.status != 200:
            if len(self._body) > MAX_ANSWER_BYTES:
                raise ServerError("the server's answer is too long")
            return
        *lines, self._body = self._body.split(b"\n")
        for line in lines:
            self._take(line.rstrip(b"\r"), self._second)
        if len(self._body) > MAX_EVENT_BYTES:
            raise ServerError("the server sent an event that is too long")

    def on_message_complete(self) -> None:
        if self.status < 200:
            return  # 100 Continue: the answer is yet to come
        if self._take is not None and self.status == 200 and self._body:
            self._take(self._body.rstrip(b"\r"), self._second)  # a last line without its end
        self.is_reusable = self._parser.should_keep_alive()
        self._end()
