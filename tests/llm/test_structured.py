"""Structured output from `LLM`: what comes out validates, whatever else runs and however."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.env import ENV
from minisgl.llm import LLM
from minisgl.params import Constraint, InvalidRequestError
from minisgl.server.tool_calls import HERMES, ToolCallParser
from minisgl.server.tool_grammar import forced_calls

from tests.llm.conftest import MakeLLM
from tests.llm.tiny import EOS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["city", "river"]},
        "place": {
            "type": "object",
            "properties": {"country": {"type": "string", "maxLength": 12}},
            "required": ["country"],
            "additionalProperties": False,
        },
        "years": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "place", "years"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "maybe not"]
CONSTRAINTS = {
    "json_schema": Constraint("json_schema", json.dumps(SCHEMA)),
    "regex": Constraint("regex", r"[A-Z][a-z]{2,5}, [0-9]{4}"),
    "choice": Constraint("choice", json.dumps(CHOICES)),
    "grammar": Constraint("grammar", 'start: "(" start ")" | /[ab]{1,3}/'),
}


def check(kind: str, text: str) -> None:
    """Whether `text` is what the constraint of this kind spells."""
    if kind == "json_schema":
        value = json.loads(text)
        assert list(value) == list(SCHEMA["properties"])
        assert value["kind"] in ("city", "river") and list(value["place"]) == ["country"]
        assert all(len(t) <= 12 for t in (value["name"], value["place"]["country"]))
        assert 1 <= len(value["years"]) <= 3 and set(value["years"]) <= {1, 2, 3}
    elif kind == "regex":
        assert re.fullmatch(CONSTRAINTS["regex"].text, text)
    elif kind == "choice":
        assert text in CHOICES
    else:
        assert re.fullmatch(r"(\(*)[ab]{1,3}(\)*)", text) and text.count("(") == text.count(")")


@pytest.fixture(scope="module")
def default_llm() -> Iterator[LLM]:
    llm = LLM("default", dtype="auto", num_page_override=4096, max_running_req=16, num_threads=1)
    yield llm
    llm.shutdown()


def test_answers_of_the_default_model_validate_with_and_without_seeds(default_llm: LLM) -> None:
    chat = default_llm.chat_prompt([{"role": "user", "content": "Tell me about Paris."}])
    kinds = [kind for kind in CONSTRAINTS for _ in range(2)]
    params = [
        SamplingParams(
            max_tokens=100,
            constraint=CONSTRAINTS[kind],
            temperature=0.0 if i % 2 == 0 else 0.8,
            seed=i,
        )
        for i, kind in enumerate(kinds)
    ]
    free = SamplingParams(max_tokens=20)
    results = default_llm.generate([chat] * (len(params) + 1), [*params, free])
    for kind, result in zip(kinds, results):
        assert result["finish_reason"] == "stop" or kind == "grammar", result
        if result["finish_reason"] == "stop":
            check(kind, result["text"])
        assert default_llm.tokenizer.decode(result["token_ids"]) == result["text"]
    assert results[-1] == default_llm.generate([chat], free)[0]
    assert default_llm.generate([chat] * len(params), params) == results[:-1]


def test_a_forced_call_of_the_default_model_parses(default_llm: LLM) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    constraint, style = forced_calls(HERMES, [tool])
    chat = default_llm.chat_prompt([{"role": "user", "content": "The weather in Paris?"}])
    for result in default_llm.generate(
        [chat] * 2,
        [
            SamplingParams(constraint=constraint, max_tokens=100),
            SamplingParams(constraint=constraint, max_tokens=100, temperature=1.0, seed=1),
        ],
    ):
        parser = ToolCallParser(style)
        piece = parser.push(result["text"])
        assert (parser.num_calls, piece.content, parser.flush().content) == (1, "", "")
        value = json.loads("".join(delta.arguments for delta in piece.calls))
        assert set(value) == {"city", "unit"} and value["unit"] in ("C", "F")


# --- the tiny model, which writes any byte: nothing but the mask keeps its answers in form ---

PROMPT = [7 * i % 250 for i in range(20)]
OTHERS = [[3, 1, 4, 1, 5], [9] * 23, PROMPT[:11]]


def params_for(kind: str, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 150, "constraint": CONSTRAINTS[kind], **fields})


@pytest.fixture(scope="module")
def expected(tiny_model: Any) -> Any:
    """What each kind gives alone, sampled with a seed, without overlap."""
    ENV.DISABLE_OVERLAP_SCHEDULING.value = True
    with LLM(str(tiny_model), dtype="float32", num_page_override=512, num_threads=1) as llm:
        return {
            kind: llm.generate([PROMPT], params_for(kind, temperature=1.0, seed=5))[0]
            for kind in CONSTRAINTS
        }


@pytest.mark.parametrize("disabled", [True, False], ids=["plain", "overlap"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"max_extend_tokens": 7}, {"page_size": 4, "num_page_override": 128}],
    ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items()) or "usual",
)
def test_answers_are_the_same_among_others_in_chunks_and_under_overlap(
    make_llm: MakeLLM, expected: Any, fields: dict[str, Any], disabled: bool
) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = disabled
    llm = make_llm(**fields)
    kinds = list(CONSTRAINTS)
    params = [params_for(kind, temperature=1.0, seed=5) for kind in kinds]
    free = [SamplingParams(max_tokens=40, temperature=1.0, frequency_penalty=0.5)] * len(OTHERS)
    results = llm.generate([*OTHERS, *[PROMPT] * len(kinds)], [*free, *params])
    for kind, result in zip(kinds, results[len(OTHERS) :]):
        assert result == expected[kind]
        assert result["finish_reason"] == "stop"
        check(kind, result["text"])


@pytest.mark.parametrize("disabled", [True, False], ids=["plain", "overlap"])
def test_answers_and_log_probabilities_are_the_same_after_a_preemption(
    make_llm: MakeLLM, disabled: bool
) -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = disabled
    prompts = [[(3 * i + 5 * j) % 250 for j in range(8 + i)] for i in range(8)]
    kinds = [list(CONSTRAINTS)[i % 4] for i in range(8)]
    told = {"temperature": 1.0, "seed": 5, "logprobs": 2, "prompt_logprobs": 2, "max_tokens": 40}
    params = [params_for(kind, **told) for kind in kinds]
    params[-1] = SamplingParams(**{**told, "ignore_eos": True})
    plain = make_llm(num_page_override=2048).generate(prompts, params)
    llm = make_llm(num_page_override=96, admission="optimistic", admission_share=0.01)
    records: list[Any] = []
    llm.step_listeners.append(records.append)
    assert llm.generate(prompts, params) == plain
    assert records[-1].num_preemptions > 0
    llm.cache_manager.check_integrity()


def test_the_last_token_that_the_grammar_allows_ends_the_answer_and_belongs_to_it(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm()
    one = Constraint("choice", '["abc"]')
    for max_tokens in (3, 4, 100):
        result = llm.generate([PROMPT], SamplingParams(max_tokens=max_tokens, constraint=one))[0]
        assert (result["text"], result["finish_reason"]) == ("abc", "stop")
    result = llm.generate([PROMPT], SamplingParams(max_tokens=2, constraint=one))[0]
    assert (result["text"], result["finish_reason"]) == ("ab", "length")


def test_an_eos_ends_the_answer_where_the_grammar_accepts_even_if_it_is_to_be_ignored(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm()
    params = SamplingParams(
        max_tokens=20,
        ignore_eos=True,
        constraint=Constraint("regex", "a{3}a*"),
        logit_bias={EOS: 50.0},
    )
    result = llm.generate([PROMPT], params)[0]
    assert (result["text"], result["finish_reason"]) == ("aaa", "stop")


def test_penalties_and_bias_count_before_the_mask(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for letter in "ab":
        (wanted,), (refused,) = llm.tokenizer.encode(letter), llm.tokenizer.encode("!")
        biased = params_for("regex", logit_bias={wanted: 50.0, refused: 100.0})
        text = llm.generate([PROMPT], biased)[0]["text"]
        assert re.fullmatch(rf"[A-Z]{letter}{{5}}, [0-9]{{4}}", text)


def test_log_probabilities_are_those_before_the_mask(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = SamplingParams(constraint=Constraint("choice", '["abc"]'), logprobs=1)
    positions = llm.generate([PROMPT], params)[0]["logprobs"]
    assert [p.chosen.raw for p in positions] == [b"a", b"b", b"c"]
    free = llm.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=1))[0]["logprobs"]
    assert positions[0].top == free[0].top
    assert all(p.chosen.logprob < 0 for p in positions)


def test_a_constraint_that_cannot_be_used_is_refused_before_any_work(make_llm: MakeLLM) -> None:
    llm = make_llm()
    good, bad = (SamplingParams(constraint=Constraint("regex", text)) for text in ("a", "["))
    with pytest.raises(InvalidRequestError, match="prompt 1: regex cannot be used") as caught:
        llm.generate([PROMPT, PROMPT], [good, bad])
    assert caught.value.param == "regex" and llm.is_idle
    assert llm.generate([PROMPT], good)[0]["text"] == "a"


def test_a_grammar_that_breaks_down_ends_its_own_request_only(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    start = llm.grammars.start

    def broken(constraint: Constraint, tokens: Any = ()) -> Any:
        matcher = start(constraint, tokens)
        matcher.take([0])  # a token that may not come
        return matcher

    monkeypatch.setattr(llm.grammars, "start", broken)
    free = SamplingParams(max_tokens=5)
    failed, fine = llm.generate([PROMPT, PROMPT], [params_for("choice"), free])
    assert failed["finish_reason"] == "error" and "constraint" in failed["error"]
    assert fine["finish_reason"] == "length"


def test_one_that_is_called_off_leaves_nothing_behind(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream([PROMPT] * 3, params_for("json_schema"))
    next(stream)
    stream.close()
    assert llm.is_idle and len(llm.engine.sampler.processors._masks) == 0
