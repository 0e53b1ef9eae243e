"""The request fields that endpoints share, and what they become: `SamplingParams`.

May import `params`, `server.bounds`, `server.body` and `server.errors`. Each endpoint's body is a
struct that lists every field it knows; any other is refused. null is the same as absent.

Invariant: a field does what it says, is in `Harmless`, or is refused; none is ignored in silence.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from minisgl.params import (
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    Constraint,
    InvalidRequestError,
    SamplingParams,
)

from .body import check_depth
from .bounds import MAX_CHOICE_TEXTS, MAX_CHOICES, MAX_NAME_CHARS, MAX_REQUEST_SECONDS
from .errors import ApiError, bad_request, from_invalid

MAX_INT32 = 2**31 - 1


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object with these fields and no others."""


class Harmless(Strict):
    """Fields that clients send and that change nothing here: accepted, whatever they hold."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class StreamOptions(Strict):
    """include_usage: a last chunk tells the token counts. include_obfuscation: harmless."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class JsonSchema(Strict):
    """A schema that the answer must fit."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Harmless):
    """The fields of chat completions, completions and generate alike."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None


_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)


def refuse(request: msgspec.Struct, allowed: Mapping[str, Sequence[Any]], where: str = "") -> None:
    """A 400 if a field that is not implemented holds anything but null or an `allowed` value."""
    for name, neutral in allowed.items():
        value = getattr(request, name)
        if value is not None and not any(value is v or value == v for v in neutral):
            param = where + name
            raise bad_request(f"{param} is not supported", param, "unsupported_field")


def check_model(name: str | None, served: str | None) -> None:
    """404 for a model that is not the one served; any name goes if none was given at start."""
    if name is not None and len(name) > MAX_NAME_CHARS:
        raise bad_request(f"model has more than {MAX_NAME_CHARS} characters", "model")
    if name is not None and served is not None and name != served:
        raise model_not_found(name, served)


def model_not_found(name: str, served: str) -> ApiError:
    """The 404 that OpenAI clients know."""
    message = f"the model {name[:MAX_NAME_CHARS]!r} is not served here; {served!r} is"
    return ApiError(404, message, param="model", code="model_not_found")


def num_choices(request: Sampling) -> int:
    """`n`, checked."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_CHOICES:
        raise bad_request(f"n must be in 1 to {MAX_CHOICES}", "n")
    return n


def wants_usage(request: Sampling) -> bool:
    """Whether a stream ends with a chunk of token counts."""
    if request.stream_options is None:
        return False
    if not request.stream:
        raise bad_request("stream_options goes with stream", "stream_options")
    return bool(request.stream_options.include_usage)


def sampling_params(
    request: Sampling,
    defaults: SamplingParams,
    max_tokens: int,
    names: Mapping[str, str] | None = None,
    **more: Any,
) -> SamplingParams:
    """How to sample: what the request says, then what the model's authors advise, then greedy.

    max_tokens: where the request is silent. names: what the client calls fields, for the `ApiError`
    of a value without meaning. more: fields that the endpoint works out itself.
    """
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    given["max_tokens"] = max_tokens if request.max_tokens is None else request.max_tokens
    if request.stop is not None:
        given["stop"] = _stops(request.stop)
    params = dataclasses.replace(
        defaults, **{"constraint": constraint_of(request), **given, **more}
    )
    try:
        params.validate()
    except InvalidRequestError as error:
        raise from_invalid(renamed(error, names or {})) from None
    return params


def _stops(stop: str | list[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOP_STRINGS:
        raise bad_request(f"stop takes at most {MAX_STOP_STRINGS} texts", "stop")
    if any(len(text) > MAX_NAME_CHARS for text in stops):
        raise bad_request(f"a stop text has at most {MAX_NAME_CHARS} characters", "stop")
    return stops


def constraint_of(request: Sampling) -> Constraint | None:
    """What the answer must spell; a 400 if it is said in two ways."""
    found: dict[str, Constraint] = {}
    if request.response_format is not None:
        constraint = format_constraint(request.response_format)
        if constraint is not None:
            found["response_format"] = constraint
    for kind in ("regex", "grammar"):
        text = getattr(request, kind)
        if text is not None:
            if not text:
                raise bad_request(f"{kind} is empty", kind)
            found[kind] = Constraint(kind, text)
    if request.choice is not None:
        if not 1 <= len(request.choice) <= MAX_CHOICE_TEXTS or "" in request.choice:
            raise bad_request(f"choice takes 1 to {MAX_CHOICE_TEXTS} texts, none empty", "choice")
        found["choice"] = Constraint("choice", json.dumps(request.choice))
    if len(found) > 1:
        names = " and ".join(found)
        raise bad_request(f"{names} cannot be combined: give one", list(found)[1])
    return next(iter(found.values()), None)


def format_constraint(form: ResponseFormat) -> Constraint | None:
    """The constraint of a `response_format`."""
    if form.type != "json_schema":
        if form.json_schema is not None:
            raise bad_request("json_schema goes with type json_schema", "response_format")
        return Constraint("json_object") if form.type == "json_object" else None
    if form.json_schema is None or form.json_schema.schema is None:
        where = "response_format.json_schema.schema"
        raise bad_request(f"{where} is missing", where)
    return schema_constraint(form.json_schema.schema, "response_format.json_schema.schema")


def schema_constraint(schema: dict[str, Any], param: str) -> Constraint:
    """A JSON schema as a constraint, its depth checked."""
    check_depth(schema, param)
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False))


def routing(request: Sampling) -> dict[str, Any]:
    """Fields of a `TokenizeMsg` that say how a request is queued: salt, priority, deadline."""
    fields: dict[str, Any] = {}
    if request.cache_salt is not None:
        if len(request.cache_salt) > MAX_NAME_CHARS:
            raise bad_request(f"cache_salt has at most {MAX_NAME_CHARS} characters", "cache_salt")
        fields["salt"] = request.cache_salt
    if request.priority is not None:
        if not -MAX_INT32 <= request.priority <= MAX_INT32:
            raise bad_request(f"priority is in {-MAX_INT32} to {MAX_INT32}", "priority")
        fields["priority"] = request.priority
    if request.timeout is not None:
        if not 0.0 < request.timeout <= MAX_REQUEST_SECONDS:
            raise bad_request(
                f"timeout is in seconds, above 0 to {MAX_REQUEST_SECONDS:g}", "timeout"
            )
        fields["deadline"] = time.time() + request.timeout
    return fields


def check_logprobs(value: int | None, name: str) -> None:
    """A 400 if more tokens are wanted for a position than are ever told."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise bad_request(f"{name} must be in 0 to {MAX_LOGPROBS}", name)


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The error with the field called as the client called it."""
    old, message = error.param or "", str(error)
    if old not in names:
        return error
    if message.startswith(old):
        message = names[old] + message.removeprefix(old)
    return InvalidRequestError(message, names[old])
