"""Messages to the API server."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.params import ErrorKind, FinishReason, PositionLogprobs

from .codec import Message


class BaseFrontendMsg(Message, family=True):
    """Base of the messages to the API server."""


@dataclass(eq=False)
class BatchFrontendMsg(BaseFrontendMsg):
    """Several messages that arrive together, in order."""

    data: list[BaseFrontendMsg]


@dataclass(eq=False)
class UserReply(BaseFrontendMsg):
    """The next piece of a request's answer.

    token_ids: the tokens of this piece, without the one that ended it. num_prompt_tokens and
    num_cached_tokens (those that were in the prefix cache) are told in each. logprobs: of
    `token_ids`, if asked for; prompt_logprobs: of the prompt, in the first piece.
    """

    uid: int
    incremental_output: str
    finished: bool
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)


@dataclass(eq=False)
class ErrorReply(BaseFrontendMsg):
    """A request that ended in an error; `param` names the field at fault, if one is."""

    uid: int
    message: str
    param: str | None = None
    kind: ErrorKind = ErrorKind.FAILED


@dataclass(eq=False)
class EncodeReply(BaseFrontendMsg):
    """The ids that an `EncodeMsg` asked for."""

    uid: int
    token_ids: list[int]


@dataclass(eq=False)
class DecodeReply(BaseFrontendMsg):
    """The text that a `DecodeMsg` asked for."""

    uid: int
    text: str
