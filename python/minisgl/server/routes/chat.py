"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.body import read_json
from minisgl.server.chat import Chat, chunk_choice, open_chat, whole_messages
from minisgl.server.generation import new_id
from minisgl.server.openapi import described
from minisgl.server.protocol import wants_usage
from minisgl.server.protocol_chat import CHAT_DECODER, NEUTRAL, ChatRequest
from minisgl.server.stream import DONE, EventStream, event, while_connected

router = APIRouter()


@router.post("/v1/chat/completions", **described(ChatRequest, NEUTRAL))
async def chat_completions(request: Request) -> Response:
    """Continue a conversation."""
    body = await read_json(request, CHAT_DECODER)
    has_usage = wants_usage(body)
    chat = await open_chat(request, body)
    if body.stream:
        return EventStream(_chunks(chat, has_usage))
    answer = await while_connected(request.receive, _answer(chat))
    return Response(answer, media_type="application/json")


async def _answer(chat: Chat) -> bytes:
    choices = [message.choice() for message in await whole_messages(chat)]
    generation = chat.generation
    return msgspec.json.encode(
        generation.reply(new_id("chatcmpl"), "chat.completion", choices, usage=generation.usage())
    )


async def _chunks(chat: Chat, has_usage: bool) -> AsyncGenerator[bytes, None]:
    generation = chat.generation
    usage: dict[str, Any] = {"usage": None} if has_usage else {}
    chunk = generation.reply(new_id("chatcmpl"), "chat.completion.chunk", [], **usage)
    has_begun = [False] * generation.n
    async with aclosing(chat.deltas()) as deltas:
        async for delta in deltas:
            chunk.choices = [chunk_choice(delta, not has_begun[delta.index])]
            has_begun[delta.index] = True
            yield event(chunk)
    if has_usage:
        chunk.choices, chunk.usage = [], generation.usage()
        yield event(chunk)
    yield DONE
