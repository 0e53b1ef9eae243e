"""Real sockets: clients that go away, send slowly, send too much, or do not read."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from minisgl.server import bounds, connection
from minisgl.server.connection import uvicorn_options

from .harness import wait_until
from .scripted import CHAT, HELLO, ScriptedFrontend, make_app

Serve = Callable[[ScriptedFrontend], tuple[str, int]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve the app over a frontend on a free port, on a thread."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(frontend: ScriptedFrontend) -> tuple[str, int]:
        sock = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(make_app(frontend), **uvicorn_options(), log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        running.append((server, thread))
        wait_until(lambda: server.started, 10, "the port is open")
        address: tuple[str, int] = sock.getsockname()
        return address

    yield start
    for server, thread in running:
        server.should_exit = server.force_exit = True
        thread.join(10)
        assert not thread.is_alive()


def request(path: str, body: Any, **headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def talk(address: tuple[str, int], data: bytes, seconds: float = 10.0) -> bytes:
    """Everything that comes back until the server closes."""
    with socket.create_connection(address, timeout=seconds) as client:
        client.sendall(data)
        return rest(client)


def rest(client: socket.socket) -> bytes:
    found = b""
    while part := client.recv(1 << 16):
        found += part
    return found


def read_until(client: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        part = client.recv(1 << 16)
        assert part, found
        found += part
    return found


ONCE = {"connection": "close"}


def test_a_whole_answer_and_a_stream_come_over_a_socket(serve: Serve) -> None:
    address = serve(ScriptedFrontend("Hel", "lo"))
    answer = talk(address, request(CHAT, {"messages": HELLO}, **ONCE))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and b'"content":"Hello"' in answer
    answer = talk(address, request(CHAT, {"messages": HELLO, "stream": True}, **ONCE))
    assert b"text/event-stream" in answer and answer.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_goes_away_aborts_its_requests(serve: Serve, stream: bool, n: int) -> None:
    frontend = ScriptedFrontend("a", asyncio.Event(), "b")
    address = serve(frontend)
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(request(CHAT, {"messages": HELLO, "stream": stream, "n": n}))
        wait_until(lambda: len(frontend.submitted) == n, 10, "the request has come")
        if stream:
            read_until(client, b'"a"')
    wait_until(lambda: len(frontend.aborted) == n, 10, "the request is aborted")


def test_a_client_that_goes_away_before_the_first_token_is_noticed(serve: Serve) -> None:
    frontend = ScriptedFrontend(asyncio.Event(), "b")
    address = serve(frontend)
    for stream in (True, False):
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(request(CHAT, {"messages": HELLO, "stream": stream}))
            wait_until(lambda: frontend.submitted, 10, "the request has come")
        wait_until(lambda: frontend.aborted, 10, "the request is aborted")
        frontend.submitted.clear()
        frontend.aborted.clear()


def test_a_client_that_does_not_read_is_dropped(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_SEND_SECONDS", 0.2)
    frontend = ScriptedFrontend(*["x" * (1 << 20)] * 64, asyncio.Event(), "end")
    address = serve(frontend)
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(request(CHAT, {"messages": HELLO, "stream": True}))
        wait_until(lambda: frontend.aborted, 10, "the request is aborted")


def test_headers_have_a_size(serve: Serve) -> None:
    address = serve(ScriptedFrontend("Hi"))
    fits = "x" * (bounds.MAX_HEADER_BYTES - 200)
    body = {"messages": HELLO}
    assert b" 200 OK" in talk(address, request(CHAT, body, pad=fits, **ONCE))
    for pad in ("x" * bounds.MAX_HEADER_BYTES, "x" * (20 * bounds.MAX_HEADER_BYTES)):
        answer = talk(address, request(CHAT, body, pad=pad, **ONCE)[: len(pad) + 100])
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'{"error":{"message":"the headers are larger than' in answer
    many = {f"h{i}": "x" * 100 for i in range(1000)}
    assert b" 431 " in talk(address, request(CHAT, body, **many, **ONCE))
    url = request("/" + "x" * bounds.MAX_HEADER_BYTES, body, **ONCE)
    assert b" 431 " in talk(address, url)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",  # TLS
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1 HTTP/1.1\r\nhost localhost\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_400_in_the_shape_of_every_error(serve: Serve, data: bytes) -> None:
    answer = talk(serve(ScriptedFrontend("Hi")), data)
    assert answer.startswith(b"HTTP/1.1 400 ") or answer.startswith(b"HTTP/1.1 403 "), answer
    assert b'{"error":{"message":' in answer


@pytest.mark.parametrize(
    "data", [b"", b"\r\n", b"POST /gen", b"POST /generate HTTP/1.1\r\nhost: localhost\r\n"]
)
def test_a_client_that_does_not_finish_its_headers_is_dropped(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(connection, "MAX_HEADER_SECONDS", 0.1)
    with _closed():
        assert talk(serve(ScriptedFrontend("Hi")), data) == b""


def test_a_body_that_comes_too_slowly_is_a_408(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.server.body.MAX_BODY_SECONDS", 0.1)
    monkeypatch.setattr(connection, "MAX_LINGER_SECONDS", 0.1)
    answer = talk(serve(ScriptedFrontend("Hi")), request(CHAT, {"messages": HELLO})[:-5])
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"message":"the body took too long to arrive"' in answer


def test_a_body_that_nobody_wants_ends_the_connection(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_LINGER_SECONDS", 0.1)
    head = b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\nx"
    assert talk(serve(ScriptedFrontend("Hi")), head).startswith(b"HTTP/1.1 404 ")


def test_a_body_that_is_too_large_gets_its_answer_before_it_is_sent(serve: Serve) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n"
    with socket.create_connection(serve(ScriptedFrontend("Hi")), timeout=10) as client:
        client.sendall(head.encode())
        assert b'"code":"body_too_large"' in read_until(client, b"}}")


def test_a_connection_serves_one_request_after_another(serve: Serve) -> None:
    data = request(CHAT, {"messages": HELLO})
    with socket.create_connection(serve(ScriptedFrontend("Hi")), timeout=10) as client:
        for _ in range(3):
            client.sendall(data)
            assert b" 200 OK" in read_until(client, b"}}}")
        client.sendall(data * 3)  # pipelined
        found = b""
        while found.count(b"}}}") < 3:
            found += client.recv(1 << 16)
        client.sendall(request(CHAT, {"messages": HELLO}, **ONCE))
        assert b" 200 OK" in rest(client)


def test_more_connections_than_allowed_are_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 2)
    address = serve(ScriptedFrontend("Hi"))
    data = request(CHAT, {"messages": HELLO})
    held = [socket.create_connection(address, timeout=10) for _ in range(2)]
    for client in held:
        client.sendall(data)
        read_until(client, b"}}}")
    with _closed():
        assert talk(address, data) == b""
    for client in held:
        client.close()
    wait_until(lambda: b" 200 OK" in _try(address), 10, "there is room again")


def _try(address: tuple[str, int]) -> bytes:
    try:
        return talk(address, request(CHAT, {"messages": HELLO}, **ONCE))
    except OSError:
        return b""


class _closed:
    """A connection that the server aborts may show as a reset."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return isinstance(error, (ConnectionResetError, BrokenPipeError))


def test_a_client_of_http_1_0_needs_no_host(serve: Serve) -> None:
    answer = talk(serve(ScriptedFrontend("Hi")), b"GET /v1 HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'{"status":"ok"}')


def test_head_is_get_without_its_body(serve: Serve) -> None:
    address = serve(ScriptedFrontend("Hi"))
    rest_of_it = b" /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    (head, body), (same_head, nothing) = (
        talk(address, method + rest_of_it).split(b"\r\n\r\n") for method in (b"GET", b"HEAD")
    )
    assert body and nothing == b""
    for line in (b"HTTP/1.1 200 OK", b"content-length: %d" % len(body)):
        assert line in head.splitlines() and line in same_head.splitlines()
