"""Greedy tokens and logits are those of transformers, whatever the configuration.

The answers of the default model are teacher-forced through the oracle: where each token is the
argmax of the oracle's logits before it, greedy decoding in the oracle gives the same answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.engine import engine as engine_module
from minisgl.env import ENV
from minisgl.llm import LLM
from minisgl.scheduler import StepRecord

from tests.llm.conftest import MakeLLM
from tests.llm.oracle import load_oracle, logits_along

TEXTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "Water boils at",
    "Q: What is the largest planet?\nA:",
    "The",
    "The capital of France is",
]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)

Config = tuple[str, int, int, bool]  # cache type, page size, chunk, overlap
CONFIGS: list[Config] = list(
    itertools.product(["radix", "naive"], [1, 4, 16], [5, 8192], [False, True])
)
# Every pair of values occurs in one of these.
PAIRWISE: list[Config] = [
    ("radix", 1, 8192, False),
    ("radix", 4, 5, True),
    ("radix", 16, 5, False),
    ("naive", 1, 5, True),
    ("naive", 4, 8192, False),
    ("naive", 16, 8192, True),
]


def test_the_pairwise_table_is_pairwise() -> None:
    for i, j in itertools.combinations(range(4), 2):
        wanted = {(config[i], config[j]) for config in CONFIGS}
        assert {(config[i], config[j]) for config in PAIRWISE} == wanted


def collect_logits(llm: Any) -> dict[int, list[torch.Tensor]]:
    """The logits of each uid, one row for each sampled token, from now on."""
    rows: dict[int, list[torch.Tensor]] = {}
    forward = llm.engine.forward

    def observed(batch: Any) -> torch.Tensor:
        logits = forward(batch)
        for req, row in zip(batch.reqs, logits):
            if req.is_sampled:
                rows.setdefault(req.uid, []).append(row.clone())
        return logits

    llm.engine.forward = observed
    return rows


def fields_of(config: Config) -> dict[str, Any]:
    cache_type, page_size, chunk, overlap = config
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    return {
        "cache_type": cache_type,
        "page_size": page_size,
        "max_extend_tokens": chunk,
        "num_page_override": 1024 // page_size,
    }


# --- the tiny model, every configuration ---


@pytest.fixture(scope="module")
def tiny_logits(tiny_model: Path) -> Any:
    """`logits_along` the tiny model in transformers, remembered."""
    from transformers import LlamaForCausalLM

    oracle = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    return lru_cache(partial(logits_along, oracle))


@pytest.fixture(scope="module")
def tiny_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lens = [1, 2, 5, 17, 33, 64, 90, 17]
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lens]
    prompts[-1] = prompts[3]  # two equal ones
    prompts[5][:20] = prompts[4][:20]  # and a shared beginning
    return prompts


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_tiny_model_agrees_with_transformers_in_every_configuration(
    tiny_logits: Any, tiny_prompts: list[list[int]], make_llm: MakeLLM, config: Config
) -> None:
    llm = make_llm(**fields_of(config))
    rows = collect_logits(llm)
    for _ in range(1 if config[0] == "naive" else 2):  # the second time from the cache
        rows.clear()
        results = llm.generate(tiny_prompts, PARAMS)
        for uid, (prompt, result) in enumerate(zip(tiny_prompts, results)):
            answer = tuple(result["token_ids"])
            expected = tiny_logits(tuple(prompt), answer)
            assert list(answer) == expected.argmax(-1).tolist()
            assert torch.allclose(torch.stack(rows[uid]), expected, atol=1e-4, rtol=0)
    llm.cache_manager.check_integrity()


def test_log_probabilities_of_prompt_and_answer_agree_with_transformers(
    tiny_logits: Any, tiny_prompts: list[list[int]], make_llm: MakeLLM
) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=4, prompt_logprobs=4)
    results = make_llm(max_extend_tokens=50).generate(tiny_prompts, params)
    for prompt, result in zip(tiny_prompts, results):
        ids = prompt + result["token_ids"]
        positions = result["prompt_logprobs"] + result["logprobs"]
        assert [p.chosen.token_id for p in positions] == ids
        assert positions[0].chosen.logprob is None and positions[0].top == []
        expected = tiny_logits(tuple(ids[:1]), tuple(ids[1:])).double().log_softmax(-1)
        for row, position in zip(expected, positions[1:]):
            assert [t.logprob for t in position.top] == sorted(
                (t.logprob for t in position.top), reverse=True
            )
            best = row.topk(4).values.tolist()
            assert [t.logprob for t in position.top] == pytest.approx(best, abs=1e-4)
            for entry in (position.chosen, *position.top):
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)


# --- the default model ---


@pytest.fixture(scope="module")
def make_default(default_model_path: Path) -> Iterator[Callable[[Config], LLM]]:
    """LLMs of the default model in float32 that share one copy of the weights."""
    made: list[LLM] = []
    weights: dict[str, torch.Tensor] = {}

    def share(model: Any, *args: Any, **kwargs: Any) -> None:
        model.load_state_dict(dict(weights))

    def make(config: Config) -> LLM:
        with pytest.MonkeyPatch.context() as patch:
            if weights:
                patch.setattr(engine_module, "load_model_weights", share)
            fields = {"dtype": "float32", "num_threads": 1, **fields_of(config)}
            made.append(LLM(str(default_model_path), **fields))
        weights.update(made[-1].engine.model.state_dict())
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="module")
def known(
    default_model_path: Path, make_default: Callable[[Config], LLM]
) -> tuple[list[Any], list[torch.Tensor]]:
    """The answers of the plainest configuration, and the oracle's logits along them."""
    llm = make_default(PAIRWISE[0])
    results = llm.generate(TEXTS, PARAMS)
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    oracle = load_oracle(default_model_path)
    return results, [
        logits_along(oracle, prompt, result["token_ids"])
        for prompt, result in zip(prompts, results)
    ]


def test_the_default_model_gives_the_greedy_tokens_of_transformers(
    known: tuple[list[Any], list[torch.Tensor]],
) -> None:
    results, logits = known
    for result, expected in zip(results, logits):
        assert len(result["token_ids"]) == 20
        assert result["token_ids"] == expected.argmax(-1).tolist()
    assert "Paris" in results[0]["text"]


@pytest.mark.parametrize("config", PAIRWISE, ids=str)
def test_the_default_model_agrees_in_each_pair_of_settings(
    known: tuple[list[Any], list[torch.Tensor]],
    make_default: Callable[[Config], LLM],
    config: Config,
) -> None:
    results, expected = known
    llm = make_default(config)
    rows = collect_logits(llm)
    assert llm.generate(TEXTS, PARAMS) == results
    for uid, logits in enumerate(expected):
        assert torch.allclose(torch.stack(rows[uid]), logits, atol=1e-4, rtol=0)
    llm.cache_manager.check_integrity()


def test_the_default_model_answers_a_second_time_from_the_cache(
    known: tuple[list[Any], list[torch.Tensor]], make_default: Callable[[Config], LLM]
) -> None:
    llm = make_default(PAIRWISE[0])
    records: list[StepRecord] = []
    llm.step_listeners.append(records.append)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    first, second = llm.generate(TEXTS, params), llm.generate(TEXTS, params)
    assert first == second
    assert [r["token_ids"] for r in first] == [r["token_ids"][:4] for r in known[0]]
    num_computed = [record.num_tokens for record in records if record.phase == "prefill"]
    assert num_computed[1:] == [len(TEXTS)]
