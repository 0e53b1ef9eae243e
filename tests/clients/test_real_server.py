"""Clients of a whole server with the default model: the shell, the load generator, the examples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.harness import Server

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
QUESTION = "What is the capital of France? Answer in one sentence."
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_command(server: Server) -> Callable[..., str]:
    """Run a command with the server's address in its environment; what it prints."""

    def run(*argv: str, folder: Path = ROOT) -> str:
        result = subprocess.run(
            argv,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"},
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


Run = Callable[..., str]


def test_the_shell_as_a_client_says_what_the_shell_in_one_process_says(
    server: Server, run_python: RunPython
) -> None:
    argv = ["-m", "minisgl", "chat", "--temperature", "0", "--max-tokens", "12"]
    lines = f"{QUESTION}\nAnd of Italy?\n"
    alone = run_python(*argv, stdin=lines)
    client = run_python(*argv, "--server", server.url, stdin=lines)
    assert (client.returncode, alone.returncode) == (0, 0), client.stderr
    assert client.stdout == alone.stdout and "Paris" in client.stdout
    assert client.stderr.count("tokens/s, first token after") == 2
    counted = re.findall(r"\((\d+) tokens", client.stderr)
    assert counted == re.findall(r"\((\d+) tokens", alone.stderr)


def test_the_load_generator_counts_what_the_server_counts(
    server: Server, run_python: RunPython
) -> None:
    argv = ["-m", "minisgl", "bench", "serve", "--url", server.url, "--requests", "24"]
    argv += ["--users", "8", "--input-tokens", "40-60", "--shared-prefix", "30"]
    argv += ["--output-tokens", "5-9", "--ignore-eos", "--json", "-"]
    for api in ("chat", "completions"):
        result = run_python(*argv, "--api", api)
        assert (result.returncode, result.stderr) == (0, "")
        found = json.loads(result.stdout)
        summary, requests = found["summary"], found["requests"]
        assert (summary["num_complete"], summary["errors"]) == (24, {})
        assert {r["finish_reason"] for r in requests} == {"length"}
        assert {r["output_tokens"] for r in requests} <= set(range(5, 10))
        template = (0, 40) if api == "chat" else (0, 2)  # words are tokens, as near as may be
        assert all(40 + template[0] <= r["prompt_tokens"] <= 60 + template[1] for r in requests)
        assert summary["cached_tokens"] >= 16 * 29  # all but those of the first eight at once
        assert summary["inter_token_s"]["p50"] > 0


def test_the_openai_example_holds_a_conversation_and_streams(run_command: Run) -> None:
    lines = run_command(sys.executable, "examples/openai_client.py").splitlines()
    assert "Paris" in lines[1] and "Rome" in lines[2]
    read, cached = map(int, re.findall(r"\d+", lines[3]))
    assert 0 < cached < read
    assert lines[4].startswith("stream: 1.") and re.fullmatch(r"streamed: \d+ tokens", lines[5])


@pytest.mark.slow
def test_the_command_for_curl_on_the_page_about_deployment_streams(
    server: Server, run_command: Run
) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    found = re.search(r"^ +(curl \S+/chat/completions(?:.|\n)+?}\]}')$", page, re.MULTILINE)
    assert found is not None
    events = run_command("sh", "-c", found[1].replace("http://127.0.0.1:1919", server.url))
    assert events.count("data: {") > 3 and events.endswith("data: [DONE]\n\n")


@pytest.mark.slow
def test_the_npm_package_does_all_that_the_one_for_python_does(
    run_command: Run, tmp_path: Path
) -> None:
    run_command("npm", "install", "openai@7", "--no-audit", "--no-fund", folder=tmp_path)
    script = tmp_path / "client.mjs"
    script.write_text((ROOT / "examples" / "openai_client.mjs").read_text(encoding="utf-8"))
    lines = run_command("node", "client.mjs", folder=tmp_path).splitlines()
    assert "Paris" in lines[0] and lines[1].startswith("streamed: ")
    assert lines[2:] == ["the same: true", "refused: 400 temperature"]
    script.write_text((ROOT / "tests" / "clients" / "openai_npm.mjs").read_text(encoding="utf-8"))
    whole = "conversation,stream,three choices,logprobs,schema,tool,echo,response,refusal"
    assert run_command("node", "client.mjs", folder=tmp_path).split("\n")[:-1] == whole.split(",")


@pytest.mark.slow
def test_langchain_answers_streams_and_batches(run_command: Run, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    run_command(python, "-m", "pip", "install", "--quiet", "langchain-openai")
    lines = run_command(python, "examples/langchain_client.py").splitlines()
    answer = lines[0].removeprefix("answer: ")
    assert "Paris" in answer and lines[1:] == [f"streamed: {answer}", "batch of 3"]
