"""How much of what it may generate will a request really generate? A guess, for admission.

A guess that is too low costs a preemption, one that is too high some memory; no answer depends on
it. Only counts of tokens go in, so that every rank and every replay guesses alike.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

LATEST = 256  # answers remembered of each size
FEWEST = 8  # fewer are no evidence
WHOLE = 1 << 20  # shares are integers out of so many


class Forecast:
    """Answers by the share of `max_tokens` that they used, those of like `max_tokens` together.

    A request is expected to end with the median of those that went further than it is now; if
    fewer than `FEWEST` did, it is expected to use all. Sizes double: clients that send no
    `max_tokens` may use a hundredth of the whole context, while others use all that they ask for.
    share: expect this share of the rest instead, and learn nothing.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = None if share is None else max(int(share * WHOLE), 1)
        self._answers: dict[int, tuple[deque[int], list[int]]] = {}  # latest last, and sorted

    def learn(self, num_generated: int, max_tokens: int) -> None:
        """Take in an answer that has come to its end."""
        if self._share is not None or not num_generated:
            return
        latest, ordered = self._answers.setdefault(max_tokens.bit_length(), (deque(), []))
        used = num_generated * WHOLE // max_tokens
        latest.append(used)
        insort(ordered, used)
        if len(latest) > LATEST:
            del ordered[bisect_left(ordered, latest.popleft())]

    def unused(self, num_generated: int, max_tokens: int) -> int:
        """How many of the tokens that a request may still generate it will likely not."""
        rest = max_tokens - num_generated
        if self._share is not None:
            return rest * (WHOLE - self._share) // WHOLE
        _, ordered = self._answers.get(max_tokens.bit_length(), (None, ()))
        first = bisect_right(ordered, num_generated * WHOLE // max_tokens)
        num_longer = len(ordered) - first
        if num_longer < FEWEST:
            return 0
        total = -(-ordered[first + num_longer // 2] * max_tokens // WHOLE)
        return min(max(max_tokens - total, 0), rest - 1)
