"""One request's answer while it grows: tokens in, pieces of text out, stop strings held back.

May import `params` and `message`. Invariant: the pieces join to what `Tokenizer.decode` gives, cut
at the first stop string; nothing that a stop string hides leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.message import DetokenizeMsg, UserReply
from minisgl.params import FinishReason

from .decoder import IncrementalDecoder, TokenBytes
from .stop import StopStringFilter

WITHOUT_TOKEN = (FinishReason.STOP, FinishReason.ERROR)


class GrowingAnswer:
    """Turns the tokens of request `uid` into replies.

    stops: its stop strings. token_bytes: of the tokenizer. holds_tokens: a token leaves with the
    text that it completes; else at once.
    """

    __slots__ = (
        "_bytes",
        "_decoder",
        "_filter",
        "_held",
        "_holds",
        "_num_cached",
        "_num_prompt",
        "uid",
    )

    def __init__(
        self,
        uid: int,
        tokenizer: Any,
        stops: Sequence[str],
        token_bytes: TokenBytes,
        *,
        holds_tokens: bool,
    ) -> None:
        self.uid = uid
        self._decoder = IncrementalDecoder(tokenizer)
        self._filter = StopStringFilter(stops) if stops else None
        self._bytes = token_bytes
        self._holds = holds_tokens
        self._num_prompt = self._num_cached = 0
        self._held: UserReply | None = None

    def take(self, msg: DetokenizeMsg) -> UserReply | None:
        """Add one token; the reply to pass on, None if its text is not certain yet.

        Its tokens do not have the one that ends the answer, its log-probabilities have the bytes
        of theirs. After one that says `finished` nothing more may come.
        """
        if msg.num_prompt_tokens and not self._num_prompt:
            self._num_prompt, self._num_cached = msg.num_prompt_tokens, msg.num_cached_tokens
        reply, self._held = self._held or self._new_reply(), None
        if msg.prompt_logprobs:
            reply.prompt_logprobs += map(self._bytes.named, msg.prompt_logprobs)
        text = ""
        if msg.finish_reason not in WITHOUT_TOKEN:
            reply.token_ids.append(msg.next_token)
            if msg.logprobs is not None:
                reply.logprobs.append(self._bytes.named(msg.logprobs))
            text = self._decoder.push(msg.next_token)
        if msg.finished:
            text += self._decoder.flush()
            reply.finished, reply.finish_reason = True, msg.finish_reason
        if self._filter is not None:
            text = self._filter.push(text)
            if self._filter.stopped:
                reply.finished, reply.finish_reason = True, FinishReason.STOP
            elif msg.finished:
                text += self._filter.flush()
        reply.incremental_output += text
        if text or reply.finished or not self._holds:
            return reply
        self._held = reply
        return None

    def _new_reply(self) -> UserReply:
        return UserReply(
            self.uid,
            "",
            False,
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=self._num_cached,
        )
