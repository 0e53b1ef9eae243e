"""One conversation: who said what, and the next answer as a stream. May import `llm` and below."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from minisgl.params import EngineError, InvalidRequestError, MinisglError, SamplingParams

if TYPE_CHECKING:
    from minisgl.llm import LLM, StreamEvent


class Chat:
    """The messages so far, and the model that answers them.

    template_args: variables of the model's chat template.

    Each turn sends the whole conversation again; the prefix cache makes the old part free.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: SamplingParams,
        *,
        system: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.llm = llm
        self.template_args = dict(template_args or {})
        self.sampling = sampling
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.is_stopped = False
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages = [] if self.system is None else [self._message("system", self.system)]

    def set_system(self, text: str) -> None:
        """Take another system message (none if empty), and begin anew."""
        self.system = text or None
        self.reset()

    def stop(self) -> None:
        """End the answer that is being streamed after the token that is being computed."""
        self.is_stopped = True

    def ask(self, text: str) -> Iterator[StreamEvent]:
        """Stream the answer to `text`. Both are remembered; an answer that was stopped as it is.

        A question that the model refuses (too long, not allowed by its template) raises
        `InvalidRequestError`, one that fails on the way `EngineError`, and is forgotten.
        """
        self.is_stopped = False
        question = self._message("user", text)
        prompt = self.llm.chat_prompt([*self.messages, question], **self.template_args)
        try:
            events = self.llm.stream([prompt], self.sampling)
        except InvalidRequestError as error:
            raise self._refusal(error) from error
        pieces: list[str] = []
        with closing(cast("Generator[StreamEvent, None, None]", events)):
            for event in events:
                if event.error is not None:
                    raise EngineError(event.error)
                pieces.append(event.text)
                yield event
                if self.is_stopped:
                    break
        self.messages += [question, self._message("assistant", "".join(pieces))]

    def is_final(self, error: MinisglError) -> bool:
        """Whether other questions of this conversation will fail by the same error."""
        if not isinstance(error, InvalidRequestError):
            return False
        return error.param != "prompt" or self._has_begun

    @property
    def _has_begun(self) -> bool:
        return len(self.messages) > (self.system is not None)

    def _refusal(self, error: InvalidRequestError) -> InvalidRequestError:
        """The error in the words of a chat, where there is one prompt and a way to shorten it."""
        text = str(error).removeprefix("prompt 0: ")
        if error.param == "prompt" and self._has_begun:
            text = f"/reset begins anew, this conversation cannot go on: {text}"
        return InvalidRequestError(text, error.param)

    @staticmethod
    def _message(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}
