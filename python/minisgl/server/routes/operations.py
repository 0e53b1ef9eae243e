"""What is not generation: models, health, metrics, and what this server does not do."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.errors import ApiError
from minisgl.server.frontend import State
from minisgl.server.generation import Server, server_of
from minisgl.server.protocol import model_not_found
from minisgl.server.replies import json_response

router = APIRouter()


@router.get("/v1")
async def root() -> Response:
    """That there is a server."""
    return json_response({"status": "ok"})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model(server_of(request))]})


@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str) -> Response:
    """What is told of a model."""
    found = _model(server_of(request))
    if model_id != found["id"]:
        raise model_not_found(model_id, found["id"])
    return json_response(found)


def _model(server: Server) -> dict[str, Any]:
    info = server.frontend.info
    return {
        "id": server.args.served_model_name or info.name,
        "object": "model",
        "created": server.created,
        "owned_by": "minisgl",
        "max_model_len": info.max_seq_len,
    }


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the server lives: it starts, answers, or drains; 503 once its engine is gone."""
    state = server_of(request).frontend.health().state
    return json_response({"status": state.value}, 503 if state is State.DEAD else 200)


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken."""
    found = server_of(request).frontend.health()
    return json_response({"status": found.state.value}, 200 if found.is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counts and times, in Prometheus' text format."""
    return Response(server_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.post("/v1/embeddings")
async def embeddings() -> Response:
    """There are none."""
    raise ApiError(404, "this server generates text: it has no embeddings", code="not_found")
