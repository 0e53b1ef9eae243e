"""The server's own description of itself: bodies as JSON schemas, made from their structs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_bodies: dict[str, type[msgspec.Struct]] = {}


def described(body: type[msgspec.Struct]) -> dict[str, Any]:
    """Arguments of a route whose body is a `body`, which the route reads itself."""
    _bodies[body.__name__] = body
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    content = {"application/json": {"schema": schema}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of all routes, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = msgspec.json.schema_components(
            list(_bodies.values()), ref_template="#/components/schemas/{name}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        app.openapi_schema = document
    return app.openapi_schema
