"""The queue, and how prompts get from it into batches: match, admit, lock, take a row, chunk.

First come, first served; admission stops at the first request that does not fit. The whole policy
is `PrefillManager.schedule_next_batch` and `PrefillAdder.try_add_one`; `queue` has other orders.

Sharing (`min_shared` > 0): a batch reads only what earlier steps wrote, so a request whose next
pages are just being computed for another waits until they are in the cache. `PrefixKey` is what it
would compute first. Two prompts that share more than is cached have the same longest match, so they
have the same key if they share `min_shared` tokens more: one look-up replaces all comparisons.
"""

from __future__ import annotations

import itertools
from typing import TypeAlias

from minisgl.core import Batch, Req, SamplingParams
from minisgl.kvcache import BaseCacheHandle
from minisgl.message import UserMsg
from minisgl.utils import align_ceil, align_down, div_ceil

from .admission import AdmissionPolicy, PageDemand, Promises, conservative
from .cache import CacheManager
from .decode import DecodeManager
from .forecast import Forecast
from .queue import MAX_LOOKAHEAD, Order, Turns, fcfs
from .table import TableManager
from .utils import PendingReq

WAITS_FOR_ROW = "table row"
WAITS_FOR_PAGES = "pages"
WAITS_FOR_BUDGET = "token budget"
WAITS_FOR_PREFIX = "shared prefix"
WAITS_FOR_DECODE = "decode step"

MAX_PREEMPTIONS = 3  # of one request; after that it starts only if its worst case fits

MAX_PROMPT_LOGITS = 256  # prompt tokens of a step whose logits are kept until they are read

PrefixKey: TypeAlias = tuple[str, bytes]  # the salt, the tokens from the start


class ChunkedReq(Req):
    """A request whose prompt is only partly computed: it never decodes and is never sampled."""

    @property
    def can_decode(self) -> bool:
        """Never: the rest of its prompt comes first."""
        return False

    @property
    def is_sampled(self) -> bool:
        """Never: its last position is in the middle of the prompt."""
        return False


