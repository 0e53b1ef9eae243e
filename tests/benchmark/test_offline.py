"""`benchmark.offline.run` and `minisgl bench offline`, on a tiny model."""

from __future__ import annotations

import json

import pytest

from minisgl.benchmark import offline

from tests.cli.scripted import exit_code
from tests.llm.tiny import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def test_the_engine_alone_is_measured_on_the_same_prompts_each_time(model: str) -> None:
    found = [offline.run(model, 5, 120, 110, dtype="float32", page_size=4) for _ in range(2)]
    assert found[0]["output_tokens"] == found[1]["output_tokens"]
    assert 5 * 100 <= found[0]["output_tokens"] <= 5 * 110
    assert 5 * 100 <= found[0]["input_tokens"] <= 5 * 120
    for result in found:
        assert result["throughput"] == result["output_tokens"] / result["seconds"] > 0


def test_lengths_below_a_hundred_are_exact(model: str) -> None:
    found = offline.run(model, 3, 7, 2, "float32")
    assert (found["input_tokens"], found["output_tokens"]) == (21, 6)


def test_the_command_tells_it_in_a_line_or_in_json(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "offline", "--model", model, "--requests", "2", "--max-input", "6"]
    argv += ["--max-output", "3"]
    assert exit_code(*argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 requests, 12 tokens read, 6 written in ") and "tokens/s" in out
    assert exit_code(*argv, "--json") == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 6
