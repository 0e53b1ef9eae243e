"""One record per step: what traces, metrics, the live page and many tests read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The state right after a forward, before its results are processed.

    num_tokens: tokens computed. waiting: requests in the queue. Pages by state: free, cached (of
    them `evictable_pages` unlocked), owned by running requests. reserved_tokens: promised to
    running requests beyond what they hold. head_waits_for: why the head of the queue was
    not taken, None if nothing waits. num_preemptions: how often a request was put back into the
    queue, since the start. Times are in seconds and take part in no decision.
    """

    step: int
    phase: str
    uids: tuple[int, ...]
    num_tokens: int
    waiting: int
    free_pages: int
    cached_pages: int
    evictable_pages: int
    owned_pages: int
    reserved_tokens: int
    head_waits_for: str | None
    num_preemptions: int
    schedule_seconds: float
    forward_seconds: float
