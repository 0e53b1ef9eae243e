"""`minisgl chat` on a scripted model, on a pipe and on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from tests.cli.scripted import ScriptedLLM, exit_code
from tests.llm.tiny import write_model


def test_a_chat_on_a_pipe_answers_each_line_and_remembers(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped(b"hello\n\nagain\n")
    assert exit_code("chat", "-q", "--system", "s") == 0
    assert [call[0] for call in scripted[0].calls] == [
        ["system:s user:hello"],
        ["system:s user:hello assistant:SYSTEM:S USER:HELLO user:again"],
    ]
    assert capsys.readouterr().out.startswith("SYSTEM:S USER:HELLO\n")


def test_the_commands_of_a_chat(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped(b"a\n/reset\nb\n/system be brief\nc\n/system\nd\n/help\n/what\n/exit\nnever\n")
    assert exit_code("chat", "-q") == 0
    assert [call[0][0] for call in scripted[0].calls] == [
        "user:a",
        "user:b",
        "system:be brief user:c",
        "user:d",
    ]
    err = capsys.readouterr().err
    assert "/reset          forget" in err and "there is no command /what" in err


def test_ctrl_c_on_a_pipe_ends_the_session(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped(b"one interrupt two three\nmore\n")
    assert exit_code("chat", "-q") == 130
    assert capsys.readouterr().out == "USER:ONE INTERRUPT \n"
    assert len(scripted[0].calls) == 1 and scripted[0].was_shut_down


def test_ctrl_c_on_a_terminal_stops_an_answer_and_keeps_the_session(
    scripted: list[ScriptedLLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with create_pipe_input() as terminal, create_app_session(terminal, DummyOutput()):
        terminal.send_text("one interrupt two three\rmore\r\x04")
        assert exit_code("chat", "-q") == 0
    assert capsys.readouterr().out.splitlines()[0] == "USER:ONE INTERRUPT "
    assert scripted[0].calls[1][0][0].endswith("assistant:USER:ONE INTERRUPT  user:more")


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ("hello\rmore\r\x04", 2),  # Ctrl-D ends
        ("hello\r\x03more\r\x04", 2),  # Ctrl-C clears the line
        ("hello\r\x03\x03", 1),  # twice in a row ends
        ("hello\r/exit\r", 1),
    ],
)
def test_a_chat_on_a_terminal(
    keys: str,
    asked: int,
    scripted: list[ScriptedLLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with create_pipe_input() as terminal, create_app_session(terminal, DummyOutput()):
        terminal.send_text(keys)
        assert exit_code("chat", "-q") == 0
    assert len(scripted[0].calls) == asked
    out, err = capsys.readouterr()
    assert out.startswith("USER:HELLO\n") and "Ctrl-D ends the session" in err


@pytest.mark.parametrize("bad", ["too-long", "this will fail"])
def test_a_question_that_fails_is_forgotten_and_the_session_goes_on(
    bad: str,
    scripted: list[ScriptedLLM],
    piped: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    piped(f"{bad}\nfine\n".encode())
    assert exit_code("chat", "-q") == 1
    assert scripted[0].calls[1][0] == ["user:fine"]
    assert capsys.readouterr().err.count("minisgl: the ") == 1


@pytest.mark.parametrize(
    ("lines", "asked"),
    [("refuse\nrefuse\nfine\n", 0), ("fine\ntoo-long\ntoo-long\nfine\n", 2)],
)
def test_an_error_that_no_later_line_can_cure_ends_a_piped_chat(
    lines: str,
    asked: int,
    scripted: list[ScriptedLLM],
    piped: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    piped(lines.encode())
    assert exit_code("chat", "-q") == 1
    assert len(scripted[0].calls) == asked
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_model_without_a_chat_template_is_told_before_the_greeting(
    scripted: list[ScriptedLLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert exit_code("chat", "--model", "no-template") == 1
    assert capsys.readouterr() == ("", "minisgl: this model has no chat template\n")


def test_a_real_model_without_a_chat_template_cannot_chat(
    tmp_path: Path, piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "plain")
    for template in (None, "{% for %}"):
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        piped(b"a\nb\n")
        assert exit_code("chat", "--model", str(folder), "-q") == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("chat template") == len(err.splitlines()) == 1


def test_input_that_is_not_utf8_is_refused(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for bad in (b"a\xff\nmore\n", b"a\xc3"):
        piped(b"fine\n" + bad)
        assert exit_code("chat", "-q") == 2
        out, err = capsys.readouterr()
        assert out == "USER:FINE\n"
        assert err.startswith("minisgl: standard input is not UTF-8 text: ")


def test_a_long_line_is_not_cut_within_a_character(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.shell.repl.MAX_LINE_BYTES", 4)
    piped("aaaé\n".encode())
    assert exit_code("chat", "-q") == 0
    assert scripted[0].calls[1][0][0].endswith("user:é")


def test_the_shell_takes_its_defaults_from_the_environment(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None]
) -> None:
    from minisgl.env import ENV

    ENV.SHELL_MAX_TOKENS.value, ENV.SHELL_TEMPERATURE.value = 5, 0.25
    for argv in (["chat"], ["--shell", "--model", "default"], ["--model", "m", "--shell-mode"]):
        piped(b"hi\n")
        assert exit_code(*argv) == 0
    for llm in scripted:
        assert (llm.calls[0][1].max_tokens, llm.calls[0][1].temperature) == (5, 0.25)
    piped(b"hi\n")
    assert exit_code("chat", "--max-tokens", "7") == 0
    assert scripted[-1].calls[0][1].max_tokens == 7


def test_an_answer_that_was_cut_says_why(
    scripted: list[ScriptedLLM],
    piped: Callable[[bytes], None],
    on_terminal: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    piped(b"a cut b\n")
    assert exit_code("chat", "-q") == 0
    hint = "(cut: the context is full; /reset begins anew)"
    assert capsys.readouterr() == ("USER:A CUT\n", f"\x1b[2m{hint}\x1b[0m\n")
    monkeypatch.setenv("NO_COLOR", "1")
    piped(b"a cut b\n")
    assert exit_code("chat", "-q", "--max-tokens", "2") == 0
    assert capsys.readouterr().err == "(cut at --max-tokens 2)\n"


def test_a_conversation_that_is_too_long_names_the_way_out_first(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped(b"too-long\nfine\ntoo-long\n")
    assert exit_code("chat", "-q") == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "minisgl: the prompt has too many tokens"  # of this message: no reset helps
    assert second.startswith("minisgl: /reset begins anew, this conversation cannot go on: the pr")


def test_a_long_wait_in_a_chat_is_told(
    scripted: list[ScriptedLLM],
    piped: Callable[[bytes], None],
    on_terminal: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_terminal()
    piped(b"\xef\xbb\xbfslow start\n")  # begins as an editor on Windows begins a file
    assert exit_code("chat") == 0
    assert scripted[0].calls[0][0] == ["user:slow start"]
    out, err = capsys.readouterr()
    assert out == "USER:SLOW START\n"
    assert err.split("\r")[1] == "reading the prompt: 2 tokens, 0 s"
    assert err.split("\r")[-1].startswith("(2 tokens in ")


def test_a_variable_without_effect_is_told_before_the_first_question(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped(b"")
    assert exit_code("chat", "--template-arg", "mood=1") == 0
    assert "minisgl: --template-arg mood has no effect: " in capsys.readouterr().err
