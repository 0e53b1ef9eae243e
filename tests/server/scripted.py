"""The app over a frontend that answers from a script: every byte of HTTP, no engine."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import httpx
from fastapi import FastAPI

from minisgl.config import ServerArgs
from minisgl.message import EngineStats, TokenizeMsg, UserReply
from minisgl.params import FinishReason
from minisgl.server.app import create_app
from minisgl.server.frontend import Frontend, Health, ModelInfo, State

INFO: dict[str, Any] = {
    "name": "scripted",
    "max_seq_len": 1024,
    "vocab_size": 256,
    "num_pages": 1024,
    "page_size": 1,
    "chat_template": "a template with tools",
}
CHAT = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


class ScriptedFrontend:
    """Has what the routes call of `Frontend`, and answers every request with the same pieces.

    A text is a reply of one token, the last one ends the answer; a reply is given as it is; an
    error is raised; an event is waited for.
    """

    def __init__(self, *script: Any, **info: Any) -> None:
        self.info = ModelInfo(**{**INFO, **info})
        self.stats = EngineStats(running=2, waiting=1, free_pages=7, num_aborts=5)
        self.state = State.READY
        self.script = script or ("Hi",)
        self.submitted: list[TokenizeMsg] = []
        self.aborted: list[int] = []
        self.ended = asyncio.Event()
        self._uids = itertools.count(1)

    def new_uid(self) -> int:
        return next(self._uids)

    def health(self) -> Health:
        return Health(self.state, {}, 0)

    def held(self) -> dict[str, int]:
        return {"api": len(self.submitted)}

    async def generate(self, msg: TokenizeMsg) -> AsyncIterator[UserReply]:
        self.submitted.append(msg)
        is_over = False
        try:
            for i, item in enumerate(self.script):
                if isinstance(item, Exception):
                    is_over = True
                    raise item
                if isinstance(item, asyncio.Event):
                    await item.wait()
                    continue
                is_over = i == len(self.script) - 1
                yield self._reply(msg.uid, item, i, is_over)
        finally:
            if not is_over:
                self.aborted.append(msg.uid)
            self.ended.set()

    @staticmethod
    def _reply(uid: int, item: str | UserReply, token: int, is_last: bool) -> UserReply:
        if isinstance(item, UserReply):
            return item
        return UserReply(uid, item, is_last, FinishReason.STOP if is_last else None, [token], 3, 1)

    async def tokenize(self, text: Any, **options: Any) -> list[int]:
        text = text if isinstance(text, str) else "".join(m["content"] for m in text)
        return list(text.encode())

    async def detokenize(self, token_ids: Sequence[int], **options: Any) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


def make_app(frontend: ScriptedFrontend, **args: Any) -> FastAPI:
    """The real app over it."""
    return create_app(cast(Frontend, frontend), ServerArgs("model", **args))


def ask_app(app: FastAPI, path: str, body: Any = None, **options: Any) -> httpx.Response:
    """One request: a POST if there is a body. Options as those of httpx."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            content = options.pop("content", None if body is None else json.dumps(body))
            method = options.pop("method", "GET" if content is None else "POST")
            return await client.request(method, path, content=content, **options)

    return asyncio.run(send())


def ask(frontend: ScriptedFrontend, path: str, body: Any = None, **options: Any) -> httpx.Response:
    """One request to a new app over `frontend`."""
    return ask_app(make_app(frontend), path, body, **options)


def events(response: httpx.Response) -> list[Any]:
    """What a stream of server-sent events told; comments and names are left out."""
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after a check that it is in OpenAI's shape."""
    assert response.headers["content-type"] == "application/json", response.text
    body = response.json()
    assert list(body) == ["error"], body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"], error
    return error
