"""The ASGI app: routes behind the edge, every error in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from minisgl import __version__
from minisgl.config import ServerArgs
from minisgl.params import InvalidRequestError

from .edge import Edge
from .errors import ApiError, error_response, from_invalid
from .frontend import Frontend, RequestFailed
from .generation import Server, failed
from .metrics import Metrics
from .openapi import describe
from .routes import chat, completions, operations, responses, tokens


def create_app(frontend: Frontend, args: ServerArgs) -> FastAPI:
    """The app that answers with what `frontend` generates; it can be served before it is ready."""
    app = FastAPI(title="minisgl", version=__version__, docs_url=None, redoc_url=None)
    metrics = Metrics(lambda: frontend.stats, frontend.held)
    app.state.server = Server(frontend, args, metrics)
    for module in (chat, completions, responses, tokens, operations):
        app.include_router(module.router)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(InvalidRequestError, _on_invalid)
    app.add_exception_handler(RequestFailed, _on_failed)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(Edge, args=args, metrics=metrics)
    if args.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(args.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


async def _on_api_error(_: Request, error: Any) -> Response:
    return error_response(error)


async def _on_invalid(_: Request, error: Any) -> Response:
    return error_response(from_invalid(error))


async def _on_failed(request: Request, error: Any) -> Response:
    return error_response(failed(error, request.state.request_id))


async def _on_http_error(request: Request, error: Any) -> Response:
    """What the router says: an unknown path, or a known one with another method."""
    method, path = request.method, request.url.path[:100]
    known = f"{method} does not go with {path}" if error.status_code == 405 else None
    message = known or f"there is nothing at {path}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))
