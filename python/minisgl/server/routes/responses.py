"""POST /v1/responses: a chat, answered as items and in its own sequence of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.body import read_json
from minisgl.server.chat import Chat, ChatDelta, open_chat
from minisgl.server.errors import ApiError
from minisgl.server.generation import new_id
from minisgl.server.openapi import described
from minisgl.server.protocol_responses import (
    NEUTRAL,
    RESPONSES_DECODER,
    ResponsesRequest,
    chat_request,
    renamed_param,
)
from minisgl.server.replies import json_response
from minisgl.server.stream import EventStream, event, while_connected

router = APIRouter()

Event = dict[str, Any]


@router.post("/v1/responses", **described(ResponsesRequest, NEUTRAL))
async def responses(request: Request) -> Response:
    """Continue a conversation given as items."""
    body = await read_json(request, RESPONSES_DECODER)
    try:
        chat = await open_chat(request, chat_request(body))
    except ApiError as error:
        raise renamed_param(error) from None
    answer = _Answer(body, chat)
    if body.stream:
        return EventStream(_encoded(answer.events()))
    return json_response(await while_connected(request.receive, _whole(answer)))


async def _whole(answer: _Answer) -> Event:
    async with aclosing(answer.events()) as events:
        async for _ in events:
            pass
    return answer.response


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events) as source:
        async for told in source:
            yield event(told, told["type"])


class _Answer:
    """The response while it grows; each change is told as an event."""

    def __init__(self, body: ResponsesRequest, chat: Chat) -> None:
        self._chat = chat
        self._number = 0
        self._items: list[Event] = []
        self._open: Event | None = None  # the item that grows
        self.response = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": chat.generation.model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else body.text,
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }

    async def events(self) -> AsyncGenerator[Event, None]:
        """Everything that happens, in order; what fails before the first token raises."""
        has_begun = False
        reason: str | None = None
        try:
            async with aclosing(self._chat.deltas()) as deltas:
                async for delta in deltas:
                    if not has_begun:
                        has_begun = True
                        yield self._event("response.created", response=self.response)
                        yield self._event("response.in_progress", response=self.response)
                    for told in self._take(delta):
                        yield told
                    reason = delta.finish_reason
        except ApiError as error:
            if not has_begun:
                raise renamed_param(error) from None
            details = error.body["error"]
            self.response["status"] = "failed"
            self.response["error"] = {"code": details["code"], "message": details["message"]}
            yield self._event("response.failed", response=self.response)
            return
        is_cut = reason == "length"
        for told in self._close("incomplete" if is_cut else "completed"):
            yield told
        yield self._finish(is_cut)

    def _finish(self, is_cut: bool) -> Event:
        self.response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self._chat.generation.usage()
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": usage.prompt_tokens_details,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }
        return self._event(f"response.{self.response['status']}", response=self.response)

    def _event(self, kind: str, /, **fields: Any) -> Event:
        told = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return told

    def _take(self, delta: ChatDelta) -> list[Event]:
        """The events of one delta."""
        events: list[Event] = []
        if delta.reasoning:
            events += self._item("reasoning")
            events.append(self._grow("response.reasoning_text.delta", delta.reasoning))
        if delta.content:
            events += self._item("message")
            events.append(self._grow("response.output_text.delta", delta.content, logprobs=[]))
        for call in delta.calls:
            if call.id is not None:
                events += self._close()
                events += self._item("function_call", call_id=call.id, name=call.name, arguments="")
            if call.arguments:
                events.append(self._grow("response.function_call_arguments.delta", call.arguments))
        return events

    def _item(self, kind: str, **fields: Any) -> list[Event]:
        """Make sure that an item of a kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close()
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[kind]
        item: Event = {"type": kind, "id": new_id(prefix), "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        if kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._open = item
        events.append(self._event("response.output_item.added", **self._place(), item=dict(item)))
        if kind != "function_call":
            part = self._new_part(kind)
            events.append(self._part_event("added", dict(part)))
            item["content"] = [part]
        return events

    @staticmethod
    def _new_part(kind: str) -> Event:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": ""}
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

    def _place(self) -> Event:
        return {"output_index": len(self._items) - 1}

    def _inside(self) -> Event:
        assert self._open is not None
        place = {"item_id": self._open["id"], **self._place()}
        return place if self._open["type"] == "function_call" else {**place, "content_index": 0}

    def _part_event(self, what: str, part: Event) -> Event:
        return self._event(f"response.content_part.{what}", **self._inside(), part=part)

    def _grow(self, name: str, text: str, **fields: Any) -> Event:
        assert self._open is not None
        if self._open["type"] == "function_call":
            self._open["arguments"] += text
        else:
            self._open["content"][0]["text"] += text
        return self._event(name, **self._inside(), delta=text, **fields)

    def _close(self, status: str = "completed") -> list[Event]:
        """The events that end the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        inside, events = self._inside(), []
        if item["type"] == "function_call":
            name, arguments = "response.function_call_arguments.done", item["arguments"]
            events.append(self._event(name, **inside, name=item["name"], arguments=arguments))
        else:
            part = item["content"][0]
            name = f"response.{part['type']}.done"
            more = {key: part[key] for key in ("logprobs",) if key in part}
            events.append(self._event(name, **inside, text=part["text"], **more))
            events.append(self._part_event("done", dict(part)))
        item["status"] = status
        events.append(self._event("response.output_item.done", **self._place(), item=dict(item)))
        self._open = None
        return events
