"""Every field of every endpoint: what it becomes, and what is refused, with the field's name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minisgl.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Constraint,
    SamplingParams,
)
from minisgl.server import bounds
from minisgl.server.protocol import MAX_INT32

from .scripted import CHAT, HELLO, ScriptedFrontend, ask, error_of

COMPLETIONS, GENERATE, RESPONSES = "/v1/completions", "/generate", "/v1/responses"
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Hello"},
    GENERATE: {"prompt": "Hello"},
    RESPONSES: {"input": "Hello"},
}
SAMPLING = (CHAT, COMPLETIONS, GENERATE)
NAN, HUGE = math.nan, 10**30


def submitted(path: str, **fields: Any) -> Any:
    """The message that a request becomes."""
    frontend = ScriptedFrontend("Hi")
    response = ask(frontend, path, {**MINIMAL[path], **fields})
    assert response.status_code == 200, response.text
    return frontend.submitted[0]


def refused(path: str, **fields: Any) -> dict[str, Any]:
    """The error that a request gets; nothing reaches the tokenizer."""
    frontend = ScriptedFrontend("Hi")
    response = ask(frontend, path, {**MINIMAL[path], **fields})
    assert response.status_code == 400, (fields, response.text)
    assert frontend.submitted == []
    return error_of(response)


# field, values that are taken (and what of SamplingParams they become), values that are refused
NUMBERS: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [1, MAX_INT32], [0, -1, 2**31, 2**63, HUGE, 1.5, True, "5", [5], {}]),
    ("temperature", [0, 0.7, 100], [-0.1, 101, HUGE, True, "1", [], {}]),
    ("top_p", [0.1, 1], [0, -1, 1.1, 2**63, "1", False]),
    ("top_k", [-1, 1, MAX_INT32], [0, -2, 2**31, 2**63, 1.5, "1", True]),
    ("min_p", [0, 1, 0.5], [-0.1, 1.1, 2**31, "0"]),
    ("seed", [0, -1, MAX_SEED, -MAX_SEED - 1], [MAX_SEED + 1, HUGE, 1.5, "7", False]),
    ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, 2**31, "0"]),
    ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, 2**63, "0"]),
    ("repetition_penalty", [0.01, 1, 100], [0, -1, 101, 2**31, "1"]),
    ("ignore_eos", [True, False], [0, 1, "true", []]),
    ("stop_token_ids", [[], [0], [5] * MAX_STOP_TOKEN_IDS], [[-1], [2**31], ["5"], 5, "5"]),
    ("stop_token_ids", [], [[5] * (MAX_STOP_TOKEN_IDS + 1), [None], [1.5]]),
]


@pytest.mark.parametrize(("field", "good", "bad"), NUMBERS)
@pytest.mark.parametrize("path", SAMPLING)
def test_a_sampling_field_is_taken_or_refused_by_name(
    path: str, field: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        assert getattr(submitted(path, **{field: value}).sampling_params, field) == value
    for value in bad:
        error = refused(path, **{field: value})
        assert str(error["param"]).startswith(field), (value, error)
        assert field in error["message"]


@pytest.mark.parametrize("path", SAMPLING)
def test_null_is_the_same_as_absent(path: str) -> None:
    fields = {name for name, *_ in NUMBERS} | {"stop", "logit_bias", "n", "stream", "model"}
    fields |= {"response_format", "regex", "cache_salt", "timeout", "user", "stream_options"}
    with_nulls = submitted(path, **dict.fromkeys(fields))
    assert with_nulls.sampling_params == submitted(path).sampling_params


@pytest.mark.parametrize("path", [*SAMPLING, RESPONSES])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "01", "+1", "1."])
def test_numbers_that_are_no_json_are_refused(path: str, text: str) -> None:
    body = str({**MINIMAL[path], "temperature": 0}).replace("'", '"')
    content = body.replace('"temperature": 0', f'"temperature": {text}')
    response = ask(ScriptedFrontend("Hi"), path, content=content)
    assert response.status_code == 400
    error_of(response)


def test_stop_is_one_text_or_several() -> None:
    assert submitted(CHAT, stop="a").sampling_params.stop == ["a"]
    assert submitted(CHAT, stop=["a", "b"]).sampling_params.stop == ["a", "b"]
    most = [str(i) for i in range(MAX_STOP_STRINGS)]
    assert submitted(CHAT, stop=most).sampling_params.stop == most
    longest = "x" * bounds.MAX_NAME_CHARS
    assert submitted(CHAT, stop=longest).sampling_params.stop == [longest]
    for bad in ("", [""], [1], 5, [*most, "x"], longest + "x", [None], {"a": 1}):
        assert str(refused(CHAT, stop=bad)["param"]).startswith("stop")


def test_logit_bias_has_ids_as_texts() -> None:
    assert submitted(CHAT, logit_bias={"5": -100, "7": 1.5}).sampling_params.logit_bias == {
        5: -100,
        7: 1.5,
    }
    most = {str(i): 1 for i in range(MAX_LOGIT_BIAS)}
    assert len(submitted(CHAT, logit_bias=most).sampling_params.logit_bias) == MAX_LOGIT_BIAS
    for bad in ({"a": 1}, {"1.5": 1}, {"-1": 1}, {"5": 101}, {"5": "1"}, [1], {str(2**63): 0}):
        assert str(refused(CHAT, logit_bias=bad)["param"]).startswith("logit_bias")
    assert refused(CHAT, logit_bias={**most, "9999": 1})["param"] == "logit_bias"


@pytest.mark.parametrize("n", [0, -1, bounds.MAX_CHOICES + 1, 2**31, 2**63, 1.5, "2", True])
def test_n_is_bounded(n: Any) -> None:
    for path in SAMPLING:
        assert refused(path, n=n)["param"] == "n"


def test_as_many_choices_as_are_allowed_come_back() -> None:
    body = {"messages": HELLO, "n": bounds.MAX_CHOICES}
    choices = ask(ScriptedFrontend("Hi"), CHAT, body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(bounds.MAX_CHOICES))


def test_max_completion_tokens_is_the_newer_name() -> None:
    assert submitted(CHAT, max_completion_tokens=7).sampling_params.max_tokens == 7
    assert submitted(CHAT, max_completion_tokens=7, max_tokens=7).sampling_params.max_tokens == 7
    assert refused(CHAT, max_completion_tokens=0)["param"] == "max_completion_tokens"
    assert refused(CHAT, max_completion_tokens=7, max_tokens=8)["param"] == "max_tokens"
    assert submitted(RESPONSES, max_output_tokens=7).sampling_params.max_tokens == 7
    assert refused(RESPONSES, max_output_tokens=0)["param"] == "max_output_tokens"


def test_where_a_request_is_silent_the_models_advice_counts_and_then_greedy() -> None:
    assert submitted(CHAT).sampling_params == SamplingParams(max_tokens=MAX_INT32)
    assert submitted(COMPLETIONS).sampling_params == SamplingParams(max_tokens=16)
    assert submitted(GENERATE).sampling_params == SamplingParams(max_tokens=1024)
    frontend = ScriptedFrontend("Hi", sampling_defaults={"temperature": 0.6, "top_k": 20})
    ask(frontend, CHAT, {"messages": HELLO, "top_k": 5})
    params = frontend.submitted[0].sampling_params
    assert (params.temperature, params.top_k) == (0.6, 5)


CONSTRAINTS: list[tuple[dict[str, Any], Constraint | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Constraint("json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}},
        Constraint("json_schema", '{"type": "null"}'),
    ),
    ({"regex": "a|b"}, Constraint("regex", "a|b")),
    ({"choice": ["a", "b"]}, Constraint("choice", '["a", "b"]')),
    ({"grammar": 'start: "a"'}, Constraint("grammar", 'start: "a"')),
]


@pytest.mark.parametrize(("fields", "constraint"), CONSTRAINTS)
@pytest.mark.parametrize("path", SAMPLING)
def test_each_way_to_constrain_an_answer(
    path: str, fields: dict[str, Any], constraint: Constraint | None
) -> None:
    assert submitted(path, **fields).sampling_params.constraint == constraint


def nested(depth: int) -> Any:
    """A schema of lists in lists."""
    value: Any = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format"),
        ({"regex": "a", "choice": ["a"]}, "choice"),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * (2**18 + 1)}, "regex"),
        ({"grammar": 5}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"choice": ["a"] * (bounds.MAX_CHOICE_TEXTS + 1)}, "choice"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": nested(bounds.MAX_JSON_DEPTH + 1)},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_constraint_that_means_nothing_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(CHAT, **fields)["param"] == param


def test_a_schema_as_deep_as_is_allowed_is_taken() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": nested(bounds.MAX_JSON_DEPTH)}}
    assert submitted(CHAT, response_format=form).sampling_params.constraint.kind == "json_schema"


def test_salt_priority_and_timeout_go_with_the_request() -> None:
    msg = submitted(CHAT, cache_salt="s", priority=3, timeout=10)
    assert (msg.salt, msg.priority) == ("s", 3)
    assert submitted(CHAT, timeout=20).deadline - msg.deadline == pytest.approx(10, abs=5)
    assert submitted(CHAT).deadline is None
    for bad in (0, -1, bounds.MAX_REQUEST_SECONDS + 1, "5", 2**63):
        assert refused(CHAT, timeout=bad)["param"] == "timeout"
    for bad in (2**31, -(2**31), "1", 1.5):
        assert refused(CHAT, priority=bad)["param"] == "priority"
    for bad in ("x" * (bounds.MAX_NAME_CHARS + 1), 5):
        assert refused(CHAT, cache_salt=bad)["param"] == "cache_salt"


def test_logprobs_of_a_chat_and_of_a_completion() -> None:
    assert submitted(CHAT).sampling_params.logprobs is None
    assert submitted(CHAT, logprobs=True).sampling_params.logprobs == 0
    assert submitted(CHAT, logprobs=True, top_logprobs=5).sampling_params.logprobs == 5
    assert refused(CHAT, top_logprobs=5)["param"] == "top_logprobs"
    for bad in (-1, MAX_LOGPROBS + 1, 2**63, "1"):
        assert refused(CHAT, logprobs=True, top_logprobs=bad)["param"] == "top_logprobs"
        assert refused(COMPLETIONS, logprobs=bad)["param"] == "logprobs"
    assert refused(CHAT, logprobs=1)["param"] == "logprobs"
    params = submitted(COMPLETIONS, logprobs=3, echo=True).sampling_params
    assert (params.logprobs, params.prompt_logprobs) == (3, 3)
    assert submitted(COMPLETIONS, logprobs=3).sampling_params.prompt_logprobs is None


HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


@pytest.mark.parametrize("path", [*SAMPLING, RESPONSES])
def test_harmless_fields_are_taken_whatever_they_hold(path: str) -> None:
    for value in ("x", 1, True, {"a": [1]}, None):
        submitted(path, **dict.fromkeys(HARMLESS, value))


NOT_IMPLEMENTED: list[tuple[str, str, Any, Any]] = [  # path, field, refused, taken
    (CHAT, "audio", {"voice": "x"}, None),
    (CHAT, "functions", [{"name": "f"}], []),
    (CHAT, "function_call", "auto", "none"),
    (CHAT, "modalities", ["audio"], ["text"]),
    (CHAT, "prediction", {"type": "content"}, None),
    (CHAT, "reasoning_effort", "high", None),
    (CHAT, "verbosity", "low", "medium"),
    (CHAT, "web_search_options", {}, None),
    (COMPLETIONS, "best_of", 2, 1),
    (COMPLETIONS, "suffix", "x", ""),
    (RESPONSES, "previous_response_id", "resp_1", None),
    (RESPONSES, "background", True, False),
    (RESPONSES, "conversation", "c", None),
    (RESPONSES, "include", ["message.output_text.logprobs"], []),
    (RESPONSES, "max_tool_calls", 1, None),
    (RESPONSES, "prompt", {"id": "x"}, None),
    (RESPONSES, "reasoning", {"effort": "low"}, {}),
    (RESPONSES, "top_logprobs", 2, 0),
    (RESPONSES, "truncation", "auto", "disabled"),
]


@pytest.mark.parametrize(("path", "field", "bad", "good"), NOT_IMPLEMENTED)
def test_what_is_not_implemented_is_refused_unless_it_asks_for_nothing(
    path: str, field: str, bad: Any, good: Any
) -> None:
    error = refused(path, **{field: bad})
    assert (error["param"], error["code"]) == (field, "unsupported_field")
    submitted(path, **{field: good})


@pytest.mark.parametrize("path", [*SAMPLING, RESPONSES, "/tokenize", "/detokenize"])
def test_a_field_that_is_not_known_is_refused(path: str) -> None:
    body = {**MINIMAL.get(path, {}), "temprature": 1}
    response = ask(ScriptedFrontend("Hi"), path, body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("temprature", "unknown_field")


def test_stream_options_go_with_streams() -> None:
    assert refused(CHAT, stream_options={"include_usage": True})["param"] == "stream_options"
    assert refused(CHAT, stream="yes")["param"] == "stream"
    bad = refused(CHAT, stream=True, stream_options={"include": True})
    assert bad["param"] == "stream_options.include"
    submitted(CHAT, stream=True, stream_options={"include_usage": True})
    submitted(CHAT, stream=True, stream_options={"include_obfuscation": False})


@pytest.mark.parametrize(
    "prompt",
    [5, [], [[]], [1, "a"], ["a", 1], [1, [2]], [[1], "a"], [True], [1.5], {}, [-1], [[2**31]]],
)
def test_a_prompt_is_texts_or_ids(prompt: Any) -> None:
    assert str(refused(COMPLETIONS, prompt=prompt)["param"]).startswith("prompt")


def test_prompts_are_bounded_in_number_and_size() -> None:
    most = ["a"] * bounds.MAX_PROMPTS
    answer = ask(ScriptedFrontend("Hi"), COMPLETIONS, {"prompt": most}).json()
    assert len(answer["choices"]) == bounds.MAX_PROMPTS
    assert refused(COMPLETIONS, prompt=[*most, "a"])["param"] == "prompt"
    assert refused(COMPLETIONS, prompt=most, n=2)["param"] == "prompt"
    submitted(COMPLETIONS, prompt="x" * bounds.MAX_PROMPT_CHARS)
    for path in (COMPLETIONS, GENERATE):
        error = refused(path, prompt="x" * (bounds.MAX_PROMPT_CHARS + 1))
        assert (error["param"], error["code"]) == ("prompt", "prompt_too_long")
    half = "x" * (bounds.MAX_PROMPT_CHARS // 2 + 1)
    assert refused(COMPLETIONS, prompt=[half, half])["param"] == "prompt"


def test_many_choices_of_a_large_request_are_refused() -> None:
    prompt = "x" * (bounds.MAX_CHOICES_BYTES // bounds.MAX_CHOICES)
    assert refused(COMPLETIONS, prompt=prompt, n=bounds.MAX_CHOICES)["param"] == "n"
    assert refused(CHAT, user=prompt, n=bounds.MAX_CHOICES)["param"] == "n"
    submitted(COMPLETIONS, prompt=prompt[:1000], n=bounds.MAX_CHOICES)


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
def test_token_ids_that_leave_no_room_are_refused_with_both_numbers(path: str) -> None:
    submitted(path, prompt=[1] * 1023)
    for num in (1024, bounds.MAX_PROMPT_TOKENS):
        error = refused(path, prompt=[1] * num)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert str(num) in error["message"] and "1024" in error["message"]


def test_token_ids_to_decode_are_bounded() -> None:
    for bad in ([], [-1], [256], [2**63], ["a"], [1] * (bounds.MAX_PROMPT_TOKENS + 1), None, 5):
        response = ask(ScriptedFrontend("Hi"), "/detokenize", {"tokens": bad})
        assert response.status_code == 400
        assert str(error_of(response)["param"]).startswith("tokens")


def test_a_raw_prompt_stands_in_for_messages() -> None:
    frontend = ScriptedFrontend("Hi")
    assert ask(frontend, CHAT, {"prompt": "raw"}).status_code == 200
    assert frontend.submitted[0].text == "raw"
    assert refused(CHAT, prompt="raw")["param"] == "messages"  # both
    response = ask(frontend, CHAT, {})
    assert (response.status_code, error_of(response)["param"]) == (400, "messages")
