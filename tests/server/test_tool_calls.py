"""Tool calls in a stream of text: formats, deltas, what is malformed, and every way to cut it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.server.tool_calls import (
    HERMES,
    LLAMA3,
    MISTRAL,
    TOOL_FORMATS,
    ToolCallParser,
    ToolFormat,
    new_call_id,
    tool_format_of,
)

Parsed = tuple[str, list[tuple[str, str, str]]]


def parse(style: ToolFormat, pieces: list[str], names: tuple[str, ...] = ("f", "g")) -> Parsed:
    """(content, [(id, name, arguments)]) of an answer that came in these pieces."""
    counter = itertools.count()
    parser = ToolCallParser(style, names, lambda: f"call_{next(counter)}")
    content, calls = "", list[tuple[str, str, str]]()
    for piece in [*(parser.push(text) for text in pieces), parser.flush()]:
        content += piece.content
        for delta in piece.calls:
            if delta.id is not None:
                assert delta.index == len(calls) and delta.name and not delta.arguments
                calls.append((delta.id, delta.name, ""))
            else:
                assert delta.index == len(calls) - 1 and delta.arguments
                calls[-1] = (*calls[-1][:2], calls[-1][2] + delta.arguments)
    assert parser.num_calls == len(calls)
    return content, calls


def one(name: str, arguments: str, index: int = 0) -> tuple[str, str, str]:
    return f"call_{index}", name, arguments


TRICKY = '{"a": "}</tool_call>\\"", "b": [1, {"c": null}], "d": -1.5e3}'

CASES: list[tuple[ToolFormat, str, Parsed]] = [
    (HERMES, "no call at all\n", ("no call at all\n", [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', ("", [one("f", "{}")])),
    (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "f", "arguments": {TRICKY}}}\n</tool_call>',
        ("Let me see.", [one("f", TRICKY)]),
    ),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
        ("", [one("f", '{"a": 1}'), one("g", "{}", 1)]),
    ),
    (
        HERMES,
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>',
        ("", [one("f", "{}"), one("g", "{}", 1)]),
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> done',
        (" done", [one("f", '{"a": 1}')]),
    ),
    (
        HERMES,
        r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>',
        ("", [one("f", '{"a": 1}')]),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [one("f", '{"a": 1')])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x',
        (" x", [one("f", '{"a": 1}')]),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call> x',
        (" x", [one("f", "{a: 1}}")]),
    ),
    (
        LLAMA3,
        ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ("", [one("f", '{"a": 1}'), one("g", "{}", 1)]),
    ),
    (
        LLAMA3,
        '{"type": "function", "name": "f", "parameters": {"é": "ü"}}',
        ("", [one("f", '{"é": "ü"}')]),
    ),
    (
        LLAMA3,
        '<|python_tag|>{"name": "other", "parameters": {}}',
        ("", [one("other", "{}")]),
    ),
    (
        MISTRAL,
        'Yes. [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        ("Yes.", [one("f", "{}"), one("g", "{}", 1)]),
    ),
]

# What is no call comes out as it went in.
TEXTS: list[tuple[ToolFormat, str]] = [
    (HERMES, ""),
    (HERMES, " \n "),
    (HERMES, "a < b <tool_cal"),
    (HERMES, "<tool_call>"),
    (HERMES, "x <tool_call></tool_call> y"),
    (HERMES, "<tool_call>{bad}</tool_call> z"),
    (HERMES, '<tool_call>{"name": "f"'),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (HERMES, '{"name": "f", "arguments": {}}'),
    (LLAMA3, '{"name": "Bob", "age": 4}'),
    (LLAMA3, '{"colour": "red"}\n'),
    (LLAMA3, 'so: {"name": "f", "parameters": {}}'),
    (LLAMA3, "<|python_tag|>print(1)"),
    (LLAMA3, "  hello "),
]


@pytest.mark.parametrize("style, text, expected", CASES)
def test_calls_are_told_apart_from_text(style: ToolFormat, text: str, expected: Parsed) -> None:
    assert parse(style, [text]) == expected
    assert parse(style, list(text)) == expected


@pytest.mark.parametrize("style, text", TEXTS)
def test_what_is_no_call_comes_out_as_it_went_in(style: ToolFormat, text: str) -> None:
    assert parse(style, [text]) == (text, [])
    assert parse(style, list(text)) == (text, [])


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<tool", "_call>", "<", "["),
    *('{"name": "f", "arguments": ', '{"name": "g", "parameters": ', '{"a": 1}', "}", "{", "]"),
    *('"arguments": {', '"name": "f"', ", ", ";", " ", "\n", "text", "é", '"', "\\", "tru", "0"),
]


@given(
    style=st.sampled_from(list(TOOL_FORMATS.values())),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=20),
)
def test_the_pieces_do_not_depend_on_how_the_text_is_cut(
    style: ToolFormat, fragments: list[str], cuts: list[int]
) -> None:
    text = "".join(fragments)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = parse(style, [text])
    assert parse(style, [text[a:b] for a, b in itertools.pairwise(places)]) == whole
    assert parse(style, list(text)) == whole


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(), json_values, max_size=3)),
        max_size=3,
    ),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_any_arguments_come_back_as_they_were(
    calls: list[tuple[str, dict[str, Any]]], ascii_only: bool, indent: int | None
) -> None:
    for style in (HERMES, LLAMA3):
        objects = [
            json.dumps(
                {"name": name, style.arguments: arguments}, ensure_ascii=ascii_only, indent=indent
            )
            for name, arguments in calls
        ]
        text = "; ".join(objects)
        if style is HERMES:
            text = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        content, found = parse(style, list(text))
        assert content == ""
        assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls


def test_arguments_stream_while_they_are_written() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push('<tool_call>{"name": "f", "argum').calls == []
    first = parser.push('ents": {"text": "once').calls
    assert [(d.name, d.arguments) for d in first] == [("f", ""), (None, '{"text": "once')]
    assert [d.arguments for d in parser.push(" upon").calls] == [" upon"]
    assert [d.arguments for d in parser.push('"}}</tool_call>').calls] == ['"}']


def test_text_streams_and_only_what_may_become_a_tag_is_held_back() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push("one <").content == "one"
    assert parser.push("b> <tool").content == " <b>"
    assert parser.push("ing").content == " <tooling"


def test_a_plain_object_streams_as_soon_as_it_cannot_be_a_call() -> None:
    parser = ToolCallParser(LLAMA3, names=["f"])
    assert parser.push('{"colour"').content == '{"colour"'
    assert parser.push(": 1").content == ": 1"


def test_deep_nesting_is_no_recursion() -> None:
    depth = 100_000
    arguments = '{"a": ' * depth + "1" + "}" * depth
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse(HERMES, [text]) == ("", [one("f", arguments)])


def test_ids_are_fresh() -> None:
    assert len({new_call_id() for _ in range(100)}) == 100
    assert new_call_id().startswith("call_")


@pytest.mark.parametrize(
    "template, style",
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{{ '<|python_tag|>' + x }}", LLAMA3),
        ("[TOOL_CALLS]", MISTRAL),
        ("{{ messages }}", HERMES),
        (None, HERMES),
    ],
)
def test_the_format_is_the_one_that_the_template_teaches(
    template: str | None, style: ToolFormat
) -> None:
    assert tool_format_of(template) is style
