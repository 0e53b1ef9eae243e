"""Errors as clients see them: a status, and OpenAI's `{"error": {message, type, param, code}}`.

May import `params` and `server.replies`. Invariant: what went wrong inside is told in the log
alone; a client gets a fixed sentence and its request id.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from minisgl.params import ErrorKind, InvalidRequestError

from .replies import json_response

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Ends a request with an HTTP status. param: the field at fault; code: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The error in OpenAI's shape."""
        kind = TYPES.get(self.status, TYPES[400])
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def from_invalid(error: InvalidRequestError) -> ApiError:
    """A 400 from an error of the layers below."""
    return failure(ErrorKind.INVALID, str(error), error.param, "")


def failure(kind: ErrorKind, message: str, param: str | None, request_id: str) -> ApiError:
    """What a request that ended in an error tells its client."""
    if kind is ErrorKind.INVALID:
        code = "context_length_exceeded" if "leaves no room" in message else None
        return bad_request(message, param, code)
    if kind is ErrorKind.OVERLOADED:
        return overloaded()
    if kind is ErrorKind.TIMEOUT:
        return ApiError(504, "the request's time is up", param="timeout", code="timeout")
    return internal(request_id)


def overloaded() -> ApiError:
    """A 429: there is no room for another request now."""
    headers = {"retry-after": "1"}
    return ApiError(429, "too many requests: try again", code="overloaded", headers=headers)


def internal(request_id: str) -> ApiError:
    """A 500; the log says why, under the same request id."""
    return ApiError(500, f"the request failed (request id {request_id})", code="internal_error")


def unavailable(message: str) -> ApiError:
    """A 503: the engine is gone, or not there yet."""
    return ApiError(503, message, code="unavailable", headers={"retry-after": "5"})


def error_response(error: ApiError) -> Response:
    """The error as a whole answer."""
    return json_response(error.body, error.status, error.headers)
