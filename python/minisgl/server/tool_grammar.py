"""Tool calls that a model must make, as a constraint on its answer in its own format.

May import `params` and `tool_calls`. Invariant: what such an answer spells, the parser of the
returned format takes apart into calls alone, with arguments that fit the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minisgl.params import Constraint

from .tool_calls import ToolFormat

MAX_FORCED_CALLS = 8  # a small model may see no reason to stop

# One space where models write one, and none elsewhere: nothing to write for ever. What llguidance
# cannot enforce of a schema is left to the model, as it would be without a constraint.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
_ROOT_KEYS = ("$defs", "definitions")  # what references count from the root


def forced_calls(
    style: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    name: str | None = None,
    *,
    parallel: bool = False,
) -> tuple[Constraint, ToolFormat]:
    """The constraint of an answer that only calls, and the format to parse it in.

    tools: as OpenAI's clients send them (`{"function": {"name", "parameters"}}`). name: of the only
    one that may be called, None for any. parallel: up to `MAX_FORCED_CALLS` may follow each other.
    Raises `ValueError` if no tool has the name.
    """
    functions = [tool["function"] for tool in tools]
    functions = [one for one in functions if name is None or one["name"] == name]
    if not functions:
        raise ValueError(
            "there is no tool to call" if name is None else f"no tool is called {name}"
        )
    is_tagged = bool(style.closing)  # else the tag is a special token, which is no text
    opening, closing = (f"{style.opening}\n", f"\n{style.closing}") if is_tagged else ("", "")
    separator = "\n" if is_tagged else "; "
    more = f" ({json.dumps(separator)} call){{0,{MAX_FORCED_CALLS - 1}}}"
    rules = ["start: call" + (more if parallel else "")]
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        parts = [f"%json {json.dumps(_call_schema(style, function))}"]
        if is_tagged:
            parts = [json.dumps(opening), *parts, json.dumps(closing)]
        rules.append(f"call{i}: {' '.join(parts)}")
    return Constraint("grammar", "\n".join(rules)), replace(style, is_bare=not is_tagged)


def _call_schema(style: ToolFormat, function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(function.get("parameters") or {})
    roots = {key: parameters.pop(key) for key in _ROOT_KEYS if key in parameters}
    if not parameters:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    parameters.setdefault("type", "object")
    return {
        **roots,
        "type": "object",
        "properties": {"name": {"const": function["name"]}, style.arguments: parameters},
        "required": ["name", style.arguments],
        "additionalProperties": False,
        "x-guidance": _JSON_OPTIONS,
    }
