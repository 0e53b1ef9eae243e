"""Scheduler processes with a real engine: they answer as `LLM` does, on one rank and on two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams

from tests.llm.tiny import write_model
from tests.server.harness import running

PROMPTS = [[70 + i, 20 + i, 3, i] for i in range(8)]
ENGINE = {"engine": "minisgl.engine:Engine", "num_page_override": 512, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[dict[str, Any]]:
    with LLM(str(model), dtype="float32", num_page_override=512) as llm:
        return llm.generate(PROMPTS, SamplingParams(max_tokens=20))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_server_answers_as_the_offline_class_does(
    tp_size: int, model: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    with running(tmp_path, model, tp_size=tp_size, **ENGINE) as server:
        assert len(server.children()) == tp_size + 1

        def answer(prompt: list[int]) -> dict[str, Any]:
            lines = server.stream(prompt, max_tokens=20, ignore_eos=False).lines()
            return {
                "text": "".join(line["text"] for line in lines),
                "token_ids": [token for line in lines for token in line["ids"]],
                "finish_reason": lines[-1]["reason"],
            }

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(answer, PROMPTS)) == expected
        server.wait_idle()
        server.process.terminate()
        assert server.end() == 0


def test_cached_prefixes_are_saved_at_the_end_and_there_in_the_next_run(
    tmp_path: Path, model: Path
) -> None:
    args = {**ENGINE, "kv_prefix_file": str(tmp_path / "kv")}
    answers = []
    for run in ("first", "second"):
        with running(tmp_path / run, model, **args) as server:
            answers.append(server.stream("remember me", max_tokens=3).lines())
            server.process.terminate()
            assert server.end() == 0
    first, second = answers
    assert (first[0]["cached"], second[0]["cached"]) == (0, len("remember me") - 1)
    tokens = [[token for line in lines for token in line["ids"]] for lines in answers]
    assert tokens[0] == tokens[1]
