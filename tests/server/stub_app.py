"""The smallest ASGI application over a `Frontend`: what tests of the processes need of HTTP.

POST /generate with a prompt and fields of `SamplingParams` streams one JSON line for each piece; an
error is a line too. GET /health; GET /stats; POST /tokenize.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

from minisgl.message import TokenizeMsg
from minisgl.params import SamplingParams
from minisgl.server.frontend import Frontend, RequestFailed, Unavailable


def create_app(frontend: Frontend, args: Any) -> Any:
    """The application."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await _route(frontend, scope["path"], body, receive, send)

    return app


async def _route(frontend: Frontend, path: str, body: bytes, receive: Any, send: Any) -> None:
    health = frontend.health()
    if path == "/health":
        fields = {"state": health.state.value, "processes": health.processes}
        await _answer(send, 200 if health.is_ready else 503, fields)
    elif path == "/stats":
        fields = {n: getattr(frontend.stats, n) for n in frontend.stats.__dataclass_fields__}
        fields["open"] = health.num_requests
        await _answer(send, 200, fields)
    elif path == "/tokenize":
        try:
            ids = await frontend.tokenize(json.loads(body)["text"])
            await _answer(send, 200, {"ids": ids, "text": await frontend.detokenize(ids)})
        except RequestFailed as error:
            await _answer(send, _status(error), {"error": str(error)})
    else:
        await _generate(frontend, json.loads(body), receive, send)


def _status(error: RequestFailed) -> int:
    return 503 if isinstance(error, Unavailable) else 400


async def _generate(frontend: Frontend, fields: dict[str, Any], receive: Any, send: Any) -> None:
    prompt = fields.pop("prompt")
    fields = {"ignore_eos": True, **fields}
    msg = TokenizeMsg(frontend.new_uid(), prompt, SamplingParams(**fields))
    has_begun = False

    async def pieces() -> None:
        nonlocal has_begun
        async with aclosing(frontend.generate(msg)) as replies:
            async for reply in replies:
                if not has_begun:
                    has_begun = True
                    await _start(send, 200)
                line = {"text": reply.incremental_output, "ids": reply.token_ids}
                line["prompt"], line["cached"] = reply.num_prompt_tokens, reply.num_cached_tokens
                if reply.finished:
                    line["reason"] = reply.finish_reason.value
                await _write(send, line)

    answering = asyncio.ensure_future(pieces())
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            await answering
            await send({"type": "http.response.body", "body": b""})
    except RequestFailed as error:
        line = {"error": str(error), "kind": error.kind.value, "param": error.param}
        if not has_begun:
            await _answer(send, _status(error), line)
        else:
            await _write(send, line)
            await send({"type": "http.response.body", "body": b""})
    finally:
        answering.cancel()
        leaving.cancel()


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Any, status: int) -> None:
    headers = [(b"content-type", b"application/x-ndjson")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _write(send: Any, fields: dict[str, Any]) -> None:
    line = json.dumps(fields).encode() + b"\n"
    await send({"type": "http.response.body", "body": line, "more_body": True})


async def _answer(send: Any, status: int, fields: dict[str, Any]) -> None:
    await _start(send, status)
    await send({"type": "http.response.body", "body": json.dumps(fields).encode()})
