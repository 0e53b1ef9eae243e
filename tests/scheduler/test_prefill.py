"""The queue, admission and chunks: `PrefillAdder`, `PrefillManager`, `ChunkedReq`, `PageDemand`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from minisgl.core import Req, SamplingParams
from minisgl.kvcache.radix_cache import RadixCacheHandle
from minisgl.message import UserMsg
from minisgl.scheduler.admission import PageDemand
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.intake import clamp_max_tokens
from minisgl.scheduler.prefill import ChunkedReq, PrefillAdder, PrefillManager
from minisgl.scheduler.table import TableManager
from minisgl.scheduler.utils import PendingReq


class Parts:
    """A cache, a table and a queue without a scheduler."""

    def __init__(
        self, num_pages: int = 32, page_size: int = 1, num_rows: int = 4, type: str = "radix"
    ) -> None:
        table = torch.zeros((num_rows + 1, num_pages * page_size), dtype=torch.int32)
        self.cache = CacheManager(num_pages, page_size, table, type)
        self.table = TableManager(num_rows, table)
        self.decode = DecodeManager(page_size)
        self.prefill = PrefillManager(self.cache, self.table, self.decode)

    def fill_cache(self, ids: Sequence[int]) -> None:
        """Cache `ids` as a finished request would."""
        row = self.table.allocate()
        req = Req(torch.tensor(ids, dtype=torch.int32), row, 0, 1, 99, SamplingParams())
        self.cache.allocate_paged([req])
        req.complete_one()
        self.cache.cache_req(req, finished=True)
        self.table.free(row)

    def add(self, uid: int, ids: Sequence[int], max_tokens: int = 4) -> None:
        self.prefill.add_one_req(UserMsg(uid, list(ids), SamplingParams(max_tokens=max_tokens)))

    def run(self, budget: int = 8192) -> list[tuple[int, int, str]] | None:
        """Schedule and compute a prefill batch: (uid, tokens computed, kind) of each request."""
        batch = self.prefill.schedule_next_batch(budget)
        if batch is None:
            return None
        assert batch.is_prefill
        self.cache.allocate_paged(batch.reqs)
        out = [(req.uid, req.extend_len, type(req).__name__) for req in batch.reqs]
        for req in batch.reqs:
            req.complete_one()
        self.decode.filter_reqs(batch.reqs)
        self.cache.check_integrity()
        return out

    @property
    def queue(self) -> list[int]:
        return [pending.uid for pending in self.prefill.pending_list]


def pending(ids: Sequence[int], max_tokens: int = 4, uid: int = 0) -> PendingReq:
    tokens = torch.tensor(ids, dtype=torch.int32)
    return PendingReq(uid, tokens, SamplingParams(max_tokens=max_tokens))


def test_a_pending_request_knows_its_lengths() -> None:
    req = PendingReq(uid=3, input_ids=torch.arange(5), sampling_params=SamplingParams(max_tokens=7))
    assert (req.input_len, req.output_len, req.chunked_req) == (5, 7, None)


# --- worst cases in pages ---


@pytest.mark.parametrize(
    ("input_len", "output_len", "cached_len", "page_size", "growth"),
    [(5, 8, 0, 1, 13), (5, 8, 4, 1, 9), (5, 8, 4, 4, 3), (6, 2, 0, 4, 2), (6, 3, 0, 4, 3)],
)
def test_a_candidate_needs_its_input_and_output_in_whole_pages_without_what_is_cached(
    input_len: int, output_len: int, cached_len: int, page_size: int, growth: int
) -> None:
    prefix = RadixCacheHandle(cached_len, None)  # type: ignore[arg-type]
    demand = PageDemand.of_candidate(input_len, output_len, prefix, page_size)
    assert demand.growth == growth


@pytest.mark.parametrize(
    ("cached_len", "max_device_len", "page_size", "growth"),
    [(5, 13, 1, 7), (12, 13, 1, 0), (16, 18, 16, 1), (16, 17, 16, 0), (6, 13, 4, 1), (8, 13, 4, 1)],
)
def test_a_request_with_a_row_still_needs_all_but_its_last_token(
    cached_len: int, max_device_len: int, page_size: int, growth: int
) -> None:
    assert PageDemand.of_holder(cached_len, max_device_len, None, page_size).growth == growth


# --- PrefillAdder ---


def test_the_adder_gives_a_handle_and_a_row() -> None:
    parts = Parts()
    parts.fill_cache([1, 2, 3, 4])
    adder = PrefillAdder(100, 0, parts.cache, parts.table)
    result = adder._try_allocate_one(pending([1, 2, 3, 9]))
    assert result is not None
    handle, row = result
    assert (handle.cached_len, row) == (3, 0)
    assert parts.table.available_size == 3
    assert parts.cache.prefix_cache.size_info == (1, 3)  # the hit is locked
    assert parts.table.page_table[0, :3].tolist() == [0, 1, 2]
    assert parts.table.token_pool[0, :3].tolist() == [1, 2, 3]


def test_without_a_free_row_nothing_is_matched() -> None:
    parts = Parts(num_rows=1)
    parts.table.allocate()
    adder = PrefillAdder(100, 0, parts.cache, parts.table)
    parts.cache.match_req = None  # type: ignore[assignment,method-assign]
    assert adder._try_allocate_one(pending([1, 2])) is None


def test_what_is_reserved_for_others_counts() -> None:
    parts = Parts(num_pages=16)
    assert PrefillAdder(100, 6, parts.cache, parts.table)._try_allocate_one(pending([1] * 6, 4))
    parts = Parts(num_pages=16)
    adder = PrefillAdder(100, 7, parts.cache, parts.table)
    assert adder._try_allocate_one(pending([1] * 6, 4)) is None
    assert parts.table.available_size == 4


def test_a_hopeless_request_is_refused_before_its_hit_is_locked() -> None:
    parts = Parts(num_pages=16)
    parts.fill_cache([1, 2, 3, 4])
    adder = PrefillAdder(100, 8, parts.cache, parts.table)
    parts.cache.lock = None  # type: ignore[assignment,method-assign]
    assert adder._try_allocate_one(pending([1, 2, 3, 4, 5], 9)) is None


def test_a_hit_that_was_meant_to_be_evicted_is_unlocked_again() -> None:
    parts = Parts(num_pages=10)
    parts.fill_cache([1, 2, 3, 4, 5, 6])  # 6 evictable, 4 free
    adder = PrefillAdder(100, 3, parts.cache, parts.table)
    calls: list[str] = []
    lock, unlock = parts.cache.lock, parts.cache.unlock
    parts.cache.lock = lambda h: (calls.append("lock"), lock(h))[1]
    parts.cache.unlock = lambda h: (calls.append("unlock"), unlock(h))[1]
    # It misses 3 tokens; 3 + 3 <= 10 before its hit of 6 is locked, but 3 + 3 > 4 after.
    assert adder._try_allocate_one(pending([1, 2, 3, 4, 5, 6, 7, 8], 1)) is None
    assert calls == ["lock", "unlock"]
    assert parts.cache.prefix_cache.size_info == (6, 0)
    assert parts.table.available_size == 4


def test_the_worst_case_is_counted_in_pages_not_tokens() -> None:
    parts = Parts(num_pages=4, page_size=4)
    # 5 + 1 = 6 tokens each: two pages. In tokens, 12 of 16 would leave room for a third of 4.
    for uid in range(3):
        parts.add(uid, [uid] * 5, max_tokens=1 if uid < 2 else 3)
    assert parts.run() == [(0, 5, "Req"), (1, 5, "Req")]
    assert parts.queue == [2]


def test_try_add_one_cuts_a_prompt_at_the_budget() -> None:
    parts = Parts()
    adder = PrefillAdder(5, 0, parts.cache, parts.table)
    first = adder.try_add_one(pending([1, 2, 3]))
    assert type(first) is Req and first.extend_len == 3
    assert adder.token_budget == 2
    second = adder.try_add_one(pending([4, 5, 6, 7]))
    assert isinstance(second, ChunkedReq) and second.input_ids.tolist() == [4, 5]
    assert adder.try_add_one(pending([8])) is None
    assert parts.table.available_size == 2


def test_a_chunk_never_decodes_and_is_never_sampled() -> None:
    ids = torch.arange(3, dtype=torch.int32)
    chunk = ChunkedReq(ids, 0, 0, 5, 0, SamplingParams())
    assert (chunk.can_decode, chunk.is_sampled, chunk.remain_len) == (False, False, 5)


# --- PrefillManager ---


def test_first_come_first_served() -> None:
    parts = Parts()
    for uid in (5, 1, 3):
        parts.add(uid, [uid] * 4)
    assert parts.queue == [5, 1, 3] and parts.prefill.runnable
    assert parts.run() == [(5, 4, "Req"), (1, 4, "Req"), (3, 4, "Req")]
    assert parts.queue == [] and not parts.prefill.runnable


def test_admission_stops_at_the_first_request_that_does_not_fit() -> None:
    parts = Parts(num_pages=20)
    parts.add(0, [0] * 4, max_tokens=4)
    parts.add(1, [1] * 10, max_tokens=4)  # 14 tokens do not fit beside 8
    parts.add(2, [2] * 2, max_tokens=1)  # 3 would
    assert parts.run() == [(0, 4, "Req")]
    assert parts.queue == [1, 2]
    assert parts.prefill.head_waits_for == "pages"
    assert parts.run() is None and parts.queue == [1, 2]


def test_admission_stops_when_the_rows_are_used_up() -> None:
    parts = Parts(num_rows=2)
    for uid in range(3):
        parts.add(uid, [uid] * 2)
    assert parts.run() == [(0, 2, "Req"), (1, 2, "Req")]
    assert (parts.queue, parts.prefill.head_waits_for) == ([2], "table row")


def test_an_empty_queue_gives_no_batch() -> None:
    parts = Parts()
    assert not parts.prefill.runnable
    assert parts.prefill.schedule_next_batch(100) is None


def test_a_long_prompt_is_computed_in_chunks_that_use_up_the_budget() -> None:
    parts = Parts(page_size=4, num_pages=16)
    parts.add(0, [0] * 10)
    parts.add(1, [1] * 5)
    assert parts.run(6) == [(0, 6, "ChunkedReq")]
    assert parts.queue == [0, 1]
    chunk = parts.prefill.pending_list[0].chunked_req
    assert isinstance(chunk, ChunkedReq) and chunk.cached_len == 6
    assert parts.run(6) == [(0, 4, "Req"), (1, 2, "ChunkedReq")]
    assert parts.queue == [1]
    assert parts.run(6) == [(1, 3, "Req")]
    assert parts.queue == []
    assert parts.decode.running_reqs.__len__() == 2


def test_the_chunks_of_a_request_share_its_row_and_its_prefix() -> None:
    parts = Parts()
    parts.fill_cache([1, 2, 3])
    parts.add(0, [1, 2, 3, 4, 5, 6, 7])
    assert parts.run(2) == [(0, 2, "ChunkedReq")]
    first = parts.prefill.pending_list[0].chunked_req
    assert first is not None and first.cached_len == 5
    assert parts.run(2) == [(0, 2, "Req")]
    (last,) = parts.decode.running_reqs
    assert (last.table_idx, last.cache_handle) == (first.table_idx, first.cache_handle)
    assert parts.table.available_size == 3


def test_a_half_prefilled_request_keeps_its_reservation() -> None:
    parts = Parts(num_pages=20)
    parts.add(0, [0] * 10, max_tokens=4)
    assert parts.run(6) == [(0, 6, "ChunkedReq")]
    parts.add(1, [1] * 4, max_tokens=4)  # 8 > 14 free - 7 that the first may still take
    assert parts.run(6) == [(0, 4, "Req")]
    assert parts.queue == [1]


def test_abort_takes_a_request_out_of_the_queue() -> None:
    parts = Parts()
    for uid in range(3):
        parts.add(uid, [uid] * 4)
    removed = parts.prefill.abort_req(1)
    assert removed is not None and removed.uid == 1
    assert parts.queue == [0, 2]
    assert parts.prefill.abort_req(1) is None


def test_too_large_max_tokens_are_cut_on_a_copy() -> None:
    params = SamplingParams(max_tokens=100, temperature=0.5)
    msg = UserMsg(0, [1, 2, 3], params, salt="s")
    cut = clamp_max_tokens(msg, 10)
    assert (cut.sampling_params.max_tokens, cut.sampling_params.temperature) == (7, 0.5)
    assert cut.salt == "s" and cut.input_ids.tolist() == [1, 2, 3]
    assert params == SamplingParams(max_tokens=100, temperature=0.5)
    assert msg.sampling_params is params
    assert clamp_max_tokens(msg, 103) is msg
