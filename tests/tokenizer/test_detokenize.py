"""Pieces of text come as soon as they are whole, and join to exactly the decoded text."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from minisgl.message import DetokenizeMsg
from minisgl.params import FinishReason
from minisgl.tokenizer import (
    DetokenizeManager,
    IncrementalDecoder,
    Tokenizer,
    find_printable_text,
)
from minisgl.tokenizer.tokenizer import SpecialTokens

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


class OnlyDecode:
    """A tokenizer of which nothing is known but `decode`."""

    eos_token_id = 2

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decode = tokenizer.decode


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """A SentencePiece tokenizer with byte fallback, like Llama 2's."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["▁", "▁the", "a", "é", "漢", "▁▁", "x▁y", "<0xZZ>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, SpecialTokens(bos="<s>", eos="</s>"))


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of single bytes."""
    spelled = enumerate(tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size)))
    return [i for i, s in spelled if len(s) == 1 or (len(s) == 6 and s.startswith("<0x"))]


def random_ids(tokenizer: Tokenizer, num: int) -> Iterable[list[int]]:
    """Lists of any ids, and of single bytes, which are mostly invalid UTF-8."""
    rng = random.Random(3)
    anything, single = range(tokenizer.vocab_size), byte_ids(tokenizer)
    for _ in range(num):
        yield rng.choices(anything, k=rng.randrange(30))
        yield rng.choices(single, k=rng.randrange(12))
        letters = "".join(rng.choices("aé漢🤖 \u200d", k=rng.randrange(6)))
        cut = tokenizer.encode(letters, add_special_tokens=False)
        yield cut[rng.randrange(2) :] + rng.choices(single, k=rng.randrange(3)) + cut


def stream(tokenizer: Any, ids: Iterable[int], **options: Any) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, **options)
    return [decoder.push(token_id) for token_id in ids] + [decoder.flush()]


def messages(uid: int, ids: list[int], reason: FinishReason | None) -> list[DetokenizeMsg]:
    done = [False] * (len(ids) - 1) + [True]
    ends = zip(ids, done, strict=True)
    return [DetokenizeMsg(uid, token_id, end, reason if end else None) for token_id, end in ends]


@pytest.mark.parametrize("kind", ["tokenizer", "sentencepiece"])
@pytest.mark.parametrize("skip", [False, True])
def test_streamed_pieces_join_to_the_decoded_text(
    kind: str, skip: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    for ids in random_ids(tokenizer, 1000):
        pieces = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_a_tokenizer_of_which_only_decode_is_known_streams_too(tokenizer: Tokenizer) -> None:
    for ids in random_ids(tokenizer, 200):
        assert "".join(stream(OnlyDecode(tokenizer), ids)) == tokenizer.decode(ids)


def test_every_text_streams_back_as_it_is(tokenizer: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        assert "".join(stream(tokenizer, tokenizer.encode(text))) == text


def test_a_character_comes_whole_with_its_last_byte(tokenizer: Tokenizer) -> None:
    by_byte = {tokenizer.convert_ids_to_tokens(i): i for i in byte_ids(tokenizer)}
    robot = [by_byte[letter] for letter in "ðŁ¤ĸ"]
    assert tokenizer.decode(robot) == "🤖"
    assert stream(tokenizer, robot) == ["", "", "", "🤖", ""]
    assert stream(tokenizer, robot[:3]) == ["", "", "", "\ufffd"]
    assert stream(tokenizer, [*robot[:2], by_byte["a"]]) == ["", "", "\ufffda", ""]


def test_text_comes_with_the_token_that_makes_it_whole(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, tokenizer.encode("Hello, we can")) == ["Hello", ",", " we", " can", ""]


def test_a_byte_run_of_sentencepiece_is_text_when_it_ends(sentencepiece: Tokenizer) -> None:
    the, a = 260, 261
    assert stream(sentencepiece, [the, a, 3 + 0xC3, 3 + 0xBC, a]) == ["the", "a", "", "", "üa", ""]
    assert stream(sentencepiece, [3 + 0xC3, 3 + 0xBC]) == ["", "", "ü"]
    assert stream(sentencepiece, [3 + 0xC3, 3 + 0x20, the]) == ["", "", "\ufffd\ufffd the", ""]


def test_ids_outside_the_vocabulary_are_nothing(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [49152, 2**31 - 1, 198, -1, 2**40]) == ["", "", "\n", "", "", ""]


def test_a_token_costs_the_same_late_as_early(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    ids = rng.choices(range(tokenizer.vocab_size), k=60_000)
    decoder = IncrementalDecoder(tokenizer)
    started = time.process_time()
    for token_id in ids:
        decoder.push(token_id)
    assert time.process_time() - started < 3.0  # 50 us each; decoding all of it anew takes hours


@pytest.mark.parametrize(
    ("text", "printable"),
    [
        ("", ""),
        ("word", ""),
        ("two words", "two "),
        ("ends in space ", "ends in space "),
        ("line\n", "line\n"),
        ("line\nnext", ""),
        ("你好", "你好"),
        ("hello 世", "hello 世"),
        ("かな", "かな"),
        ("你好a", ""),
        ("𠀀", "𠀀"),
        ("한국어", ""),
    ],
)
def test_printable_text_is_whole_words_lines_or_cjk(text: str, printable: str) -> None:
    assert find_printable_text(text) == printable


def test_the_manager_sends_whole_words(tokenizer: Tokenizer) -> None:
    manager = DetokenizeManager(tokenizer)
    ids = tokenizer.encode("Hello, we can\n use 12")
    pieces = [manager.detokenize([msg])[0] for msg in messages(7, ids, LENGTH)]
    assert list(map(tokenizer.decode, ids)) == [
        "Hello", ",", " we", " can", "\n", " use", " ", "1", "2",
    ]  # fmt: skip
    assert pieces == ["", "", "Hello, ", "we ", "can\n", " ", "use ", "", "12"]
    assert manager.decode_map == {}


def test_the_managers_pieces_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    manager = DetokenizeManager(tokenizer)
    for uid, ids in enumerate(random_ids(tokenizer, 500)):
        if ids:
            pieces = manager.detokenize(messages(uid, ids, LENGTH))
            assert "".join(pieces) == tokenizer.decode(ids)
    assert manager.decode_map == {}


def test_requests_in_one_batch_do_not_mix(tokenizer: Tokenizer) -> None:
    manager = DetokenizeManager(tokenizer)
    first, second = tokenizer.encode("Hello world"), tokenizer.encode("\n\n")
    both = manager.detokenize(
        [
            DetokenizeMsg(1, first[0], False),
            DetokenizeMsg(2, second[0], True, LENGTH),
            DetokenizeMsg(1, first[1], True, LENGTH),
        ]
    )
    assert both == ["", "\n\n", "Hello world"]


def test_the_token_that_stops_an_answer_is_no_part_of_it(tokenizer: Tokenizer) -> None:
    manager = DetokenizeManager(tokenizer)
    ids = [*tokenizer.encode("Hello"), 2]
    assert "".join(manager.detokenize(messages(1, ids, None))) == "Hello"
    assert "".join(manager.detokenize(messages(2, ids, STOP))) == "Hello"
    assert "".join(manager.detokenize(messages(3, ids, LENGTH))) == "Hello<|im_end|>"
    assert "".join(manager.detokenize(messages(4, [2, 2, 198], LENGTH))) == "<|im_end|>" * 2 + "\n"
    assert manager.decode_map == {}


def test_an_error_flushes_and_adds_no_token(tokenizer: Tokenizer) -> None:
    manager = DetokenizeManager(tokenizer)
    failed = DetokenizeMsg(1, -1, True, FinishReason.ERROR, error="NaN")
    assert manager.detokenize([DetokenizeMsg(1, 19556, False), failed]) == ["", "Hello"]
    assert manager.decode_map == {}


def test_the_state_of_an_aborted_request_can_be_dropped(tokenizer: Tokenizer) -> None:
    manager = DetokenizeManager(tokenizer)
    manager.detokenize([DetokenizeMsg(1, 19556, False)])
    assert list(manager.decode_map) == [1]
    manager.forget(1)
    manager.forget(1)
    assert manager.decode_map == {}


def test_a_transformers_tokenizer_is_taken_as_it_is(tokenizer: Tokenizer) -> None:
    foreign = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    manager = DetokenizeManager(foreign)
    ids = [*tokenizer.encode("größer 🤖 than"), 2]
    assert "".join(manager.detokenize(messages(1, ids, None))) == foreign.decode(ids[:-1])
    assert "".join(manager.detokenize(messages(2, ids, LENGTH))) == foreign.decode(ids)


def test_a_long_word_is_held_without_growing_cost(tokenizer: Tokenizer) -> None:
    manager = DetokenizeManager(tokenizer)
    a = tokenizer.convert_tokens_to_ids("a")
    num = 30_000
    started = time.process_time()
    pieces = manager.detokenize(messages(1, [a] * num, LENGTH))
    assert time.process_time() - started < 3.0
    assert pieces == [""] * (num - 1) + ["a" * num]