class PrefillAdder:
    """Builds one prefill batch under a token budget.

    reserved_size: tokens promised to others. `promised` says it request by request, for policies
    that need more than the sum; both count. forecast: what answers are expected to use, None: all
    they may. min_shared: whole pages, in tokens. in_flight: what the batch before this one
    computes; `started` is what this one does. pace: of `PrefillManager`.
    """

    def __init__(
        self,
        token_budget: int,
        reserved_size: int,
        cache_manager: CacheManager,
        table_manager: TableManager,
        *,
        promised: Promises | None = None,
        policy: AdmissionPolicy = conservative,
        forecast: Forecast | None = None,
        min_shared: int = 0,
        in_flight: frozenset[PrefixKey] = frozenset(),
        pace: int = 0,
    ) -> None:
        self.token_budget = token_budget
        self.reserved_size = reserved_size
        self.cache_manager = cache_manager
        self.table_manager = table_manager
        self.policy = policy
        self.forecast = forecast
        self.promised = Promises() if promised is None else promised
        self.min_shared = min_shared
        self.in_flight = in_flight
        self.pace = pace
        self.started: set[PrefixKey] = set()
        self.waits_for: str | None = None
        if reserved_size:  # for nobody knows how long
            worst = div_ceil(reserved_size, cache_manager.page_size)
            until = cache_manager.num_pages * cache_manager.page_size
            self.promised.append(PageDemand(0, worst, reserved_size, until))

    def try_add_one(self, pending: PendingReq) -> Req | None:
        """The next chunk of `pending` as a request of this batch, None if it has to wait."""
        if self.token_budget <= 0:
            self.waits_for = WAITS_FOR_BUDGET
            return None
        if chunk := pending.chunked_req:
            return self._add_chunk(pending, chunk.cache_handle, chunk.table_idx, chunk.cached_len)
        if resource := self._try_allocate_one(pending):
            handle, row = resource
            return self._add_chunk(pending, handle, row, handle.cached_len)
        return None

    def _try_allocate_one(self, pending: PendingReq) -> tuple[BaseCacheHandle, int] | None:
        """Lock the longest cached prefix and take a row, if the worst case fits."""
        if self.table_manager.available_size == 0:
            self.waits_for = WAITS_FOR_ROW
            return None
        cache = self.cache_manager
        handle = cache.match_req(pending).cuda_handle
        key = self._prefix_key(pending, handle.cached_len, pending.match_len)
        if key is not None and (key in self.started or key in self.in_flight):
            self.waits_for = WAITS_FOR_PREFIX
            return None
        demand = self._demand(pending, handle)
        policy = self.policy if pending.num_preemptions < MAX_PREEMPTIONS else conservative
        if not policy(demand, self.promised, cache):
            self.waits_for = WAITS_FOR_PAGES
            return None
        cache.lock(handle)  # what it locks is no longer evictable: look again
        if not policy(demand, self.promised, cache):
            cache.unlock(handle)
            self.waits_for = WAITS_FOR_PAGES
            return None
        handle = cache.restore(pending.input_ids[: pending.match_len], handle, pending.salt)
        self.promised.append(self._demand(pending, handle))  # less what was just restored
        row = self.table_manager.allocate()
        if pending.num_cached_tokens is None:
            pending.num_cached_tokens = handle.cached_len
        if (cached_len := handle.cached_len) > 0:
            self._write_tokens(pending, row, 0, cached_len)
            self.table_manager.page_table[row, :cached_len] = handle.get_matched_indices()
        return handle, row

    def _demand(self, pending: PendingReq, handle: BaseCacheHandle) -> PageDemand:
        return PageDemand.of_candidate(
            pending.input_len,
            pending.output_len,
            handle,
            self.cache_manager.page_size,
            pace=self.pace,
            unused=unused_tokens(self.forecast, pending.num_generated, pending.sampling_params),
        )

    def _add_chunk(
        self, pending: PendingReq, handle: BaseCacheHandle | None, row: int, cached_len: int
    ) -> Req:
        if pending.tells_prompt:
            self.token_budget = min(self.token_budget, MAX_PROMPT_LOGITS)
        end = min(cached_len + self.token_budget, pending.input_len)
        self.token_budget -= end - cached_len
        self._write_tokens(pending, row, cached_len, end)
        if (key := self._prefix_key(pending, cached_len, end)) is not None:
            self.started.add(key)
        req_type = ChunkedReq if end < pending.input_len else Req
        req = req_type(
            input_ids=pending.input_ids[:end],
            table_idx=row,
            cached_len=cached_len,
            output_len=pending.sampling_params.max_tokens,
            uid=pending.uid,
            sampling_params=pending.sampling_params,
            cache_handle=handle,
            salt=pending.salt,
            num_generated=pending.num_generated,
            pending=pending,
        )
        if pending.tells_prompt:
            req.prompt_logprobs = pending.prompt_logprobs
            req.next_id = int(pending.input_ids[end]) if end < pending.input_len else None
        return req

    def _prefix_key(self, pending: PendingReq, cached_len: int, end: int) -> PrefixKey | None:
        """The prefix with the first `min_shared` tokens to compute; None if they go past `end`."""
        length = align_down(cached_len, self.cache_manager.page_size) + self.min_shared
        if not self.min_shared or length > end:
            return None
        return pending.salt, pending.input_ids[:length].numpy().tobytes()

    def _write_tokens(self, pending: PendingReq, row: int, start: int, end: int) -> None:
        self.table_manager.token_pool[row, start:end] = pending.input_ids[start:end]


