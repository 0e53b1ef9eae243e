"""Connections with bounds: on the size and the time of headers, on bodies nobody wants, on clients
that do not read.

May import `config` and the server's modules. Invariant: a connection that makes no progress ends,
whatever state it is in; what it holds until then is bounded.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .bounds import (
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    MAX_HEADER_SECONDS,
    MAX_LINGER_SECONDS,
    MAX_SEND_SECONDS,
)
from .errors import ApiError

_STATUS_LINES = {
    400: b"HTTP/1.1 400 Bad Request\r\n",
    431: b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
}


class BoundedProtocol(HttpToolsProtocol):  # type: ignore[misc, unused-ignore]
    """uvicorn's protocol, with one timer for what is expected and one for what is sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._expecting: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._is_in_head = True
        self._is_refused = False

    def _expect(self, seconds: float) -> None:
        """The client has so long for what comes next."""
        self._expect_nothing()
        self._expecting = self.loop.call_later(seconds, self.transport.abort)

    def _expect_nothing(self) -> None:
        if self._expecting is not None:
            self._expecting.cancel()
            self._expecting = None

    # The connection

    def connection_made(self, transport: Any) -> None:
        """Begin with the first request's headers."""
        super().connection_made(transport)
        self._expect(MAX_HEADER_SECONDS)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._expect_nothing()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read: it has so long."""
        super().pause_writing()
        if self._sending is None:
            self._sending = self.loop.call_later(MAX_SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        super().resume_writing()

    # The request

    def data_received(self, data: bytes) -> None:
        """Bytes, of which those that are no headers yet count as headers."""
        if self._is_refused:
            return
        if self._is_in_head:
            if self._expecting is None:
                self._expect(MAX_HEADER_SECONDS)
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEADER_BYTES:
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        """The headers have come; how long the body takes is the route's business."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            self._num_head_bytes = size
            raise ValueError("the headers are too large")  # the parser ends in send_400_response
        super().on_headers_complete()
        self._is_in_head, self._num_head_bytes = False, 0
        self._expect_nothing()

    def on_message_complete(self) -> None:
        """The body has come; what follows is another request."""
        super().on_message_complete()
        self._is_in_head = True
        self._expect_nothing()

    def on_response_complete(self) -> None:
        """An answer is written; a client that still sends, or does not read, has so long."""
        super().on_response_complete()
        if not self._is_in_head or self.transport.is_closing():
            self._expect(MAX_LINGER_SECONDS)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came on an idle connection."""
        super().timeout_keep_alive_handler()
        self._expect(MAX_LINGER_SECONDS)  # for what is still to be written

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or too much of it, in the shape of every other error."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self._num_head_bytes > MAX_HEADER_BYTES:
            error = ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")
        else:
            error = ApiError(400, "this is not an HTTP request", code="invalid_http")
        body = msgspec.json.encode(error.body)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(_STATUS_LINES[error.status] + head % len(body) + body)
        self.transport.write_eof()  # a reset would take the answer away from who still sends
        self._expect(MAX_LINGER_SECONDS)


def uvicorn_options() -> dict[str, Any]:
    """Arguments of `uvicorn.Config` that the bounds and the log need."""
    return {
        "http": BoundedProtocol,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": 75,
    }
