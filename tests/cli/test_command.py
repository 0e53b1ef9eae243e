"""The real command, in its own process; the last tests run it on the default model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def test_help_and_mistakes_load_neither_torch_nor_numpy(run_python: RunPython) -> None:
    code = (
        "import sys\nfrom minisgl.cli import main\n"
        "try: main({argv})\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'rich', 'prompt_toolkit') if m in sys.modules])"
    )
    mistakes = [["x", "--top-p", "3"], ["x", "--page-size", "0"], ["x", ""], ["-f", "/no/file"], []]
    for argv in (["--help"], ["chat", "--help"], *(["generate", *rest] for rest in mistakes)):
        result = run_python("-c", code.format(argv=argv))
        assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_an_environment_variable_that_cannot_be_used_is_one_line(run_python: RunPython) -> None:
    variables = [("MINISGL_SHELL_TOP_P", "use a number"), ("MINISGL_NUM_THREADS", "use 0 for auto")]
    for name, expected in variables:
        result = run_python("-m", "minisgl", "chat", env={name: "much"})
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1
        assert f"{name}='much' cannot be used: {expected}" in result.stderr


def test_a_missing_model_shows_no_traceback(run_python: RunPython) -> None:
    result = run_python("-m", "minisgl", "generate", "x", "--model", "/no/such/model")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("minisgl: ") and "/no/such/model" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_demo_says_paris(default_model_path: Path, run_python: RunPython) -> None:
    result = run_python("-m", "minisgl", "demo")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout and "tokens/s" in result.stdout


def test_the_default_model_answers_in_json(default_model_path: Path, run_python: RunPython) -> None:
    argv = ["-m", "minisgl", "generate", "--json", "--max-tokens", "5", "-f", "-"]
    result = run_python(*argv, stdin="The capital of France is\n1, 2, 3,\n")
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(answer["token_ids"]) for answer in answers] == [5, 5]
    assert [answer["finish_reason"] for answer in answers] == ["length", "length"]
    assert "Paris" in answers[0]["text"]


def test_the_default_model_chats_on_a_pipe(default_model_path: Path, run_python: RunPython) -> None:
    argv = ["-m", "minisgl", "chat", "--temperature", "0", "--max-tokens", "12"]
    lines = "What is the capital of France? Answer in one sentence.\nWhat did I ask?\n"
    result = run_python(*argv, stdin=lines)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert result.stderr.count("tokens/s") == 2


def test_the_real_command_ends_with_a_whole_line_on_ctrl_c(
    default_model_path: Path, repo_root: Path
) -> None:
    argv = [
        sys.executable,
        "-m",
        "minisgl",
        "generate",
        "--ignore-eos",
        "--max-tokens",
        "1900",
        "a",
    ]
    environ = {**os.environ, "PYTHONPATH": str(repo_root / "python")}
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)  # it has begun to answer
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and out.endswith("\n")
    assert err.startswith("(interrupted)\n") and " tokens in " in err and err.count("\n") == 2


@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-"])
def test_the_real_command_runs_without_its_streams(stream: str, repo_root: Path) -> None:
    command = f'"$0" -m minisgl generate -f /no/such/file {stream}'
    environ = {**os.environ, "PYTHONPATH": str(repo_root / "python")}
    argv = ["sh", "-c", command, sys.executable]
    result = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120)
    said = "" if stream == "2>&-" else "minisgl: --file: /no/such/file: No such file or directory\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", said)


def test_a_second_ctrl_c_ends_the_process_in_the_middle_of_a_native_call(
    run_python: RunPython,
) -> None:
    code = (
        "import hashlib, os, signal, threading, time\n"
        "from minisgl.shell.interrupt import interrupt_calls, is_stopping\n"
        "def press():\n"
        "    time.sleep(0.2); os.kill(os.getpid(), signal.SIGINT); time.sleep(0.5)\n"
        "    print(is_stopping(), flush=True); os.kill(os.getpid(), signal.SIGINT)\n"
        "with interrupt_calls(lambda: None):\n"
        "    threading.Thread(target=press).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'a', b'b', 100_000_000)\n"  # a minute in one call
        "print('too late')"
    )
    result = run_python("-c", code)
    assert (result.returncode, result.stdout) == (130, "True\n"), result.stderr
