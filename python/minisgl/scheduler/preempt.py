"""Preemption: if the next step needs more pages than there are, the newest requests wait again.

Invariant: no allocation fails. Shortage is looked for before anything is allocated, and it can
always be ended, because the oldest request alone fits at its longest. Nobody is preempted more than
`MAX_PREEMPTIONS` times: after that a request starts only if its worst case and that of all others
fit at once, and whoever comes later goes first. docs/scheduling.md has the proof.
"""

from __future__ import annotations

from minisgl.core import Batch, Req
from minisgl.utils import div_ceil

from .cache import CacheManager
from .decode import DecodeManager
from .prefill import PrefillManager
from .table import TableManager


class Preemptor:
    """Makes room. `num_preemptions` counts them all."""

    def __init__(
        self,
        cache_manager: CacheManager,
        table_manager: TableManager,
        prefill_manager: PrefillManager,
        decode_manager: DecodeManager,
    ) -> None:
        self.cache_manager = cache_manager
        self.table_manager = table_manager
        self.prefill_manager = prefill_manager
        self.decode_manager = decode_manager
        self.num_preemptions = 0

    def is_short(self) -> bool:
        """Whether those with a row may not all get their next step.

        If so, the results of the step in flight come first: who has ended in it gives pages back,
        and only who is not in flight can be preempted. Who starts only now has been counted.
        """
        cache = self.cache_manager
        num_needed = cache.num_missing_pages(self.decode_manager.running_reqs)
        for pending in self.prefill_manager.half_prefilled:
            if chunk := pending.chunked_req:
                num_needed += div_ceil(pending.input_len, cache.page_size)
                num_needed -= div_ceil(chunk.cached_len, cache.page_size)
        return num_needed > cache.available_pages

    def make_room(self, batch: Batch) -> None:
        """Preempt until what is left of `batch` gets its pages; nothing may be in flight then."""
        cache = self.cache_manager
        while cache.num_missing_pages(batch.reqs) > cache.available_pages:
            req = self._newest(batch)
            self.preempt(req)
            batch.reqs[:] = [other for other in batch.reqs if other.table_idx != req.table_idx]
            if not any(req.is_prefilling for req in batch.reqs):
                batch.phase = "decode"

    def _newest(self, batch: Batch) -> Req:
        """The request that was admitted last; the batch may have some that hold no pages yet."""
        live = [req for req in self.cache_manager.holders if req.finish_reason is None]
        rows = {req.table_idx for req in live}
        live += [req for req in batch.reqs if req.table_idx not in rows]
        assert len(live) > 1, f"{live} does not fit into the pool although it is alone"
        return live[-1]

    def preempt(self, req: Req) -> None:
        """Put a request back at the head of the queue; its KV stays in the cache while it may."""
        pending = req.pending
        assert pending is not None, f"{req} was never in the queue"
        if req.has_bad_kv:
            self.cache_manager.drop_req(req)
        else:
            self.cache_manager.cache_req(req, finished=True)
        self.table_manager.free(req.table_idx)
        self.decode_manager.remove_req(req)
        if req.is_sampled:  # its answer so far becomes input
            assert req.num_ids == req.device_len, f"{req} is preempted in flight"
            pending.num_generated += req.num_ids - pending.input_len
            pending.input_ids = req.input_ids
        pending.num_preemptions += 1
        self.prefill_manager.put_back(pending)
        self.num_preemptions += 1
