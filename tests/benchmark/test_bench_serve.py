"""`minisgl bench serve` against a scripted server: real HTTP on this machine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from minisgl.benchmark import HttpClient, Load, Plan, RepeatedRequests, Request
from minisgl.benchmark.load import PAUSE_AFTER_ERROR_SECONDS
from minisgl.utils.openai_api import MAX_SHOWN_CHARS, Address, ServerError

from tests.cli.scripted import exit_code
from tests.openai_server import ScriptedServer, scripted_server

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as made:
        yield made


@pytest.fixture
def bench(server: ScriptedServer, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run the command on lines as prompts; its exit code and its JSON."""

    def run(prompts: list[str], *flags: str) -> tuple[int, dict[str, Any]]:
        file, result = tmp_path / "prompts.txt", tmp_path / "result.json"
        file.write_text("\n".join(prompts))
        argv = ["--url", server.url, "--prompts", str(file), "--json", str(result), *flags]
        code = exit_code("bench", "serve", *argv)
        return code, json.loads(result.read_text())

    return run


Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_users_keep_their_connections_and_every_token_is_counted(
    api: str, bench: Bench, server: ScriptedServer, capsys: Captured
) -> None:
    prompts = [f"one two w{i}" for i in range(30)]
    code, result = bench(prompts, "--users", "3", "--api", api, "--output-tokens", "2")
    assert code == 0
    summary = result["summary"]
    assert (summary["num_complete"], summary["errors"], summary["num_cut"]) == (30, {}, 0)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (90, 60)
    assert (summary["cached_tokens"], summary["is_counted_by_server"]) == (30, True)
    assert sorted(r["index"] for r in result["requests"]) == list(range(30))
    assert {r["finish_reason"] for r in result["requests"]} == {"length"}
    assert server.num_connections == 3  # the warm-up's went to a user
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    assert server.paths == ["/v1/models", *[path] * 31]
    assert server.bodies[0]["max_tokens"] == 4  # the warm-up
    assert all(body["model"] == "scripted" for body in server.bodies)
    out = capsys.readouterr().out
    assert out.startswith("30 requests in ") and "first token" in out and "p99" in out


@pytest.mark.parametrize(
    ("word", "kind", "said"),
    [
        ("busy", "429", "the server is busy, try again in 7 s: too many requests (429)"),
        ("refuse", "400", "the server refuses: temperature must be in 0 to 100 (400)"),
        ("break", "500", "the server fails: the request failed (request id x) (500)"),
        ("a fail b", "stream", "the server gave up: the engine is gone"),
        ("a vanish", "stream", "the server closed the connection in mid-answer"),
        ("a nonsense", "stream", "the server sent an event that is no chunk of an answer"),
        ("garbage", "stream", "the server's answer is not HTTP/1.1"),
    ],
)
def test_errors_are_counted_by_kind_and_told_in_the_servers_words(
    word: str, kind: str, said: str, bench: Bench, capsys: Captured
) -> None:
    code, result = bench(["fine", word, "good"], "--users", "1")
    assert code == 0
    assert result["summary"]["errors"] == {kind: 1} and result["summary"]["num_complete"] == 2
    out, err = capsys.readouterr()
    assert err == f"minisgl: request 1: {said}\n" and f"1 failed ({kind}: 1)" in out
    assert result["requests"][1]["message"] == said


def test_a_stream_may_end_without_done_and_count_no_tokens(bench: Bench, capsys: Captured) -> None:
    code, result = bench(["a mute b", "a cutless"])
    assert (code, result["summary"]["num_complete"]) == (0, 2)
    assert result["summary"]["output_tokens"] == 5
    assert "the server counts no tokens" in capsys.readouterr().out


def test_an_answer_that_takes_too_long_is_a_timeout_and_its_connection_is_closed(
    bench: Bench, server: ScriptedServer
) -> None:
    code, result = bench(["wait a", "fine"], "--users", "1", "--timeout", "0.3")
    assert (code, result["summary"]["errors"]) == (0, {"timeout": 1})
    server.release.set()
    assert server.num_connections == 2


