"""The state of one answer in its grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


class Matcher:
    """Takes in the tokens of one answer and says which may come next.

    state: llguidance's, not shared with others. vocab_size: of the model, which may have more ids
    than the tokenizer; those are never allowed. Invariant: after the end nothing changes any more.
    """

    def __init__(self, state: Any, vocab_size: int) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self._num_taken = 0
        self._completed_at: int | None = None
        self.error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._completed_at is not None

    def is_complete_after(self, num_tokens: int) -> bool:
        """Whether the first `num_tokens` of what was taken in were all there can be."""
        return self._completed_at is not None and self._completed_at <= num_tokens

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which ids may come next, bool `(vocab,)`; an EOS where the grammar accepts."""
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if self.error is None:
            bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
            known = np.unpackbits(bits, bitorder="little", count=min(8 * len(bits), len(allowed)))
            if self._state.is_error():
                self.error = first_line(self._state.get_error())
            else:
                allowed[: len(known)] = known
                if not known.any():
                    self.error = "no token of the vocabulary goes on"
        return allowed

    def take(self, tokens: Iterable[int]) -> None:
        """Take in the next tokens of the answer; -1 stands for none."""
        for token in tokens:
            if self.is_complete or self.error is not None:
                return
            self._num_taken += 1
            if token >= 0 and not self._state.consume_token(token):
                self.error = first_line(self._state.get_error()) or "a token that may not come"
            elif self._state.is_stopped():
                self._completed_at = self._num_taken


def first_line(text: str) -> str:
    """What is wrong, of an error of llguidance that also draws where."""
    lines = text.strip().split("\n")
    named = [line for line in lines if line.startswith("error: ")]
    return (named or lines)[0].removeprefix("error: ")[:300]
