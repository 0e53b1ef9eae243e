"""Calls that must be made: any answer that the grammar allows is taken apart into calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from minisgl.constraint import Grammars
from minisgl.server.tool_calls import TOOL_FORMATS, ToolCallParser, ToolFormat
from minisgl.server.tool_grammar import MAX_FORCED_CALLS, forced_calls

from tests.constraint.test_grammars import EOS, make_grammars

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"$ref": "#/$defs/city"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
                "$defs": {"city": {"type": "string", "maxLength": 4}},
            },
        },
    },
    {"type": "function", "function": {"name": "ping"}},
    {
        "type": "function",
        "function": {
            "name": "note",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "format": "unheard-of", "maxLength": 2}},
                "if": {"required": ["text"]},
                "additionalProperties": False,
            },
        },
    },
]


@pytest.fixture(scope="module")
def compiled() -> Any:
    shared = make_grammars()
    yield shared
    shared.shutdown()


def write_at_random(compiled: Grammars, constraint: Any, seed: int) -> str:
    """An answer of a model that has no preferences but for an end and for plain letters."""
    draw = random.Random(seed)
    matcher = compiled.start(constraint)
    answer: list[int] = []
    while not matcher.is_complete and len(answer) < 3000:
        choices = matcher.mask().nonzero()[0].tolist()
        if EOS in choices and draw.random() < 0.3:
            break
        choices = [c for c in choices if 32 <= c < 127] or choices
        choices = [c for c in choices if c < EOS] or choices
        answer.append(draw.choice(choices))
        matcher.take(answer[-1:])
    assert matcher.error is None
    return bytes(answer).decode()


@pytest.mark.parametrize("style", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
@pytest.mark.parametrize("parallel", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("name", [None, "weather", "note"])
def test_a_forced_answer_always_parses(
    compiled: Grammars, style: ToolFormat, parallel: bool, name: str | None
) -> None:
    constraint, forced_style = forced_calls(style, TOOLS, name, parallel=parallel)
    most_calls = 0
    for seed in range(12):
        text = write_at_random(compiled, constraint, seed)
        parser = ToolCallParser(forced_style, [tool["function"]["name"] for tool in TOOLS])
        pieces = [parser.push(text[i : i + 3]) for i in range(0, len(text), 3)] + [parser.flush()]
        assert "".join(piece.content for piece in pieces) == "", text
        calls: list[list[str]] = []
        for delta in (delta for piece in pieces for delta in piece.calls):
            if delta.name is not None:
                calls.append([delta.name, ""])
            calls[-1][1] += delta.arguments
        assert 1 <= len(calls) <= (MAX_FORCED_CALLS if parallel else 1), text
        most_calls = max(most_calls, len(calls))
        for called, arguments in calls:
            assert name in (None, called)
            check_arguments(called, json.loads(arguments))
    assert most_calls > 1 or not parallel


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    if name == "ping":
        assert arguments == {}
    elif name == "note":
        assert set(arguments) <= {"text"}
    else:
        assert {"city", "unit"} <= set(arguments) <= {"city", "unit", "days"}
        assert arguments["unit"] in ("C", "F") and len(arguments["city"]) <= 4
        assert all(isinstance(day, int) for day in arguments.get("days", []))


def test_the_models_own_format_is_spelled(compiled: Grammars) -> None:
    texts = {
        style.name: write_at_random(compiled, forced_calls(style, TOOLS, "ping")[0], 0)
        for style in TOOL_FORMATS.values()
    }
    assert texts == {
        "hermes": '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        "llama3": '{"name": "ping", "parameters": {}}',
        "mistral": '{"name": "ping", "arguments": {}}',
    }


def test_a_tool_that_is_not_there_cannot_be_forced() -> None:
    style = TOOL_FORMATS["hermes"]
    with pytest.raises(ValueError, match="pong"):
        forced_calls(style, TOOLS, "pong")
    with pytest.raises(ValueError, match="no tool"):
        forced_calls(style, [])