def test_all_that_arrive_at_once_are_under_way_at_once(
    bench: Bench, server: ScriptedServer
) -> None:
    def release_when_all_wait() -> None:
        for _ in range(50):
            server.waiting.acquire(timeout=20)
        server.release.set()

    releaser = threading.Thread(target=release_when_all_wait)
    releaser.start()
    code, result = bench([f"a wait b{i}" for i in range(50)], "--rate", "inf")
    releaser.join()
    assert (code, result["summary"]["num_complete"]) == (0, 50)


def test_requests_beyond_the_bound_are_not_sent_and_counted(
    bench: Bench, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.benchmark.load.MAX_OPEN_REQUESTS", 2)

    def release_when_two_wait() -> None:
        for _ in range(2):
            server.waiting.acquire(timeout=20)
        server.release.set()

    releaser = threading.Thread(target=release_when_two_wait)
    releaser.start()
    code, result = bench(["a wait"], "--rate", "inf", "--requests", "5")
    releaser.join()
    assert (code, result["summary"]["num_complete"]) == (0, 2)
    assert result["summary"]["errors"] == {"not sent": 3}


def test_waiting_counts_from_when_a_request_was_due(server: ScriptedServer) -> None:
    """A client that lags behind its own timetable must not make the server look fast."""

    async def run() -> Load:
        plan = Plan(RepeatedRequests([Request("a b", None, 2)]), True, rate=1e6, num_requests=3)
        load = Load(HttpClient(Address.parse(server.url)), plan)
        asyncio.get_running_loop().call_soon(threading.Event().wait, 0.2)  # a hiccup
        await load.run()
        return load

    load = asyncio.run(run())
    assert all((record.seconds_to_first or 0) >= 0.15 for record in load.records)


def test_ctrl_c_prints_what_was_measured_so_far(
    bench: Bench, server: ScriptedServer, capsys: Captured
) -> None:
    code, result = bench(["fine", "a b interrupt wait c", "never"], "--users", "1")
    assert code == 130
    summary = result["summary"]
    assert (summary["num_complete"], summary["num_cut"], summary["num_requests"]) == (1, 1, 2)
    assert "1 cut by the end of the run" in capsys.readouterr().out
    server.release.set()
    assert server.gone.acquire(timeout=20)  # the cut request's connection was closed


def test_ctrl_c_with_requests_that_arrive_at_a_rate_waits_for_none(bench: Bench) -> None:
    prompts = ["a wait", "b wait", "interrupt wait"]  # a second Ctrl-C would end the process
    code, result = bench(prompts, "--rate", "1000", "--requests", "3")
    assert (code, result["summary"]["num_complete"]) == (130, 0)
    assert result["summary"]["num_cut"] == result["summary"]["num_requests"] == 3


def test_a_run_ends_by_the_clock(bench: Bench) -> None:
    for flags in (["--users", "2"], ["--rate", "100"]):
        code, result = bench(["a"], "--duration", "0.3", *flags)
        assert (code, result["summary"]["errors"]) == (0, {})
        assert result["summary"]["num_complete"] > 3
        assert all(r["due_s"] < 0.3 for r in result["requests"])


def test_the_key_is_sent_and_told_nobody(tmp_path: Path, capsys: Captured) -> None:
    with scripted_server(api_key="secret-key") as server:
        argv = ["bench", "serve", "--url", server.url, "--requests", "2", "--json", "-"]
        assert exit_code(*argv) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("minisgl: the server wants another API key, --api-key or MINISGL_API")
        assert exit_code(*argv, "--api-key", "secret-key") == 0
        assert set(server.authorizations[1:]) == {"Bearer secret-key"}
        out = capsys.readouterr().out
    assert "secret-key" not in out and json.loads(out)["summary"]["num_complete"] == 2


def test_no_server_is_one_line(capsys: Captured) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert exit_code("bench", "serve", "--url", url) == 1
    out, err = capsys.readouterr()
    said = f"minisgl: no server answers at {url} (Connection refused); `minisgl serve` starts one\n"
    assert (out, err) == ("", said)


def test_users_of_a_server_that_is_gone_do_not_spin_and_are_counted() -> None:
    with scripted_server() as other:
        address = Address.parse(other.url)

    async def run() -> Load:
        plan = Plan(RepeatedRequests([Request("a", None, 2)]), True, users=2, num_requests=4)
        load = Load(HttpClient(address), plan)
        await load.run()
        return load

    load = asyncio.run(run())
    assert [record.error for record in load.records] == ["connection"] * 4
    assert load.end - load.start >= 2 * PAUSE_AFTER_ERROR_SECONDS


def test_the_same_seed_asks_for_the_same_again(server: ScriptedServer) -> None:
    argv = ["bench", "serve", "--url", server.url, "--requests", "6", "--users", "1", "-q"]
    argv += ["--input-tokens", "5-9", "--shared-prefix", "2", "--output-tokens", "2-4"]
    for seed in ("1", "1", "2"):
        assert exit_code(*argv, "--seed", seed) == 0
    first, again, other = server.bodies[1:7], server.bodies[8:14], server.bodies[15:]
    assert first == again != other


def answering(data: bytes, num_idle: int = 0) -> tuple[str, threading.Thread]:
    """A server that reads a request of a connection, sends `data` and closes.

    num_idle: so many connections it leaves open, and closes each at its second request.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(max(1, num_idle)):
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):
                connection.recv(1 << 16)
                connection.sendall(data)
                if num_idle:
                    connection.recv(1 << 16)
        listener.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


def test_a_connection_that_had_been_idle_for_too_long_is_made_anew() -> None:
    body = b'{"data": [{"id": "a"}]}'
    url, thread = answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (23, body), 2)

    async def run() -> list[bytes]:
        client = HttpClient(Address.parse(url))
        found = [await client.get("/models"), await client.get("/models")]
        client.close()
        return found

    assert asyncio.run(run()) == [body, body]
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("head", "data", "said"),
    [
        (b"content-length: 2000000", b"data: " + b"x" * 1_999_994, "an event that is too long"),
        (b"content-length: 400", b"x" * 300, "closed the connection in mid-answer"),
        (b"transfer-encoding: chunked", b"zz\r\n", "not HTTP/1.1"),
    ],
)
def test_an_answer_beyond_bounds_is_an_error(head: bytes, data: bytes, said: str) -> None:
    url, _ = answering(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + head + b"\r\n\r\n" + data)

    async def run() -> None:
        lines: list[bytes] = []
        await HttpClient(Address.parse(url)).stream("/x", b"{}", lambda line, _: lines.append(line))

    with pytest.raises(ServerError, match=said):
        asyncio.run(run())


def test_a_refusal_of_any_length_and_form_is_one_line() -> None:
    for body in (b"<html>", b'{"error": "text"}', b'{"detail": []}', b"\xff", b""):
        head = b"HTTP/1.1 418 No\r\ncontent-length: %d\r\n\r\n" % len(body)
        url, _ = answering(head + body)
        with pytest.raises(ServerError, match=r"the server refuses: .* \(418\)"):
            asyncio.run(HttpClient(Address.parse(url)).get("/models"))
    message = b'{"error": {"message": "%s"}}' % (b"x" * (MAX_SHOWN_CHARS + 1))
    head = b"HTTP/1.1 418 No\r\ncontent-length: %d\r\n\r\n" % len(message)
    with pytest.raises(ServerError, match=rf"refuses: x{{{MAX_SHOWN_CHARS}}} \(418\)"):
        asyncio.run(HttpClient(Address.parse(answering(head + message)[0])).get("/models"))
    url, _ = answering(b"HTTP/1.1 500 No\r\ncontent-length: 2000000\r\n\r\n" + b"x" * 1_500_000)
    with pytest.raises(ServerError, match="too long"):
        asyncio.run(HttpClient(Address.parse(url)).get("/models"))


def test_a_server_without_tls_is_told(server: ScriptedServer) -> None:
    address = Address.parse(server.url.replace("http:", "https:"))
    with pytest.raises(ServerError, match="no server answers at https://"):
        asyncio.run(HttpClient(address).get("/models"))


def test_a_bar_is_drawn_on_a_terminal_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    code, _ = bench(["a", "b"])
    assert code == 0 and "of 2 done" in capsys.readouterr().err
    assert bench(["a", "b"], "-q")[0] == 0
    assert capsys.readouterr().err == ""
