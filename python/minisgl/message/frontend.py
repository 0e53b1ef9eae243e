"""Messages to the API server."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.params import FinishReason

from .codec import Message


class BaseFrontendMsg(Message, family=True):
    """Base of the messages to the API server."""


@dataclass(eq=False)
class BatchFrontendMsg(BaseFrontendMsg):
    """Several messages that arrive together, in order."""

    data: list[BaseFrontendMsg]


@dataclass(eq=False)
class UserReply(BaseFrontendMsg):
    """The next piece of a request's answer."""

    uid: int
    incremental_output: str
    finished: bool
    finish_reason: FinishReason | None = None


@dataclass(eq=False)
class ErrorReply(BaseFrontendMsg):
    """A request that ended in an error; `param` names the field at fault, if one is."""

    uid: int
    message: str
    param: str | None = None
