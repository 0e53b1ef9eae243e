"""The openai client for Python against a whole server: processes, a model, HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from minisgl.llm import LLM
from minisgl.params import SamplingParams

from .harness import Server, running
from tests.llm.tiny import write_model

ENGINE, APP = "minisgl.engine:Engine", "minisgl.server.app:create_app"
FIELDS = {"dtype": "float32", "num_page_override": 4096, "num_threads": 1, "page_size": 1}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
TALK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can chat."""
    folder = write_model(tmp_path_factory.mktemp("chat") / "tiny-chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """A server of the tiny model, on its real engine."""
    folder = tmp_path_factory.mktemp("server")
    with running(folder, model, engine=ENGINE, app=APP, **FIELDS) as server:
        yield server


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """The same model in this process."""
    with LLM(str(model), **FIELDS) as llm:
        yield llm


def offline(llm: LLM, *prompts: str, **params: object) -> list[str]:
    """The texts of `LLM`, whose tokens are the reference."""
    given = SamplingParams(**params)  # type: ignore[arg-type]
    return [answer["text"] for answer in llm.generate(list(prompts), given)]


def test_a_greedy_completion_is_what_llm_answers(client: openai.OpenAI, llm: LLM) -> None:
    options = {"max_tokens": 12, "temperature": 0}
    body = {"ignore_eos": True}
    answer = client.completions.create(model="m", prompt="Hello", extra_body=body, **options)  # type: ignore[call-overload]
    (expected,) = offline(llm, "Hello", ignore_eos=True, **options)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    pieces = client.completions.create(
        model="m", prompt="Hello", extra_body=body, stream=True, **options
    )  # type: ignore[call-overload]
    assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_32_at_once_get_what_each_gets_alone(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [f"{i}: {'x' * (i % 5)}" for i in range(32)]
    expected = offline(llm, *prompts, max_tokens=24)

    def ask(prompt: str) -> str:
        answer = client.completions.create(model="m", prompt=prompt, max_tokens=24, temperature=0)
        return answer.choices[0].text

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, prompts)) == expected


def test_a_conversation_goes_on(client: openai.OpenAI, llm: LLM) -> None:
    talk, text = list(TALK), "[user]Hello there\n[assistant]"
    for turn in range(2):
        answer = client.chat.completions.create(model="m", messages=talk, max_tokens=8)
        content = answer.choices[0].message.content or ""
        assert [content] == offline(llm, text, max_tokens=8)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert (cached or 0) > 0 if turn else cached == 0
        talk += [{"role": "assistant", "content": content}, {"role": "user", "content": "More"}]
        text += f"{content}\n[user]More\n[assistant]"


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=TALK, max_tokens=20)
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=TALK,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_three_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(
            model="m", messages=TALK, n=3, seed=7, temperature=1.5, max_tokens=12
        )
        assert answer.usage is not None and answer.usage.prompt_tokens == 29
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_a_stop_string_never_shows(client: openai.OpenAI, llm: LLM) -> None:
    (text,) = offline(llm, "Stop here", max_tokens=30)
    stop = text[10:13]
    cut = text[: text.index(stop)]
    answer = client.completions.create(
        model="m", prompt="Stop here", max_tokens=30, temperature=0, stop=[stop]
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
    pieces = client.completions.create(
        model="m", prompt="Stop here", max_tokens=30, temperature=0, stop=stop, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == cut


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        client.completions.create(model="m", prompt="x" * 300)
    assert (info.value.code, info.value.param) == ("context_length_exceeded", "prompt")
    assert "300 tokens" in info.value.message and "256" in info.value.message
    with pytest.raises(openai.BadRequestError) as info:
        client.chat.completions.create(model="m", messages=TALK, temperature=-1)
    assert info.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")


def test_max_tokens_is_cut_to_what_the_context_leaves(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="m", prompt="x" * 250, max_tokens=10**6, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_a_response_and_its_events(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="m", input="Hello there", max_output_tokens=16)
    assert answer.usage is not None and answer.usage.output_tokens <= 16
    with client.responses.stream(model="m", input="Hello there", max_output_tokens=16) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == answer.output_text


def test_models_and_a_second_look_at_the_server(client: openai.OpenAI, real_server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-chat"]
    assert real_server.get("/v1") == (200, {"status": "ok"})
    assert real_server.get("/health")[0] == real_server.get("/health/ready")[0] == 200
    status, answer = real_server.ask("POST", "/tokenize", {"prompt": "Hi"})
    assert (status, answer["count"]) == (200, 2)
    status, back = real_server.ask("POST", "/detokenize", {"tokens": answer["tokens"]})
    assert (status, back) == (200, {"text": "Hi"})
