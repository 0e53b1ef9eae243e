"""The tokenizer process without its sockets: messages in, messages out, no state left."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.message import (
    AbortBackendMsg,
    AbortMsg,
    BatchTokenizerMsg,
    DecodeMsg,
    DecodeReply,
    DetokenizeMsg,
    EncodeMsg,
    EncodeReply,
    ErrorReply,
    TokenizeMsg,
    UserMsg,
    UserReply,
)
from minisgl.params import ErrorKind, FinishReason, Logprob, PositionLogprobs, SamplingParams
from minisgl.tokenizer import load_tokenizer
from minisgl.tokenizer.worker import TokenizerWorker

from tests.llm.tiny import EOS, write_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def worker(tokenizer: Any) -> TokenizerWorker:
    return TokenizerWorker(tokenizer)


def submit(worker: TokenizerWorker, uid: int = 1, text: Any = "hi", **params: Any) -> None:
    backend, frontend = worker.process([TokenizeMsg(uid, text, SamplingParams(**params))])
    assert len(backend) == 1 and frontend == []


def tokens(worker: TokenizerWorker, text: str, uid: int = 1) -> list[DetokenizeMsg]:
    ids = worker.tokenizer.encode(text, add_special_tokens=False)
    return [DetokenizeMsg(uid, token, False) for token in ids]


def replies(worker: TokenizerWorker, msgs: list[DetokenizeMsg]) -> tuple[list, list[UserReply]]:
    backend: list = []
    frontend: list = []
    for msg in msgs:
        one, other = worker.process([msg])
        backend += one
        frontend += other
    return backend, frontend


def test_a_text_becomes_ids_with_all_that_belongs_to_it(worker: TokenizerWorker) -> None:
    params = SamplingParams(max_tokens=3)
    msg = TokenizeMsg(5, "hi", params, group=2, salt="s", priority=3, deadline=1.5)
    backend, frontend = worker.process([msg])
    assert backend == [UserMsg(5, [71, 72], params, group=2, salt="s", priority=3, deadline=1.5)]
    assert frontend == []


def test_ids_are_taken_as_they_are(worker: TokenizerWorker) -> None:
    backend, _ = worker.process([TokenizeMsg(5, [1, 2, 259], SamplingParams())])
    assert backend == [UserMsg(5, [1, 2, 259], SamplingParams())]


@pytest.mark.parametrize("text", ["\ud800", [2**31], [{"role": "user", "content": "hi"}]])
def test_what_cannot_be_tokenized_is_an_error_of_its_own(
    worker: TokenizerWorker, text: Any
) -> None:
    good = TokenizeMsg(2, "hi", SamplingParams())
    backend, frontend = worker.process([TokenizeMsg(1, text, SamplingParams()), good])
    assert [msg.uid for msg in backend] == [2]
    assert [(msg.uid, msg.kind) for msg in frontend] == [(1, ErrorKind.INVALID)]
    assert list(worker.answers) == [2]


def test_a_character_leaves_when_it_is_whole_with_all_its_tokens(worker: TokenizerWorker) -> None:
    submit(worker)
    msgs = tokens(worker, "aé€b")
    msgs[0].num_prompt_tokens, msgs[0].num_cached_tokens = 2, 1
    _, got = replies(worker, msgs)
    assert [reply.incremental_output for reply in got] == ["a", "é", "€", "b"]
    assert [len(reply.token_ids) for reply in got] == [1, 2, 3, 1]
    assert {(reply.num_prompt_tokens, reply.num_cached_tokens) for reply in got} == {(2, 1)}


def test_a_batch_in_is_answered_in_order(worker: TokenizerWorker) -> None:
    submit(worker, 1)
    submit(worker, 2)
    batch = BatchTokenizerMsg([*tokens(worker, "ab", 1), *tokens(worker, "xy", 2)])
    _, got = worker.process([batch])
    assert [(r.uid, r.incremental_output) for r in got] == [(1, "a"), (1, "b"), (2, "x"), (2, "y")]


@pytest.mark.parametrize(
    ("reason", "token", "text", "num_ids"),
    [
        (FinishReason.STOP, EOS, "a", 1),  # the token that stops it is no part of the answer
        (FinishReason.LENGTH, 66, "ac", 2),
        (FinishReason.LENGTH, 127, "a\ufffd", 2),  # half a character shows at the end
    ],
)
def test_the_end_tells_why_and_nothing_is_kept(
    worker: TokenizerWorker, reason: FinishReason, token: int, text: str, num_ids: int
) -> None:
    submit(worker)
    _, got = replies(worker, [*tokens(worker, "a"), DetokenizeMsg(1, token, True, reason)])
    assert "".join(reply.incremental_output for reply in got) == text
    assert sum(len(reply.token_ids) for reply in got) == num_ids
    assert (got[-1].finished, got[-1].finish_reason) == (True, reason)
    assert worker.answers == {}


def test_a_stop_string_over_several_tokens_never_shows_and_ends_the_engines_work(
    worker: TokenizerWorker,
) -> None:
    submit(worker, stop=["cde"])
    backend, got = replies(worker, tokens(worker, "abcdX cdef"))
    assert "".join(reply.incremental_output for reply in got) == "abcdX "
    assert "".join(reply.incremental_output for reply in got[:2]) == "ab"
    assert (got[-1].finished, got[-1].finish_reason) == (True, FinishReason.STOP)
    assert backend == [AbortBackendMsg(1)]
    assert worker.answers == {}


def test_what_a_stop_string_holds_back_shows_if_the_answer_ends(worker: TokenizerWorker) -> None:
    submit(worker, stop=["cde"])
    msgs = tokens(worker, "abcd")
    msgs[-1].finished, msgs[-1].finish_reason = True, FinishReason.LENGTH
    backend, got = replies(worker, msgs)
    assert "".join(reply.incremental_output for reply in got) == "abcd"
    assert got[-1].finish_reason is FinishReason.LENGTH
    assert backend == []


def test_an_abort_goes_on_to_the_engine_and_late_tokens_are_nothing(
    worker: TokenizerWorker,
) -> None:
    submit(worker)
    late = tokens(worker, "ab")
    assert worker.process([AbortMsg(1), *late]) == ([AbortBackendMsg(1)], [])
    assert worker.answers == {}


def test_an_error_of_the_engine_is_handed_on(worker: TokenizerWorker) -> None:
    submit(worker)
    reason, kind = FinishReason.ERROR, ErrorKind.OVERLOADED
    msg = DetokenizeMsg(1, -1, True, reason, error="full", error_kind=kind, error_param="p")
    assert worker.process([msg]) == ([], [ErrorReply(1, "full", "p", kind)])
    assert worker.answers == {}


def test_logprobs_get_the_bytes_of_their_tokens(worker: TokenizerWorker) -> None:
    submit(worker)
    (first, second) = tokens(worker, "é")
    told = PositionLogprobs(Logprob(first.next_token, -0.5), [Logprob(EOS, -0.1)])
    first.logprobs, second.logprobs = told, PositionLogprobs(Logprob(second.next_token, -1.0))
    first.prompt_logprobs = [PositionLogprobs(Logprob(64, None))]
    _, (reply,) = replies(worker, [first, second])
    assert [one.chosen.raw for one in reply.logprobs] == [b"\xc3", b"\xa9"]
    assert reply.logprobs[0].top == [Logprob(EOS, -0.1, b"<eos>")]
    assert reply.prompt_logprobs[0].chosen == Logprob(64, None, b"a")


def test_questions_about_texts_and_ids(worker: TokenizerWorker) -> None:
    _, got = worker.process([EncodeMsg(1, "hi"), DecodeMsg(2, [71, 72]), EncodeMsg(3, "\ud800")])
    assert got[:2] == [EncodeReply(1, [71, 72]), DecodeReply(2, "hi")]
    assert isinstance(got[2], ErrorReply) and got[2].uid == 3
    _, (error,) = worker.process([DecodeMsg(4, [-1])])
    assert isinstance(error, ErrorReply) and error.kind is ErrorKind.INVALID
