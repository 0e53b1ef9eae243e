"""Messages to text in whole words, for those who keep no `GrowingAnswer`: the server has those.

May import `params` and `message`. Invariant: the pieces of a request join to exactly
`tokenizer.decode(ids)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.message import DetokenizeMsg
from minisgl.params import FinishReason

from .decoder import IncrementalDecoder

_CJK_RANGES = (
    (0x3040, 0x30FF),  # kana
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2FA1F),  # the ideographs beyond the first plane
)


def _is_cjk(char: str) -> bool:
    code = ord(char)
    return any(low <= code <= high for low, high in _CJK_RANGES)


def find_printable_text(text: str) -> str:
    """The part of `text` made of whole words, as a reader would like to see it appear.

    All of it if it ends in a newline or a CJK character, else up to and with the last space.
    """
    if text.endswith("\n") or (text and _is_cjk(text[-1])):
        return text
    return text[: text.rfind(" ") + 1]


class _RequestState:
    """The decoder of one request, and its text that is not part of a whole word yet."""

    def __init__(self, decoder: IncrementalDecoder) -> None:
        self.decoder = decoder
        self.held: list[str] = []  # holds no space and no other place to cut

    def push(self, token_id: int) -> str:
        """Add one id; the words that are now whole."""
        text = self.decoder.push(token_id)
        if not text:
            return ""
        printable = find_printable_text(text)
        if not printable:
            self.held.append(text)
            return ""
        piece = "".join(self.held) + printable
        self.held = [text[len(printable) :]]
        return piece

    def flush(self) -> str:
        """Everything that was held back."""
        return "".join(self.held) + self.decoder.flush()


class DetokenizeManager:
    """The detokenizer's side of all requests: one message in, one piece of text out.

    decode_map: state by uid, from a request's first token to its last or to `forget`.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = False) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.decode_map: dict[int, _RequestState] = {}

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer and are no part of its text."""
        for name in ("eos_token_ids", "eos_token_id"):
            found = getattr(self.tokenizer, name, None)
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
        return frozenset()

    def detokenize(self, msgs: Sequence[DetokenizeMsg]) -> list[str]:
        """The next piece of text of each message's request, in order; often empty."""
        return [self._one(msg) for msg in msgs]

    def _one(self, msg: DetokenizeMsg) -> str:
        state = self.decode_map.get(msg.uid)
        if state is None:
            decoder = IncrementalDecoder(
                self.tokenizer, skip_special_tokens=self.skip_special_tokens
            )
            state = self.decode_map[msg.uid] = _RequestState(decoder)
        piece = "" if self._is_dropped(msg) else state.push(msg.next_token)
        if msg.finished:
            del self.decode_map[msg.uid]
            piece += state.flush()
        return piece

    def _is_dropped(self, msg: DetokenizeMsg) -> bool:
        """Whether the token is no text: there is none after an error, nor if it stops it."""
        if msg.error is not None or msg.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return True
        if not msg.finished or msg.finish_reason is FinishReason.LENGTH:
            return False
        return msg.finish_reason is FinishReason.STOP or msg.next_token in self.eos_token_ids

    def forget(self, uid: int) -> None:
        """Drop the state of a request that was aborted."""
        self.decode_map.pop(uid, None)
