"""The body of a request: read with bounds on size and time, then decoded strictly.

May import `server.bounds` and `server.errors`. Invariant: whatever bytes come, the outcome is a
checked struct or a 4xx that names the field.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from .bounds import MAX_BODY_BYTES, MAX_BODY_SECONDS, MAX_JSON_DEPTH
from .errors import ApiError, bad_request

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*)`$", re.DOTALL)


async def read_body(request: Request) -> bytes:
    """All bytes of a body; 413 if there are too many, 408 if they take too long."""
    too_large = ApiError(
        413,
        f"the body is larger than {MAX_BODY_BYTES} bytes",
        code="body_too_large",
    )
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length[:20]) > MAX_BODY_BYTES:
        raise too_large
    try:
        body = await asyncio.wait_for(_collect(request, too_large), MAX_BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, "the body took too long to arrive") from None
    except ClientDisconnect:
        raise ApiError(499, "the client is gone") from None
    request.state.num_body_bytes = len(body)
    return body


async def _collect(request: Request, too_large: ApiError) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The struct that a JSON body stands for; a 400 naming the field if it is not one."""
    if not body:
        raise bad_request("the body is empty: send JSON")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def _explained(message: str) -> ApiError:
    path = _PATH.search(message)
    where = path.group(1) if path else ""
    text = message[: path.start()] if path else message
    if unknown := _UNKNOWN.search(text):
        where = f"{where}.{unknown.group(1)}" if where else unknown.group(1)
        where = where[:80]
        return bad_request(f"{where} is not a field that is known here", where, "unknown_field")
    return bad_request(f"{where or 'the body'}: {text}", where or None, "invalid_type")


def check_depth(value: Any, param: str) -> None:
    """A 400 if objects and lists are nested deeper than `MAX_JSON_DEPTH`."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise bad_request(f"{param} is nested deeper than {MAX_JSON_DEPTH} levels", param)
        level = [part for item in level for part in _parts(item)]


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


async def read_json(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Read and decode the body of a request."""
    return decode(decoder, await read_body(request))
