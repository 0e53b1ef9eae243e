"""Constraints as masks: what may come next, the end, what cannot be used, and every bound."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.constraint import Grammars, Matcher, grammars
from minisgl.params import MAX_CONSTRAINT_CHARS, Constraint, InvalidRequestError

EOS, SPECIAL, WORD, EMPTY = 256, 257, 258, 259
VOCAB_SIZE = 264  # of the model: more than the tokenizer knows

TOKEN_BYTES = [bytes([i]) for i in range(256)] + [b"<eos>", b"<tool>", b"yes", b""]


class ByteTokenizer:
    """A token for each byte, and a few more."""

    vocab_size = len(TOKEN_BYTES)
    all_special_ids = (EOS, SPECIAL)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


def make_grammars(eos: tuple[int, ...] = (EOS,)) -> Grammars:
    return Grammars(lambda: (ByteTokenizer(), TOKEN_BYTES, eos), VOCAB_SIZE)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Grammars]:
    shared = make_grammars()
    yield shared
    shared.shutdown()


def allowed(matcher: Matcher) -> set[int]:
    return set(matcher.mask().nonzero()[0].tolist())


def follow(matcher: Matcher, text: str) -> None:
    """Take a text in, byte by byte, each of which must be allowed."""
    for byte in text.encode():
        assert byte in allowed(matcher), (text, byte)
        matcher.take([byte])


def accepts(compiled: Grammars, constraint: Constraint, text: str) -> bool:
    """Whether an answer may be exactly `text`."""
    matcher = compiled.start(constraint)
    for byte in text.encode():
        if byte not in allowed(matcher):
            return False
        matcher.take([byte])
    return matcher.is_complete or EOS in allowed(matcher)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["a", "b"]},
        "at": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "required": ["name", "kind", "at", "tags"],
    "additionalProperties": False,
}
VALUE: dict[str, Any] = {"name": "é\n", "kind": "b", "at": {"x": -3}, "tags": ["t"]}


def spelled(value: Any, **style: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **style)


@pytest.mark.parametrize(
    "kind, text, good, bad",
    [
        ("json_schema", json.dumps(SCHEMA), spelled(VALUE), spelled({**VALUE, "kind": "c"})),
        ("json_schema", json.dumps(SCHEMA), spelled(VALUE, indent=4), spelled(VALUE)[:-1]),
        ("json_schema", json.dumps(SCHEMA), spelled(VALUE, separators=(",", ":")), "{}"),
        ("json_schema", "true", "[1]", "[1"),
        ("json_object", "", '{"a": [1, {"b": null}]}', "[1]"),
        ("regex", r"[0-9]{2}/\w+", "12/ab", "12/"),
        ("choice", json.dumps(['a"b\\', "x/y\n", "é", "."]), 'a"b\\', "b"),
        ("choice", json.dumps(['a"b\\', "x/y\n", "é", "."]), "x/y\n", "x/y"),
        ("grammar", 'start: "(" start ")" | /[0-9]+/', "((42))", "((42)"),
        ("grammar", 'start: "<tool>" %json {"type": "integer"}', "<tool>7", "7"),
    ],
)
def test_what_a_constraint_spells_may_come_and_nothing_else(
    compiled: Grammars, kind: str, text: str, good: str, bad: str
) -> None:
    constraint = Constraint(kind, text)
    assert accepts(compiled, constraint, good)
    assert not accepts(compiled, constraint, bad)


def test_an_eos_may_come_exactly_where_the_grammar_accepts(compiled: Grammars) -> None:
    matcher = compiled.start(Constraint("regex", "ab*c?"))
    assert allowed(matcher) == {ord("a")}
    follow(matcher, "a")
    assert allowed(matcher) == {ord("b"), ord("c"), EOS}
    follow(matcher, "bb")
    assert allowed(matcher) == {ord("b"), ord("c"), EOS}
    assert not matcher.is_complete
    follow(matcher, "c")
    assert matcher.is_complete


def test_every_eos_of_a_model_may_end_an_answer_and_one_without_ends_all_the_same() -> None:
    several = make_grammars((EOS, SPECIAL)).start(Constraint("regex", "a+"))
    several.take(b"a")
    assert allowed(several) == {ord("a"), EOS, SPECIAL}
    none = make_grammars(()).start(Constraint("regex", "ab"))
    follow(none, "ab")
    assert none.is_complete and allowed(none) <= set(range(VOCAB_SIZE))


def test_tokens_of_several_bytes_may_come_but_special_ones_are_no_text(compiled: Grammars) -> None:
    matcher = compiled.start(Constraint("choice", '["yes", "<tool>"]'))
    assert allowed(matcher) == {ord("y"), WORD, ord("<")}
    matcher.take([WORD])
    assert matcher.is_complete


def test_the_mask_covers_the_models_vocabulary(compiled: Grammars) -> None:
    mask = compiled.start(Constraint("regex", r"(?s:.)*")).mask()
    assert mask.shape == (VOCAB_SIZE,)
    assert mask[WORD] and not mask[EMPTY:].any() and not mask[SPECIAL]


def test_a_matcher_is_rebuilt_from_the_tokens_of_its_answer(compiled: Grammars) -> None:
    constraint = Constraint("json_schema", json.dumps(SCHEMA))
    tokens = spelled(VALUE).encode()
    grown = compiled.start(constraint)
    for i, token in enumerate(tokens):
        rebuilt = compiled.start(constraint, tokens[:i])
        assert (rebuilt.mask() == grown.mask()).all()
        grown.take([token])
    assert compiled.start(constraint, tokens).is_complete and grown.is_complete


def test_what_comes_after_the_end_changes_nothing(compiled: Grammars) -> None:
    matcher = compiled.start(Constraint("choice", '["ab"]'))
    matcher.take(b"ab")
    matcher.take(b"zz")
    assert matcher.error is None
    assert matcher.is_complete_after(2) and matcher.is_complete_after(3)
    assert not matcher.is_complete_after(1)


def test_a_token_that_may_not_come_is_an_error_and_no_token_is_none(compiled: Grammars) -> None:
    matcher = compiled.start(Constraint("choice", '["ab"]'))
    matcher.take([-1])
    assert matcher.error is None
    matcher.take(b"b")
    assert matcher.error and not matcher.mask().any()


def test_answers_do_not_share_their_state(compiled: Grammars) -> None:
    first, second = (compiled.start(Constraint("choice", '["ab", "cd"]')) for _ in range(2))
    first.take(b"a")
    assert allowed(first) == {ord("b")} and allowed(second) == {ord("a"), ord("c")}


@pytest.mark.parametrize(
    "kind, text, reason",
    [
        ("json_schema", "{", "Expecting"),
        ("json_schema", "[1]", "object"),
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", '{"if": {"type": "string"}, "type": "string"}', '"if"'),
        ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', ""),
        ("json_schema", '{"type":"array","items":' * 2000 + "{}" + "}" * 2000, "recursion"),
        ("regex", "[0-9", "unclosed"),
        ("regex", "(?=a)b", "look"),
        ("regex", "(" * 5000 + ")" * 5000, ""),
        ("choice", "[]", "list"),
        ("choice", '"a"', "list"),
        ("choice", "[1]", "texts"),
        ("choice", "[", "Expecting"),
        ("choice", "[" * 20000, ""),
        ("grammar", "", ""),
        ("grammar", "start: other", "other"),
        ("grammar", "start: " + "(" * 9000 + '"a"' + ")" * 9000, "nested"),
        ("grammar", "start: start", ""),
    ],
)
def test_what_cannot_be_used_is_named(
    compiled: Grammars, kind: str, text: str, reason: str
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequestError, match=reason or " ") as caught:
            compiled.check(Constraint(kind, text))
        assert caught.value.param == kind and len(str(caught.value)) < 400


def chain(num: int, kind: str) -> str:
    """Rules, terminals or references that refer to each other, `num` deep."""
    if kind == "json_schema":
        text = '{"type":"array","items":{"$ref":"#/$defs/%d"}}'
        inner = ",".join(f'"{i}":{text % (i + 1)}' for i in range(num))
        return f'{{"$ref":"#/$defs/0","$defs":{{{inner},"{num}":{{"type":"null"}}}}}}'
    name = "r" if kind == "rules" else "R"
    rules = [f"{name}{i}:{name}{i + 1}" for i in range(num)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{num}: "a"'])


@pytest.mark.parametrize("kind, size", [("json_schema", 1200), ("rules", 5600), ("names", 5600)])
def test_the_deepest_chains_that_fit_end_no_process(
    compiled: Grammars, kind: str, size: int
) -> None:
    text = chain(size, kind)
    assert MAX_CONSTRAINT_CHARS - 5000 < len(text) <= MAX_CONSTRAINT_CHARS
    constraint = Constraint("json_schema" if kind == "json_schema" else "grammar", text)
    matcher = compiled.start(constraint)
    assert allowed(matcher) == {ord("[") if kind == "json_schema" else ord("a")}


def test_a_constraint_is_compiled_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = make_grammars()
    constraint = Constraint("regex", "a")
    futures = {id(fresh.compile(constraint)) for _ in range(10)}
    assert len(futures) == 1


def test_only_so_many_are_remembered_and_what_was_forgotten_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "MAX_REMEMBERED", 2)
    fresh = make_grammars()
    first, second, third = (Constraint("choice", f'["{c}"]') for c in "abc")
    kept = fresh.compile(first)
    fresh.check(second)
    assert fresh.compile(first) is kept  # used again, so the second is the oldest
    fresh.check(third)
    assert fresh.compile(first) is kept
    assert allowed(fresh.start(second)) == {ord("b")}
    assert len(fresh._compiled) == 2


def test_compiling_does_not_block_the_caller_and_uses_a_bounded_number_of_threads() -> None:
    started, may_go = threading.Event(), threading.Event()

    def make_tokenizer() -> Any:
        started.set()
        assert may_go.wait(60)
        return ByteTokenizer(), TOKEN_BYTES, (EOS,)

    usual, others = threading.stack_size(), set(threading.enumerate())
    fresh = Grammars(make_tokenizer, VOCAB_SIZE)
    futures = [fresh.compile(Constraint("choice", f'["{i}"]')) for i in range(8)]
    assert started.wait(60) and not any(future.done() for future in futures)
    may_go.set()
    for future in futures:
        future.result(60)
    threads = [thread for thread in threading.enumerate() if thread not in others]
    assert 1 <= len(threads) <= grammars.MAX_COMPILERS
    assert threading.stack_size() == usual
    fresh.shutdown()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_white_space_between_the_parts_of_json_is_bounded(compiled: Grammars) -> None:
    schema = Constraint("json_schema", '{"type": "array", "items": {"type": "integer"}}')
    assert accepts(compiled, schema, "[\n" + " " * 40 + "1, 2\n]")
    assert not accepts(compiled, schema, "[\n\n1]")
    assert not accepts(compiled, schema, "[  1]")
    loose = Constraint("json_schema", '{"x-guidance": {"whitespace_pattern": "[ ]+"}}')
    assert accepts(compiled, loose, "[" + " " * 60 + "1]")
