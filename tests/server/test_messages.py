"""Conversations and tools on their way into the chat template, and what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.params import Constraint
from minisgl.server import bounds

from .scripted import CHAT, HELLO, ScriptedFrontend, ask, error_of

USER = {"role": "user", "content": "Hi"}
CALL = {"function": {"name": "f"}}
NO_TOOLS = "a template that does not know them"


def rendered(messages: Any, template: str = "with tools", **fields: Any) -> list[dict[str, Any]]:
    """The messages that reach the template."""
    frontend = ScriptedFrontend("Hi", chat_template=template)
    response = ask(frontend, CHAT, {"messages": messages, **fields})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = frontend.submitted[0].text  # type: ignore[assignment]
    return found


def refused(messages: Any, **fields: Any) -> dict[str, Any]:
    response = ask(ScriptedFrontend("Hi"), CHAT, {"messages": messages, **fields})
    assert response.status_code == 400, response.text
    return error_of(response)


def test_each_role_reaches_the_template_and_a_developer_is_the_system() -> None:
    messages = [{"role": role, "content": role} for role in ("developer", "user", "assistant")]
    assert [message["role"] for message in rendered(messages)] == ["system", "user", "assistant"]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_braces_and_special_tokens_in_content_are_text() -> None:
    text = "{{ 7 * 7 }} {% raise %} <|im_end|>"
    assert rendered([{"role": "user", "content": text}])[0]["content"] == text


def test_calls_reach_the_template_with_their_arguments_as_objects() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "call_1", "type": "function", "function": function}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    plain = rendered(messages)
    assert plain[1]["content"] == ""
    assert plain[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert plain[2] == {"role": "tool", "tool_call_id": "call_1", "content": "2"}


def test_arguments_that_are_no_json_stay_as_they_were_written() -> None:
    for arguments in ("{", '"\\ud800"', "[" * 100_000):
        call = {"function": {"name": "f", "arguments": arguments}}
        plain = rendered([USER, {"role": "assistant", "tool_calls": [call]}, USER])
        assert plain[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_template_without_tools_is_told_of_them_in_the_system_message() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "adds"}}]
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    plain = rendered(messages, NO_TOOLS, tools=tools)
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert plain[0]["content"].startswith("Be brief.\n\n")
    assert '{"name": "f", "description": "adds", "parameters":' in plain[0]["content"]
    called = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert plain[2] == {"role": "assistant", "content": called}
    assert plain[3]["content"] == "<tool_response>\n2\n</tool_response>"
    assert rendered([USER], NO_TOOLS, tools=tools)[0]["role"] == "system"
    assert rendered([USER], NO_TOOLS, tools=tools, tool_choice="none") == [USER]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": None, "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour"),
        ({"role": "user", "content": "x", "name": ""}, "messages[0].name"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ("Hi", "messages[0]"),
        (None, "messages[0]"),
    ],
)
def test_a_message_that_is_none_is_refused_by_its_place(message: Any, param: str) -> None:
    assert refused([message])["param"] == param


def test_messages_are_bounded() -> None:
    assert refused([])["param"] == "messages"
    assert len(rendered([USER] * bounds.MAX_MESSAGES)) == bounds.MAX_MESSAGES
    assert refused([USER] * (bounds.MAX_MESSAGES + 1))["param"] == "messages"
    part = {"type": "text", "text": "x"}
    rendered([{"role": "user", "content": [part] * bounds.MAX_PARTS}])
    many = [{"role": "user", "content": [part] * (bounds.MAX_PARTS + 1)}]
    assert refused(many)["param"] == "messages[0].content"
    half = {"role": "user", "content": "x" * (bounds.MAX_PROMPT_CHARS // 2 + 1)}
    assert refused([half, half])["code"] == "prompt_too_long"
    calls = [CALL] * (bounds.MAX_TOOL_CALLS + 1)
    error = refused([{"role": "assistant", "tool_calls": calls}])
    assert error["param"] == "messages[0].tool_calls"


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    frontend = ScriptedFrontend("Hi")
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    tools = [tool("f", parameters=schema, strict=True), tool("g")]
    for choice in (None, "auto", "none"):
        ask(frontend, CHAT, {"messages": HELLO, "tools": tools, "tool_choice": choice})
    empty = {"type": "object", "properties": {}}
    told = [tool("f", parameters=schema), tool("g", parameters=empty)]
    assert [msg.tools for msg in frontend.submitted] == [told, told, None]
    assert all(msg.sampling_params.constraint is None for msg in frontend.submitted)


def forced(tools: Any, choice: Any) -> Constraint | None:
    """The constraint of a request that must call."""
    frontend = ScriptedFrontend("Hi")
    ask(frontend, CHAT, {"messages": HELLO, "tools": tools, "tool_choice": choice})
    return frontend.submitted[0].sampling_params.constraint


def test_a_forced_call_is_a_constraint() -> None:
    tools = [tool("f"), tool("g")]
    named = forced(tools, {"type": "function", "function": {"name": "f"}})
    assert named is not None and named.kind == "grammar"
    assert '"const": "f"' in named.text and '"const": "g"' not in named.text
    any_of_them = forced(tools, "required")
    assert any_of_them is not None
    assert '"const": "f"' in any_of_them.text and '"const": "g"' in any_of_them.text


NAMED = {"type": "function", "function": {"name": "h"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 300)]}, "tools[0].function.name"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [tool(str(i)) for i in range(bounds.MAX_TOOLS + 1)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"tools": [tool("f")], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_tools_that_mean_nothing_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(HELLO, **fields)["param"] == param


def test_as_many_tools_as_are_allowed_are_taken() -> None:
    tools = [tool(str(i)) for i in range(bounds.MAX_TOOLS)]
    rendered([USER], tools=tools)


def test_variables_of_the_template_go_with_the_request() -> None:
    frontend = ScriptedFrontend("Hi")
    body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
    ask(frontend, CHAT, body)
    assert frontend.submitted[0].template_args == {"enable_thinking": False}
    deep: Any = {}
    for _ in range(bounds.MAX_JSON_DEPTH):
        deep = {"a": deep}
    assert refused(HELLO, chat_template_kwargs=deep)["param"] == "chat_template_kwargs"
    response = ask(frontend, CHAT, {"prompt": "x", "chat_template_kwargs": {"a": 1}})
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
