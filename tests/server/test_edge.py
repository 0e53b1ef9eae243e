"""Who may call: keys, hosts, origins, the bound on requests at a time; ids and the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.config import ServerArgs
from minisgl.params import ConfigError

from .scripted import CHAT, HELLO, ScriptedFrontend, ask, ask_app, error_of, make_app

BODY = {"messages": HELLO}
KEY = "sk-secret"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The server's log."""
    logger = logging.getLogger("minisgl")
    logger.propagate = True
    caplog.set_level(logging.DEBUG, "minisgl")
    yield caplog
    logger.propagate = False


def status(path: str, body: Any = None, headers: Any = None, **args: Any) -> int:
    app = make_app(ScriptedFrontend("Hi"), **args)
    response = ask_app(app, path, body, headers=headers or {})
    if response.status_code >= 400:
        error_of(response)
    return response.status_code


def test_a_key_guards_every_route_but_health() -> None:
    for path in ("/v1", "/v1/models", "/metrics", "/openapi.json", "/nothing"):
        assert status(path, api_key=KEY) == 401
        assert status(path, headers={"authorization": f"Bearer {KEY}"}, api_key=KEY) != 401
    assert status(CHAT, BODY, api_key=KEY) == 401
    assert status("/health", api_key=KEY) == status("/health/ready", api_key=KEY) == 200


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY]
)
def test_another_key_is_none(header: str) -> None:
    assert status(CHAT, BODY, {"authorization": header}, api_key=KEY) == 401


def test_a_key_is_taken_in_any_spelling_of_bearer() -> None:
    assert status(CHAT, BODY, {"authorization": f"bearer {KEY}"}, api_key=KEY) == 200


def test_without_a_key_any_authorization_is_taken() -> None:
    for header in ("Bearer x", "Basic y", "nonsense", ""):
        assert status(CHAT, BODY, {"authorization": header}) == 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:1919", "127.0.0.1:1919", "[::1]:1919", "192.168.0.7", "LOCALHOST"],
)
def test_addresses_and_localhost_are_known_hosts(host: str) -> None:
    assert status(CHAT, BODY, {"host": host}) == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "[::1", "a b", "@"])
def test_other_names_are_not(host: str) -> None:
    assert status(CHAT, BODY, {"host": host}) == 403
    assert status("/health", None, {"host": host}) == 403


def test_a_host_that_was_allowed_is_known() -> None:
    allowed = ("my.box",)
    assert status(CHAT, BODY, {"host": "my.box:80"}, allowed_hosts=allowed) == 200
    assert status(CHAT, BODY, {"host": "my.box"}, allowed_hosts=("My.Box",)) == 200
    assert status(CHAT, BODY, {"host": "your.box"}, allowed_hosts=allowed) == 403
    assert status(CHAT, BODY, {"host": "your.box"}, allowed_hosts=("*",)) == 200
    assert status("/health", None, {"host": "your.box"}, api_key=KEY) == 200


def test_pages_of_other_origins_may_not_call_unless_allowed() -> None:
    foreign = {"origin": "https://evil.example"}
    assert status(CHAT, BODY, foreign) == 403
    assert status(CHAT, BODY, {"origin": "null"}) == 403
    assert status(CHAT, BODY, {"origin": "http://localhost"}) == 200  # our own pages
    assert status(CHAT, BODY, {"origin": "http://localhost:3000"}) == 403
    page = {"origin": "https://chat.example"}
    assert status(CHAT, BODY, page, cors_origins=("https://chat.example",)) == 200
    assert status(CHAT, BODY, foreign, cors_origins=("https://chat.example",)) == 403
    assert status(CHAT, BODY, foreign, cors_origins=("*",)) == 200


def test_browsers_are_told_which_origins_may_call() -> None:
    app = make_app(ScriptedFrontend("Hi"), cors_origins=("https://chat.example",))
    page = {"origin": "https://chat.example"}
    asking = {**page, "access-control-request-method": "POST"}
    answer = ask_app(app, CHAT, method="OPTIONS", headers=asking)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    answer = ask_app(app, CHAT, BODY, headers=page)
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    answer = ask_app(app, CHAT, {"x": 1}, headers=page)  # errors can be read too
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    closed = make_app(ScriptedFrontend("Hi"))
    answer = ask_app(closed, CHAT, method="OPTIONS", headers=asking)
    assert "access-control-allow-origin" not in answer.headers


def test_a_request_id_comes_back_or_is_made() -> None:
    made = ask(ScriptedFrontend("Hi"), CHAT, BODY).headers["x-request-id"]
    assert made.startswith("req-") and len(made) == 36
    for given, kept in (("my-id.1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)):
        answer = ask(ScriptedFrontend("Hi"), CHAT, BODY, headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) == kept
    assert ask(ScriptedFrontend("Hi"), "/nothing").headers["x-request-id"]


def test_more_requests_at_a_time_than_allowed_are_429() -> None:
    frontend = ScriptedFrontend(wait := asyncio.Event(), "Hi")
    app = make_app(frontend, max_concurrent_requests=2)

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            waiting = [asyncio.ensure_future(client.post(CHAT, json=BODY)) for _ in range(2)]
            while len(frontend.submitted) < 2:
                await asyncio.sleep(0)
            refused = await client.post(CHAT, json=BODY)
            assert error_of(refused)["code"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
            probe = await client.get("/health")
            wait.set()
            answers = await asyncio.gather(*waiting)
            after = await client.post(CHAT, json=BODY)
            return [r.status_code for r in (refused, probe, *answers, after)]

    assert asyncio.run(run()) == [429, 200, 200, 200, 200]


def test_the_log_has_a_line_for_each_request_and_nothing_of_what_was_said(
    log: pytest.LogCaptureFixture,
) -> None:
    secret = "my deepest secret"
    body = {"messages": [{"role": "user", "content": secret}], "user": secret}
    answer = ask(ScriptedFrontend(secret), CHAT, body)
    request_id = answer.headers["x-request-id"]
    lines = [line for line in log.messages if line.startswith(request_id)]
    assert len(lines) == 1
    assert f"POST '{CHAT}' 200" in lines[0] and "3+1 tokens" in lines[0]
    ask(ScriptedFrontend(secret), CHAT, {**body, "temperature": -1})
    ask(ScriptedFrontend(secret), CHAT, {**body, "n": secret})
    assert secret not in log.text


def test_a_line_of_the_log_is_one_line(log: pytest.LogCaptureFixture) -> None:
    ask(ScriptedFrontend("Hi"), "/a%0Ab%1b[31m")
    assert all("\n" not in line and "\x1b" not in line for line in log.messages)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_listening_beyond_this_machine_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        ServerArgs("m", server_host=host)
    assert ServerArgs("m", server_host=host, api_key=KEY).server_host == host
    assert ServerArgs("m", server_host=host, insecure_bind=True).server_host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_alone_needs_none(host: str) -> None:
    assert ServerArgs("m", server_host=host).server_host == host


def test_a_key_is_not_shown() -> None:
    assert KEY not in repr(ServerArgs("m", api_key=KEY))
    for bad in ("", " ", "a b", "ä", 5):
        with pytest.raises(ConfigError, match="--api-key"):
            ServerArgs("m", api_key=bad)  # type: ignore[arg-type]
