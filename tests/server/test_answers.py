"""Answers as clients read them: whole and streamed the same, complete in every field."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.message import UserReply
from minisgl.params import FinishReason, Logprob, PositionLogprobs

from .scripted import CHAT, HELLO, ScriptedFrontend, ask, error_of, events

COMPLETIONS, GENERATE, RESPONSES = "/v1/completions", "/generate", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "f"}}
CALLS = [
    "Let me see. <tool_",
    'call>{"name": "f", "argu',
    'ments": {"a"',
    ': 1}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
]


def streamed(frontend: ScriptedFrontend, path: str, body: dict[str, Any]) -> list[Any]:
    response = ask(frontend, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response)


def folded(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The messages that the deltas of a chat stream join to, as a client joins them."""
    messages: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = messages.setdefault(choice["index"], {"content": "", "calls": {}})
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if "reasoning_content" in delta:
                message.setdefault("reasoning", "")
                message["reasoning"] += delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                entry = message["calls"].setdefault(call["index"], {"arguments": ""})
                entry |= {"id": call["id"]} if "id" in call else {}
                entry |= {"name": call["function"]["name"]} if "id" in call else {}
                entry["arguments"] += call["function"].get("arguments", "")
            message["reason"] = choice["finish_reason"]
    return messages


def test_a_chat_answer_is_complete() -> None:
    answer = ask(ScriptedFrontend("Hel", "lo"), CHAT, {"messages": HELLO, "model": "any"}).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("minisgl-")
    assert answer == {
        "object": "chat.completion",
        "model": "any",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_a_chat_stream_says_the_role_once_and_the_reason_last() -> None:
    *chunks, done = streamed(ScriptedFrontend("Hel", "", "lo"), CHAT, {"messages": HELLO})
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "Hel"},
        {"content": "lo"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


def test_a_stream_tells_usage_at_its_end_if_asked() -> None:
    body = {"stream_options": {"include_usage": True}}
    for path, more in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        *chunks, last, _ = streamed(ScriptedFrontend("a", "b"), path, {**body, **more})
        assert [chunk["usage"] for chunk in chunks] == [None, None]
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == 5


def test_the_end_of_text_before_any_token_is_an_empty_answer() -> None:
    end = UserReply(1, "", True, FinishReason.STOP, [], 3, 0)
    answer = ask(ScriptedFrontend(end), CHAT, {"messages": HELLO}).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 0
    chunks = streamed(ScriptedFrontend(end), CHAT, {"messages": HELLO})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("reason", list(FinishReason)[:3])
def test_why_an_answer_ended_is_told(reason: FinishReason) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        frontend = ScriptedFrontend(UserReply(1, "x", True, reason, [1], 3, 0))
        assert ask(frontend, path, body).json()["choices"][0]["finish_reason"] == reason.value


def test_several_choices_come_under_their_index_and_the_prompt_counts_once() -> None:
    body = {"messages": HELLO, "n": 3, "seed": 5}
    frontend = ScriptedFrontend("a", "b")
    answer = ask(frontend, CHAT, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"ab"}
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 6)
    assert sorted(msg.sampling_params.seed or 0 for msg in frontend.submitted) == [5, 6, 7]
    assert len({msg.uid for msg in frontend.submitted}) == 3
    assert {msg.group for msg in frontend.submitted} == {1}
    messages = folded(streamed(ScriptedFrontend("a", "b"), CHAT, body)[:-1])
    assert {i: message["content"] for i, message in messages.items()} == dict.fromkeys(
        range(3), "ab"
    )


