"""The server's own description, and what a machine makes up from it: never a 500."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from .scripted import CHAT, ScriptedFrontend, ask, make_app

APP = make_app(ScriptedFrontend("Hi", " there"), allowed_hosts=("*",))
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


def test_every_route_and_every_field_is_described() -> None:
    document = ask(ScriptedFrontend(), "/openapi.json").json()
    paths = set(document["paths"])
    assert {CHAT, "/v1/completions", "/generate", "/v1/responses", "/health", "/metrics"} <= paths
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    described = document["components"]["schemas"]["ChatRequest"]
    assert {"messages", "temperature", "logit_bias", "tools", "user"} <= set(
        described["properties"]
    )
    assert described["additionalProperties"] is False


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_nothing_made_up_from_the_description_is_a_500(case: Any) -> None:
    response = case.call()
    case.validate_response(response, checks=[not_a_server_error])
