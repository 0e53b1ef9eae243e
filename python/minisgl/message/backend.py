"""Messages to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.params import SamplingParams

from .codec import Message, TokenIds


class BaseBackendMsg(Message, family=True):
    """Base of the messages to the scheduler."""


@dataclass(eq=False)
class BatchBackendMsg(BaseBackendMsg):
    """Several messages that arrive together, in order."""

    data: list[BaseBackendMsg]


@dataclass(eq=False)
class ExitMsg(BaseBackendMsg):
    """Finish what runs and end."""


@dataclass(eq=False)
class FlushMsg(BaseBackendMsg):
    """Forget every cached prefix that no request uses."""


@dataclass(eq=False)
class UserMsg(BaseBackendMsg):
    """A tokenized request.

    input_ids: tensor, array or list in; CPU int32 tensor out. `salt` separates prefix caches;
    `group` ties the answers of one prompt; a larger `priority` is served earlier by policies
    that look at it; `deadline` is in seconds since the epoch.
    """

    uid: int
    input_ids: TokenIds = TokenIds()  # noqa: RUF009 - a descriptor, not a default
    sampling_params: SamplingParams  # type: ignore[misc]
    group: int | None = None
    salt: str = ""
    priority: int = 0
    deadline: float | None = None


@dataclass(eq=False)
class AbortBackendMsg(BaseBackendMsg):
    """End a request in whatever state it is; an unknown uid is remembered for a while."""

    uid: int


@dataclass(eq=False)
class VocabularyMsg(BaseBackendMsg):
    """The first message of a scheduler's life: which ids end an answer."""

    eos_token_ids: list[int]


@dataclass(eq=False)
class ExpireBackendMsg(BaseBackendMsg):
    """End a request whose deadline has passed, and say so; one that has ended is left alone."""

    uid: int
