"""`SamplingParams`: defaults, what counts as greedy, and values without meaning refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minisgl.params import (
    MAX_CONSTRAINT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Constraint,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    shown,
)


def test_the_defaults_are_those_of_the_contract() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p) == (0.0, -1, 1.0)
    assert (params.ignore_eos, params.max_tokens) == (False, 1024)
    assert SamplingParams(0.5, 3, 0.9, True, 7) == SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, ignore_eos=True, max_tokens=7
    )


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0, top_p=0.9), False),
        (SamplingParams(temperature=0.7, top_k=1), True),
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(temperature=0.7, top_k=2), False),
        (SamplingParams(temperature=0.7, top_k=1, top_p=0.5), False),
    ],
)
def test_greedy_is_temperature_zero_or_top_k_one_with_all_of_top_p(
    params: SamplingParams, greedy: bool
) -> None:
    assert params.is_greedy is greedy


@pytest.mark.parametrize(
    "changed",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": -1.0},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
    ],
)
def test_a_logits_processor_is_needed_only_if_something_changes(changed: dict[str, Any]) -> None:
    assert SamplingParams(**changed).changes_logits
    assert not SamplingParams(temperature=1.0, top_k=5, min_p=0.1).changes_logits


BIG = 10**5000  # Python refuses to print it

REFUSED: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0, -1, 2**31, BIG, 1.0, "4", True, None, math.nan]),
    ("top_k", [0, -2, 2**31, 0.5, "all", None, True]),
    ("temperature", [-0.1, 100.1, math.nan, math.inf, -math.inf, "hot", None, BIG, False]),
    ("top_p", [0.0, 0, -0.1, 1.1, math.nan, "1", None]),
    ("min_p", [-0.1, 1.1, math.nan, None]),
    ("frequency_penalty", [-2.1, 2.1, math.nan]),
    ("presence_penalty", [-2.1, 2.1, math.inf]),
    ("repetition_penalty", [0.0, -1, 100.5, math.nan]),
    ("ignore_eos", [1, 0, None, "yes"]),
    ("logprobs", [-1, MAX_LOGPROBS + 1, True, "2", 1.5]),
    ("prompt_logprobs", [-1, MAX_LOGPROBS + 1, False]),
    ("constraint", ["json_object", Constraint("xml")]),
    ("seed", [1.5, "7", True, MAX_SEED + 1, -MAX_SEED - 2]),
    ("stop", ["end", [""], [1], None, 5, {"a"}, ["x"] * (MAX_STOP_STRINGS + 1)]),
    ("stop_token_ids", [[-1], [2**31], ["1"], 5, None, [0] * (MAX_STOP_TOKEN_IDS + 1)]),
    (
        "logit_bias",
        [
            *([1], None, {-1: 0.0}, {"1": 0.0}, {1: 101.0}, {1: math.nan}, {1: None}),
            dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0),
        ],
    ),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(n, v, id=f"{n}-{i}") for n, values in REFUSED for i, v in enumerate(values)],
)
def test_a_value_without_meaning_is_refused_and_its_field_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value}).validate()
    assert caught.value.param == name
    assert name in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "accepted",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 2**31 - 1},
        {"temperature": 100.0, "top_k": 1, "top_p": 1e-9, "min_p": 1.0},
        {"temperature": 0, "top_p": 1},
        {"seed": MAX_SEED},
        {"seed": -MAX_SEED - 1},
        {"stop": ["x"] * MAX_STOP_STRINGS, "stop_token_ids": [0] * MAX_STOP_TOKEN_IDS},
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS), -100.0)},
    ],
)
def test_every_bound_itself_is_accepted(accepted: dict[str, Any]) -> None:
    SamplingParams(**accepted).validate()


def test_token_ids_are_checked_against_the_vocabulary_where_it_is_known() -> None:
    SamplingParams(stop_token_ids=[99], logit_bias={99: 1.0}).validate(vocab_size=100)
    for params in (SamplingParams(stop_token_ids=[100]), SamplingParams(logit_bias={100: 1.0})):
        params.validate()
        with pytest.raises(InvalidRequestError):
            params.validate(vocab_size=100)


def test_finish_reasons_are_the_strings_that_clients_see() -> None:
    assert [reason.value for reason in FinishReason] == ["stop", "length", "abort", "error"]
    assert FinishReason("stop") is FinishReason.STOP


def test_values_in_errors_are_short() -> None:
    assert shown(BIG) == "a number of more than 40 digits"
    assert shown("x" * 1000) == "'" + "x" * 79
    assert shown(-5) == "-5"


def test_a_constraint_that_is_too_long_is_named_by_its_kind() -> None:
    SamplingParams(constraint=Constraint("regex", "a" * MAX_CONSTRAINT_CHARS)).validate()
    for text in ("a" * (MAX_CONSTRAINT_CHARS + 1), 5):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(constraint=Constraint("regex", text)).validate()  # type: ignore[arg-type]
        assert caught.value.param == "regex"
