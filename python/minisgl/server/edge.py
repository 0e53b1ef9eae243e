"""The edge: what every request passes before its route. Who may call, ids, the bound, the log.

May import `config`, `utils` and the server's modules. Invariant: a request gets exactly one answer
and one line in the log; what a client sent is never in it.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import time
import uuid
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.config import ServerArgs
from minisgl.utils import init_logger

from .errors import ApiError, error_response, internal, overloaded
from .metrics import Metrics
from .stream import CLIENT_GONE

logger = init_logger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_OPEN_PATHS = ("/health", "/health/ready")


class Edge:
    """ASGI middleware around the routes."""

    def __init__(self, app: ASGIApp, args: ServerArgs, metrics: Metrics) -> None:
        self._app = app
        self._args = args
        self._metrics = metrics
        self._num_running = 0
        names = ("localhost", args.server_host, *args.allowed_hosts)
        self._names = frozenset(name.lower() for name in names)
        self._key = None if args.api_key is None else args.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        start, status = time.perf_counter(), CLIENT_GONE

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                marked = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": marked}
            await send(message)

        try:
            await self._answer(scope, receive, send_marked, headers, request_id)
        except Exception:
            logger.exception("%s failed", request_id)
            if status == CLIENT_GONE:  # nothing was sent yet
                await error_response(internal(request_id))(scope, receive, send_marked)
            else:
                raise
        finally:
            status = CLIENT_GONE if state.get("is_gone") else status
            self._metrics.http_requests.labels(str(status)).inc()
            self._log(scope, request_id, status, time.perf_counter() - start)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
        request_id: str,
    ) -> None:
        is_probe = scope["path"] in _OPEN_PATHS
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if not is_probe:
                self._check_key(headers)
                if self._num_running >= self._args.max_concurrent_requests:
                    raise overloaded()
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        self._num_running += not is_probe
        if scope["method"] == "HEAD":  # as GET; the connection leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= not is_probe

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Names only that we are known by: a page must not reach us under a name of its own.

        With a key there is nothing to gain, as a browser does not know it. Without the header (as
        HTTP/1.0 allows) it is no browser.
        """
        if self._key is not None or "*" in self._names or b"host" not in headers:
            return
        host = _host_of(headers.get(b"host", b""))
        if _is_address(host) or host in self._names:
            return
        raise ApiError(
            403,
            f"the host {host[:100]!r} is not known here: start with --allowed-host",
            code="host_not_allowed",
        )

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Web pages of our own host, or that `--cors-origin` names; other clients send none."""
        origin = headers.get(b"origin")
        if origin is None:
            return
        text = origin.decode("latin-1")
        allowed = self._args.cors_origins
        if text in allowed or "*" in allowed:
            return
        if text.partition("://")[2].encode("latin-1") == headers.get(b"host"):
            return
        raise ApiError(
            403,
            f"the origin {text[:100]!r} may not call: start with --cors-origin",
            code="origin_not_allowed",
        )

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        if self._key is None:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    @staticmethod
    def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
        usage = scope["state"].get("usage")
        tokens = f" {usage.prompt_tokens}+{usage.completion_tokens} tokens" if usage else ""
        path = scope["path"][:100].encode("ascii", "backslashreplace").decode()
        level = 10 if scope["path"] in (*_OPEN_PATHS, "/metrics") else 20
        logger.log(
            level,
            "%s %s %r %d %.0f ms%s",
            request_id,
            scope["method"],
            path,
            status,
            seconds * 1000,
            tokens,
        )


def _host_of(header: bytes) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit("//" + header.decode("latin-1")).hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
