"""The default model's logits have the same bits whatever else runs, and however it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.kernel import native
from minisgl.llm import LLM

from tests.llm.test_against_transformers import collect_logits

pytestmark = pytest.mark.skipif(not native.available(), reason="a promise of the native kernels")

NUM_TOKENS = 6
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts() -> list[list[int]]:
    """The first one is watched; 31 others of 1 to 60 tokens, some of which begin like it."""
    generator = torch.Generator().manual_seed(11)
    watched, *others = torch.randint(0, 49152, (32, 60), generator=generator).tolist()
    rest = [watched[: i % 4 * 10] + ids[: 1 + 7 * i % 60] for i, ids in enumerate(others)]
    return [watched[:45], *rest]


@pytest.fixture(scope="module", params=["auto", "float16", "int8"])
def kv_dtype(request: Any) -> Any:
    """How K and V are stored; "auto" is int16."""
    return request.param


@pytest.fixture(scope="module")
def expected(kv_dtype: Any) -> Iterator[torch.Tensor]:
    """Logits float32 (tokens, vocabulary) of the first prompt alone."""
    llm = LLM("default", dtype="auto", num_page_override=512, kv_dtype=kv_dtype)
    yield watched_logits(llm, prompts()[:1])
    llm.shutdown()


def watched_logits(llm: Any, given: list[list[int]]) -> torch.Tensor:
    """Those of the first of `given`, all of which run at once."""
    logits = collect_logits(llm)
    llm.generate(given, PARAMS)
    rows = torch.stack(logits[min(logits)])
    assert rows.shape == (NUM_TOKENS, 49152)
    return rows


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"max_extend_tokens": 7}, {"num_threads": 1},
        {"page_size": 16, "num_page_override": 256},
        {"page_size": 16, "num_page_override": 256, "max_extend_tokens": 7, "cache_type": "naive"},
    ],
    ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items()) or "plain",
)  # fmt: skip
def test_among_31_others_in_chunks_in_pages_and_after_a_cache_hit(
    expected: torch.Tensor, fields: dict[str, Any], kv_dtype: Any
) -> None:
    fields = {"num_page_override": 4096, "kv_dtype": kv_dtype, **fields}
    llm = LLM("default", dtype="auto", **fields)
    try:
        assert torch.equal(watched_logits(llm, prompts()), expected)
        assert torch.equal(watched_logits(llm, prompts()[:1]), expected)  # after a hit, if cached
    finally:
        llm.shutdown()
