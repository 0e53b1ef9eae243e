"""The openai package for Python against a whole server with the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.harness import Server

MODEL = "smol"  # any name goes
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
TALK: list[Any] = [
    {"role": "user", "content": "Hi, my name is Bob."},
    {"role": "assistant", "content": "Hello Bob! How can I help you today?"},
    {"role": "user", "content": "What is my name?"},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_conversation_goes_on_from_what_is_cached(client: openai.OpenAI) -> None:
    talk = TALK[:1]
    first = client.chat.completions.create(messages=talk, max_tokens=24, **GREEDY)
    talk = [*talk, first.choices[0].message, TALK[2]]
    second = client.chat.completions.create(messages=talk, max_tokens=24, **GREEDY)
    assert "Bob" in (second.choices[0].message.content or "")
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert first.usage.prompt_tokens <= cached < second.usage.prompt_tokens


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=TALK, max_tokens=20, **GREEDY)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=TALK, max_tokens=20, **GREEDY, **options))
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert sum(map(bool, pieces)) > 5
    assert chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_three_choices_differ_and_their_seed_repeats_them(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=TALK, max_tokens=12, n=3, temperature=1, seed=1
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3 and texts() == first


def test_logprobs_tell_the_likeliest_tokens_of_each_place(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=TALK, max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY
    )
    choice = answer.choices[0]
    assert choice.logprobs and choice.logprobs.content
    assert "".join(place.token for place in choice.logprobs.content) == choice.message.content
    for place in choice.logprobs.content:
        tops = [top.logprob for top in place.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert (place.token, place.logprob) == (place.top_logprobs[0].token, tops[0])
        assert place.logprob <= 0 and bytes(place.bytes or ()).decode() == place.token


def test_an_answer_under_a_schema_fits_it(client: openai.OpenAI) -> None:
    form: Any = {"name": "person", "schema": SCHEMA, "strict": True}
    answer = client.chat.completions.create(
        messages=TALK,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": form},
        **GREEDY,
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert sorted(person) == ["age", "name"]
    assert isinstance(person["name"], str) and len(person["name"]) <= 20
    assert isinstance(person["age"], int) and 1 <= person["age"] <= 120
    assert answer.choices[0].finish_reason == "stop"


def test_a_tool_is_called_when_it_must_be_and_its_result_is_taken(client: openai.OpenAI) -> None:
    talk: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    asked = client.chat.completions.create(
        messages=talk, tools=[WEATHER], tool_choice=forced, max_tokens=100, **GREEDY
    )
    assert asked.choices[0].finish_reason == "tool_calls"
    (call,) = asked.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert sorted(arguments) == ["city", "unit"] and arguments["unit"] in "CF"
    chunks = client.chat.completions.create(
        messages=talk, tools=[WEATHER], tool_choice=forced, max_tokens=100, stream=True, **GREEDY
    )
    parts = [c.choices[0].delta.tool_calls or [] for c in chunks if c.choices]
    told = "".join(p.function.arguments or "" for part in parts for p in part if p.function)
    assert json.loads(told) == arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "22 C, sunny"}
    talk += [asked.choices[0].message, result]
    answer = client.chat.completions.create(
        messages=talk, tools=[WEATHER], tool_choice="none", max_tokens=40, **GREEDY
    )
    assert answer.choices[0].message.content
    assert answer.usage and asked.usage
    assert answer.usage.prompt_tokens > 20


def test_a_prompt_comes_back_with_its_logprobs(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(prompt=prompt, max_tokens=3, echo=True, logprobs=2, **GREEDY)
    choice = answer.choices[0]
    assert choice.logprobs and choice.logprobs.tokens and choice.logprobs.token_logprobs
    assert choice.text.startswith(f"{prompt} Paris")
    assert "".join(choice.logprobs.tokens) == choice.text
    values = choice.logprobs.token_logprobs
    assert values[0] is None and all(value <= 0 for value in values[1:])
    assert len(values) == answer.usage.total_tokens  # type: ignore[union-attr]


def test_a_response_and_its_events_say_the_same(client: openai.OpenAI) -> None:
    fields: Any = {"input": "Say hi", "max_output_tokens": 10, **GREEDY}
    answer = client.responses.create(**fields)
    assert answer.output_text and answer.usage and answer.usage.output_tokens <= 10
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == answer.output_text


@pytest.mark.parametrize(("field", "value"), [("temperature", -1), ("max_tokens", 0), ("n", 1000)])
def test_what_is_refused_names_its_field(client: openai.OpenAI, field: str, value: int) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        client.chat.completions.create(**{"model": MODEL, "messages": TALK, field: value})
    assert info.value.param == field


def test_a_request_ends_when_its_time_is_up(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"prompt": "One, two,", "max_tokens": 1500, **GREEDY}
    extra = {"timeout": 0.3, "ignore_eos": True}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**fields, extra_body=extra)
    assert (caught.value.status_code, caught.value.code) == (504, "timeout")
    pieces = []
    with pytest.raises(openai.APIError) as late:
        for chunk in client.completions.create(**fields, stream=True, extra_body=extra):
            pieces.append(chunk.choices[0].text)
    assert late.value.code == "timeout" and 0 < len(pieces) < 1500
