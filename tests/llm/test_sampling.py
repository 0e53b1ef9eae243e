"""Sampling through the whole LLM: seeds, company, penalties and bias, stop strings."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.env import ENV
from minisgl.llm import LLM

from tests.llm.conftest import MakeLLM


def seeded(seed: int, max_tokens: int = 10, **fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True, **fields
    )


def free(max_tokens: int = 10) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [result["token_ids"] for result in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    "fields", [{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05, "presence_penalty": 1.0}], ids=str
)
def test_a_seeded_request_draws_the_same_alone_and_in_any_batch(
    llm: LLM, fields: dict[str, Any]
) -> None:
    prompt, params = [5, 6, 7, 8], seeded(42, **fields)
    (alone,) = tokens(llm, [prompt], params)
    assert tokens(llm, [prompt], params) == [alone]
    prompts = [[9, 9], prompt, [1] * 30, prompt, [5, 6, 7]]
    others = [free(3), params, SamplingParams(max_tokens=5), params, seeded(42)]
    results = tokens(llm, prompts, others)
    assert results[1] == results[3] == alone


@pytest.mark.parametrize(
    ("page_size", "max_extend_tokens", "cache_type", "overlap"),
    [(1, 3, "naive", True), (4, 8192, "radix", True), (16, 5, "radix", False)],
)
def test_a_seeded_request_draws_the_same_in_any_configuration(
    llm: LLM,
    make_llm: MakeLLM,
    page_size: int,
    max_extend_tokens: int,
    cache_type: str,
    overlap: bool,
) -> None:
    prompts, params = [[i + 1] * (3 * i + 2) for i in range(4)], [seeded(i) for i in range(4)]
    expected = tokens(llm, prompts, params)
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    other = make_llm(
        page_size=page_size, max_extend_tokens=max_extend_tokens, cache_type=cache_type
    )
    assert tokens(other, prompts, params) == expected


def test_different_seeds_draw_differently(llm: LLM) -> None:
    results = tokens(llm, [[5, 6, 7]] * 6, [seeded(seed) for seed in range(6)])
    assert len({tuple(result) for result in results}) == 6


def test_unseeded_draws_differ(llm: LLM) -> None:
    results = tokens(llm, [[5, 6, 7]] * 6, free()) + tokens(llm, [[5, 6, 7]] * 6, free())
    assert len({tuple(result) for result in results}) == 12


def test_a_random_seed_of_the_engine_makes_unseeded_draws_repeatable(make_llm: MakeLLM) -> None:
    first, second = make_llm(random_seed=7), make_llm(random_seed=7)
    prompts = [[5, 6, 7]] * 3
    assert tokens(first, prompts, free()) == tokens(second, prompts, free())


def test_greedy_rows_stay_greedy_beside_drawn_ones(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    (alone,) = tokens(llm, [[5, 6, 7]], params)
    mixed = tokens(llm, [[5, 6, 7], [5, 6, 7], [5, 6, 7]], [free(), params, free()])
    assert mixed[1] == alone


def test_a_bias_can_force_and_forbid_tokens(llm: LLM) -> None:
    force = SamplingParams(max_tokens=5, ignore_eos=True, logit_bias={66: 100.0})
    assert tokens(llm, [[5, 6]], force) == [[66] * 5]
    plain = SamplingParams(max_tokens=5, ignore_eos=True)
    (first,) = tokens(llm, [[5, 6]], plain)
    plain.logit_bias = dict.fromkeys(first, -100.0)
    assert not set(tokens(llm, [[5, 6]], plain)[0]) & set(first)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_penalty_sees_every_token_at_once_also_under_overlap(
    make_llm: MakeLLM, overlap: bool
) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    llm = make_llm(max_extend_tokens=2)
    params = SamplingParams(
        max_tokens=40, ignore_eos=True, logit_bias={66: 20.0, 67: 19.9}, frequency_penalty=2.0
    )
    (result,) = tokens(llm, [[5, 6, 7]], params)
    assert abs(result.count(66) - result.count(67)) <= 2  # each one makes the other likelier
    assert not any(a == b == c for a, b, c in zip(result, result[1:], result[2:]))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_ends_the_answer_before_it_and_gives_everything_back(
    make_llm: MakeLLM, overlap: bool
) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    llm = make_llm()
    bias = {llm.tokenizer.encode(letter)[0]: 100.0 for letter in "a"}
    params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias=bias, stop=["aaa"])
    (result,) = llm.generate(["x"], params)
    assert (result["text"], result["finish_reason"]) == ("", "stop")
    params.stop = ["b"]
    (result,) = llm.generate(["x"], params)
    assert (result["text"], result["finish_reason"]) == ("a" * 30, "length")
    assert llm.is_idle and llm.table_manager.available_size == 16
    llm.cache_manager.check_integrity()


def test_a_stop_token_id_ends_the_answer(llm: LLM) -> None:
    (whole,) = tokens(llm, [[5, 6]], SamplingParams(max_tokens=9, ignore_eos=True))
    cut = next(i for i in range(2, 9) if whole[i] not in whole[:i])
    params = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[whole[cut]])
    (result,) = llm.generate([[5, 6]], params)
    assert (result["token_ids"], result["finish_reason"]) == (whole[:cut], "stop")
