"""The body of POST /v1/responses, and the chat request that it stands for.

May import the protocol modules. Nothing is kept between requests: what came before is sent again.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from .body import check_depth
from .bounds import MAX_MESSAGES
from .errors import ApiError, bad_request
from .protocol import Harmless, JsonSchema, ResponseFormat, StreamOptions, Strict, refuse
from .protocol_chat import (
    CalledFunction,
    ChatRequest,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    Part,
    Tool,
    ToolCall,
)

Choice = Literal["none", "auto", "required"]


class Item(Strict):
    """One item of the input: a message, a call, the output of one, or reasoning (left out)."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: Any = None
    status: Any = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: Any = None
    encrypted_content: Any = None
    phase: Any = None


class FunctionTool(Function, kw_only=True):
    """A function that the model may call, in the flat form of this endpoint."""

    type: Literal["function"]


class FunctionChoice(NamedFunction, kw_only=True):
    """The one function that must be called."""

    type: Literal["function"]


class TextFormat(JsonSchema):
    """A `response_format` in the flat form of this endpoint."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Strict):
    """How the text of the answer looks."""

    format: TextFormat | None = None
    verbosity: Any = None


class ResponsesRequest(Harmless):
    """POST /v1/responses."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Choice | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    # Refused unless they ask for what is done anyway.
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    reasoning: Any = None
    top_logprobs: Any = None
    truncation: Any = None


_MESSAGE = re.compile(r"messages\[\d+\]\S*|messages")

RESPONSES_DECODER = msgspec.json.Decoder(ResponsesRequest)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The chat request with the same meaning; raises `ApiError`."""
    if body.previous_response_id is not None:
        raise bad_request(
            "previous_response_id: answers are not kept; send the whole conversation as input",
            "previous_response_id",
            "unsupported_field",
        )
    refuse(body, NEUTRAL)
    check_depth(body.metadata, "metadata")  # it is told back
    text = body.text or TextOptions()
    refuse(text, {"verbosity": ("medium",)}, "text.")
    messages = []
    if body.instructions is not None:
        messages.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    elif not body.input:
        raise bad_request("input is missing", "input")
    elif len(body.input) > MAX_MESSAGES:
        raise bad_request(f"input takes at most {MAX_MESSAGES} items", "input")
    else:
        for i, item in enumerate(body.input):
            _add(messages, item, f"input[{i}]")
    return ChatRequest(
        model=body.model,
        messages=messages,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(text.format),
    )


def _add(messages: list[Message], item: Item, where: str) -> None:
    """Add an item to the conversation; a call joins the message before it."""
    if item.type == "message":
        if item.role is None:
            raise bad_request(f"{where}.role is missing", f"{where}.role")
        messages.append(Message(role=item.role, content=_parts(item.content)))
    elif item.type == "function_call":
        if item.name is None:
            raise bad_request(f"{where}.name is missing", f"{where}.name")
        function = CalledFunction(name=item.name, arguments=item.arguments or "{}")
        call = ToolCall(function=function, id=item.call_id)
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant"))
        messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
    elif item.type == "function_call_output":
        if item.output is None:
            raise bad_request(f"{where}.output is missing", f"{where}.output")
        output = _parts(item.output)
        messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))


def _parts(content: str | list[Part] | None) -> str | list[Part] | None:
    """Parts under the names that chat has for them."""
    if not isinstance(content, list):
        return content
    names = {"input_text": "text", "output_text": "text"}
    return [Part(type=names.get(part.type, part.type), text=part.text) for part in content]


def _tool(tool: FunctionTool) -> Tool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _choice(choice: Choice | FunctionChoice | None) -> Choice | NamedTool | None:
    if isinstance(choice, FunctionChoice):
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return choice


def _format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema))


def renamed_param(error: ApiError) -> ApiError:
    """The error with its field called as this endpoint calls it."""
    param = error.param or ""
    if param.startswith("messages"):  # their numbers are not those of the items
        text = _MESSAGE.sub("an item of input", str(error))
        return ApiError(error.status, text, param="input", code=error.code)
    if param == "max_completion_tokens":
        text = str(error).replace(param, "max_output_tokens")
        return ApiError(error.status, text, param="max_output_tokens", code=error.code)
    return error
