"""Chat answers: from a checked request to deltas of content, reasoning and calls.

May import the server's modules. Invariant: the deltas of a choice, joined, are its message, whether
they are streamed or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from minisgl.message import UserReply
from minisgl.params import Constraint, FinishReason

from .errors import bad_request
from .generation import Generation, server_of
from .protocol import MAX_INT32, constraint_of, num_choices, routing, sampling_params
from .protocol_chat import (
    ChatRequest,
    NamedTool,
    chat_logprobs,
    check_chat,
    prompt_of,
    tools_of,
)
from .reasoning import ReasoningParser
from .replies import CallDelta, ChunkChoice, Delta, FunctionDelta, chat_logprob
from .tool_calls import ToolCallDelta, ToolCallParser, ToolFormat
from .tool_grammar import forced_calls
from .tools import format_of, knows_tools, spelled_out


@dataclass(slots=True)
class ChatDelta:
    """What a piece adds to the choice `index`; the last says why it ended."""

    index: int
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (
            self.content or self.reasoning or self.calls or self.logprobs or self.finish_reason
        )


@dataclass(slots=True)
class _Reader:
    """Takes the pieces of one choice apart.

    reasoning, tools: what looks for them in the text, if they may be there. is_single: all calls
    but the first are left out.
    """

    index: int
    reasoning: ReasoningParser | None
    tools: ToolCallParser | None
    has_logprobs: bool
    is_single: bool

    def read(self, reply: UserReply) -> ChatDelta:
        """The delta of the choice's next piece."""
        delta = ChatDelta(self.index, reply.incremental_output)
        if self.reasoning is not None:
            self._split_reasoning(self.reasoning, delta, reply.finished)
        if self.tools is not None:
            self._split_calls(self.tools, delta, reply.finished)
        if self.has_logprobs:
            delta.logprobs = [chat_logprob(position) for position in reply.logprobs]
        if reply.finished and reply.finish_reason is not None:
            has_calls = self.tools is not None and self.tools.num_calls
            is_call = has_calls and reply.finish_reason is FinishReason.STOP
            delta.finish_reason = "tool_calls" if is_call else reply.finish_reason.value
        return delta

    @staticmethod
    def _split_reasoning(parser: ReasoningParser, delta: ChatDelta, is_last: bool) -> None:
        delta.reasoning, delta.content = parser.push(delta.content)
        if is_last:
            reasoning, content = parser.flush()
            delta.reasoning += reasoning
            delta.content += content

    def _split_calls(self, parser: ToolCallParser, delta: ChatDelta, is_last: bool) -> None:
        pieces = [parser.push(delta.content), *([parser.flush()] if is_last else [])]
        delta.content = "".join(piece.content for piece in pieces)
        for call in (call for piece in pieces for call in piece.calls):
            if self.is_single and call.index:
                continue
            if call.id is None and delta.calls and delta.calls[-1].index == call.index:
                last = delta.calls.pop()
                call = dataclasses.replace(last, arguments=last.arguments + call.arguments)
            delta.calls.append(call)


class Chat:
    """One chat request under way."""

    def __init__(self, generation: Generation, readers: list[_Reader]) -> None:
        self.generation = generation
        self._readers = readers

    async def deltas(self) -> AsyncGenerator[ChatDelta, None]:
        """The answer, piece by piece; raises `ApiError`."""
        async with aclosing(self.generation.replies()) as replies:
            async for i, reply in replies:
                delta = self._readers[i].read(reply)
                if not delta.is_empty:
                    yield delta


