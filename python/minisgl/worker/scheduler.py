"""`ServedScheduler`: a scheduler that ends when a step fails, and counts for the metrics.

Invariant: after a step that could not be launched nothing more is computed: its state is no longer
known to be sound, and with several ranks the others wait for this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from minisgl.config import SchedulerConfig
from minisgl.core import Batch, FinishReason
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    DetokenizeMsg,
    EngineStats,
    UserMsg,
)
from minisgl.scheduler import Scheduler
from minisgl.scheduler.protocols import EngineProtocol

from .io import FollowerIO, PrimaryIO

STATS_SECONDS = 0.5


class ServedScheduler(Scheduler):
    """The scheduler of a server. `failure` is the error of the step that ended it."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: EngineProtocol,
        io: PrimaryIO | FollowerIO,
        *,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        super().__init__(config, engine, io, eos_token_ids=eos_token_ids)
        self.failure: BaseException | None = None
        self.stats = EngineStats()
        self._told = EngineStats()
        self._told_at = 0.0

    def _fail_batch(self, batch: Batch, error: BaseException) -> None:
        self.failure, self.is_exiting = error, True
        super()._fail_batch(batch, error)

    def _process_one_msg(self, msg: BaseBackendMsg) -> None:
        self.stats.num_requests += isinstance(msg, UserMsg)
        self.stats.num_aborts += isinstance(msg, AbortBackendMsg)
        super()._process_one_msg(msg)

    def send_result(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Hand over the replies of a step, and count them."""
        stats = self.stats
        stats.num_steps += 1
        for reply in replies:
            if reply.error is None:
                stats.num_generated_tokens += 1
            stats.num_prompt_tokens += reply.num_prompt_tokens
            stats.num_cached_tokens += reply.num_cached_tokens
            if reply.finished:
                reason = reply.finish_reason or FinishReason.LENGTH
                stats.num_errors += reason is FinishReason.ERROR
                stats.finished[reason.value] = stats.finished.get(reason.value, 0) + 1
        super().send_result(replies)

    def due_stats(self, is_idle: bool) -> EngineStats | None:
        """What to tell now: at most once in `STATS_SECONDS`, and when the last request has gone."""
        now = time.monotonic()
        if not is_idle and now - self._told_at < STATS_SECONDS:
            return None
        self._update_stats()
        if self.stats == self._told:
            return None
        self._told, self._told_at = replace(self.stats, finished=dict(self.stats.finished)), now
        return self._told

    def _update_stats(self) -> None:
        stats, cache = self.stats, self.cache_manager
        sizes = cache.prefix_cache.size_info
        table = self.table_manager
        stats.held = len(self.finished_reqs) + len(self._num_in_flight) + self._num_at_the_gate()
        stats.running = table.max_running_reqs - table.available_size
        stats.waiting = len(self.prefill_manager.pending_list)
        stats.free_pages = cache.num_free_pages
        stats.cached_pages = sizes.total_size // cache.page_size
        stats.evictable_pages = sizes.evictable_size // cache.page_size
        stats.owned_pages = cache.num_owned_pages
        stats.num_preemptions = self.preemptor.num_preemptions if self.preemptor else 0
        stats.held += stats.running + stats.waiting

    def _num_at_the_gate(self) -> int:
        """Requests whose constraint is being compiled, and deadlines that are watched."""
        return self.io.num_held if isinstance(self.io, PrimaryIO) else 0
