"""The command line: one clear line for each mistake, streamed and JSON output, quiet ends.

A scripted model stands in for the real one, so that each test takes milliseconds; the last tests
run the real command on the default model.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from minisgl.cli import main
from minisgl.cli.options import parse_bytes
from minisgl.llm import StreamEvent
from minisgl.params import FinishReason, InvalidRequestError, ModelLoadError, SamplingParams

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


class ScriptedLLM:
    """Answers each prompt with its own words in capitals, one word per event."""

    made: ClassVar[list[ScriptedLLM]] = []

    def __init__(self, model: str, **options: Any) -> None:
        if model == "missing":
            raise ModelLoadError("there is no model at 'missing':\n  pass a folder")
        self.model, self.options = model, options
        self.tokenizer = self
        self.calls: list[tuple[list[Any], SamplingParams]] = []
        self.was_shut_down = False
        self.was_closed = False
        ScriptedLLM.made.append(self)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(" ".join(f"{m['role']}:{m['content']}" for m in messages))

    def stream(self, prompts: list[list[int]], sampling: SamplingParams) -> Iterator[StreamEvent]:
        texts = [bytes(prompt).decode() for prompt in prompts]
        self.calls.append((texts, sampling))
        if any("too-long" in text for text in texts):
            raise InvalidRequestError("the prompt has too many tokens", "prompt")
        return self._events(texts)

    def _events(self, texts: list[str]) -> Iterator[StreamEvent]:
        try:
            for index, text in reversed(list(enumerate(texts))):
                words = text.upper().split(" ")
                for i, word in enumerate(words):
                    if word == "INTERRUPT":
                        signal.raise_signal(signal.SIGINT)
                    if word == "FAIL":
                        error = "the forward pass failed"
                        yield StreamEvent(index, [], "", FinishReason.ERROR, error)
                        break
                    last = FinishReason.STOP if i == len(words) - 1 else None
                    yield StreamEvent(index, [i], word + " " * (last is None), last)
        finally:
            self.was_closed = True

    def shutdown(self) -> None:
        self.was_shut_down = True


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedLLM]:
    monkeypatch.setattr("minisgl.cli.output.LLM", ScriptedLLM)
    monkeypatch.setattr(ScriptedLLM, "made", [])
    return ScriptedLLM.made


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def set_stdin(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return set_stdin


def exit_code(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)


# --- help and mistakes ---


def test_help_of_every_command_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["generate", "--help"], ["chat", "--help"]):
        assert exit_code(*argv) == 0
        assert "examples:\n  minisgl " in capsys.readouterr().out
    assert exit_code("demo", "-h") == 0


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
    (["generate", "x", "--device", "tpu"], "--device"),
    (["generate", "x", "--model", ""], "--model"),
    (["generate", "x", "--system", "s"], "--chat"),
    (["generate", "x", "-f", "y"], "--file"),
    (["generate", "-f", "/no/such/file"], "--file: /no/such/file"),
    (["generate", "-f", "/"], "--file: /"),
    (["chat", "--top-p", "7"], "--top-p"),
    (["demo", "--page-size", "-2"], "--page-size"),
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


# --- generate ---


def test_one_prompt_is_streamed_and_statistics_go_to_stderr(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "one two three") == 0
    out, err = capsys.readouterr()
    assert out == "ONE TWO THREE\n"
    assert err.startswith("3 tokens in ") and "tokens/s, first token after" in err
    assert scripted[0].was_shut_down


def test_flags_reach_the_engine_and_the_request(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "x", "--model", "m", "--max-tokens", "9", "--temperature", "0.5"]
    argv += ["--top-k", "4", "--top-p", "0.9", "--min-p", "0.1", "--seed", "3", "--stop", "a"]
    argv += ["--stop", "b", "--ignore-eos", "--dtype", "float32", "--threads", "2"]
    argv += ["--page-size", "16", "--kv-memory", "1G", "--num-pages", "10", "--cache-type", "naive"]
    assert exit_code(*argv) == 0
    llm = scripted[0]
    assert llm.calls[0][1] == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        stop=["a", "b"],
        ignore_eos=True,
    )
    options = {k: v for k, v in llm.options.items() if k != "progress"}
    assert options == {
        "dtype": "float32",
        "num_threads": 2,
        "page_size": 16,
        "cpu_kv_cache_bytes": 1 << 30,
        "num_page_override": 10,
        "cache_type": "naive",
    }


def test_what_is_not_given_is_left_to_the_engine(scripted: list[ScriptedLLM]) -> None:
    assert exit_code("generate", "x", "-q") == 0
    llm = scripted[0]
    assert (llm.model, llm.options) == ("default", {"dtype": "auto", "progress": None})


def test_standard_input_is_one_prompt(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped("une\nphrase é\n".encode())
    assert exit_code("generate", "-q") == 0
    assert scripted[0].calls[0][0] == ["une\nphrase é"]
    assert capsys.readouterr().err == ""


def test_input_that_is_no_text_is_a_mistake(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped(b"\xff\xfe")
    assert exit_code("generate") == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_input_beyond_the_bound_is_a_mistake(
    scripted: list[ScriptedLLM],
    piped: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minisgl.cli.generate.MAX_INPUT_BYTES", 1 << 20)
    piped(b"x" * (1 << 20))
    assert exit_code("generate", "-q") == 0
    piped(b"x" * ((1 << 20) + 1))
    assert exit_code("generate", "-q") == 2
    assert "more than 1 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("from_stdin", [False, True])
def test_each_line_of_a_file_is_a_prompt(
    from_stdin: bool,
    scripted: list[ScriptedLLM],
    piped: Callable[[bytes], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = b"first one\n\n  \nsecond\n"
    (tmp_path / "prompts.txt").write_bytes(lines)
    piped(lines)
    assert (
        exit_code("generate", "-q", "-f", "-" if from_stdin else str(tmp_path / "prompts.txt")) == 0
    )
    assert scripted[0].calls[0][0] == ["first one", "second"]
    assert capsys.readouterr().out == "[0] first one\nFIRST ONE\n\n[1] second\nSECOND\n\n"


def test_json_is_one_line_per_prompt_in_their_order(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "--json", "a b", "\u00e9\n") == 0  # answered last to first
    lines = capsys.readouterr().out.split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {
            "index": 0,
            "prompt": "a b",
            "text": "A B",
            "token_ids": [0, 1],
            "finish_reason": "stop",
        },
        {
            "index": 1,
            "prompt": "\u00e9\n",
            "text": "\u00c9\n",
            "token_ids": [0],
            "finish_reason": "stop",
        },
    ]


def test_chat_uses_the_template_and_the_system_message(scripted: list[ScriptedLLM]) -> None:
    assert exit_code("generate", "-q", "--chat", "--system", "be kind", "hi") == 0
    assert scripted[0].calls[0][0] == ["system:be kind user:hi"]


def test_an_answer_that_fails_is_told_and_the_others_are_printed(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "-q", "--json", "fail", "fine") == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["error", "stop"]
    assert err == "minisgl: prompt 0: the forward pass failed\n"


def test_control_characters_do_not_reach_a_terminal(
    scripted: list[ScriptedLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert exit_code("generate", "-q", "red:\x1b[31m\ttab") == 0
    assert capsys.readouterr().out == "RED:\ufffd[31M\tTAB\n"


def test_interrupting_ends_quietly_between_two_tokens(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert exit_code("generate", "one two interrupt three") == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("ONE TWO ", "")
    assert scripted[0].was_closed
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reader_that_goes_away_ends_it_quietly(
    scripted: list[ScriptedLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert exit_code("generate", "one two") == 141
    assert capsys.readouterr().err == ""


# --- chat ---


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


def test_ctrl_c_stops_an_answer_and_keeps_the_session(
    scripted: list[ScriptedLLM], piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    piped(b"one interrupt two three\nmore\n")
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


# --- the real command ---


def test_help_and_mistakes_load_neither_torch_nor_numpy(run_python: RunPython) -> None:
    code = (
        "import sys\nfrom minisgl.cli import main\n"
        "try: main({argv})\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'rich', 'prompt_toolkit') if m in sys.modules])"
    )
    for argv in (["--help"], ["chat", "--help"], ["generate", "x", "--top-p", "3"]):
        result = run_python("-c", code.format(argv=argv))
        assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_an_environment_variable_that_cannot_be_used_is_one_line(run_python: RunPython) -> None:
    result = run_python("-m", "minisgl", "chat", env={"MINISGL_SHELL_TOP_P": "much"})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and "MINISGL_SHELL_TOP_P='much'" in result.stderr


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


def test_the_real_command_ends_quietly_on_ctrl_c(default_model_path: Path, repo_root: Path) -> None:
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
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")
