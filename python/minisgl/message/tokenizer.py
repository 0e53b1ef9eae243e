"""Messages to the tokenizer and detokenizer workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minisgl.params import FinishReason, SamplingParams

from .codec import Message


class BaseTokenizerMsg(Message, family=True):
    """Base of the messages to the tokenizer."""


@dataclass(eq=False)
class BatchTokenizerMsg(BaseTokenizerMsg):
    """Several messages that arrive together, in order."""

    data: list[BaseTokenizerMsg]


@dataclass(eq=False)
class TokenizeMsg(BaseTokenizerMsg):
    """A request as text, or as a list of chat messages (`{"role", "content"}`).

    tools: functions that the model may call, for its chat template. template_args: other variables
    of the template, such as `enable_thinking`.
    """

    uid: int
    text: str | list[dict[str, Any]]
    sampling_params: SamplingParams
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DetokenizeMsg(BaseTokenizerMsg):
    """One sampled token. The last of a request says `finished` and why; an error has no token."""

    uid: int
    next_token: int
    finished: bool
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(eq=False)
class AbortMsg(BaseTokenizerMsg):
    """End a request; it takes the same road as its submit."""

    uid: int
