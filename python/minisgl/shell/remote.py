"""A conversation with a server that speaks OpenAI's API. May import `params`, `utils`.

Invariant: Ctrl-C ends a wait for the server at once; whatever the server does is a `ServerError`
of one line, after which the next question may well succeed.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from minisgl.params import FinishReason, MinisglError
from minisgl.utils.openai_api import (
    CONNECT_SECONDS,
    MAX_ANSWER_BYTES,
    MAX_EVENT_BYTES,
    Address,
    Chunk,
    ServerError,
    is_end,
    parse_error,
    parse_line,
    parse_models,
)

from .conversation import Conversation, Piece

TOO_LONG = "context_length_exceeded"
SILENCE_SECONDS = 600.0


class RemoteChat(Conversation):
    """A conversation with a server.

    fields: what every request carries besides messages, such as `max_tokens`; without "model" the
    server's first is asked. Raises `ServerError` if there is no server, or it wants another key.
    """

    def __init__(
        self, address: Address, fields: Mapping[str, Any], *, system: str | None = None
    ) -> None:
        super().__init__(system)
        self.address = address
        self.fields = {"model": "", **fields}
        self._connection: http.client.HTTPConnection | None = None
        models = parse_models(self._get("/models"))
        self.fields["model"] = self.fields["model"] or models[0]

    def stop(self) -> None:
        """End the answer now: a read that waits for the server returns."""
        super().stop()
        if self._connection is not None and self._connection.sock is not None:
            try:  # of the plain class: a TLS socket would talk to the server first
                socket.socket.shutdown(self._connection.sock, socket.SHUT_RDWR)
            except OSError:
                return  # it is gone by itself

    def answer(self, messages: list[dict[str, str]]) -> Generator[Piece, None, None]:
        """Raises `ServerError`."""
        fields = {**self.fields, "messages": messages, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        try:
            with closing(self._open("POST", "/chat/completions", fields)) as response:
                yield from _pieces(self._chunks(response))
        except ServerError as error:
            if self.is_stopped:
                return
            if error.code != TOO_LONG:
                raise
            text = self.hint_at_reset(str(error))
            raise ServerError(text, status=error.status, code=TOO_LONG) from error
        finally:
            self._close()

    def is_final(self, error: MinisglError) -> bool:
        """No server, another key, or a conversation that has grown too long."""
        if not isinstance(error, ServerError):
            return False
        return error.is_lasting or (error.code == TOO_LONG and self.has_begun)

    def _get(self, path: str) -> bytes:
        try:
            with closing(self._open("GET", path, None)) as response:
                return response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from error
        finally:
            self._close()

    def _open(self, method: str, path: str, fields: Any) -> http.client.HTTPResponse:
        """Send a request; its answer, if that is a 200."""
        address = self.address
        kind = http.client.HTTPSConnection if address.is_tls else http.client.HTTPConnection
        self._connection = connection = kind(address.host, address.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise address.unreachable(error) from error
        if fields is not None:
            connection.sock.settimeout(SILENCE_SECONDS)
        body = None if fields is None else json.dumps(fields).encode()
        try:
            if self.is_stopped:
                raise ConnectionAbortedError
            connection.request(method, address.prefix + path, body, address.headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            headers = {name.lower(): value for name, value in response.getheaders()}
            raise parse_error(response.status, headers, response.read(MAX_ANSWER_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from error

    def _chunks(self, response: http.client.HTTPResponse) -> Iterator[Chunk]:
        """The events of a stream until its end."""
        is_complete = False
        while not is_complete:
            try:
                line = response.readline(MAX_EVENT_BYTES)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise _broken(error) from error
            if len(line) == MAX_EVENT_BYTES:
                raise ServerError("the server sent an event that is too long")
            if not line.endswith(b"\n"):
                raise _broken(None)
            is_complete = is_end(line)
            chunk = parse_line(line)
            if chunk is not None:
                yield chunk

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _pieces(chunks: Iterator[Chunk]) -> Iterator[Piece]:
    """What chunks add up to: text as it comes, then the number of tokens set right."""
    num_tokens, is_thinking = 0, False
    for chunk in chunks:
        for choice in chunk.choices[:1]:
            delta, reason = choice.delta, choice.finish_reason
            if delta is not None and delta.reasoning_content:
                is_thinking = True
                num_tokens += 1
                yield Piece(delta.reasoning_content, 1, is_thought=True)
            if delta is not None and delta.content:
                if is_thinking:
                    yield Piece("\n\n", 0, is_thought=True)
                is_thinking = False
                num_tokens += 1
                yield Piece(delta.content, 1)
            if reason is not None:
                is_cut = reason == "length"
                yield Piece("", 0, FinishReason.LENGTH if is_cut else FinishReason.STOP)
        if chunk.usage is not None:
            yield Piece("", chunk.usage.completion_tokens - num_tokens)
            num_tokens = chunk.usage.completion_tokens


def _broken(error: Exception | None) -> ServerError:
    if isinstance(error, TimeoutError):
        return ServerError("the server accepts connections and does not answer")
    return ServerError("the server closed the connection in mid-answer")
