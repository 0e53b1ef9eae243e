"""The server's own description of itself: bodies as JSON schemas, made from their structs.

The types are those of the structs. `BOUNDS` and the neutral values of fields that are not
implemented are told beside them, so that a program can make requests that are answered; what
refuses the others stands in `params` and the protocol modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from minisgl.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

from .bounds import (
    MAX_CHOICE_TEXTS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PROMPT_CHARS,
    MAX_REQUEST_SECONDS,
    MAX_TOOLS,
)
from .protocol import MAX_INT32
from .protocol_chat import ROLES

Neutral = Mapping[str, Sequence[Any]]


def _within(low: float, high: float) -> dict[str, float]:
    return {"minimum": low, "maximum": high}


_TOKENS = {"integer": _within(1, MAX_INT32)}
_TOP = {"integer": _within(0, MAX_LOGPROBS)}
_PENALTY = {"number": _within(-2, 2)}
_TEXT = {"string": {"minLength": 1, "maxLength": MAX_NAME_CHARS}}
_IDS: dict[str, Any] = {"array": {"minItems": 1}, "integer": _within(0, MAX_INT32)}

# Property: what its value keeps to, if it is of a type. The items of lists are values too.
BOUNDS: dict[str, dict[str, dict[str, Any]]] = {
    "n": {"integer": _within(1, MAX_CHOICES)},
    "max_tokens": _TOKENS,
    "max_completion_tokens": _TOKENS,
    "max_output_tokens": _TOKENS,
    "temperature": {"number": _within(0, 100)},
    "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
    "top_k": {"integer": {**_within(-1, MAX_INT32), "not": {"const": 0}}},
    "min_p": {"number": _within(0, 1)},
    "seed": {"integer": _within(-MAX_SEED - 1, MAX_SEED)},
    "stop": {"array": {"maxItems": MAX_STOP_STRINGS}, **_TEXT},
    "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKEN_IDS}, "integer": _IDS["integer"]},
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": {"number": _within(0.01, 100)},
    "logit_bias": {
        "object": {
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
        },
        "number": _within(-100, 100),
    },
    "logprobs": _TOP,
    "top_logprobs": _TOP,
    "choice": {"array": {"minItems": 1, "maxItems": MAX_CHOICE_TEXTS}, "string": {"minLength": 1}},
    "regex": {"string": {"minLength": 1}},
    "grammar": {"string": {"minLength": 1}},
    "cache_salt": {"string": {"maxLength": MAX_NAME_CHARS}},
    "priority": {"integer": _within(-MAX_INT32, MAX_INT32)},
    "timeout": {"number": {"exclusiveMinimum": 0, "maximum": MAX_REQUEST_SECONDS}},
    "prompt": {"string": {"minLength": 1, "maxLength": MAX_PROMPT_CHARS}, **_IDS},
    "tokens": _IDS,
    "messages": {"array": {"minItems": 1, "maxItems": MAX_MESSAGES}},
    "tools": {"array": {"maxItems": MAX_TOOLS}},
    "name": _TEXT,
    "model": {"string": {"maxLength": MAX_NAME_CHARS}},
    "role": {"string": {"enum": list(ROLES)}},
}

_bodies: dict[str, tuple[type[msgspec.Struct], Neutral]] = {}


def described(body: type[msgspec.Struct], neutral: Neutral | None = None) -> dict[str, Any]:
    """Arguments of a route whose body is a `body`, which the route reads itself.

    neutral: fields that are not implemented, with the values that are taken beside null.
    """
    _bodies[body.__name__] = body, neutral or {}
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    content = {"application/json": {"schema": schema}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of all routes, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = msgspec.json.schema_components(
            [body for body, _ in _bodies.values()], ref_template="#/components/schemas/{name}"
        )
        for schema in schemas.values():
            for name, value in schema.get("properties", {}).items():
                _bound(value, BOUNDS.get(name, {}))
        for name, (_, neutral) in _bodies.items():
            for field, values in neutral.items():
                schemas[name]["properties"][field]["enum"] = [None, *values]
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        app.openapi_schema = document
    return app.openapi_schema


def _bound(schema: Any, bounds: dict[str, dict[str, Any]]) -> None:
    if not isinstance(schema, dict):
        return
    schema.update(bounds.get(schema.get("type", ""), {}))
    for part in (*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")):
        _bound(part, bounds)
