"""Help and mistakes: one clear line for each, before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from minisgl.cli.options import parse_bytes

from tests.cli.scripted import ScriptedLLM, exit_code


def test_help_of_every_command_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["generate", "--help"], ["chat", "--help"], ["bench", "-h"]):
        assert exit_code(*argv) == 0
        assert "examples:\n  minisgl " in capsys.readouterr().out
    assert exit_code("demo", "-h") == 0


def test_the_help_lists_the_environment_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    assert "\n  MINISGL_CACHE_DIR  " in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.startswith("minisgl 0.")


MISTAKES = [
    (["nothing"], "nothing"),
    (["generate", "x", "--max-token", "5"], "--max-token"),
    (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
    (["generate", "x", "--max-tokens", "0"], "--max-tokens"),
    (["generate", "x", "--temperature", "-1"], "--temperature"),
    (["generate", "x", "--temperature", "nan"], "--temperature"),
    (["generate", "x", "--top-p", "0"], "--top-p"),
    (["generate", "x", "--top-k", "0"], "--top-k"),
    (["generate", "x", "--min-p", "2"], "--min-p"),
    (["generate", "x", "--seed", str(2**70)], "--seed"),
    (["generate", "x", "--stop", ""], "--stop"),
    (["generate", "x", "--threads", "-1"], "--threads"),
    (["generate", "x", "--page-size", "0"], "--page-size"),
    (["generate", "x", "--num-pages", "0"], "--num-pages"),
    (["generate", "x", "--kv-memory", "lots"], "--kv-memory"),
    (["generate", "x", "--kv-memory", "0"], "--kv-memory"),
    (["generate", "x", "--memory-ratio", "3"], "--memory-ratio"),
    (["generate", "x", "--max-running-requests", "0"], "--max-running-requests"),
    (["generate", "x", "--max-seq-len-override", "1"], "--max-seq-len-override"),
    (["generate", "x", "--max-prefill-length", "0"], "--max-prefill-length"),
    (["generate", "x", "--cache-type", "lru"], "--cache-type"),
    (["generate", "x", "--share-prefixes", "-1"], "--share-prefixes"),
    (["generate", "x", "--admission", "bold"], "--admission"),
    (["generate", "x", "--admission-share", "0.5"], "--admission"),
    (["generate", "x", "--admission-share", "half"], "--admission-share"),
    (["generate", "x", "--mixed-chunk", "-1"], "--mixed-chunk"),
    (["generate", "x", "--max-prefill-streak", "-1"], "--max-prefill-streak"),
    (["generate", "x", "--queue-order", "lifo"], "--queue-order"),
    (["generate", "x", "--max-overtaken", "-1"], "--max-overtaken"),
    (["generate", "x", "--max-queued-requests", "-1"], "--max-queued-requests"),
    (["generate", "x", "--device", "tpu"], "--device"),
    (["generate", "x", "--model", ""], "--model"),
    (["generate", "x", "--system", "s"], "--chat"),
    (["generate", "x", "--template-arg", "a=1"], "--chat"),
    (["generate", "x", "--chat", "--template-arg", "a"], "--template-arg"),
    (["generate", "x", "--sampling-defaults", "mine"], "--sampling-defaults"),
    (["generate", "x", "--revision", ""], "--revision"),
    (["generate", "x", "-f", "y"], "--file"),
    (["generate", "x", ""], "PROMPT 2 of 2 is empty"),
    (["generate", "x", "--kv-memory", "-1G"], "--flag=-value"),
    (["generate", "x", "--kv-memory=-1G"], "--kv-memory must"),
    (["generate", "-f", "/no/such/file"], "--file: /no/such/file"),
    (["generate", "-f", "/"], "--file: /"),
    (["chat", "--top-p", "7"], "--top-p"),
    (["demo", "--page-size", "-2"], "--page-size"),
    (["bench"], "COMMAND"),
    (["bench", "serve", "--what"], "minisgl bench serve: unrecognized arguments: --what"),
    (["bench", "serve", "--url", "ftp://x"], "'ftp://x' is no address"),
    (["bench", "serve", "--url", "http://h:x"], "'http://h:x' is no address"),
    (["bench", "serve", "--url", "http://h/v1?a=b"], "is no address"),
    (["bench", "serve", "--api-key", "a\nb"], "API key"),
    (["bench", "serve", "--users", "0"], "--users"),
    (["bench", "serve", "--users", "5000"], "--users must be at most"),
    (["bench", "serve", "--users", "2", "--rate", "2"], "--users or --rate"),
    (["bench", "serve", "--rate", "nan"], "--rate"),
    (["bench", "serve", "--rate", "inf", "--duration", "3"], "--rate inf"),
    (["bench", "serve", "--requests", "-1"], "--requests"),
    (["bench", "serve", "--warmup", "-1"], "--warmup"),
    (["bench", "serve", "--timeout", "0"], "--timeout"),
    (["bench", "serve", "--temperature", "nan"], "--temperature"),
    (["bench", "serve", "--input-tokens", "9-3"], "--input-tokens"),
    (["bench", "serve", "--input-tokens", "5", "--shared-prefix", "6"], "--shared-prefix"),
    (["bench", "serve", "--output-tokens", "x"], "--output-tokens"),
    (["bench", "serve", "--prompts", "/no/such/file"], "--prompts: /no/such/file: No such"),
    (["bench", "serve", "--prompts", "x", "--input-tokens", "5"], "--input-tokens"),
    (["bench", "serve", "--prompts", "x", "--output-tokens", "5-6"], "--output-tokens"),
    (["bench", "serve", "--extra-body", "{"], "--extra-body"),
    (["bench", "serve", "--extra-body", "[1]"], "--extra-body"),
    (["bench", "serve", "--api", "images"], "--api"),
    (["bench", "offline", "--requests", "0"], "--requests"),
    (["bench", "offline", "--page-size", "0"], "--page-size"),
]


@pytest.mark.parametrize(("argv", "named"), MISTAKES, ids=lambda v: "_".join(v)[:50])
def test_a_mistake_is_one_line_that_names_the_flag(
    argv: list[str], named: str, scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err and err.startswith("minisgl")
    assert scripted == []  # found before anything was loaded


def test_a_model_that_is_not_there_is_one_line_and_code_1(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "x", "--model", "missing") == 1
    err = capsys.readouterr().err
    assert err == "minisgl: there is no model at 'missing': pass a folder\n"


def test_no_prompt_at_all_is_a_mistake(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for data in (b"", b"\n"):
        piped(data)
        assert exit_code("generate") == 2
        assert "there is no prompt" in capsys.readouterr().err


def test_a_refused_prompt_is_one_line_and_code_1(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "too-long") == 1
    assert capsys.readouterr().err == "minisgl: the prompt has too many tokens\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512M", 512 << 20), ("1.5GiB", 3 << 29), (" 4g ", 4 << 30), ("7KB", 7 << 10)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-tokens", "0"], "minisgl: --max-tokens must be in 1 to "),
        (["--top-p", "0"], "minisgl: --top-p must be above 0; for greedy use temperature 0\n"),
        (["--stop", ""], "minisgl: --stop must not be an empty text\n"),
        (["--kv-memory", "0"], "minisgl: --kv-memory must be a size of 1 byte to 8 EiB, such as "),
        (["--page-size", "0"], "minisgl: --page-size must be a whole number of 1 to "),
        (["--max-tokens", "1e9"], "minisgl generate: --max-tokens: must be a whole number, not "),
        (["--top-p", "x"], "minisgl generate: --top-p: must be a number, not 'x'"),
    ],
)
def test_a_mistake_names_its_flag_once(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "x", *argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(said) and err.count(argv[0]) == 1
    assert argv[0][2:].replace("-", "_") + " " not in err.replace(argv[0], "")


def test_no_prompt_on_a_terminal_is_a_mistake(
    scripted: list[ScriptedLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert exit_code("generate") == 2
    assert "there is no prompt" in capsys.readouterr().err
    assert scripted == []


def test_the_number_of_a_prompt_is_told_where_there_are_several(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "too-long", "b") == 1
    assert capsys.readouterr().err == "minisgl: prompt 0: the prompt has too many tokens\n"
    assert exit_code("generate", "-q", "fail") == 1
    assert capsys.readouterr().err == "minisgl: the forward pass failed\n"
