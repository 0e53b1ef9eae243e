"""One record per step: what traces, metrics, the live page and many tests read."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.core import Batch

from .decode import DecodeManager
from .prefill import PrefillManager


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The state right after a forward, before its results are processed.

    num_tokens: tokens computed, of them `num_prompt_tokens` of prompts. waiting: requests in the
    queue. Pages by state: free, cached (of them `evictable_pages` unlocked), owned by running
    requests. reserved_tokens: promised to running requests beyond what they hold. head_waits_for:
    why the first that was not taken waits, None if nothing does. num_preemptions: how often a
    request was put back into the queue, since the start. Times are in seconds and take part in no
    decision.
    """

    step: int
    phase: str
    uids: tuple[int, ...]
    num_tokens: int
    num_prompt_tokens: int
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

    @classmethod
    def take(
        cls,
        step: int,
        batch: Batch,
        num_tokens: tuple[int, int],
        queue: PrefillManager,
        running: DecodeManager,
        num_preemptions: int,
        seconds: tuple[float, float],
    ) -> StepRecord:
        """The record of a batch that was just launched; `num_tokens` is from before that."""
        cache, sizes = queue.cache_manager, queue.cache_manager.prefix_cache.size_info
        return cls(
            step=step,
            phase=batch.phase,
            uids=tuple(req.uid for req in batch.reqs),
            num_tokens=num_tokens[0],
            num_prompt_tokens=num_tokens[1],
            waiting=len(queue.pending_list),
            free_pages=cache.num_free_pages,
            cached_pages=sizes.total_size // cache.page_size,
            evictable_pages=sizes.evictable_size // cache.page_size,
            owned_pages=cache.num_owned_pages,
            reserved_tokens=running.inflight_tokens,
            head_waits_for=queue.head_waits_for,
            num_preemptions=num_preemptions,
            schedule_seconds=seconds[0],
            forward_seconds=seconds[1],
        )
