"""`minisgl generate` on a scripted model: where prompts come from, what is printed where."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.params import SamplingParams

from tests.cli.scripted import ScriptedLLM, exit_code
from tests.llm.tiny import write_model


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
    argv += ["--share-prefixes", "32", "--admission", "optimistic", "--admission-share", "0.5"]
    argv += ["--max-prefill-streak", "2", "--queue-order", "skip", "--max-overtaken", "5"]
    argv += ["--max-queued-requests", "100", "--mixed-chunk", "128"]
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
        "share_prefixes": 32,
        "admission": "optimistic",
        "admission_share": 0.5,
        "mixed_chunk": 128,
        "max_prefill_streak": 2,
        "queue_order": "skip",
        "max_overtaken": 5,
        "max_queued": 100,
    }


def test_a_flag_goes_before_what_the_model_advises_and_that_before_what_is_usual(
    scripted: list[ScriptedLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    advised = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.1)
    monkeypatch.setattr(ScriptedLLM, "default_sampling_params", advised)
    assert exit_code("generate", "x", "-q", "--temperature", "0", "--max-tokens", "9") == 0
    assert scripted[0].calls[0][1] == SamplingParams(
        max_tokens=9, temperature=0.0, top_k=20, repetition_penalty=1.1, stop=[]
    )


def test_variables_of_the_template_are_json_or_text(scripted: list[ScriptedLLM]) -> None:
    argv = ["--template-arg", "enable_thinking=false", "--template-arg", "tone=dry=er"]
    assert exit_code("generate", "x", "-q", "--chat", *argv) == 0
    assert scripted[0].calls[0][0] == ["user:x enable_thinking=False tone=dry=er"]


@pytest.mark.parametrize("name", ["enable_thinkin", "messages"])
def test_a_variable_without_effect_is_one_warning(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    argv = ["--chat", "--template-arg", f"{name}=1", "--template-arg", "tone=dry"]
    assert exit_code("generate", "x", "y", "-q", *argv) == 0
    assert capsys.readouterr().err == (
        f"minisgl: --template-arg {name} has no effect: "
        "the model's chat template understands enable_thinking, tone\n"
    )


def test_what_is_not_given_is_left_to_the_engine(scripted: list[ScriptedLLM]) -> None:
    assert exit_code("generate", "x", "-q") == 0
    llm = scripted[0]
    assert llm.options.pop("progress")
    assert (llm.model, llm.options) == ("default", {"dtype": "auto"})


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
    monkeypatch.setattr("minisgl.cli.prompts.MAX_INPUT_BYTES", 1 << 20)
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
    lines = b"\xef\xbb\xbffirst one\r\n\n  \n\r\nsecond\n"
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


def test_interrupting_ends_the_line_between_two_tokens_and_tells_how_far_it_came(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert exit_code("generate", "one two interrupt three") == 130
    out, err = capsys.readouterr()
    assert out == "ONE TWO \n"
    assert err.startswith("(interrupted)\n2 tokens in ") and err.count("\n") == 2
    assert scripted[0].was_closed and scripted[0].was_shut_down
    assert scripted[0].step_listeners == []
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


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_interrupting_many_prints_the_answers_that_are_complete(
    flags: list[str], scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", *flags, "never", "an interrupt", "one two", "three") == 130
    out, err = capsys.readouterr()
    if flags:
        assert [json.loads(line)["text"] for line in out.splitlines()] == ["ONE TWO", "THREE"]
    else:
        assert out == "[2] one two\nONE TWO\n\n[3] three\nTHREE\n\n"
    assert err.startswith("(interrupted: 2 of 4 answers complete)\n4 tokens in ")


def test_a_line_ends_where_a_newline_is_and_nowhere_else(
    scripted: list[ScriptedLLM], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_bytes("a\x0bb\x0cc\u2028d\x85e\rf\r\ng".encode())
    assert exit_code("generate", "-q", "-f", str(tmp_path / "prompts.txt")) == 0
    assert scripted[0].calls[0][0] == ["a\x0bb\x0cc\u2028d\x85e\rf", "g"]


@pytest.mark.parametrize(("encoding", "is_escaped"), [("ascii", True), ("UTF-8", False)])
def test_json_loses_nothing_on_an_output_that_is_not_utf8(
    encoding: str,
    is_escaped: bool,
    scripted: list[ScriptedLLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert exit_code("generate", "-q", "--json", "\u00e9\U0001f600") == 0
    assert json.loads(written.getvalue())["text"] == "\u00c9\U0001f600"
    assert (b"\\u00c9" in written.getvalue()) == is_escaped


def test_what_was_cut_by_its_length_is_told(
    scripted: list[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "a cut b", "--max-tokens", "2") == 0
    assert capsys.readouterr().err.startswith("(cut at --max-tokens 2)\n2 tokens")
    assert exit_code("generate", "a cut b") == 0
    assert capsys.readouterr().err.startswith("(cut: the context is full)\n2 tokens")
    assert exit_code("generate", "a cut b", "b", "cut") == 0
    assert capsys.readouterr().err.startswith("(2 of 3 answers cut by --max-tokens or a full ")


# --- the live line ---


def test_a_long_wait_for_the_first_token_is_told_and_leaves_no_trace(
    scripted: list[ScriptedLLM], on_terminal: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal()
    assert exit_code("generate", "slow two") == 0
    out, err = capsys.readouterr()
    told, blank, rest = err.split("\r")[1:]
    assert out == "SLOW TWO\n"
    assert told == "reading the prompt: 2 tokens, 0 s"
    assert blank == " " * (len(told) + 2) and rest.startswith("2 tokens in ")


def test_a_stop_that_waits_for_a_long_step_is_told(
    scripted: list[ScriptedLLM], on_terminal: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal()
    assert exit_code("generate", "interrupt-slow two") == 130
    out, err = capsys.readouterr()
    assert out == "\n"
    assert "\rstopping after this step (Ctrl-C again: at once), 0 s\r " in err
    assert err.split("\r")[-1].startswith("(interrupted)\n")
    assert exit_code("generate", "slow two") == 0
    assert "stopping" not in capsys.readouterr().err


def test_many_prompts_tell_that_tokens_come(
    scripted: list[ScriptedLLM], on_terminal: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal()
    assert exit_code("generate", "a b slow", "c") == 0
    out, err = capsys.readouterr()
    assert out == "[0] a b slow\nA B SLOW\n\n[1] c\nC\n\n"
    assert "\r1 of 2 done, 4 tokens read, 3 written, " in err and " s to go, 0 s\r " in err


@pytest.mark.parametrize("flags", [["-q"], ["-v"], []])
def test_the_live_line_is_for_a_terminal_and_can_be_silenced(
    flags: list[str],
    scripted: list[ScriptedLLM],
    on_terminal: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_terminal()
    if not flags:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert exit_code("generate", "slow", *flags) == 0
    assert "\r" not in capsys.readouterr().err


def test_loading_is_told_once_its_size_is_known(
    scripted: list[ScriptedLLM],
    on_terminal: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_terminal()

    def load(model: str, progress: Callable[[int, int], None], **options: Any) -> ScriptedLLM:
        monkeypatch.setattr("minisgl.cli.progress.REDRAW_SECONDS", 0.01)
        time.sleep(0.1)
        progress(1, 4)
        time.sleep(0.2)
        return ScriptedLLM(model)

    monkeypatch.setattr("minisgl.llm.LLM", load)
    assert exit_code("generate", "x") == 0
    err = capsys.readouterr().err
    assert err.startswith("\rloading the model: 25 %, 0 s")


def test_advice_that_cannot_be_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    folder = write_model(tmp_path / "tiny")
    (folder / "generation_config.json").write_text("{")
    assert exit_code("generate", "a", "--max-tokens", "2", "--model", str(folder)) == 0
    (warning,) = {r.message for r in caplog.records if "generation_config.json" in r.message}
    assert warning.startswith("its advice is left out: ")


# --- streams that end or are not there ---


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_stream_that_is_closed_is_no_error(
    name: str,
    scripted: list[ScriptedLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, name, None)
    assert exit_code("generate", "x") == 0
    if name == "stdin":  # nothing to read
        assert exit_code("generate") == 2


def test_a_full_disk_is_one_line(
    scripted: list[ScriptedLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert exit_code("generate", "x") == 1
    err = capsys.readouterr().err
    assert err == "minisgl: the answer cannot be written: No space left on device\n"