async def open_chat(request: Request, body: ChatRequest) -> Chat:
    """Check a chat request and make it ready to run; `ApiError` if it cannot."""
    server = server_of(request)
    model = server.model_name(body.model)
    check_chat(body)
    n = num_choices(body)
    prompt, tools = prompt_of(body), tools_of(body)
    template = server.frontend.info.tool_template or server.frontend.info.chat_template
    style = format_of(template)
    forced: dict[str, Constraint] = {}
    if _must_call(body, tools):
        forced["constraint"], style = _forced(body, tools or [], style)
    if not isinstance(prompt, str) and not knows_tools(template):
        prompt = spelled_out(prompt, tools)
    names = {"prompt": "messages" if body.messages is not None else "prompt"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    params = sampling_params(
        body, server.defaults(), MAX_INT32, names, logprobs=chat_logprobs(body), **forced
    )
    args = body.chat_template_kwargs or {}
    generation = Generation(
        request,
        model,
        [prompt],
        params,
        n=n,
        names=names,
        tools=tools if knows_tools(template) else None,
        template_args=args,
        **routing(body),
    )
    may_reason = body.messages is not None and params.constraint is None
    is_inside = await server.opens_reasoning(args) if may_reason else None
    called = [tool["function"]["name"] for tool in tools or ()]
    readers = [
        _Reader(
            i,
            None if is_inside is None else ReasoningParser(starts_inside=is_inside),
            ToolCallParser(style, called) if tools else None,
            has_logprobs=bool(body.logprobs),
            is_single=body.parallel_tool_calls is False,
        )
        for i in range(n)
    ]
    return Chat(generation, readers)


def _must_call(body: ChatRequest, tools: list[dict[str, Any]] | None) -> bool:
    """Whether the answer has to be calls; a 400 if it has to be something else as well."""
    if not tools or body.tool_choice in (None, "auto", "none"):
        return False
    if constraint_of(body) is not None:
        raise bad_request("a forced call leaves no room for another constraint", "tool_choice")
    return True


def _forced(
    body: ChatRequest, tools: list[dict[str, Any]], style: ToolFormat
) -> tuple[Constraint, ToolFormat]:
    """What makes the model call, and how its answer is read."""
    if isinstance(body.tool_choice, NamedTool):
        return forced_calls(style, tools, body.tool_choice.function.name)
    return forced_calls(style, tools, parallel=body.parallel_tool_calls is not False)


def chunk_choice(delta: ChatDelta, is_first: bool) -> ChunkChoice:
    """A delta as a chunk tells it; the first of a choice says whose message it is."""
    told = Delta()
    if is_first:
        told.role = "assistant"
    if delta.content or is_first:
        told.content = delta.content
    if delta.reasoning:
        told.reasoning_content = delta.reasoning
    if delta.calls:
        told.tool_calls = [_call_delta(call) for call in delta.calls]
    logprobs = {"content": delta.logprobs, "refusal": None} if delta.logprobs else None
    return ChunkChoice(delta.index, told, logprobs, delta.finish_reason)


def _call_delta(call: ToolCallDelta) -> CallDelta:
    if call.id is None:
        return CallDelta(index=call.index, function=FunctionDelta(UNSET, call.arguments))
    function = FunctionDelta(call.name or "", call.arguments)
    return CallDelta(index=call.index, id=call.id, type="function", function=function)


class Message:
    """A choice while its deltas come in; `choice` is the whole of it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] | None = None
        self.finish_reason: str | None = None

    def add(self, delta: ChatDelta) -> None:
        """Take in the next delta."""
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.finish_reason = delta.finish_reason
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        for call in delta.calls:
            if call.id is not None:
                function = {"name": call.name, "arguments": ""}
                self.calls.append({"id": call.id, "type": "function", "function": function})
            self.calls[call.index]["function"]["arguments"] += call.arguments

    def choice(self) -> dict[str, Any]:
        """The choice as an unstreamed answer has it."""
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not content else content,
            "refusal": None,
        }
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        logprobs = None
        if self.logprobs is not None:
            logprobs = {"content": self.logprobs, "refusal": None}
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }


async def whole_messages(chat: Chat) -> list[Message]:
    """All choices of a chat, complete."""
    messages = [Message(i) for i in range(chat.generation.n)]
    async with aclosing(chat.deltas()) as deltas:
        async for delta in deltas:
            messages[delta.index].add(delta)
    return messages
