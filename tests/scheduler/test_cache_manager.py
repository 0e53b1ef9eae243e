"""`CacheManager`: every sentence of the contract about who owns a page, number by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.core import Req, SamplingParams
from minisgl.kvcache.naive_cache import NaivePrefixCache
from minisgl.kvcache.radix_cache import RadixPrefixCache
from minisgl.params import ConfigError
from minisgl.scheduler.cache import CacheManager, _write_page_table
from minisgl.scheduler.utils import PendingReq


def manager(
    num_pages: int = 8, page_size: int = 4, type: str = "radix", num_rows: int = 4
) -> CacheManager:
    table = torch.full((num_rows, num_pages * page_size), -1, dtype=torch.int32)
    return CacheManager(num_pages, page_size, table, type)


def request(
    ids: int | list[int], row: int, cached_len: int = 0, handle: Any = None, output_len: int = 20
) -> Req:
    tokens = list(range(ids)) if isinstance(ids, int) else ids
    ids_tensor = torch.tensor(tokens, dtype=torch.int32)
    return Req(ids_tensor, row, cached_len, output_len, row, SamplingParams(), handle)


def pending(ids: list[int], max_tokens: int = 4) -> PendingReq:
    tokens = torch.tensor(ids, dtype=torch.int32)
    return PendingReq(0, tokens, SamplingParams(max_tokens=max_tokens))


def compute(cache: CacheManager, req: Req, num_tokens: int = 1) -> None:
    """Allocate for and account for `num_tokens` forwards; the sampled tokens are 50, 51, ..."""
    for i in range(num_tokens):
        cache.allocate_paged([req])
        req.complete_one()
        req.append_host(50 + i)


def test_a_new_manager_holds_every_page_in_order() -> None:
    table = torch.zeros((3, 32), dtype=torch.int32)
    cache = CacheManager(num_pages=8, page_size=4, page_table=table, type="radix")
    assert cache.free_slots.tolist() == [0, 4, 8, 12, 16, 20, 24, 28]
    assert cache.free_slots.dtype == torch.int32
    assert cache.page_table is table
    assert (cache.num_pages, cache.page_size, cache.available_size) == (8, 4, 32)
    assert cache.device == table.device
    assert isinstance(cache.prefix_cache, RadixPrefixCache)
    cache.check_integrity()


def test_the_type_names_the_prefix_cache() -> None:
    assert isinstance(manager(type="naive").prefix_cache, NaivePrefixCache)
    with pytest.raises(ConfigError, match="naive"):
        manager(type="lru")


def test_a_request_takes_pages_only_when_it_crosses_into_them() -> None:
    cache = manager(num_pages=8, page_size=4)
    req = request(6, row=2)
    cache.allocate_paged([req])
    assert cache.page_table[2, :8].tolist() == list(range(8))
    assert len(cache.free_slots) == 6

    req.complete_one()
    assert req.device_len == 7
    cache.allocate_paged([req])
    assert len(cache.free_slots) == 6
    req.complete_one()
    cache.allocate_paged([req])
    assert len(cache.free_slots) == 6

    req.complete_one()
    assert req.device_len == 9
    cache.allocate_paged([req])
    assert len(cache.free_slots) == 5
    assert int(cache.page_table[2, 8]) % 4 == 0
    assert cache.page_table[2, 8:12].tolist() == [8, 9, 10, 11]
    cache.check_integrity()


def test_cached_6_and_device_9_with_pages_of_4_allocates_exactly_one_page() -> None:
    cache = manager(num_pages=8, page_size=4)
    cache.allocate_paged([request(9, row=0, cached_len=6)])
    assert len(cache.free_slots) == 7
    assert cache.page_table[0, :13].tolist() == [-1] * 8 + [0, 1, 2, 3] + [-1]


def test_a_batch_is_allocated_in_order_and_written_in_place() -> None:
    cache = manager(num_pages=8, page_size=4)
    table = cache.page_table
    address = table.data_ptr()
    cache.allocate_paged([request(5, row=3), request(1, row=0), request(4, row=1)])
    assert table[3, :8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert table[0, :4].tolist() == [8, 9, 10, 11]
    assert table[1, :4].tolist() == [12, 13, 14, 15]
    assert table[2].tolist() == [-1] * 32
    assert cache.page_table is table and table.data_ptr() == address
    assert cache.free_slots.tolist() == [16, 20, 24, 28]


def test_pages_are_taken_from_the_front_and_freed_to_the_back() -> None:
    cache = manager(num_pages=5, page_size=2, type="naive")
    taken = cache._allocate(2)
    assert taken.tolist() == [0, 2] and taken.dtype == torch.int32
    cache._free(cache._page_to_token(taken[1:]))
    assert cache.free_slots.tolist() == [4, 6, 8, 2]
    cache._free(cache._page_to_token(taken[:1]))
    assert cache.free_slots.tolist() == [4, 6, 8, 2, 0]
    assert cache._allocate(4).tolist() == [4, 6, 8, 2]


def test_the_order_holds_through_many_rounds() -> None:
    cache = manager(num_pages=5, page_size=1, type="naive")
    expected = list(range(5))
    for step in range(200):
        number = step % 4 + 1
        taken = cache._allocate(number)
        assert taken.tolist() == expected[:number]
        expected = expected[number:] + taken.flip(0).tolist()
        cache._free(taken.flip(0))
        assert cache.free_slots.tolist() == expected


def test_free_takes_every_page_size_th_location() -> None:
    cache = manager(num_pages=4, page_size=4, type="naive")
    cache._allocate(4)
    cache._free(torch.tensor([8, 9, 10, 11, 0, 1, 2, 3], dtype=torch.int32))
    assert cache.free_slots.tolist() == [8, 0]


def test_freed_indices_are_copied_not_kept_as_views() -> None:
    cache = manager(num_pages=4, page_size=1, type="naive")
    cache._allocate(4)
    cache.page_table[0, :2] = torch.tensor([3, 1])
    cache._free(cache.page_table[0, :2])
    cache.page_table[0, :2] = 99
    assert cache.free_slots.tolist() == [3, 1]


def test_page_to_token_spells_out_every_location() -> None:
    pages = torch.tensor([8, 0], dtype=torch.int32)
    tokens = manager(page_size=4)._page_to_token(pages)
    assert tokens.tolist() == [8, 9, 10, 11, 0, 1, 2, 3] and tokens.dtype == torch.int32
    assert manager(page_size=1)._page_to_token(pages).tolist() == [8, 0]


def test_write_page_table_writes_each_span_of_pages() -> None:
    table = torch.full((2, 8), -1, dtype=torch.int32)
    allocated = torch.tensor([6, 7, 0, 1, 2, 3], dtype=torch.int32)
    _write_page_table(table, allocated, [(1, 1, 2), (0, 0, 2)], 2)
    assert table.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1], [-1, -1, 6, 7, -1, -1, -1, -1]]


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    cache = manager(num_pages=3, page_size=4)
    with pytest.raises((RuntimeError, AssertionError)):
        cache.allocate_paged([request(8, row=0), request(8, row=1)])
    assert cache.free_slots.tolist() == [0, 4, 8]
    assert cache.page_table.unique().tolist() == [-1]
    cache.check_integrity()


def test_allocation_evicts_what_no_request_uses() -> None:
    cache = manager(num_pages=3, page_size=4)
    old = request(8, row=0)
    compute(cache, old)
    cache.cache_req(old, finished=True)
    assert (len(cache.free_slots), cache.available_size) == (1, 12)
    cache.allocate_paged([request([9] * 12, row=1)])
    assert len(cache.free_slots) == 0
    assert cache.prefix_cache.size_info == (0, 0)
    cache.check_integrity()


def test_available_size_counts_tokens_that_are_free_or_evictable() -> None:
    cache = manager(num_pages=8, page_size=4)
    req = request(8, row=0)
    compute(cache, req)
    assert cache.available_size == 24
    cache.cache_req(req, finished=True)
    assert cache.available_size == 32
    handle = cache.match_req(pending([*range(8), 99])).cuda_handle
    cache.lock(handle)
    assert (handle.cached_len, cache.available_size) == (8, 24)
    cache.unlock(handle)
    assert cache.available_size == 32


@pytest.mark.parametrize(("page_size", "expected"), [(1, 7), (4, 4)])
def test_a_match_leaves_at_least_one_token_to_compute(page_size: int, expected: int) -> None:
    cache = manager(num_pages=16, page_size=page_size)
    req = request(8, row=0)
    compute(cache, req)
    cache.cache_req(req, finished=True)
    assert cache.match_req(pending(list(range(8)))).cuda_handle.cached_len == expected


def test_after_prefill_the_request_holds_its_cached_prefix_locked() -> None:
    cache = manager(num_pages=8, page_size=4)
    req = request(6, row=1)
    compute(cache, req)
    cache.cache_req(req, finished=False)
    assert req.cache_handle is not None and req.cache_handle.cached_len == 4
    assert cache.prefix_cache.size_info == (0, 4)
    assert cache.page_table[1, :8].tolist() == list(range(8))
    assert cache.free_slots.tolist() == [8, 12, 16, 20, 24, 28]  # the short tail is kept
    cache.check_integrity()


def test_at_its_end_a_request_gives_the_short_tail_back_and_unlocks() -> None:
    cache = manager(num_pages=8, page_size=4)
    req = request(6, row=1)
    compute(cache, req)
    cache.cache_req(req, finished=True)
    assert req.cache_handle is None
    assert cache.prefix_cache.size_info == (4, 0)
    assert cache.free_slots.tolist() == [8, 12, 16, 20, 24, 28, 4]
    cache.check_integrity()


def test_what_another_request_cached_meanwhile_is_freed_as_a_duplicate() -> None:
    cache = manager(num_pages=8, page_size=4)
    first, second = request(8, row=0), request(8, row=1)
    cache.allocate_paged([first, second])
    for req in (first, second):
        req.complete_one()
        req.append_host(50)
        cache.cache_req(req, finished=False)
        cache.check_integrity()
    assert cache.page_table[0, :8].tolist() == list(range(8))
    assert cache.page_table[1, :8].tolist() == list(range(8))  # re-pointed at the cache's pages
    assert cache.free_slots.tolist() == [16, 20, 24, 28, 8, 12]
    assert cache.prefix_cache.size_info == (0, 8)
    for req in (first, second):
        cache.cache_req(req, finished=True)
        cache.check_integrity()
    assert cache.prefix_cache.size_info == (8, 0)


def test_a_duplicate_found_only_at_the_end_is_freed_too() -> None:
    cache = manager(num_pages=8, page_size=4)
    first, second = request(8, row=0), request(8, row=1)
    cache.allocate_paged([first, second])
    for req in (first, second):
        req.complete_one()
        cache.cache_req(req, finished=True)
    assert sorted(cache.free_slots.tolist()) == [8, 12, 16, 20, 24, 28]
    cache.check_integrity()
    cache.check_integrity(full=False)


def test_the_naive_cache_gives_every_page_back_at_the_end() -> None:
    cache = manager(num_pages=8, page_size=4, type="naive")
    req = request(6, row=1)
    compute(cache, req)
    cache.cache_req(req, finished=False)
    assert len(cache.free_slots) == 6
    cache.cache_req(req, finished=True)
    assert cache.free_slots.tolist() == [8, 12, 16, 20, 24, 28, 0, 4]
    cache.check_integrity()


def test_a_request_that_is_dropped_shares_nothing() -> None:
    cache = manager(num_pages=8, page_size=4)
    req = request(6, row=1)
    compute(cache, req)
    cache.drop_req(req)
    assert cache.prefix_cache.size_info == (0, 0)
    assert len(cache.free_slots) == 8
    cache.check_integrity()


def test_flush_forgets_what_no_request_uses() -> None:
    cache = manager(num_pages=8, page_size=4)
    used, unused = request([7] * 4, row=0), request(8, row=1)
    for req in (used, unused):
        compute(cache, req)
        cache.cache_req(req, finished=req is unused)
    assert cache.flush() == 2
    assert cache.prefix_cache.size_info == (0, 4)
    cache.check_integrity()


# --- the integrity check ---


@pytest.mark.parametrize("full", [False, True])
def test_pages_taken_and_given_to_nobody_are_noticed(full: bool) -> None:
    cache = manager()
    cache._allocate(3)
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity(full=full)


def test_the_check_runs_without_arguments() -> None:
    cache = manager()
    cache.check_integrity()
    cache._allocate(3)
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity()


@pytest.mark.parametrize("full", [False, True])
def test_duplicates_that_are_not_freed_are_noticed(full: bool) -> None:
    cache = manager(num_pages=8, page_size=4)
    first, second = request(8, row=0), request(8, row=1)
    cache.allocate_paged([first, second])
    for req in (first, second):
        req.complete_one()
    cache.cache_req(first, finished=True)
    cache._free = lambda indices: None  # type: ignore[method-assign]
    cache.cache_req(second, finished=True)
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity(full=full)


def test_a_page_freed_twice_is_noticed() -> None:
    cache = manager()
    pages = cache._page_to_token(cache._allocate(2))
    cache._free(pages)
    cache._free(pages)
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity()


def test_a_live_page_that_is_also_free_is_noticed_by_the_full_check() -> None:
    cache = manager()
    req = request(4, row=0)
    cache.allocate_paged([req])
    cache.free_slots = torch.tensor([0, 8, 12, 16, 20, 24, 28])  # 0 is the request's, 4 is lost
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity()


def test_a_row_that_left_its_locked_prefix_is_noticed() -> None:
    cache = manager()
    req = request(8, row=0)
    compute(cache, req)
    cache.cache_req(req, finished=False)
    cache.page_table[0, 1] = 30
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity()


# --- lazy_free_region ---


def test_inside_a_lazy_region_frees_are_collected_and_appended_once() -> None:
    cache = manager(num_pages=6, page_size=2, type="naive")
    taken = cache._page_to_token(cache._allocate(4))
    pushes: list[list[int]] = []
    push = cache._free_list.push
    cache._free_list.push = lambda pages: (pushes.append(pages.tolist()), push(pages))[1]
    with cache.lazy_free_region():
        cache._free(taken[2:4])
        cache._free(taken[4:4])  # empty ranges are skipped
        cache._free(taken[0:2])
        assert cache.free_slots.tolist() == [8, 10]
    assert cache.free_slots.tolist() == [8, 10, 2, 0]
    assert pushes == [[2, 0]]


def test_a_lazy_region_without_frees_appends_nothing() -> None:
    cache = manager(num_pages=3, page_size=2)
    with cache.lazy_free_region():
        cache._free(torch.empty(0, dtype=torch.int32))
    assert cache.free_slots.tolist() == [0, 2, 4]


def test_a_lazy_region_copies_what_is_freed() -> None:
    cache = manager(num_pages=3, page_size=1, type="naive")
    cache._allocate(3)
    cache.page_table[0, :2] = torch.tensor([2, 0])
    with cache.lazy_free_region():
        cache._free(cache.page_table[0, :2])
        cache.page_table[0, :2] = 77
    assert cache.free_slots.tolist() == [2, 0]


def test_a_lazy_region_that_raises_still_gives_the_pages_back() -> None:
    cache = manager(num_pages=3, page_size=1, type="naive")
    taken = cache._allocate(2)
    with pytest.raises(KeyError), cache.lazy_free_region():
        cache._free(taken)
        raise KeyError
    assert cache.free_slots.tolist() == [2, 0, 1]
    with cache.lazy_free_region():
        pass
