"""Tools for models whose chat template does not know them: spelled out in the conversation.

May import `server.tool_calls`. Invariant: a request with tools reaches every model that can chat.
"""

from __future__ import annotations

import json
from typing import Any

from .tool_calls import HERMES, ToolFormat, tool_format_of

_INTRODUCTION = """\
These functions can be called, each described by a JSON schema:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between tags:
<tool_call>
{{"name": "a function", "arguments": {{"an argument": "a value"}}}}
</tool_call>"""


def knows_tools(template: str | None) -> bool:
    """Whether a chat template writes tools into the prompt."""
    return template is not None and "tools" in template


def format_of(template: str | None) -> ToolFormat:
    """How a model with this template calls."""
    return tool_format_of(template) if knows_tools(template) else HERMES


def spelled_out(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """A conversation with its tools, calls and their results as plain text, in Hermes' form."""
    plain = [_spelled_message(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=listed)
    if plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}".lstrip()}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _spelled_message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    if "tool_calls" not in message:
        return message
    calls = [
        f"{HERMES.opening}\n{json.dumps(call['function'], ensure_ascii=False)}\n{HERMES.closing}"
        for call in message["tool_calls"]
    ]
    text = "\n".join([message["content"], *calls]).lstrip("\n")
    return {"role": message["role"], "content": text}
