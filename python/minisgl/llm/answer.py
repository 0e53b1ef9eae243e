"""The answer of one request while it grows: tokens in, text out, stop strings held back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minisgl.message import DetokenizeMsg
from minisgl.params import FinishReason, PositionLogprobs, SamplingParams
from minisgl.tokenizer import IncrementalDecoder, StopStringFilter, TokenBytes, Tokenizer


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
    """Collects one request's tokens. The pieces of text join to what `Tokenizer.decode` gives."""

    def __init__(self, index: int, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.index = index
        self._params = params
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._pieces: list[str] = []
        self._decoder = IncrementalDecoder(tokenizer)
        self._filter = StopStringFilter(list(params.stop)) if params.stop else None
        self._bytes = TokenBytes(tokenizer)
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: list[PositionLogprobs] = []

    def take(self, reply: DetokenizeMsg) -> StreamEvent | None:
        """Take in one reply; the event to pass on, None if no text came out and it goes on."""
        new_ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        text = ""
        is_dropped = reply.finish_reason in (FinishReason.STOP, FinishReason.ERROR)
        if not is_dropped:
            new_ids.append(reply.next_token)
            text = self._decoder.push(reply.next_token)
            if reply.logprobs is not None:
                logprobs = [self._bytes.named(reply.logprobs)]
        prompt_logprobs = [self._bytes.named(one) for one in reply.prompt_logprobs]
        if reply.finished:
            text += self._decoder.flush()
        self.finish_reason, self.error = reply.finish_reason, reply.error
        text = self._cut_at_stop(text, reply.finished)
        self.token_ids += new_ids
        self._pieces.append(text)
        self._logprobs += logprobs
        self._prompt_logprobs += prompt_logprobs
        if not (text or new_ids or reply.finished):
            return None
        return StreamEvent(
            self.index,
            new_ids,
            text,
            self.finish_reason,
            self.error,
            logprobs,
            prompt_logprobs,
        )

    def _cut_at_stop(self, text: str, is_last: bool) -> str:
        if self._filter is None:
            return text
        text = self._filter.push(text)
        if self._filter.stopped:
            self.finish_reason = FinishReason.STOP
        elif is_last:
            text += self._filter.flush()
        return text

    def result(self) -> dict[str, Any]:
        """The whole answer as `LLM.generate` returns it."""
        reason = None if self.finish_reason is None else self.finish_reason.value
        result: dict[str, Any] = {
            "text": "".join(self._pieces),
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
