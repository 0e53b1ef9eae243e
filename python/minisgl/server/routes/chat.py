"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.body import read_json
from minisgl.server.chat import Chat, chunk_choice, open_chat, whole_messages
from minisgl.server.generation import new_id
from minisgl.server.openapi import described
from minisgl.server.protocol import wants_usage
from minisgl.server.protocol_chat import CHAT_DECODER, NEUTRAL, ChatRequest
from minisgl.server.replies import ChunkChoice, Reply, json_response
from minisgl.server.stream import EventStream, while_connected

router = APIRouter()


@router.post("/v1/chat/completions", **described(ChatRequest, NEUTRAL))
async def chat_completions(request: Request) -> Response:
    """Continue a conversation."""
    body = await read_json(request, CHAT_DECODER)
    has_usage = wants_usage(body)
    chat = await open_chat(request, body)
    if body.stream:
        return EventStream(
            chat.generation.chunks("chatcmpl", "chat.completion.chunk", _choices(chat), has_usage)
        )
    return json_response(await while_connected(request.receive, _answer(chat)))


async def _answer(chat: Chat) -> Reply:
    choices = [message.choice() for message in await whole_messages(chat)]
    usage = chat.generation.usage()
    return chat.generation.reply(new_id("chatcmpl"), "chat.completion", choices, usage=usage)


async def _choices(chat: Chat) -> AsyncGenerator[ChunkChoice, None]:
    has_begun = [False] * chat.generation.n
    async with aclosing(chat.deltas()) as deltas:
        async for delta in deltas:
            yield chunk_choice(delta, not has_begun[delta.index])
            has_begun[delta.index] = True
