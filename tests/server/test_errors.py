"""Every failure as its client sees it, before the first token and after; and bad HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from minisgl.message import UserReply
from minisgl.params import ErrorKind, FinishReason
from minisgl.server import bounds
from minisgl.server.frontend import RequestFailed, State, Unavailable

from .scripted import CHAT, HELLO, ScriptedFrontend, ask, ask_app, error_of, events, make_app

SECRET = "the secret of what went wrong in file.py"
KINDS: list[tuple[Exception, int, str | None]] = [
    (RequestFailed(ErrorKind.INVALID, "seed is odd", "seed"), 400, None),
    (RequestFailed(ErrorKind.OVERLOADED, SECRET), 429, "overloaded"),
    (RequestFailed(ErrorKind.TIMEOUT, SECRET), 504, "timeout"),
    (RequestFailed(ErrorKind.FAILED, SECRET), 500, "internal_error"),
    (Unavailable("the engine has failed"), 503, "unavailable"),
    (ZeroDivisionError(SECRET), 500, "internal_error"),
]
PATHS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO}),
    (CHAT, {"messages": HELLO, "n": 2}),
    ("/v1/completions", {"prompt": "x"}),
    ("/generate", {"prompt": "x"}),
    ("/v1/responses", {"input": "x"}),
]


@pytest.mark.parametrize(("error", "status", "code"), KINDS)
@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_its_status(
    error: Exception, status: int, code: str | None, path: str, body: dict[str, Any], stream: bool
) -> None:
    response = ask(ScriptedFrontend(error), path, {**body, "stream": stream})
    assert response.status_code == status
    told = error_of(response)
    assert told["code"] == code
    assert SECRET not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))
    if status == 500:
        assert response.headers["x-request-id"] in told["message"]


@pytest.mark.parametrize(("path", "body"), PATHS[:4])
def test_a_failure_in_a_stream_is_its_last_event(path: str, body: dict[str, Any]) -> None:
    frontend = ScriptedFrontend("a", "b", RequestFailed(ErrorKind.FAILED, SECRET))
    response = ask(frontend, path, {**body, "stream": True})
    assert response.status_code == 200
    told = events(response)
    assert told[-1]["error"]["code"] == "internal_error"
    assert SECRET not in response.text
    assert "[DONE]" not in told
    assert ask(frontend, path, body).status_code == 500


def test_a_bug_in_a_stream_is_its_last_event_and_closes_nothing_else() -> None:
    frontend = ScriptedFrontend("a", ZeroDivisionError(SECRET))
    told = events(ask(frontend, CHAT, {"messages": HELLO, "stream": True}))
    assert told[-1]["error"]["code"] == "internal_error"
    assert SECRET not in str(told)


def test_a_failure_in_a_response_is_an_event_of_its_own() -> None:
    frontend = ScriptedFrontend("a", "b", RequestFailed(ErrorKind.FAILED, SECRET))
    told = events(ask(frontend, "/v1/responses", {"input": "x", "stream": True}))
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["status"] == "failed"
    assert told[-1]["response"]["error"]["code"] == "internal_error"


def test_the_log_says_what_the_client_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("minisgl").propagate = True
    try:
        frontend = ScriptedFrontend(RequestFailed(ErrorKind.FAILED, SECRET))
        response = ask(frontend, CHAT, {"messages": HELLO})
    finally:
        logging.getLogger("minisgl").propagate = False
    request_id = response.headers["x-request-id"]
    assert any(SECRET in line and request_id in line for line in caplog.messages)


def test_what_fails_one_choice_ends_the_others() -> None:
    frontend = ScriptedFrontend("a", RequestFailed(ErrorKind.FAILED, "no"))
    forever = asyncio.Event()
    first = frontend.generate

    async def generate(msg: Any) -> Any:
        frontend.script = ("a", forever) if msg.uid == 1 else frontend.script[:2]
        if msg.uid > 1:
            frontend.script = ("a", RequestFailed(ErrorKind.FAILED, "no"))
        async for reply in first(msg):
            yield reply

    frontend.generate = generate  # type: ignore[method-assign]
    assert ask(frontend, CHAT, {"messages": HELLO, "n": 2}).status_code == 500
    assert frontend.aborted == [1]


def test_a_prompt_without_room_is_told_with_its_code_and_the_clients_field() -> None:
    text = "the prompt has 9 tokens and the context holds 8, which leaves no room for an answer"
    frontend = ScriptedFrontend(RequestFailed(ErrorKind.INVALID, text, "prompt"))
    told = error_of(ask(frontend, CHAT, {"messages": HELLO}))
    assert (told["param"], told["code"]) == ("messages", "context_length_exceeded")
    assert told["message"] == text
    assert error_of(ask(frontend, "/v1/completions", {"prompt": "x"}))["param"] == "prompt"
    assert error_of(ask(frontend, "/v1/responses", {"input": "x"}))["param"] == "input"


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"text"',
    b"{}x",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "user": "\\ud800"}',
    b'{"prompt": "x", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "temperature": NaN}',
    b"prompt=x&max_tokens=5",
    b'{"prompt": "x",}',
    b"{'prompt': 'x'}",
    b'{"prompt": "\x00"}',
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:24]))
@pytest.mark.parametrize("path", [path for path, _ in PATHS[1:]] + ["/tokenize", "/detokenize"])
def test_a_body_that_is_no_request_is_a_400(path: str, body: bytes) -> None:
    frontend = ScriptedFrontend("Hi")
    response = ask(frontend, path, content=body, method="POST")
    assert response.status_code == 400
    error_of(response)
    assert frontend.submitted == []


def test_a_body_that_is_too_large_is_refused_by_its_length_and_by_its_bytes() -> None:
    frontend = ScriptedFrontend("Hi")
    text = json.dumps({"prompt": "x", "user": "x" * bounds.MAX_BODY_BYTES})
    response = ask(frontend, "/v1/completions", content=text)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"

    async def chunks() -> Any:
        for _ in range(bounds.MAX_BODY_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    response = ask(frontend, "/v1/completions", content=chunks(), method="POST")
    assert response.status_code == 413
    padded = b'{"prompt": "x"}'.rjust(bounds.MAX_BODY_BYTES)
    assert ask(frontend, "/v1/completions", content=padded).status_code == 200
    for length in ("-1", "x", "9" * 400):
        response = ask(
            frontend, "/generate", content=b"{}", headers={"content-length": length}, method="POST"
        )
        assert response.status_code in (400, 413)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1", 405),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/generate", 405),
        ("GET", "/v1/models/../..", 404),
        ("GET", "/%00%ff", 404),
        ("GET", "/v1/models/%F0%9F", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/images/generations", 404),
    ],
)
def test_unknown_paths_and_methods_have_the_shape_of_every_error(
    method: str, path: str, status: int
) -> None:
    frontend = ScriptedFrontend("Hi")
    body = b"{}" if method in ("POST", "PUT") else None
    response = ask_app(make_app(frontend, served_model_name="m"), path, method=method, content=body)
    assert response.status_code == status, response.text
    error_of(response)
    if status == 405:
        assert response.headers["allow"]


def test_embeddings_are_said_not_to_be_there() -> None:
    response = ask(ScriptedFrontend(), "/v1/embeddings", {"input": "x"})
    assert "no embeddings" in error_of(response)["message"]


def test_any_model_is_taken_unless_a_name_was_given() -> None:
    frontend = ScriptedFrontend("Hi")
    body = {"messages": HELLO, "model": "gpt-x"}
    assert ask(frontend, CHAT, body).json()["model"] == "gpt-x"
    app = make_app(frontend, served_model_name="small")
    assert ask_app(app, CHAT, {"messages": HELLO}).status_code == 200
    assert ask_app(app, CHAT, {**body, "model": "small"}).status_code == 200
    response = ask_app(app, CHAT, body)
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert ask_app(app, "/v1/models/small").json()["id"] == "small"
    assert ask_app(app, "/v1/models/gpt-x").status_code == 404
    assert [m["id"] for m in ask_app(app, "/v1/models").json()["data"]] == ["small"]
    too_long = {**body, "model": "x" * 300}
    assert ask(frontend, CHAT, too_long).status_code == 400


def test_health_tells_the_state_and_whether_requests_are_taken() -> None:
    frontend = ScriptedFrontend("Hi")
    found = {}
    for state in State:
        frontend.state = state
        answers = [ask(frontend, path) for path in ("/health", "/health/ready")]
        found[state] = tuple(answer.status_code for answer in answers)
        assert {answer.json()["status"] for answer in answers} == {state.value}
    assert found == {
        State.STARTING: (200, 503),
        State.READY: (200, 200),
        State.DRAINING: (200, 503),
        State.DEAD: (503, 503),
    }


def test_metrics_tell_of_the_engine_and_of_the_requests() -> None:
    app = make_app(ScriptedFrontend("a", "b"))
    ask_app(app, CHAT, {"messages": HELLO})
    ask_app(app, "/nothing")
    lines = ask_app(app, "/metrics").text.splitlines()
    for line in (
        "minisgl_running_requests 2.0",
        "minisgl_waiting_requests 1.0",
        'minisgl_kv_pages{state="free"} 7.0',
        'minisgl_held_requests{process="api"} 1.0',
        "minisgl_aborts_total 5.0",
        "minisgl_preemptions_total 0.0",
        'minisgl_http_requests_total{status="200"} 1.0',
        'minisgl_http_requests_total{status="404"} 1.0',
        "minisgl_time_to_first_token_seconds_count 1.0",
        "minisgl_inter_token_latency_seconds_count 1.0",
        "minisgl_request_seconds_count 1.0",
    ):
        assert line in lines


def test_tokens_and_texts_are_turned_into_each_other() -> None:
    frontend = ScriptedFrontend()
    answer = ask(frontend, "/tokenize", {"prompt": "Hi"}).json()
    assert answer == {"tokens": [72, 105], "count": 2, "max_model_len": 1024}
    assert ask(frontend, "/tokenize", {"messages": HELLO}).json()["count"] == 5
    assert ask(frontend, "/detokenize", {"tokens": [72, 105]}).json() == {"text": "Hi"}
    for body in ({}, {"prompt": "x", "messages": HELLO}, {"messages": []}):
        assert ask(frontend, "/tokenize", body).status_code == 400


def test_a_stream_that_waits_is_kept_alive_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.server.stream.KEEP_ALIVE_SECONDS", 0.02)
    app = make_app(frontend := ScriptedFrontend("a", event := asyncio.Event(), "b"))

    async def read() -> list[str]:
        """Through ASGI itself: the test's client would collect the whole answer first."""
        sent: list[str] = []
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        asked = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not asked.is_set():
                asked.set()
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message.get("body", b"").decode())
            if sent[-1] == ": keep-alive\n\n":
                event.set()

        request = httpx.Request("POST", "http://localhost/v1/completions", content=body)
        scope = {
            "type": "http",
            "method": "POST",
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": b"",
            "headers": [(key.lower(), value) for key, value in request.headers.raw],
            "server": ("localhost", 80),
            "scheme": "http",
            "http_version": "1.1",
        }
        await app(scope, receive, send)
        return sent

    sent = asyncio.run(read())
    assert sent.count(": keep-alive\n\n") == 1
    assert sent[-2].endswith("[DONE]\n\n")
    assert frontend.aborted == []


def test_an_answer_that_is_cut_says_length() -> None:
    cut = UserReply(1, "x", True, FinishReason.LENGTH, [1], 3, 0)
    answer = ask(ScriptedFrontend(cut), CHAT, {"messages": HELLO, "max_tokens": 1}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
