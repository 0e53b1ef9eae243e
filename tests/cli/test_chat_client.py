"""`minisgl chat --server`: the shell as a client of a scripted server, over real HTTP."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from minisgl.env import ENV

from tests.cli.scripted import exit_code
from tests.openai_server import ScriptedServer, scripted_server

Captured = pytest.CaptureFixture[str]
Piped = Callable[[bytes], None]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as made:
        yield made


def said(server: ScriptedServer, index: int = -1) -> list[str]:
    return [f"{m['role']}:{m['content']}" for m in server.bodies[index]["messages"]]


def test_a_chat_with_a_server_answers_each_line_and_remembers(
    server: ScriptedServer, piped: Piped, capsys: Captured
) -> None:
    piped(b"hello you\n\nagain\n/reset\nfresh\n/system be brief\nlast\n")
    assert exit_code("chat", "--server", server.url, "--system", "s") == 0
    out, err = capsys.readouterr()
    assert out == "HELLO YOU\nAGAIN\nFRESH\nLAST\n"
    assert err.startswith("(2 tokens in ") and err.count("tokens/s, first token after") == 4
    assert said(server, 1) == ["system:s", "user:hello you", "assistant:HELLO YOU", "user:again"]
    assert said(server, 2) == ["system:s", "user:fresh"]
    assert said(server, 3) == ["system:be brief", "user:last"]
    assert server.paths == ["/v1/models", *["/v1/chat/completions"] * 4]


def test_what_flags_and_environment_say_is_sent_and_nothing_else(
    server: ScriptedServer, piped: Piped
) -> None:
    sent = []
    ENV.SHELL_TOP_K.value = 20
    flags = ["--max-tokens", "7", "--temperature", "0", "--seed", "3", "--stop", "x", "--stop", "y"]
    flags += ["--model", "other", "--ignore-eos", "--template-arg", "enable_thinking=false"]
    for argv in ([], flags):
        piped(b"a\n")
        assert exit_code("chat", "-q", "--server", server.url, *argv) == 0
        sent.append({k: v for k, v in server.bodies[-1].items() if "stream" not in k})
    messages = [{"role": "user", "content": "a"}]
    common = {"messages": messages, "top_k": 20}
    assert sent[0] == {"model": "scripted", "max_tokens": 2048, "temperature": 0.6, **common}
    assert sent[1] == {
        **common,
        "model": "other",
        "max_tokens": 7,
        "temperature": 0.0,
        "seed": 3,
        "stop": ["x", "y"],
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize(
    ("line", "line_on_stderr"),
    [
        ("busy", "the server is busy, try again in 7 s: too many requests (429)"),
        ("refuse", "the server refuses: temperature must be in 0 to 100 (400)"),
        ("long", "the server refuses: the prompt of 99 tokens leaves no room in 64 (400)"),
        ("break", "the server fails: the request failed (request id x) (500)"),
        ("fail", "the server gave up: the engine is gone"),
        ("vanish", "the server closed the connection in mid-answer"),
        ("nonsense", "the server sent an event that is no chunk of an answer"),
        ("garbage", "the server closed the connection in mid-answer"),
    ],
)
def test_an_error_is_one_line_and_the_conversation_lives_on(
    line: str, line_on_stderr: str, server: ScriptedServer, piped: Piped, capsys: Captured
) -> None:
    piped(f"{line}\nfine\nmore\n".encode())
    assert exit_code("chat", "-q", "--server", server.url) == 1
    out, err = capsys.readouterr()
    assert err == f"minisgl: {line_on_stderr}\n"
    assert out.endswith("FINE\nMORE\n")
    assert said(server) == ["user:fine", "assistant:FINE", "user:more"]  # the other is forgotten


def test_an_event_beyond_the_bound_is_an_error(
    server: ScriptedServer, piped: Piped, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.shell.remote.MAX_EVENT_BYTES", 200)
    piped(f"{'long' * 50}\nfine\n".encode())
    assert exit_code("chat", "-q", "--server", server.url) == 1
    out, err = capsys.readouterr()
    assert err == "minisgl: the server sent an event that is too long\n" and "FINE" in out


def test_a_conversation_that_is_too_long_names_the_way_out(
    server: ScriptedServer, piped: Piped, capsys: Captured
) -> None:
    piped(b"fine\nlong\nnever asked\n")
    assert exit_code("chat", "-q", "--server", server.url) == 1
    err = capsys.readouterr().err
    assert err.startswith("minisgl: /reset begins anew, this conversation cannot go on: the server")
    assert len(server.bodies) == 2


def test_a_server_that_goes_away_ends_a_piped_chat_and_no_other(
    piped: Piped, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal in (False, True):
        with scripted_server() as server:

            def shut(server: ScriptedServer = server) -> None:
                server.waiting.acquire(timeout=20)
                server.shutdown()
                server.server_close()
                server.release.set()

            threading.Thread(target=shut).start()
            if not is_terminal:
                piped(b"wait a\nb\nc\n")
                assert exit_code("chat", "-q", "--server", server.url) == 1
                expected = 1
            else:
                monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
                with create_pipe_input() as keys, create_app_session(keys, DummyOutput()):
                    keys.send_text("wait a\rb\rc\r\x04")
                    assert exit_code("chat", "-q", "--server", server.url) == 0
                expected = 2
        out, err = capsys.readouterr()
        assert out.startswith("WAIT A\n")
        assert err.count(f"minisgl: no server answers at {server.url} (Conn") == expected


def test_no_server_and_a_wrong_key_are_told_before_the_greeting(
    piped: Piped, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{unused.getsockname()[1]}"
        assert exit_code("chat", "--server", url) == 1
    told = f"minisgl: no server answers at http://{url} (Connection refused); `minisgl serve`"
    assert capsys.readouterr().err == f"{told} starts one\n"
    with scripted_server(api_key="the-key") as server:
        ENV.API_KEY.value = "another"
        assert exit_code("chat", "--server", server.url) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "wrong API key (401)" in err and "another" not in err[40:]
        ENV.API_KEY.value = "the-key"
        piped(b"a\n")
        assert exit_code("chat", "-q", "--server", server.url) == 0


def test_ctrl_c_ends_a_wait_for_the_server_at_once(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with create_pipe_input() as terminal, create_app_session(terminal, DummyOutput()):
        terminal.send_text("interrupt wait\rone interrupt wait\rmore\r\x04")
        assert exit_code("chat", "-q", "--server", server.url) == 0
    assert not server.release.is_set()  # the server never went on
    out, err = capsys.readouterr()
    assert "minisgl:" not in err
    first, second, third = out.splitlines()  # the press may overtake a piece or two
    assert "INTERRUPT ".startswith(first) and "ONE INTERRUPT ".startswith(second)
    assert third == "MORE"
    remembered = [line for line in said(server) if line.startswith("assistant:")]
    assert remembered == [f"assistant:{text}" for text in (first, second) if text]


def test_ctrl_c_on_a_pipe_ends_a_session_with_a_server(
    server: ScriptedServer, piped: Piped, capsys: Captured
) -> None:
    piped(b"interrupt wait\nmore\n")
    assert exit_code("chat", "-q", "--server", server.url) == 130
    assert len(server.bodies) == 1


def test_thoughts_are_shown_and_not_remembered(
    server: ScriptedServer, piped: Piped, capsys: Captured
) -> None:
    piped(b"think so\nmore\n")
    assert exit_code("chat", "-q", "--server", server.url) == 0
    assert capsys.readouterr().out == "THINK \n\nSO\nMORE\n"
    assert said(server) == ["user:think so", "assistant:SO", "user:more"]


def test_an_answer_that_was_cut_says_why_and_a_wait_is_told(
    server: ScriptedServer, piped: Piped, on_terminal: Callable[[], None], capsys: Captured
) -> None:
    on_terminal()
    ENV.SHELL_MAX_TOKENS.value = 2
    piped(b"a b c\nd wait\n")
    release = threading.Thread(target=lambda: server.waiting.acquire(timeout=20))
    release.start()

    def go_on() -> None:
        release.join()
        server.release.wait(0.2)  # long enough for the line to be drawn
        server.release.set()

    threading.Thread(target=go_on).start()
    assert exit_code("chat", "--server", server.url) == 0
    out, err = capsys.readouterr()
    assert out == "A B \nD WAIT\n"
    assert "(cut at --max-tokens 2)" in err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--server", "ftp://x"], "'ftp://x' is no address of a server"),
        (["--server", "--page-size", "4"], "--page-size is of a model in this process"),
        (["--server", "--kv-memory", "4G", "--threads", "2"], "--threads is of a model"),
        (["--api-key", "x"], "--api-key needs --server"),
        (["--server", "--top-p", "7"], "--top-p"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], named: str, capsys: Captured) -> None:
    assert exit_code("chat", *argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and named in err
