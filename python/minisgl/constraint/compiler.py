"""From a `Constraint` to llguidance's grammar, and from a tokenizer to its vocabulary.

The only module that imports llguidance. What it is given comes from requests: every fault of a
constraint is an `InvalidRequestError` that names the kind. Work is bounded by fuel, not by time,
so that the same constraint is accepted everywhere or nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from minisgl.params import Constraint, InvalidRequestError

from .matcher import first_line

MAX_LEXER_STATES = 20_000

# Between the parts of JSON: nothing, a space, or a new line that is indented. Anything longer only
# gives a small model room to write white space for ever. A schema's own "x-guidance" goes first.
JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n {0,40}"}


class _Vocabulary:
    """The vocabulary as llguidance's wrapper wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, token_bytes: Any, eos_token_ids: Iterable[int]) -> None:
        eos = sorted(eos_token_ids)
        self._tokenizer = tokenizer
        self.tokens = [token_bytes[i] for i in range(max([tokenizer.vocab_size - 1, *eos]) + 1)]
        self.eos_token_ids = eos
        if not eos:  # there must be one: an id that no model has
            self.tokens.append(b"")
            self.eos_token_ids = [len(self.tokens) - 1]
        self.eos_token_id = self.eos_token_ids[0]
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *self.eos_token_ids})

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class Compiler:
    """Makes matchers' first states. Building it takes half a second for 50,000 tokens.

    token_bytes: the bytes of each id. Special tokens and EOS are never text.
    """

    def __init__(self, tokenizer: Any, token_bytes: Any, eos_token_ids: Iterable[int]) -> None:
        vocabulary = _Vocabulary(tokenizer, token_bytes, eos_token_ids)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids
        )
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)

    def compile(self, constraint: Constraint) -> LLMatcher:
        """The state before the first token; to be copied, never used."""
        try:
            grammar = _grammar_of(constraint)
        except (ValueError, TypeError, RecursionError) as error:
            raise _invalid(constraint, str(error)) from None
        state = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not state.is_error():
            state.compute_bitmask()  # also the most expensive part of what is built when needed
        if state.is_error():
            raise _invalid(constraint, state.get_error())
        return state


def _invalid(constraint: Constraint, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{constraint.kind} cannot be used: {first_line(reason)}", constraint.kind
    )


def _grammar_of(constraint: Constraint) -> str:
    kind, text = constraint.kind, constraint.text
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS)
    if kind == "json_schema":
        schema = json.loads(text)
        if not isinstance(schema, dict) and schema is not True:
            raise ValueError("a schema is a JSON object")
        return LLMatcher.grammar_from_json_schema(
            {} if schema is True else text, defaults=JSON_OPTIONS
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = json.loads(text)
        if not isinstance(choices, list) or not choices:
            raise ValueError("a list of texts is wanted")
        if not all(isinstance(choice, str) for choice in choices):
            raise ValueError("its choices must be texts")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    return LLMatcher.grammar_from_lark(text)
