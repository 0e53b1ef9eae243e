"""Every family through `LLM`: greedy tokens and logits are those of transformers, however batches,
chunks and pages fall. They run as recorded programs, with the torch backend layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.kernel import native
from minisgl.llm import LLM

from tests.llm.oracle import logits_along
from tests.llm.test_against_transformers import PAIRWISE, collect_logits, fields_of
from tests.llm.tiny import VOCAB_SIZE, write_tokenizer
from tests.models.test_against_transformers import CASES, make_reference

FAMILIES = [
    "mistral windowed",
    "mixtral",
    "qwen2 windowed",
    "qwen3 tied biased",
    "qwen3_moe",
    "phi3",
    "phi3 longrope",
    "gemma3",
    "gemma3 untied linear",
]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (20, 33, 50, 20)]
    prompts[3] = prompts[0]
    prompts[2][:17] = prompts[1][:17]
    return prompts


def check(folder: Path, reference: Any, prompts: list[list[int]], **fields: Any) -> None:
    """Generate and compare tokens and logits."""
    llm = LLM(str(folder), dtype="float32", max_running_req=4, num_threads=1, **fields)
    rows = collect_logits(llm)
    try:
        results = llm.generate(prompts, PARAMS)
        is_recorded = llm.engine.graph_runner._program is not None
        may_record = native.available() and fields.get("attention_backend") != "torch"
        assert is_recorded == may_record
        llm.cache_manager.check_integrity()
        for uid, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            expected = logits_along(reference, prompt, result["token_ids"])
            assert result["token_ids"] == expected.argmax(-1).tolist()
            assert torch.allclose(torch.stack(rows[uid]), expected, atol=1e-4, rtol=0)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model_type, changes = CASES[family]
    reference = make_reference(model_type, {**changes, "vocab_size": VOCAB_SIZE}, tmp_path)
    write_tokenizer(tmp_path)
    for config in PAIRWISE:
        check(tmp_path, reference, make_prompts(), **fields_of(config))


@pytest.mark.parametrize("family", ["phi3 longrope", "gemma3"])
def test_the_torch_backend_gives_the_same(family: str, tmp_path: Path) -> None:
    model_type, changes = CASES[family]
    reference = make_reference(model_type, {**changes, "vocab_size": VOCAB_SIZE}, tmp_path)
    write_tokenizer(tmp_path)
    fields = {"attention_backend": "torch", "max_extend_tokens": 30, "num_page_override": 512}
    check(tmp_path, reference, make_prompts(), **fields)


def test_a_context_as_short_as_the_original_takes_the_short_factors(tmp_path: Path) -> None:
    changes = {"vocab_size": VOCAB_SIZE, "original_max_position_embeddings": 64}
    model_type, longrope = CASES["phi3 longrope"]
    reference = make_reference(model_type, {**longrope, **changes}, tmp_path)
    write_tokenizer(tmp_path)
    prompts = make_prompts()
    check(tmp_path, reference, prompts, num_page_override=512, max_seq_len_override=64)
    with pytest.raises(AssertionError):
        check(tmp_path, reference, prompts, num_page_override=512)
