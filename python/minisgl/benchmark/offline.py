"""The engine alone: how many tokens a second it writes when everything is there at once.

May import `llm` and below. Invariant: the same arguments run the same prompts of the same lengths.
"""

from __future__ import annotations

import random
import time
from typing import Any

from minisgl.llm import LLM
from minisgl.params import SamplingParams

LEAST_TOKENS = 100
LARGEST_ID = 10_000


def run(
    model: str,
    num_seqs: int,
    max_input_len: int,
    max_output_len: int,
    dtype: Any = "auto",
    *,
    seed: int = 0,
    **llm_kwargs: Any,
) -> dict[str, Any]:
    """Generate for `num_seqs` prompts of random tokens, EOS ignored, and take the time.

    Lengths are drawn evenly from 100 (less if the maximum is) to `max_input_len` and
    `max_output_len`. Gives `input_tokens`, `output_tokens`, `seconds` of the one call of
    `generate`, and `throughput`, output tokens a second. llm_kwargs: further arguments of `LLM`.
    """
    rng = random.Random(seed)
    llm = LLM(model, dtype=dtype, **llm_kwargs)
    try:
        largest = min(LARGEST_ID, llm.tokenizer.vocab_size - 1)
        prompts = [
            [rng.randint(0, largest) for _ in range(_length(rng, max_input_len))]
            for _ in range(num_seqs)
        ]
        params = [
            SamplingParams(max_tokens=_length(rng, max_output_len), ignore_eos=True)
            for _ in range(num_seqs)
        ]
        llm.generate([[0, 1]], SamplingParams(max_tokens=2, ignore_eos=True))  # first-call costs
        start = time.perf_counter()
        answers = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    finally:
        llm.shutdown()
    output_tokens = sum(len(answer["token_ids"]) for answer in answers)
    return {
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": output_tokens,
        "seconds": seconds,
        "throughput": output_tokens / seconds,
    }


def _length(rng: random.Random, longest: int) -> int:
    return rng.randint(min(LEAST_TOKENS, longest), longest)
