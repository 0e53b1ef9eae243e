"""What is measured of each request, and what it comes to. May import `utils`.

Invariant: latencies are of requests that were answered (or cut by the end of the run) and never of
refused ones, which would look fast; every request is counted exactly once: complete, cut or failed.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.utils.openai_api import ServerError, is_end, parse_line

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Record:
    """One request. Moments are seconds on `time.perf_counter`.

    due: when it was to be sent, from which everything counts: a generator that lags behind must not
    flatter the server. gaps: seconds between the pieces of text.
    """

    index: int
    due: float
    first: float | None = None
    last: float | None = None
    end: float | None = None
    gaps: array[float] = field(default_factory=lambda: array("d"))
    num_pieces: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    message: str | None = None
    is_complete: bool = False

    def take(self, line: bytes, second: float) -> None:
        """Take in a line of the stream that arrived at `second`; `ServerError` for an error."""
        chunk = parse_line(line)
        if chunk is None:
            self.is_complete |= is_end(line)
            return
        if chunk.usage is not None:
            usage = chunk.usage
            self.prompt_tokens, self.completion_tokens = (
                usage.prompt_tokens,
                usage.completion_tokens,
            )
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.piece:
                self._count(second)

    def _count(self, second: float) -> None:
        self.num_pieces += 1
        if self.last is None:
            self.first = second
        else:
            self.gaps.append(second - self.last)
        self.last = second

    def close(self, second: float) -> None:
        """The stream is over; `ServerError` if it ended before the answer did."""
        if not (self.is_complete or self.finish_reason):
            raise ServerError("the stream ended before the answer was complete")
        self.is_complete, self.end = True, second

    def fail(self, kind: str, message: str) -> None:
        """Note why there is no answer. kind: an HTTP status or a word, to be counted by."""
        self.error, self.message, self.is_complete = kind, message, False

    @property
    def output_tokens(self) -> int:
        """What the server counted; else one for each piece of text."""
        return self.num_pieces if self.completion_tokens is None else self.completion_tokens

    @property
    def seconds_to_first(self) -> float | None:
        """From when it was due to the first text."""
        return None if self.first is None else self.first - self.due

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a token after the first."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    def as_dict(self, start: float) -> dict[str, Any]:
        """For a file: seconds, `due_s` after `start`, the others after `due_s`."""
        return {
            "index": self.index,
            "due_s": self.due - start,
            "first_token_s": self.seconds_to_first,
            "end_s": None if self.end is None else self.end - self.due,
            "gaps_s": list(self.gaps),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "message": self.message,
        }


def summarise(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Counts, rates and latencies of a run that took `seconds`; times in seconds."""
    answered = [record for record in records if record.error is None]
    complete = [record for record in answered if record.is_complete]
    output = sum(record.output_tokens for record in answered)
    prompt = sum(record.prompt_tokens or 0 for record in answered)
    cached = [record.cached_tokens for record in answered if record.cached_tokens is not None]
    span = max(seconds, 1e-9)
    return {
        "seconds": seconds,
        "num_requests": len(records),
        "num_complete": len(complete),
        "num_cut": len(answered) - len(complete),
        "errors": dict(sorted(Counter(r.error for r in records if r.error is not None).items())),
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": output,
        "is_counted_by_server": all(r.completion_tokens is not None for r in complete),
        "requests_per_second": len(complete) / span,
        "output_tokens_per_second": output / span,
        "prompt_tokens_per_second": prompt / span,
        "time_to_first_token_s": spread([r.seconds_to_first for r in answered]),
        "inter_token_s": spread([gap for r in answered for gap in r.gaps]),
        "time_per_output_token_s": spread([r.seconds_per_token for r in complete]),
        "end_to_end_s": spread([r.end - r.due for r in complete if r.end is not None]),
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, percentiles and the largest of the values that are there; None if there are none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    percentiles = {f"p{q}": percentile(known, q) for q in PERCENTILES}
    return {"mean": math.fsum(known) / len(known), **percentiles, "max": known[-1]}


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile of ordered values, on the straight line between two neighbours."""
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
