"""What a client of an OpenAI-compatible server needs: its address, its chunks, its errors.

May import `utils` only. Invariant: whatever a server sends, a client gets values or a
`ServerError`, never another exception; every server's address is written in one way.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from .errors import ConfigError, MinisglError

EXAMPLE_URL = "http://127.0.0.1:1919"
MAX_SHOWN_CHARS = 300
MAX_ANSWER_BYTES = 1 << 20
MAX_EVENT_BYTES = 1 << 20
CONNECT_SECONDS = 10.0


class ServerError(MinisglError):
    """A request that a server refused, failed or never answered.

    status: of HTTP, None if none came. code: what the server calls it, for programs. is_lasting:
    the next request will fare no better (no server, a wrong key).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        is_lasting: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.is_lasting = is_lasting


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. prefix: what its paths begin with, as in /v1/chat/completions."""

    is_tls: bool
    host: str
    port: int
    prefix: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Address:
        """The address of `http://host:port`, with or without /v1; `ConfigError` if it is none."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address of a server: {error}") from error
        is_plain = not (parts.query or parts.fragment or parts.username)
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise ConfigError(f"{url!r} is no address of a server, such as {EXAMPLE_URL}")
        prefix = parts.path.rstrip("/") or "/v1"
        if not (prefix.isascii() and prefix.isprintable() and " " not in prefix):
            raise ConfigError(f"{url!r} is no address of a server, such as {EXAMPLE_URL}")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key must be printable ASCII")
        is_tls = parts.scheme == "https"
        usual = 443 if is_tls else 80
        return cls(is_tls, parts.hostname, usual if port is None else port, prefix, api_key or None)

    def __str__(self) -> str:
        scheme = "https" if self.is_tls else "http"
        return f"{scheme}://{self.netloc}"

    @property
    def netloc(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        headers = {"host": self.netloc, "content-type": "application/json", "user-agent": "minisgl"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers

    def unreachable(self, error: OSError) -> ServerError:
        """The error of a connection that could not be made, with the way out."""
        is_of_system = (error.errno or 0) > 0 and not isinstance(error, ssl.SSLError)
        reason = os.strerror(error.errno or 0) if is_of_system else str(error) or "no answer"
        return ServerError(
            f"no server answers at {self} ({reason}); `minisgl serve` starts one",
            is_lasting=True,
        )


class Delta(msgspec.Struct):
    """What a chunk of a chat adds."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """One answer's part of a chunk: `delta` in a chat, `text` in a completion."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        """The text that the chunk adds, thoughts included."""
        if self.delta is None:
            return self.text or ""
        return (self.delta.reasoning_content or "") + (self.delta.content or "")


class PromptDetails(msgspec.Struct):
    """How many of the prompt's tokens were cached."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's own count of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class ErrorBody(msgspec.Struct):
    """What an error says."""

    message: str = ""
    code: str | int | None = None


class Chunk(msgspec.Struct):
    """One event of a stream, or a whole error."""

    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: ErrorBody | str | None = None


class Model(msgspec.Struct):
    """A model that a server offers."""

    id: str


class Models(msgspec.Struct):
    """The answer to GET /v1/models."""

    data: list[Model]


_chunks = msgspec.json.Decoder(Chunk)
_models = msgspec.json.Decoder(Models)


def parse_line(line: bytes) -> Chunk | None:
    """The chunk of one line of a stream; None for comments, blanks and what is not data.

    The end, `data: [DONE]`, is None too. Raises `ServerError` for an error event, and for data that
    is no chunk.
    """
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if not data or data == b"[DONE]":
        return None
    try:
        chunk = _chunks.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ServerError("the server sent an event that is no chunk of an answer") from error
    if chunk.error is not None:
        raise _error_of(chunk.error, None)
    return chunk


def is_end(line: bytes) -> bool:
    """Whether a line of a stream says that the answer is complete."""
    return line.startswith(b"data:") and line[5:].strip() == b"[DONE]"


def parse_error(status: int, headers: Mapping[str, str], body: bytes) -> ServerError:
    """The error that an answer other than 200 stands for; header names are in small letters."""
    try:
        error = _chunks.decode(body).error or ""
    except (msgspec.MsgspecError, UnicodeDecodeError):
        error = ""
    return _error_of(error, status, headers.get("retry-after", ""))


def parse_models(body: bytes) -> list[str]:
    """The names of a server's models; `ServerError` if the body holds none."""
    try:
        names = [model.id for model in _models.decode(body).data]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        names = []
    if not names:
        raise ServerError("the server does not say which models it has: give --model")
    return names


def _error_of(error: ErrorBody | str, status: int | None, retry_after: str = "") -> ServerError:
    message = error if isinstance(error, str) else error.message
    message = " ".join(message.split())[:MAX_SHOWN_CHARS]
    code = None if isinstance(error, str) or error.code is None else str(error.code)
    text = message or "no reason given"
    if status is None:
        text = f"the server gave up: {text}"
    elif status in (401, 403):
        text = f"the server wants another API key, --api-key or MINISGL_API_KEY: {text} ({status})"
    elif status == 429:
        wait = f" in {retry_after} s" if retry_after.isdecimal() and len(retry_after) < 7 else ""
        text = f"the server is busy, try again{wait}: {text} (429)"
    else:
        verb = "refuses" if 400 <= status < 500 else "fails"
        text = f"the server {verb}: {text} ({status})"
    return ServerError(text, status=status, code=code, is_lasting=status in (401, 403, 404, 405))