def test_several_prompts_count_each_and_choices_follow_them() -> None:
    body = {"prompt": ["x", "y"], "n": 2, "echo": True}
    answer = ask(ScriptedFrontend("1", "2"), COMPLETIONS, body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["x12", "x12", "y12", "y12"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 8)


def test_a_completion_streams_what_it_answers_whole() -> None:
    for body in ({"prompt": "x", "echo": True}, {"prompt": [72, 105], "echo": True}):
        whole = ask(ScriptedFrontend("a", "b", "c"), COMPLETIONS, body).json()
        chunks = streamed(ScriptedFrontend("a", "b", "c"), COMPLETIONS, body)[:-1]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == whole["choices"][0]["text"]
        assert text in ("xabc", "Hiabc")
        assert {chunk["object"] for chunk in chunks} == {whole["object"]} == {"text_completion"}


def test_generate_answers_plainly() -> None:
    answer = ask(ScriptedFrontend("a", "b"), GENERATE, {"prompt": "x"}).json()
    usage = answer.pop("usage")
    assert answer == {"text": "ab", "token_ids": [0, 1], "finish_reason": "stop"}
    pieces = streamed(ScriptedFrontend("a", "b"), GENERATE, {"prompt": "x"})
    assert pieces == [
        {"text": "a", "token_ids": [0], "finish_reason": None},
        {"text": "b", "token_ids": [1], "finish_reason": "stop", "usage": usage},
        "[DONE]",
    ]


def position(token: int, logprob: float | None, raw: bytes, *top: Logprob) -> PositionLogprobs:
    return PositionLogprobs(Logprob(token, logprob, raw), list(top))


BEST = Logprob(7, -0.25, b"b")
LOGPROBS = [
    position(5, -1.5, b"a", BEST, Logprob(5, -1.5, b"a")),
    position(6, -float("inf"), b"\xc3", BEST),
]
WITH_LOGPROBS = [
    UserReply(1, "a", False, None, [5], 2, 0, LOGPROBS[:1], [position(1, None, b"x")]),
    UserReply(1, "", True, FinishReason.LENGTH, [6], 2, 0, LOGPROBS[1:]),
]


def test_chat_logprobs_have_bytes_and_alternatives() -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    best = {"token": "b", "logprob": -0.25, "bytes": [98]}
    first = {"token": "a", "logprob": -1.5, "bytes": [97]}
    second = {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3], "top_logprobs": [best]}
    expected = [{**first, "top_logprobs": [best, first]}, second]
    answer = ask(ScriptedFrontend(*WITH_LOGPROBS), CHAT, body).json()
    assert answer["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    chunks = streamed(ScriptedFrontend(*WITH_LOGPROBS), CHAT, body)[:-1]
    told = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert told == expected


def test_completion_logprobs_are_four_lists_and_echo_begins_with_the_prompt() -> None:
    expected = {
        "tokens": ["x", "a", "\ufffd"],
        "token_logprobs": [None, -1.5, -9999.0],
        "top_logprobs": [None, {"b": -0.25, "a": -1.5}, {"b": -0.25, "\ufffd": -9999.0}],
        "text_offset": [0, 1, 2],
    }
    body = {"prompt": "x", "logprobs": 2, "echo": True}
    choice = ask(ScriptedFrontend(*WITH_LOGPROBS), COMPLETIONS, body).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("xa", expected)
    chunks = streamed(ScriptedFrontend(*WITH_LOGPROBS), COMPLETIONS, body)[:-1]
    for name, values in expected.items():
        told = [v for chunk in chunks for v in chunk["choices"][0]["logprobs"][name]]
        assert told == values
    del body["echo"]
    choice = ask(ScriptedFrontend(*WITH_LOGPROBS), COMPLETIONS, body).json()["choices"][0]
    assert choice["logprobs"]["text_offset"] == [0, 1]


def test_echo_of_no_tokens_tells_of_the_prompt_alone() -> None:
    reply = UserReply(1, "a", True, FinishReason.LENGTH, [5], 2, 0, LOGPROBS[:1])
    reply.prompt_logprobs = [position(1, None, b"x")]
    frontend = ScriptedFrontend(reply)
    body = {"prompt": "x", "logprobs": 1, "echo": True, "max_tokens": 0}
    answer = ask(frontend, COMPLETIONS, body).json()
    assert frontend.submitted[0].sampling_params.max_tokens == 1
    assert answer["choices"][0]["text"] == "x"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["x"]
    assert answer["usage"]["completion_tokens"] == 0


def test_calls_come_whole_and_in_deltas_with_their_index() -> None:
    body = {"messages": HELLO, "tools": [TOOL, {"type": "function", "function": {"name": "g"}}]}
    choice = ask(ScriptedFrontend(*CALLS), CHAT, body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    calls = [(call["type"], call["function"]) for call in message["tool_calls"]]
    assert calls == [
        ("function", {"name": "f", "arguments": '{"a": 1}'}),
        ("function", {"name": "g", "arguments": "{}"}),
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    joined = folded(streamed(ScriptedFrontend(*CALLS), CHAT, body)[:-1])[0]
    assert (joined["content"], joined["reason"]) == ("Let me see.", "tool_calls")
    told = [(call["name"], call["arguments"]) for call in joined["calls"].values()]
    assert told == [("f", '{"a": 1}'), ("g", "{}")]


def test_a_message_of_calls_alone_has_no_content() -> None:
    script = ['<tool_call>{"name": "f", "arguments": {}}</tool_call>']
    message = ask(ScriptedFrontend(*script), CHAT, {"messages": HELLO, "tools": [TOOL]}).json()
    assert message["choices"][0]["message"]["content"] is None


def test_without_parallel_calls_there_is_one() -> None:
    body = {"messages": HELLO, "tools": [TOOL], "parallel_tool_calls": False}
    message = ask(ScriptedFrontend(*CALLS), CHAT, body).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_without_tools_a_call_is_text() -> None:
    message = ask(ScriptedFrontend(*CALLS), CHAT, {"messages": HELLO}).json()
    assert message["choices"][0]["message"]["content"] == "".join(CALLS)


def test_a_forced_call_is_read_in_the_format_that_was_forced() -> None:
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}
    llama = "tools <|python_tag|>"  # its tag is a special token, which no constraint can spell
    for template, call in (
        ("tools", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        (llama, '{"name": "f", "parameters": {}}'),
    ):
        frontend = ScriptedFrontend(call[:20], call[20:], chat_template=template)
        choice = ask(frontend, CHAT, body).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        function = choice["message"]["tool_calls"][0]["function"]
        assert function == {"name": "f", "arguments": "{}"}


REASONING = ["<think>\nhm", "m</thi", "nk>\n\nYes", "."]


def test_reasoning_is_told_apart_where_the_model_reasons() -> None:
    body = {"messages": HELLO}
    frontend = ScriptedFrontend(*REASONING, chat_template="{{ '</think>' }}")
    message = ask(frontend, CHAT, body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "Yes.")
    frontend = ScriptedFrontend(*REASONING, chat_template="{{ '</think>' }}")
    joined = folded(streamed(frontend, CHAT, body)[:-1])[0]
    assert (joined["reasoning"], joined["content"]) == ("hmm", "Yes.")
    message = ask(ScriptedFrontend(*REASONING), CHAT, body).json()["choices"][0]["message"]
    assert message["content"] == "".join(REASONING)


def test_a_response_is_complete() -> None:
    answer = ask(ScriptedFrontend("Hel", "lo"), RESPONSES, {"input": "x"}).json()
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    item = answer["output"][0]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"][0]["text"] == "Hello"
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 1}
    assert answer["usage"]["total_tokens"] == 5


def test_the_events_of_a_response_come_in_their_sequence() -> None:
    told = streamed(ScriptedFrontend("Hel", "lo"), RESPONSES, {"input": "x"})
    assert [event["type"] for event in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in told] == list(range(10))
    assert told[0]["response"]["output"] == []
    assert told[-1]["response"]["output"] == [told[-2]["item"]]


def test_a_response_with_calls_has_items_for_them() -> None:
    tools = [{"type": "function", "name": name} for name in "fg"]
    body = {"input": "x", "tools": tools}
    output = ask(ScriptedFrontend(*CALLS), RESPONSES, body).json()["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert (output[1]["name"], output[1]["arguments"]) == ("f", '{"a": 1}')
    told = streamed(ScriptedFrontend(*CALLS), RESPONSES, body)
    deltas = [e for e in told if e["type"] == "response.function_call_arguments.delta"]
    first = [event["delta"] for event in deltas if event["output_index"] == 1]
    assert "".join(first) == '{"a": 1}'


def test_a_conversation_of_items_is_the_same_conversation() -> None:
    frontend = ScriptedFrontend("Hi")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 2}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"a": 3}'},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
    ]
    ask(frontend, RESPONSES, {"input": items, "instructions": "Be brief."})
    messages: Any = frontend.submitted[0].text
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "tool"]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert messages[3]["tool_call_id"] == "c1"


