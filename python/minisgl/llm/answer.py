"""The answer of one request as `LLM` tells it: event by event, and as a whole at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minisgl.message import DetokenizeMsg
from minisgl.params import FinishReason, PositionLogprobs, SamplingParams
from minisgl.tokenizer import WITHOUT_TOKEN, GrowingAnswer, TokenBytes, Tokenizer


@dataclass(slots=True)
class StreamEvent:
    """A piece of one answer. index: which prompt; the last piece says why the answer ended.

    logprobs: of `token_ids`, prompt_logprobs: of the prompt, with the first piece; if asked for.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)


class Answer:
    """Collects one request's tokens. token_bytes: of the tokenizer.

    is_streamed: someone wants its text piece by piece. Else, and if no stop string has to be looked
    for, the tokens become text once, at the end.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        token_bytes: TokenBytes,
        *,
        is_streamed: bool,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._tokenizer, self._params, self._bytes = tokenizer, params, token_bytes
        self._growing: GrowingAnswer | None = None
        if is_streamed or params.stop:
            self._growing = GrowingAnswer(
                index, tokenizer, params.stop, token_bytes, holds_tokens=False
            )
        self._pieces: list[str] = []
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: list[PositionLogprobs] = []

    def take(self, msg: DetokenizeMsg) -> StreamEvent | None:
        """Take in one token, or the end; the event to pass on, if the answer has any."""
        if self._growing is None:
            self._keep(msg)
            return None
        reply = self._growing.take(msg)
        assert reply is not None  # it holds nothing
        self.finish_reason, self.error = reply.finish_reason, msg.error
        self._pieces.append(reply.incremental_output)
        self.token_ids += reply.token_ids
        self._logprobs += reply.logprobs
        self._prompt_logprobs += reply.prompt_logprobs
        return StreamEvent(
            self.index,
            reply.token_ids,
            reply.incremental_output,
            reply.finish_reason,
            msg.error,
            reply.logprobs,
            reply.prompt_logprobs,
        )

    def _keep(self, msg: DetokenizeMsg) -> None:
        if msg.prompt_logprobs:
            self._prompt_logprobs += map(self._bytes.named, msg.prompt_logprobs)
        if msg.finished:
            self.finish_reason, self.error = msg.finish_reason, msg.error
            if msg.finish_reason in WITHOUT_TOKEN:
                return
        self.token_ids.append(msg.next_token)
        if msg.logprobs is not None:
            self._logprobs.append(self._bytes.named(msg.logprobs))

    def _text(self) -> str:
        if self._growing is None:
            return self._tokenizer.decode(self.token_ids)
        return "".join(self._pieces)

    def result(self) -> dict[str, Any]:
        """The whole answer as `LLM.generate` returns it."""
        reason = None if self.finish_reason is None else self.finish_reason.value
        result: dict[str, Any] = {
            "text": self._text(),
            "token_ids": self.token_ids,
            "finish_reason": reason,
        }
        if self._params.logprobs is not None:
            result["logprobs"] = self._logprobs
        if self._params.prompt_logprobs is not None:
            result["prompt_logprobs"] = self._prompt_logprobs
        if self.error is not None:
            result["error"] = self.error
        return result
