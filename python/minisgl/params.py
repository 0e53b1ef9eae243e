"""What a request may ask for, and how it may end. Free of torch; may import `utils`.

Errors live in `minisgl.utils.errors` and are re-exported here, where the layers above find them.
Invariant: what `SamplingParams.validate` lets pass has a meaning, and travels in a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from minisgl.utils.errors import (
    ChatTemplateError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    MessageError,
    MinisglError,
    ModelLoadError,
    StartError,
    TokenizerError,
    UnsupportedModelError,
)

__all__ = [
    "ChatTemplateError",
    "ConfigError",
    "Constraint",
    "EngineError",
    "ErrorKind",
    "FinishReason",
    "InvalidRequestError",
    "Logprob",
    "MessageError",
    "MinisglError",
    "ModelLoadError",
    "PositionLogprobs",
    "SamplingParams",
    "StartError",
    "TokenizerError",
    "UnsupportedModelError",
    "shown",
]

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_CONSTRAINT_CHARS = 1 << 16

CONSTRAINT_KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")


class FinishReason(str, Enum):
    """Why a request ended; each request ends exactly once, in exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorKind(str, Enum):
    """Whose fault an error is: the request's, the load's, the clock's, or the engine's."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True)
class Constraint:
    """What an answer must spell, one of `CONSTRAINT_KINDS`.

    text: the JSON schema, the regular expression, a JSON list of the texts to choose from, or the
    grammar in Lark's form; empty for `json_object`.
    """

    kind: str
    text: str = ""


@dataclass(frozen=True)
class Logprob:
    """A token and the natural logarithm of its probability.

    logprob: None where nothing came before. raw: the token's bytes, filled in by the detokenizer.
    """

    token_id: int
    logprob: float | None
    raw: bytes = b""


@dataclass(frozen=True)
class PositionLogprobs:
    """One position of a text: the token that stands there, and the most likely ones, best first."""

    chosen: Logprob
    top: list[Logprob] = field(default_factory=list)


@dataclass
class SamplingParams:
    """How the tokens of one request are chosen.

    temperature: 0 takes the most likely token; `top_k` -1 means the whole vocabulary; `top_p` and
    `min_p` cut the tail of the distribution. `seed` makes the draws repeatable, whatever else runs.
    `max_tokens` counts generated tokens, an EOS included. Penalties and `logit_bias` change the
    logits before all of that, as the OpenAI API defines them (`repetition_penalty`: CTRL,
    arXiv:1909.05858). `logprobs`: so many of the most likely tokens are told for each position of
    the answer, `prompt_logprobs` the same for the prompt; 0 tells of the token that stands there
    alone, None of none. They are those of the model, before anything changes its logits.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    ignore_eos: bool = False
    max_tokens: int = 1024
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without looking at the distribution."""
        return (self.temperature <= 0.0 or self.top_k == 1) and self.top_p == 1.0

    @property
    def changes_logits(self) -> bool:
        """Whether a logits processor has work to do for this request."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
            or bool(self.logit_bias)
        )

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise `InvalidRequestError`, naming the field, for any value that has no meaning."""
        self._check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self._check_int("top_k", self.top_k, -1, 2**31 - 1)
        if self.top_k == 0:
            raise InvalidRequestError("top_k must be -1 (all tokens) or at least 1", "top_k")
        self._check_float("temperature", self.temperature, 0.0, 100.0)
        self._check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError(
                "top_p must be above 0; for greedy use temperature 0", "top_p"
            )
        self._check_float("min_p", self.min_p, 0.0, 1.0)
        self._check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError("ignore_eos must be true or false", "ignore_eos")
        if self.seed is not None:
            self._check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.logprobs is not None:
            self._check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            self._check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_constraint()
        self._check_stops(vocab_size)

    def _check_constraint(self) -> None:
        constraint = self.constraint
        if constraint is None:
            return
        if not isinstance(constraint, Constraint) or constraint.kind not in CONSTRAINT_KINDS:
            kinds = ", ".join(CONSTRAINT_KINDS)
            raise InvalidRequestError(f"constraint must be one of {kinds}", "constraint")
        if not isinstance(constraint.text, str) or len(constraint.text) > MAX_CONSTRAINT_CHARS:
            raise InvalidRequestError(
                f"{constraint.kind} takes a text of at most {MAX_CONSTRAINT_CHARS} characters",
                constraint.kind,
            )

    def _check_stops(self, vocab_size: int | None) -> None:
        self._check_list("stop", self.stop, MAX_STOP_STRINGS)
        if not all(isinstance(text, str) for text in self.stop):
            raise InvalidRequestError('stop must be a list of texts, such as ["\\n"]', "stop")
        if "" in self.stop:
            raise InvalidRequestError("stop must not be an empty text", "stop")
        self._check_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} entries", "logit_bias"
            )
        upper = (vocab_size or 2**31) - 1
        for token_id in self.stop_token_ids:
            self._check_int("stop_token_ids", token_id, 0, upper)
        for token_id, bias in self.logit_bias.items():
            self._check_int("logit_bias", token_id, 0, upper)
            self._check_float("logit_bias", bias, -100.0, 100.0)

    @staticmethod
    def _check_list(name: str, value: object, longest: int) -> None:
        if not isinstance(value, (list, tuple)):
            raise InvalidRequestError(f"{name} must be a list, got {shown(value)}", name)
        if len(value) > longest:
            raise InvalidRequestError(f"{name} takes at most {longest} entries", name)

    @staticmethod
    def _check_int(name: str, value: object, low: int, high: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequestError(f"{name} must be a whole number, got {shown(value)}", name)
        if not low <= value <= high:
            raise InvalidRequestError(
                f"{name} must be in {low} to {high}, got {shown(value)}", name
            )

    @staticmethod
    def _check_float(name: str, value: object, low: float, high: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequestError(f"{name} must be a number, got {shown(value)}", name)
        if not low <= value <= high:  # false for NaN as well
            raise InvalidRequestError(
                f"{name} must be in {low} to {high}, got {shown(value)}", name
            )


def shown(value: object) -> str:
    """A value for an error message, short; Python refuses to print a number of 5,000 digits."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    return repr(value)[:80]
