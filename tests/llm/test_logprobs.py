"""Log-probabilities of answers and prompts: the same bits however they are computed.

That they are those of transformers is in test_against_transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.env import ENV
from minisgl.params import PositionLogprobs
from minisgl.scheduler import prefill

from tests.llm.conftest import MakeLLM

PROMPT = [7 * i % 250 for i in range(40)]
OTHERS = [[3, 1, 4, 1, 5], [9] * 23, PROMPT[:31]]


def numbers(positions: Sequence[PositionLogprobs]) -> list[Any]:
    """All that is told, in a form that compares by bits."""
    return [
        (p.chosen.token_id, p.chosen.logprob, [(t.token_id, t.logprob) for t in p.top])
        for p in positions
    ]


def params(num_top: int = 3, **fields: Any) -> SamplingParams:
    wanted = {"max_tokens": 5, "ignore_eos": True}
    return SamplingParams(logprobs=num_top, prompt_logprobs=num_top, **{**wanted, **fields})


def told(llm: Any, given: Sequence[Sequence[int]], *rest: Any) -> list[Any]:
    """Of the first of `given`: the numbers of its answer, and of its prompt."""
    result = llm.generate(list(given), *rest)[0]
    return [numbers(result["logprobs"]), numbers(result["prompt_logprobs"])]


def test_only_what_was_asked_for_is_told(make_llm: MakeLLM) -> None:
    llm = make_llm()
    plain, answers, prompts = llm.generate(
        [PROMPT] * 3,
        [
            SamplingParams(max_tokens=3),
            SamplingParams(max_tokens=3, logprobs=0),
            SamplingParams(max_tokens=3, prompt_logprobs=1),
        ],
    )
    assert "logprobs" not in plain and "prompt_logprobs" not in plain
    assert "prompt_logprobs" not in answers and len(answers["logprobs"]) == 3
    assert all(p.top == [] for p in answers["logprobs"])
    assert "logprobs" not in prompts and len(prompts["prompt_logprobs"]) == len(PROMPT)
    assert [len(p.top) for p in prompts["prompt_logprobs"]] == [0] + [1] * (len(PROMPT) - 1)
    assert plain["token_ids"] == answers["token_ids"] == prompts["token_ids"]


def test_a_prompt_is_told_to_one_that_asks_for_nothing_else(make_llm: MakeLLM) -> None:
    only = SamplingParams(max_tokens=3, prompt_logprobs=3)
    result = make_llm().generate([PROMPT], only)[0]
    assert numbers(result["prompt_logprobs"]) == told(make_llm(), [PROMPT], params())[1]


@pytest.mark.parametrize("disabled", [True, False], ids=["plain", "overlap"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"max_extend_tokens": 7}, {"page_size": 4, "num_page_override": 64}, {"num_threads": 2}],
    ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items()) or "usual",
)
def test_the_bits_do_not_depend_on_neighbours_chunks_pages_threads_or_the_cache(
    make_llm: MakeLLM, fields: dict[str, Any], disabled: bool
) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = True
    expected = told(make_llm(), [PROMPT], params())
    ENV.DISABLE_OVERLAP_SCHEDULING.value = disabled
    llm = make_llm(**fields)
    assert told(llm, [PROMPT, *OTHERS], params()) == expected
    assert told(llm, [PROMPT, *OTHERS], params()) == expected  # with the prompt in the cache
    mixed = [params(), *(SamplingParams(max_tokens=9, temperature=1.0) for _ in OTHERS)]
    assert told(llm, [PROMPT, *OTHERS], mixed) == expected


def test_a_prompt_in_the_second_tier_is_told_all_the_same(make_llm: MakeLLM) -> None:
    expected = told(make_llm(), [PROMPT], params())
    llm = make_llm(num_page_override=64, kv_spill_bytes=1 << 20)
    assert told(llm, [PROMPT], params()) == expected
    llm.generate([[5] * 50], SamplingParams(max_tokens=4))  # pushes the prompt out of the pool
    assert told(llm, [PROMPT], params()) == expected


def test_no_step_holds_logits_of_more_prompt_tokens_than_the_bound(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    expected = told(llm, [PROMPT], params())
    monkeypatch.setattr(prefill, "MAX_PROMPT_LOGITS", 16)
    sizes = []
    forward = llm.engine.forward

    def counted(batch: Any) -> torch.Tensor:
        logits = forward(batch)
        if batch.is_prefill:
            sizes.append((sum(req.extend_len for req in batch.reqs), len(logits)))
        return logits

    monkeypatch.setattr(llm.engine, "forward", counted)
    assert told(llm, [PROMPT, PROMPT[:30]], params()) == expected
    assert sizes == [(16, 16), (16, 16), (16, 16), (16, 16), (6, 6)]


def test_they_are_those_of_the_model_whatever_changes_its_logits(make_llm: MakeLLM) -> None:
    llm = make_llm()
    biased = params(2, logit_bias={65: 100.0}, frequency_penalty=1.0)
    positions = llm.generate([PROMPT], biased)[0]["logprobs"]
    assert [p.chosen.token_id for p in positions] == [65] * 5
    for position in positions:
        assert position.chosen.logprob < position.top[0].logprob
        assert position.top[0].token_id != 65
        assert sum(math.exp(t.logprob) for t in position.top) < 1.0


def test_every_token_is_told_with_its_bytes(make_llm: MakeLLM) -> None:
    text = "h\u00e9llo"
    result = make_llm().generate([text], params())[0]
    assert b"".join(p.chosen.raw for p in result["prompt_logprobs"]) == text.encode()
    assert all(len(t.raw) >= 1 for p in result["logprobs"] for t in p.top)


def test_a_stream_tells_them_with_the_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm()
    events = list(llm.stream([PROMPT], params()))
    result = llm.generate([PROMPT], params())[0]
    assert [len(event.logprobs) for event in events] == [len(event.token_ids) for event in events]
    assert [p for event in events for p in event.logprobs] == result["logprobs"]
    assert events[0].prompt_logprobs == result["prompt_logprobs"]
    assert all(event.prompt_logprobs == [] for event in events[1:])


def test_a_token_that_ends_the_answer_is_not_told(make_llm: MakeLLM) -> None:
    llm = make_llm()
    first = llm.generate([PROMPT], params())[0]["token_ids"]
    result = llm.generate([PROMPT], params(stop_token_ids=[first[2]]))[0]
    assert result["finish_reason"] == "stop"
    assert len(result["logprobs"]) == len(result["token_ids"]) == 2


def test_a_prompt_of_one_token_has_nothing_to_tell_but_itself(make_llm: MakeLLM) -> None:
    result = make_llm().generate([[5]], params())[0]
    assert numbers(result["prompt_logprobs"]) == [(5, None, [])]


def test_a_prompt_that_was_aborted_half_way_leaves_nothing_behind(make_llm: MakeLLM) -> None:
    llm = make_llm(max_extend_tokens=7)
    stream = llm.stream([PROMPT[:5], PROMPT], params())
    next(stream)
    stream.close()
    assert llm.is_idle
    expected = told(make_llm(), [PROMPT], params())
    assert told(llm, [PROMPT], params()) == expected
