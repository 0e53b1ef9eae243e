"""The body of a chat completion: messages and tools, checked, in the form that templates take.

May import `params`, `message` and the protocol modules. Invariant: what reaches a template is
plain text in messages of known roles, bounded in number, size and depth.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .body import check_depth
from .bounds import (
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PARTS,
    MAX_PROMPT_CHARS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
)
from .errors import bad_request
from .protocol import Sampling, Strict, check_logprobs, refuse

ROLES = ("system", "developer", "user", "assistant", "tool")


class Part(Strict):
    """A part of a message's content; text only."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    annotations: Any = None
    logprobs: Any = None


class CalledFunction(Strict):
    """What an assistant called. arguments: JSON as a text."""

    name: str
    arguments: str = "{}"


class ToolCall(Strict):
    """One call in an assistant's message."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: Any = None


class Message(Strict):
    """One message of a conversation. Fields that only our own answers have are taken back."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class Function(Strict):
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the one kind there is."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """POST /v1/chat/completions. prompt: a raw text in place of `messages`."""

    messages: list[Message] | None = None
    prompt: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused unless they ask for what is done anyway.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


CHAT_DECODER = msgspec.json.Decoder(ChatRequest)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def check_chat(request: ChatRequest) -> None:
    """Everything about a chat request that does not depend on the model; raises `ApiError`."""
    refuse(request, NEUTRAL)
    if (request.messages is None) == (request.prompt is None):
        raise bad_request("give messages, or a raw prompt", "messages")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    check_logprobs(request.top_logprobs, "top_logprobs")
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise bad_request(
                "max_tokens and max_completion_tokens say different things", "max_tokens"
            )
        request.max_tokens = request.max_completion_tokens
    if request.chat_template_kwargs is not None:
        check_depth(request.chat_template_kwargs, "chat_template_kwargs")
    if request.prompt is not None and (request.tools or request.chat_template_kwargs):
        raise bad_request("a raw prompt has no template: send messages", "prompt")


def prompt_of(request: ChatRequest) -> str | list[dict[str, Any]]:
    """The raw prompt, or the messages as a chat template takes them."""
    if request.prompt is not None:
        check_text(len(request.prompt), "prompt")
        return request.prompt
    messages = request.messages or []
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise bad_request(f"messages takes 1 to {MAX_MESSAGES} messages", "messages")
    plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    check_text(sum(len(message["content"]) for message in plain), "messages")
    return plain


def check_text(size: int, param: str) -> None:
    """A 400 if a prompt has more characters than are tokenized."""
    if size > MAX_PROMPT_CHARS:
        raise bad_request(
            f"{param} has {size} characters, more than {MAX_PROMPT_CHARS}", param, "prompt_too_long"
        )


def _plain(message: Message, where: str) -> dict[str, Any]:
    role = message.role
    if role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    refuse(message, {"audio": (), "function_call": ()}, f"{where}.")
    plain: dict[str, Any] = {
        "role": "system" if role == "developer" else role,  # what templates call it
        "content": _text(message, where),
    }
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            check_name(value, f"{where}.{name}")
            plain[name] = value
    thought = message.reasoning_content or message.reasoning
    if thought and role == "assistant":
        plain["reasoning_content"] = thought
    if message.tool_calls:
        if role != "assistant" or len(message.tool_calls) > MAX_TOOL_CALLS:
            raise bad_request(
                f"{where}.tool_calls belongs to an assistant, at most {MAX_TOOL_CALLS}",
                f"{where}.tool_calls",
            )
        plain["tool_calls"] = [_called(call, where) for call in message.tool_calls]
    return plain


def _text(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise bad_request(f"{where}.content is missing", f"{where}.content")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    if len(content) > MAX_PARTS:
        raise bad_request(f"{where}.content takes at most {MAX_PARTS} parts", f"{where}.content")
    return "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: Part, where: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "refusal") or text is None:
        raise bad_request(f"{where} must be text: this model reads nothing else", where)
    return text


def _called(call: ToolCall, where: str) -> dict[str, Any]:
    """A call as templates expect it, with its arguments as an object where they are one."""
    check_name(call.function.name, f"{where}.tool_calls")
    arguments: Any = call.function.arguments
    try:
        parsed = msgspec.json.decode(arguments or "{}")  # of a function without any
    except (msgspec.DecodeError, RecursionError):
        parsed = None  # a model may have written it badly; the template shows it as it was
    if isinstance(parsed, dict):
        check_depth(parsed, f"{where}.tool_calls")
        arguments = parsed
    plain = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id, **plain}


def check_name(name: str, where: str) -> None:
    """A 400 if a name is empty or long."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise bad_request(f"{where} has 1 to {MAX_NAME_CHARS} characters", where)


def tools_of(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as a chat template takes them; None if there are none or none may be called."""
    choice = request.tool_choice
    tools = request.tools or []
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools takes at most {MAX_TOOLS} tools", "tools")
    for i, tool in enumerate(tools):
        check_name(tool.function.name, f"tools[{i}].function.name")
        check_depth(tool.function.parameters, f"tools[{i}].function.parameters")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name", "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise bad_request("tool_choice names a function that is not in tools", "tool_choice")
    if choice == "none":
        return None
    return [_plain_tool(tool.function) for tool in tools]


def _plain_tool(function: Function) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        plain["description"] = function.description
    plain["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": plain}


def chat_logprobs(request: ChatRequest) -> int | None:
    """`SamplingParams.logprobs` of a chat request."""
    return (request.top_logprobs or 0) if request.logprobs else None
