"""`share_prefixes` on a real model: the same bits, the shared tokens computed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.env import ENV

from tests.llm.conftest import MakeLLM
from tests.llm.test_against_transformers import collect_logits

native = pytest.importorskip("minisgl.kernel.native")

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


def make_prompts() -> list[list[int]]:
    """Two system prompts of 48 tokens, six users each, and one of another kind."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (20, 48), generator=generator).tolist()
    return [ids[i % 2] + ids[2 + i][: 3 + i] for i in range(12)] + [ids[15][:20]]


def run(llm: Any) -> tuple[list[dict[str, Any]], dict[int, list[torch.Tensor]], int]:
    """The answers, all logits, and the number of prompt tokens that were computed."""
    logits, num_computed = collect_logits(llm), 0

    def count(record: Any) -> None:
        nonlocal num_computed
        num_computed += record.num_tokens if record.phase == "prefill" else 0

    llm.step_listeners.append(count)
    answers = llm.generate(make_prompts(), PARAMS)
    llm.cache_manager.check_integrity()
    return answers, logits, num_computed


@pytest.mark.skipif(not native.available(), reason="equal bits are a promise of the native kernels")
@both_loops
@pytest.mark.parametrize("budget", [20, 70, 8192])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_sharing_changes_no_bit_and_computes_each_system_prompt_once(
    make_llm: MakeLLM, page_size: int, budget: int, overlap: bool
) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    fields = {"page_size": page_size, "num_page_override": 2048 // page_size}
    expected, logits, _ = run(make_llm(**fields, max_extend_tokens=8192))
    shared = make_llm(**fields, max_extend_tokens=budget, share_prefixes=16)
    answers, shared_logits, num_computed = run(shared)
    assert answers == expected
    for uid, rows in logits.items():
        assert torch.equal(torch.stack(rows), torch.stack(shared_logits[uid])), uid
    assert num_computed == 2 * 48 + sum(len(prompt) - 48 for prompt in make_prompts()[:-1]) + 20


@both_loops
def test_bad_logits_of_a_chunk_keep_its_pages_from_the_others(
    make_llm: MakeLLM, overlap: bool
) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    llm: Any = make_llm(max_extend_tokens=24, share_prefixes=8)
    prompts = make_prompts()[::2][:2]
    expected = llm.generate(prompts, PARAMS)
    llm.cache_manager.flush()
    forward = llm.engine.forward
    computed: dict[int, int] = {}

    def spoilt(batch: Any) -> torch.Tensor:
        logits = forward(batch).clone()
        for i, req in enumerate(batch.reqs):
            computed[req.uid] = computed.get(req.uid, 0) + req.extend_len
            if req.uid == 0:
                logits[i, 3] = float("nan")
        return logits

    llm.engine.forward = spoilt
    answers = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    assert answers[0]["finish_reason"] == "error"
    assert answers[1]["token_ids"] == expected[1]["token_ids"][:1]
    assert computed == {0: len(prompts[0]), 1: len(prompts[1])}  # nothing of the first was hit