def test_metadata_come_back_unless_they_are_too_deep_to_tell() -> None:
    body = {"input": "x", "metadata": {"a": "b"}}
    assert ask(ScriptedFrontend(), RESPONSES, body).json()["metadata"] == {"a": "b"}
    for depth in (100, 600, 900):
        deep: Any = []
        for _ in range(depth):
            deep = [deep]
        response = ask(ScriptedFrontend(), RESPONSES, {"input": "x", "metadata": deep})
        assert (response.status_code, error_of(response)["param"]) == (400, "metadata")


def test_a_response_that_is_cut_is_incomplete() -> None:
    cut = UserReply(1, "x", True, FinishReason.LENGTH, [1], 3, 0)
    answer = ask(ScriptedFrontend(cut), RESPONSES, {"input": "x"}).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    events = streamed(ScriptedFrontend(cut), RESPONSES, {"input": "x"})
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"content": "x"}, "input[0].role"),
        ({"type": "function_call"}, "input[0].name"),
        ({"type": "function_call_output"}, "input[0].output"),
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input"),
        ("x", "input[0]"),
    ],
)
def test_items_that_are_none_are_refused(item: Any, param: str) -> None:
    response = ask(ScriptedFrontend("Hi"), RESPONSES, {"input": [item]})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert "messages" not in error["message"]
