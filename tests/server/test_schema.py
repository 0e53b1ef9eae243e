"""The server's own description, and what a machine makes up from it: never a 500."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from minisgl.params import InvalidRequestError, SamplingParams
from minisgl.server.openapi import BOUNDS

from .harness import Server
from .scripted import CHAT, ScriptedFrontend, ask
from .soak import soaked_server

DOCUMENT = ask(ScriptedFrontend(), "/openapi.json").json()
schema = schemathesis.openapi.from_dict(DOCUMENT)
schema.config.generation.update(modes=[GenerationMode.POSITIVE])
CONSTRAINTS = ("response_format", "regex", "choice", "grammar")
counts: Counter[str] = Counter()


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Mend what a schema cannot say, so that many requests are answered, shortly."""
    if not isinstance(body, dict):
        return body
    body = {name: _whole(value) for name, value in body.items()}
    path = context.operation.path
    if path == "/v1/responses":
        body["input"] = body.get("input") or "x"
        if isinstance(body["input"], list):
            body["input"] = [_item(item) for item in body["input"]] or "x"
        body.pop("text", None)
    elif not body.get("messages"):
        body["prompt"] = body.get("prompt") or "x"
    else:
        body["messages"] = [_message(message) for message in body["messages"]]
        body.pop("prompt", None)
    if not body.get("prompt"):
        body.pop("prompt", None)
    if path == "/detokenize":
        body = {"tokens": [i % 260 if isinstance(i, int) else 0 for i in body["tokens"]]}
    if not body.get("stream"):
        body.pop("stream_options", None)
    if body.get("logprobs") is not True:
        body.pop("top_logprobs", None)
    for name in [name for name in CONSTRAINTS if body.get(name) is not None][1:]:
        del body[name]
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
        if isinstance(body.get(name), int):
            body[name] = 1 if path == "/generate" and name == "n" else min(body[name], 4)
    if body.get("max_tokens") is not None:
        body.pop("max_completion_tokens", None)
    return {k: v for k, v in body.items() if k != "chat_template_kwargs" or "messages" in body}


def _whole(value: Any) -> Any:
    """2.0 is an integer to JSON schema, and not here."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _message(message: Any) -> Any:
    kept = {k: v for k, v in message.items() if k not in ("audio", "function_call", "tool_calls")}
    return {**kept, "content": kept["content"] if isinstance(kept.get("content"), str) else "x"}


def _item(item: Any) -> Any:
    if item.get("type", "message") != "message":
        return {"type": "function_call_output", "call_id": "c", "output": "x"}
    return {"role": item.get("role") or "user", "content": "x"}


def test_every_route_and_every_field_is_described() -> None:
    paths = set(DOCUMENT["paths"])
    assert {CHAT, "/v1/completions", "/generate", "/v1/responses", "/health", "/metrics"} <= paths
    body = DOCUMENT["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    described = DOCUMENT["components"]["schemas"]["ChatRequest"]
    assert {"messages", "temperature", "logit_bias", "tools", "user"} <= set(
        described["properties"]
    )
    assert described["additionalProperties"] is False
    assert described["properties"]["n"]["anyOf"][0] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 128,
    }
    assert described["properties"]["function_call"]["enum"] == [None, "none"]


@pytest.mark.parametrize("name", sorted(BOUNDS.keys() & SamplingParams.__dataclass_fields__))
def test_the_bounds_that_are_told_are_those_that_hold(name: str) -> None:
    for kind in ("integer", "number"):
        bounds = BOUNDS[name].get(kind)
        if bounds is None or name in ("stop_token_ids", "logit_bias"):
            continue
        for limit, past in (("minimum", -1), ("maximum", 1)):
            if limit in bounds:
                SamplingParams(**{name: bounds[limit]}).validate()
                with pytest.raises(InvalidRequestError):
                    SamplingParams(**{name: bounds[limit] + past}).validate()


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model; at the end, how often each route gave each status."""
    with soaked_server(tmp_path_factory.mktemp("described")) as server:
        yield server
        print(*(f"{what}: {num}" for what, num in sorted(counts.items())), sep="\n")
    assert sum(num for what, num in counts.items() if what.endswith(" 200")) > 200  # not 400s alone


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_nothing_made_up_from_the_description_is_a_500(case: Any, real_server: Server) -> None:
    response = case.call(base_url=real_server.url, timeout=60)
    counts[f"{case.operation.path} {response.status_code}"] += 1
    case.validate_response(response, checks=[not_a_server_error])
