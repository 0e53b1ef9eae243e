"""One conversation: who said what, and the next answer as a stream.

May import `llm` and below. Invariant: what is remembered alternates between question and answer; a
question that failed is forgotten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from minisgl.params import (
    EngineError,
    FinishReason,
    InvalidRequestError,
    MinisglError,
    SamplingParams,
)

if TYPE_CHECKING:
    from minisgl.llm import LLM, StreamEvent


@dataclass(slots=True)
class Piece:
    """A piece of an answer. is_thought: shown, but no part of what is remembered."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    is_thought: bool = False


class Conversation(ABC):
    """The messages so far; who answers them is up to the subclasses.

    Each turn sends the whole conversation again; a prefix cache makes the old part free.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.is_stopped = False
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages = [] if self.system is None else [_message("system", self.system)]

    def set_system(self, text: str) -> None:
        """Take another system message (none if empty), and begin anew."""
        self.system = text or None
        self.reset()

    def stop(self) -> None:
        """End the answer that is being streamed, as soon as that is possible."""
        self.is_stopped = True

    def ask(self, text: str) -> Iterator[Piece]:
        """Stream the answer to `text`. Both are remembered; an answer that was stopped as it is.

        A question that is refused or that fails on the way is forgotten; its error says why.
        """
        self.is_stopped = False
        question = _message("user", text)
        said: list[str] = []
        with closing(self.answer([*self.messages, question])) as pieces:
            for piece in pieces:
                if not piece.is_thought:
                    said.append(piece.text)
                yield piece
                if self.is_stopped:
                    break
        if said or not self.is_stopped:
            self.messages += [question, _message("assistant", "".join(said))]

    @abstractmethod
    def answer(self, messages: list[dict[str, str]]) -> Generator[Piece, None, None]:
        """Stream the answer to the last message; closing the generator ends it."""

    @abstractmethod
    def is_final(self, error: MinisglError) -> bool:
        """Whether other questions of this conversation will fail by the same error."""

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to forget."""
        return len(self.messages) > (self.system is not None)

    def hint_at_reset(self, text: str) -> str:
        """The text of an error about a prompt's length, with the way out if there is one."""
        if not self.has_begun:
            return text
        return f"/reset begins anew, this conversation cannot go on: {text}"


class Chat(Conversation):
    """A conversation with a model in this process.

    template_args: variables of the model's chat template.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: SamplingParams,
        *,
        system: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(system)
        self.llm = llm
        self.template_args = dict(template_args or {})
        self.sampling = sampling

    def answer(self, messages: list[dict[str, str]]) -> Generator[Piece, None, None]:
        """Raises `InvalidRequestError` (its length, or the template refuses) or `EngineError`."""
        prompt = self.llm.chat_prompt(messages, **self.template_args)
        try:
            events = self.llm.stream([prompt], self.sampling)
        except InvalidRequestError as error:
            text = str(error).removeprefix("prompt 0: ")  # there is one
            text = self.hint_at_reset(text) if error.param == "prompt" else text
            raise InvalidRequestError(text, error.param) from error
        with closing(cast("Generator[StreamEvent, None, None]", events)):
            for event in events:
                if event.error is not None:
                    raise EngineError(event.error)
                yield Piece(event.text, len(event.token_ids), event.finish_reason)

    def is_final(self, error: MinisglError) -> bool:
        """Refused for anything but this question's length."""
        if not isinstance(error, InvalidRequestError):
            return False
        return error.param != "prompt" or self.has_begun


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
