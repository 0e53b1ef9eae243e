"""`serve`: from `ServerArgs` to a running server, and to its exit code.

Order: the port is taken first, so that a wrong one costs nothing; then the other processes start;
while they load, this one imports its web framework; the port opens when all are ready. Invariant:
however this function is left, no process, socket file or folder of it remains. A signal counts from
the first moment to the last: the event loop has its handlers, before and after it a signal is an
interrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from minisgl.config import ServerArgs
from minisgl.params import ConfigError
from minisgl.utils.model_files import resolve_model

from .children import Children
from .frontend import Frontend
from .supervisor import Supervisor

ENGINE = "minisgl.engine:Engine"
APP = "minisgl.server.app:create_app"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
FLUSH_SECONDS = 3
BACKLOG = 1024

Progress = Callable[[int, int], None]


def serve(
    args: ServerArgs,
    *,
    on_progress: Progress | None = None,
    on_ready: Callable[[str, str], None] | None = None,
    engine: str = ENGINE,
    app: str = APP,
) -> int:
    """Run a server until a signal or a failure ends it; the exit code of the process.

    on_progress: called with (bytes done, bytes in all) while weights load; on_ready: with the
    model's name and the address when requests are taken. engine, app: "module:name" of what makes
    the engine (in the scheduler process) and the ASGI application (with a `Frontend` and `args`).
    Raises `ConfigError` for a port that cannot be used, `StartError` for what fails while loading.
    """
    before = [signal.getsignal(name) for name in SIGNALS]
    _set_signals(signal.default_int_handler)
    try:
        return _serve(args, on_progress, on_ready, engine, app)
    except KeyboardInterrupt:
        return 0
    finally:
        for name, handler in zip(SIGNALS, before, strict=True):
            signal.signal(name, handler)


def _serve(
    args: ServerArgs,
    on_progress: Progress | None,
    on_ready: Callable[[str, str], None] | None,
    engine: str,
    app: str,
) -> int:
    with contextlib.closing(_take_port(args.server_host, args.server_port)) as sock:
        model = resolve_model(args.model_path, args.revision)
        name = args.served_model_name or model.name
        args = dataclasses.replace(args, model_path=str(model.path), revision=None)
        children = Children(args, engine)
        code = 1
        try:
            children.start()
            uvicorn, uvloop = import_module("uvicorn"), import_module("uvloop")
            module, _, function = app.partition(":")
            make_app = getattr(import_module(module), function)
            server = _Server(args, name, children, sock, on_progress, on_ready)
            code = int(uvloop.run(server.run(uvicorn, make_app)))
            return code
        finally:
            _end(children, in_order=code == 0)


def _end(children: Children, *, in_order: bool) -> None:
    """End the children; a signal that comes meanwhile means at once."""
    try:
        _set_signals(signal.default_int_handler)  # the loop took its handlers away
        children.stop(in_order=in_order)
    except KeyboardInterrupt:
        _set_signals(signal.SIG_IGN)
        children.stop(in_order=False)


def _set_signals(handler: Any) -> None:
    for name in SIGNALS:
        signal.signal(name, handler)


def _take_port(host: str, port: int) -> socket.socket:
    """A socket bound to the port, which nobody can connect to yet."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"server_host (--host) {host} cannot be used: {error}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also right after a kill
    try:
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise _port_error(host, port, error) from error
    return sock


def _port_error(host: str, port: int, error: Exception) -> ConfigError:
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return ConfigError(f"server_port (--port) {port} on {host} is taken: choose another one")
    return ConfigError(f"server_port (--port) {port} on {host} cannot be used: {error}")


@dataclasses.dataclass(slots=True)
class _Server:
    """One run of the event loop."""

    _args: ServerArgs
    _model_name: str
    _children: Children
    _sock: socket.socket
    _on_progress: Progress | None
    _on_ready: Callable[[str, str], None] | None

    async def run(self, uvicorn: Any, make_app: Callable[[Frontend, ServerArgs], Any]) -> int:
        """Wait for the children, serve, and end; the exit code."""
        args, addresses = self._args, self._children.addresses
        supervisor: Supervisor  # exists when the loop calls it
        for name in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(name, lambda: supervisor.on_signal())
        frontend = Frontend(
            addresses.frontend,
            [addresses.tokenizer(index) for index in range(args.num_tokenizer)],
            self._model_name,
            self._on_progress,
        )
        supervisor = Supervisor(frontend, self._children, args.drain_seconds)
        try:
            if not await supervisor.start():
                return 0
            server = _make_uvicorn(uvicorn, make_app(frontend, args))
            try:
                self._sock.listen(BACKLOG)
            except OSError as error:
                raise _port_error(args.server_host, args.server_port, error) from error
            if self._on_ready is not None:
                self._on_ready(self._model_name, _url(self._sock))
            await _serve_until_over(server, supervisor, self._sock)
        finally:
            frontend.stop()
        return 1 if supervisor.exit_code is None else supervisor.exit_code


async def _serve_until_over(server: Any, supervisor: Supervisor, sock: Any) -> None:
    serving = asyncio.ensure_future(server.serve([sock]))
    watching = asyncio.ensure_future(supervisor.watch())
    await asyncio.wait([serving, watching], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True  # closes idle connections, waits for those that still answer
    await serving
    watching.cancel()


def _make_uvicorn(uvicorn: Any, app: Any) -> Any:
    options = import_module("minisgl.server.connection").uvicorn_options()
    config = uvicorn.Config(
        app, **options, log_level="warning", timeout_graceful_shutdown=FLUSH_SECONDS
    )
    server = uvicorn.Server(config)

    @contextlib.contextmanager
    def no_signals() -> Iterator[None]:
        yield

    server.capture_signals = no_signals  # the supervisor has them
    return server


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
