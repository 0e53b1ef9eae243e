"""Messages to the tokenizer and detokenizer workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minisgl.params import ErrorKind, FinishReason, PositionLogprobs, SamplingParams

from .codec import Message


class BaseTokenizerMsg(Message, family=True):
    """Base of the messages to the tokenizer."""


@dataclass(eq=False)
class BatchTokenizerMsg(BaseTokenizerMsg):
    """Several messages that arrive together, in order."""

    data: list[BaseTokenizerMsg]


@dataclass(eq=False)
class TokenizeMsg(BaseTokenizerMsg):
    """A request as text, as token ids, or as a list of chat messages (`{"role", "content"}`).

    tools: functions that the model may call, for its chat template. template_args: other variables
    of the template, such as `enable_thinking`. The rest is handed on in the `UserMsg`.
    """

    uid: int
    text: str | list[Any]
    sampling_params: SamplingParams
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    group: int | None = None
    salt: str = ""
    priority: int = 0
    deadline: float | None = None


@dataclass(eq=False)
class DetokenizeMsg(BaseTokenizerMsg):
    """One sampled token. The last of a request says `finished` and why; an error has no token.

    error_param: the field at fault, if one is. num_prompt_tokens and num_cached_tokens (those that
    were in the prefix cache), prompt_logprobs: told with the first token. logprobs: of this one.
    """

    uid: int
    next_token: int
    finished: bool
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_kind: ErrorKind = ErrorKind.FAILED
    error_param: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)


@dataclass(eq=False)
class AbortMsg(BaseTokenizerMsg):
    """End a request; it takes the same road as its submit."""

    uid: int


@dataclass(eq=False)
class EncodeMsg(BaseTokenizerMsg):
    """Asks for the ids of a text or of a list of chat messages; an `EncodeReply` answers."""

    uid: int
    text: str | list[Any]
    add_special_tokens: bool = True
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DecodeMsg(BaseTokenizerMsg):
    """Asks for the text of some ids; a `DecodeReply` answers."""

    uid: int
    token_ids: list[int]
    skip_special_tokens: bool = False
