"""K and V as integers: models say the same, both backends do, and twice as much fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.kernel import native
from minisgl.llm import LLM

from tests.integer_kv import INTEGERS
from tests.llm.conftest import MakeLLM
from tests.llm.test_against_transformers import collect_logits

pytestmark = pytest.mark.skipif(not native.available(), reason="too slow without native kernels")

TEXT = """The river rises in the hills above the town and runs for forty miles to the sea. In spring
when the snow melts it floods the meadows on both sides, and the farmers move their sheep to higher
ground. An old stone bridge crosses it near the church. It was built by monks in the year 1312."""
# Mean divergence from float32 K and V; 2,048 tokens of other text gave 6.7e-4 and 4e-7.
BOUNDS = {torch.int8: 3e-3, torch.int16: 1e-5}
Found = tuple[str, torch.Tensor]


def read_text(kv_dtype: Any) -> Found:
    """An answer, and log-probabilities (12, vocabulary) after 5, 10, ... tokens of a text.

    With float32 weights: where activations are rounded to 8 bits, that alone is 3e-3 of noise.
    """
    fields = {"kv_dtype": kv_dtype, "num_page_override": 512, "num_threads": 1}
    with LLM("default", dtype="float32", **fields) as llm:
        answer = llm.generate(["The capital of France is"], SamplingParams(max_tokens=1))[0]
        ids, rows = llm.tokenizer.encode(TEXT), collect_logits(llm)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        llm.generate([ids[: 5 * n] for n in range(1, 13)], params)
        return answer["text"], torch.cat([torch.stack(row) for row in rows.values()]).log_softmax(1)


@pytest.fixture(scope="module")
def expected() -> Found:
    """With float32."""
    return read_text("float32")


@pytest.mark.parametrize("kv_dtype", INTEGERS)
def test_what_it_expects_of_a_text_is_what_it_does_with_float32(
    expected: Found, kv_dtype: torch.dtype
) -> None:
    answer, logprobs = read_text(kv_dtype)
    assert answer == expected[0] == " Paris"
    divergence = torch.nn.functional.kl_div(
        logprobs, expected[1], log_target=True, reduction="batchmean"
    )
    assert divergence.item() < BOUNDS[kv_dtype]


@pytest.mark.parametrize("kv_dtype", INTEGERS)
def test_native_and_torch_backends_agree(make_llm: MakeLLM, kv_dtype: torch.dtype) -> None:
    prompts = torch.randint(0, 256, (4, 60), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for backend in ("native", "torch"):
        llm = make_llm(kv_dtype=kv_dtype, attention_backend=backend)
        rows = collect_logits(llm)
        for _ in range(2):  # computed, and then all but the last token found in the cache
            llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        found.append(torch.cat([torch.stack(row) for row in rows.values()]))
    # Of logits up to 5; a last bit of a number may move its code by one.
    torch.testing.assert_close(*found, atol=0.02, rtol=0)


def test_int8_has_room_for_almost_twice_as_many_tokens() -> None:
    found = []
    for kv_dtype in ("float16", "int8"):
        with LLM("default", dtype="auto", kv_dtype=kv_dtype, cpu_kv_cache_bytes=64 << 20) as llm:
            found.append(llm.engine.num_pages)
    # A head of 64 numbers: 128 bytes, or 64 and a scale of 4.
    assert found[1] == pytest.approx(found[0] * 128 / 68, abs=2)
