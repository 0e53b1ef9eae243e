"""`minisgl serve`: every flag that users know becomes its field."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.cli import serve as command
from minisgl.cli.parser import parse
from minisgl.config import ServerArgs


def args_of(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> ServerArgs:
    """What `serve` is called with."""
    seen: list[ServerArgs] = []

    def serve(args: ServerArgs, **unused: Any) -> int:
        seen.append(args)
        return 0

    monkeypatch.setattr(command, "serve", serve)
    parsed = parse(argv)
    assert parsed.module == "minisgl.cli.serve"
    assert command.run(parsed) == 0
    return seen[0]


@pytest.mark.parametrize(
    ("flag", "value", "field", "expected"),
    [
        ("--dtype", "float32", "dtype", "float32"),
        ("--device", "cpu", "device", "cpu"),
        ("--max-running-requests", "7", "max_running_req", 7),
        ("--max-seq-len-override", "99", "max_seq_len_override", 99),
        ("--memory-ratio", "0.5", "memory_ratio", 0.5),
        ("--host", "127.0.0.2", "server_host", "127.0.0.2"),
        ("--port", "8000", "server_port", 8000),
        ("--cuda-graph-max-bs", "4", "cuda_graph_max_bs", 4),
        ("--graph", "4", "cuda_graph_max_bs", 4),
        ("--num-tokenizer", "3", "num_tokenizer", 3),
        ("--tokenizer-count", "3", "num_tokenizer", 3),
        ("--max-prefill-length", "64", "max_extend_tokens", 64),
        ("--max-extend-length", "64", "max_extend_tokens", 64),
        ("--num-pages", "100", "num_page_override", 100),
        ("--page-size", "16", "page_size", 16),
        ("--attention-backend", "torch", "attention_backend", "torch"),
        ("--attn", "torch", "attention_backend", "torch"),
        ("--cache-type", "naive", "cache_type", "naive"),
        ("--moe-backend", "torch", "moe_backend", "torch"),
        ("--drain-seconds", "2.5", "drain_seconds", 2.5),
        ("--served-model-name", "me", "served_model_name", "me"),
    ],
)
def test_a_flag_becomes_its_field(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: str, field: str, expected: Any
) -> None:
    args = args_of(monkeypatch, ["serve", flag, value])
    assert getattr(args, field) == expected
    assert getattr(args_of(monkeypatch, ["serve"]), field) != expected


@pytest.mark.parametrize("flag", ["--tp", "--tp-size", "--tensor-parallel-size"])
def test_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    assert args_of(monkeypatch, ["serve", flag, "2"]).tp_info.size == 2


def test_dummy_weights_are_asked_for_by_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert args_of(monkeypatch, ["serve", "--dummy-weight"]).use_dummy_weight
    assert not args_of(monkeypatch, ["serve"]).use_dummy_weight


@pytest.mark.parametrize("flag", [["--model", "m"], ["--model-path", "m"], ["--model=m"]])
def test_a_model_alone_starts_the_server(monkeypatch: pytest.MonkeyPatch, flag: list[str]) -> None:
    assert args_of(monkeypatch, flag).model_path == "m"
    assert args_of(monkeypatch, ["serve", *flag]).model_path == "m"


def test_with_the_shell_flag_a_model_alone_starts_the_shell() -> None:
    assert parse(["--model", "m", "--shell"]).module == "minisgl.cli.chat"
    assert parse(["--model", "m", "--shell-mode"]).module == "minisgl.cli.chat"
