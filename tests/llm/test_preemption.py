"""Admission policies on a real model: whoever is preempted, not one token changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.env import ENV

from tests.llm.conftest import MakeLLM
from tests.llm.test_against_transformers import collect_logits
from tests.llm.tiny import EOS

native = pytest.importorskip("minisgl.kernel.native")

both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
exact = pytest.mark.skipif(not native.available(), reason="equal bits need the native kernels")
BOLD = {"admission": "optimistic", "admission_share": 0.01}


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 256, (12, 40), generator=generator).tolist()
    return [row[: 5 + 3 * i] for i, row in enumerate(ids)]


def make_params() -> list[SamplingParams]:
    """Greedy, seeded, with penalties, with a bias, and such that stop early."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 1.2, "seed": 12, "top_p": 0.9, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": -0.4},
        {"temperature": 0.7, "seed": 13, "top_k": 20, "logit_bias": {7: 2.0, 9: -3.0}},
    ]
    return [
        SamplingParams(max_tokens=18 + i, ignore_eos=i % 4 > 0, **kinds[i % len(kinds)])
        for i in range(12)
    ]


def run(llm: Any) -> tuple[list[dict[str, Any]], list[Any], int]:
    records: list[Any] = []
    llm.step_listeners.append(records.append)
    answers = llm.generate(make_prompts(), make_params())
    llm.cache_manager.check_integrity()
    return answers, records, records[-1].num_preemptions


@exact
@both_loops
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("cache_type", ["radix", "naive"])
def test_greedy_and_seeded_answers_are_the_same_however_often_they_are_preempted(
    make_llm: MakeLLM, page_size: int, cache_type: str, overlap: bool
) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    fields: dict[str, Any] = {"page_size": page_size, "cache_type": cache_type}
    expected, _, none = run(make_llm(**fields, num_page_override=2048 // page_size))
    fields |= {"num_page_override": 96 // page_size, "max_extend_tokens": 50}
    assert run(make_llm(**fields, admission="conservative"))[0] == expected
    assert run(make_llm(**fields, admission="peak"))[0] == expected
    answers, _, num_preemptions = run(make_llm(**fields, **BOLD))
    assert answers == expected
    assert none == 0 and num_preemptions >= 4


@exact
def test_all_logits_are_the_same_and_little_is_computed_again(make_llm: MakeLLM) -> None:
    calm: Any = make_llm()
    logits = collect_logits(calm)
    _, records, _ = run(calm)
    bold: Any = make_llm(num_page_override=96, **BOLD)
    bold_logits = collect_logits(bold)
    _, bold_records, num_preemptions = run(bold)
    assert num_preemptions >= 4
    for uid, rows in logits.items():
        assert torch.equal(torch.stack(rows), torch.stack(bold_logits[uid])), uid
    computed, again = (sum(r.num_tokens for r in rs) for rs in (records, bold_records))
    assert again < 1.5 * computed


@exact
@both_loops
def test_what_was_learnt_survives_from_call_to_call(make_llm: MakeLLM, overlap: bool) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    llm: Any = make_llm(num_page_override=160, admission="optimistic")
    short = SamplingParams(max_tokens=60, logit_bias={EOS: 100.0})  # ends at once
    sizes: list[int] = []
    llm.step_listeners.append(lambda record: sizes.append(len(record.uids)))
    prompts = make_prompts()
    llm.generate(prompts, short)
    cold = sizes[0]
    sizes.clear()
    llm.cache_manager.flush()
    llm.generate(prompts, short)
    assert cold <= 3 < sizes[0]