class PrefillManager:
    """Owns the queue. The chunked request, if there is one, stands at its head.

    min_shared: the fewest tokens of another's prefix that a request waits for, 0 for never. pace:
    if others decode while a prompt is half computed, the fewest of its tokens from one of their
    steps to the next; 0 if they stand still. max_overtaken: see `queue`.
    """

    def __init__(
        self,
        cache_manager: CacheManager,
        table_manager: TableManager,
        decode_manager: DecodeManager,
        policy: AdmissionPolicy = conservative,
        min_shared: int = 0,
        *,
        forecast: Forecast | None = None,
        pace: int = 0,
        order: Order = fcfs,
        max_overtaken: int = 0,
    ) -> None:
        self.cache_manager = cache_manager
        self.table_manager = table_manager
        self.decode_manager = decode_manager
        self.policy = policy
        self.forecast = forecast
        self.min_shared = align_ceil(min_shared, cache_manager.page_size)
        self.pace = pace
        self.order = order
        self.max_overtaken = max_overtaken
        self.pending_list: list[PendingReq] = []
        self.head_waits_for: str | None = None
        self._in_flight: frozenset[PrefixKey] = frozenset()

    @property
    def runnable(self) -> bool:
        """Whether anything is in the queue."""
        return len(self.pending_list) > 0

    def add_one_req(self, user_msg: UserMsg) -> None:
        """Put a request at the end of the queue."""
        self.pending_list.append(
            PendingReq(
                uid=user_msg.uid,
                input_ids=user_msg.input_ids,
                sampling_params=user_msg.sampling_params,
                salt=user_msg.salt,
                priority=user_msg.priority,
            )
        )

    @property
    def half_prefilled(self) -> list[PendingReq]:
        """Those whose prompt is computed in part."""
        return list(itertools.takewhile(lambda pending: pending.chunked_req, self.pending_list))

    def put_back(self, pending: PendingReq) -> None:
        """A preempted request stands at the head of the queue again, with nothing computed."""
        pending.chunked_req = None
        if pending not in self.pending_list:
            self.pending_list.insert(0, pending)

    def schedule_next_batch(self, budget: int) -> Batch | None:
        """The next prefill batch of at most `budget` prompt tokens, None if nothing can start.

        What a batch computes is in the cache, or has failed, two calls later: nobody waits longer.
        """
        self.head_waits_for = None
        in_flight, self._in_flight = self._in_flight, frozenset()
        if not self.pending_list:
            return None
        if not self.table_manager.available_size and self.pending_list[0].chunked_req is None:
            self.head_waits_for = WAITS_FOR_ROW
            return None
        adder = PrefillAdder(
            token_budget=budget,
            reserved_size=0,
            cache_manager=self.cache_manager,
            table_manager=self.table_manager,
            promised=self._promised(),
            policy=self.policy,
            forecast=self.forecast,
            min_shared=self.min_shared,
            in_flight=in_flight,
            pace=self.pace,
        )
        reqs = self._take_turns(adder)
        self._in_flight = frozenset(adder.started)
        return Batch(reqs, "prefill") if reqs else None

    def _take_turns(self, adder: PrefillAdder) -> list[Req]:
        """Go down the queue in its order as far as it may go; who is ready leaves it."""
        turns = Turns(self.pending_list, self.order, self.max_overtaken, self._cached_len)
        reqs: list[Req] = []
        taken: set[PendingReq] = set()
        unfinished: list[PendingReq] = []
        num_refused = 0
        for pending in turns.candidates:
            if not turns.may_start(pending):
                break
            req = adder.try_add_one(pending)
            if req is None:
                self.head_waits_for = self.head_waits_for or adder.waits_for
                num_refused += 1
                may_skip = turns.skips and adder.waits_for in (WAITS_FOR_PAGES, WAITS_FOR_PREFIX)
                if may_skip and num_refused <= MAX_LOOKAHEAD:
                    continue
                break
            turns.overtake(pending)
            taken.add(pending)
            pending.chunked_req = None
            if isinstance(req, ChunkedReq):
                pending.chunked_req = req
                unfinished.append(pending)
            reqs.append(req)
        if reqs:
            waiting = [pending for pending in self.pending_list if pending not in taken]
            self.pending_list = unfinished + waiting
        return reqs

    def _cached_len(self, pending: PendingReq) -> int:
        return int(self.cache_manager.match_req(pending).cuda_handle.cached_len)

    def _promised(self) -> Promises:
        """What everyone who holds pages may come to need, also who has ended but not drained."""
        reqs = self.cache_manager.holders
        stored = [req.cached_len for req in reqs]
        longest = [
            req.max_device_len if req.finish_reason is None else req.cached_len + 1 for req in reqs
        ]
        prompt_lens, unused = [0] * len(reqs), [0] * len(reqs)
        halves = {p.chunked_req.table_idx: p for p in self.half_prefilled if p.chunked_req}
        for i, req in enumerate(reqs) if halves or self.forecast else ():
            if half := halves.get(req.table_idx):
                prompt_lens[i], longest[i] = half.input_len, half.input_len + half.output_len
                num_generated = half.num_generated
            elif req.finish_reason is None and req.can_decode:
                num_generated = req.device_len - req.num_prompt
            else:
                continue
            unused[i] = unused_tokens(self.forecast, num_generated, req.sampling_params)
        prefixes = [req.cache_handle for req in reqs]
        page_size = self.cache_manager.page_size
        return Promises.of_holders(
            stored, longest, prompt_lens, unused, prefixes, page_size, self.pace
        )

    def abort_req(self, uid: int) -> PendingReq | None:
        """Take request `uid` out of the queue and return it, None if it is not there."""
        for i, pending in enumerate(self.pending_list):
            if pending.uid == uid:
                return self.pending_list.pop(i)
        return None


def unused_tokens(forecast: Forecast | None, num_generated: int, params: SamplingParams) -> int:
    """How many of the tokens that a request may still generate are not expected."""
    return forecast.unused(num_generated, params.max_tokens) if forecast else 0
