"""The radix cache, promise by promise."""

from __future__ import annotations

import pytest
import torch
from benchmark.radix_scale import seconds_per_round

from minisgl.core import Context, reset_global_ctx, set_global_ctx
from minisgl.kvcache import InsertResult, MatchResult, RadixPrefixCache, SizeInfo
from minisgl.kvcache.radix_cache import RadixCacheHandle, RadixTreeNode


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def locs(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int32)


def matched(cache: RadixPrefixCache, *tokens: int, salt: str = "") -> list[int]:
    handle = cache.match_prefix(ids(*tokens), salt).cuda_handle
    indices = handle.get_matched_indices().tolist()
    assert len(indices) == handle.cached_len
    return indices


def test_page_size_defaults_to_that_of_the_current_context() -> None:
    set_global_ctx(Context(page_size=4))
    try:
        assert RadixPrefixCache("cpu").page_size == 4
    finally:
        reset_global_ctx()


def test_results_are_named_tuples() -> None:
    cache = RadixPrefixCache("cpu", 1)
    inserted = cache.insert_prefix(ids(1, 2), locs(0, 2))
    found = cache.match_prefix(ids(1, 2))
    assert isinstance(inserted, InsertResult) and isinstance(inserted, tuple)
    assert isinstance(found, MatchResult) and isinstance(found, tuple)
    assert cache.size_info == (2, 0) and isinstance(cache.size_info, SizeInfo)
    assert cache.size_info.total_size == 2 and SizeInfo(5, 2).total_size == 7


def test_two_sequences_share_their_common_prefix() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(ids(1, 2, 3, 4), locs(0, 4))
    second = cache.insert_prefix(ids(1, 2, 5), locs(10, 3))
    assert (second.cached_len, second.handle.cached_len) == (2, 3)
    (top,) = cache.root_node.children.values()
    assert list(cache.root_node.children) == [1] and top.length == 2
    assert sorted(child.length for child in top.children.values()) == [1, 2]
    assert matched(cache, 1, 2, 3, 9) == [0, 1, 2]
    assert matched(cache, 1, 2, 5, 6) == [0, 1, 12]
    cache.check_integrity()


def test_only_whole_pages_are_kept_and_matched() -> None:
    cache = RadixPrefixCache("cpu", 4)
    result = cache.insert_prefix(ids(*range(10)), locs(0, 10))
    assert (result.cached_len, result.handle.cached_len) == (0, 8)
    assert cache.size_info == (8, 0)
    assert list(cache.root_node.children) == [(0, 1, 2, 3)]
    assert matched(cache, *range(7)) == [0, 1, 2, 3]
    assert matched(cache, *range(3)) == []
    assert matched(cache, 0, 1, 2, 9, 4, 5, 6, 7) == []
    cache.check_integrity()


def test_children_that_differ_inside_their_first_page_are_apart() -> None:
    cache = RadixPrefixCache("cpu", 2)
    cache.insert_prefix(ids(1, 2, 3, 4), locs(0, 4))
    cache.insert_prefix(ids(1, 2, 3, 5), locs(4, 4))
    cache.insert_prefix(ids(1, 9), locs(8, 2))
    assert sorted(cache.root_node.children) == [(1, 2), (1, 9)]
    top = cache.root_node.children[(1, 2)]
    assert sorted(top.children) == [(3, 4), (3, 5)]
    assert cache.size_info.total_size == 8
    cache.check_integrity()


def test_inserting_the_same_again_takes_nothing() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(ids(1, 2, 3), locs(0, 3))
    again = cache.insert_prefix(ids(1, 2, 3), locs(7, 3))
    assert again.cached_len == 3 and again.handle.get_matched_indices().tolist() == [0, 1, 2]
    assert cache.size_info == (3, 0)


def test_nothing_to_insert_or_match_is_fine() -> None:
    cache = RadixPrefixCache("cpu", 4)
    for tokens in (ids(), ids(1, 2, 3)):
        result = cache.insert_prefix(tokens, locs(0, len(tokens)), salt="s")
        assert (result.cached_len, result.handle.cached_len) == (0, 0)
        assert cache.match_prefix(tokens).cuda_handle.cached_len == 0
    cache.check_integrity()


def test_what_was_inserted_is_copied() -> None:
    cache = RadixPrefixCache("cpu", 1)
    tokens, row = ids(1, 2, 3), locs(0, 8)
    handle = cache.insert_prefix(tokens, row[:3]).handle
    tokens.fill_(9)
    row.fill_(9)
    assert matched(cache, 1, 2, 3) == [0, 1, 2]
    handle.get_matched_indices().fill_(5)
    assert matched(cache, 1, 2, 3) == [0, 1, 2]


def test_locking_moves_sizes_along_the_path() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(ids(1, 2, 3, 4), locs(0, 4))
    cache.insert_prefix(ids(1, 2, 5), locs(10, 3))
    handle = cache.match_prefix(ids(1, 2, 5)).cuda_handle
    cache.lock_handle(handle)
    assert cache.size_info == (2, 3)
    cache.lock_handle(handle)
    assert cache.size_info == (2, 3)
    cache.check_integrity([handle, handle])
    cache.lock_handle(handle, unlock=True)
    assert cache.size_info == (2, 3)
    cache.lock_handle(handle, unlock=True)
    assert cache.size_info == (5, 0)
    cache.check_integrity([])


def test_unlocking_more_often_than_locking_is_our_mistake() -> None:
    cache = RadixPrefixCache("cpu", 1)
    handle = cache.insert_prefix(ids(1), locs(0, 1)).handle
    with pytest.raises(AssertionError, match="unlocked"):
        cache.lock_handle(handle, unlock=True)


def test_a_handle_survives_the_cut_of_its_node() -> None:
    cache = RadixPrefixCache("cpu", 1)
    handle = cache.insert_prefix(ids(1, 2, 3, 4), locs(0, 4)).handle
    cache.lock_handle(handle)
    upper = cache.match_prefix(ids(1, 2)).cuda_handle
    assert upper.node is handle.node.parent and upper.node.ref_count == 1
    assert handle.get_matched_indices().tolist() == [0, 1, 2, 3]
    cache.check_integrity([handle])
    cache.lock_handle(upper)
    cache.lock_handle(handle, unlock=True)
    assert cache.size_info == (2, 2)
    assert cache.evict(2).tolist() == [2, 3]
    assert upper.get_matched_indices().tolist() == [0, 1]
    cache.check_integrity([upper])


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    cache = RadixPrefixCache("cpu", 1)
    for token in (1, 2, 3):
        cache.insert_prefix(ids(token), locs(token, 1))
    cache.match_prefix(ids(1))
    assert cache.evict(1).tolist() == [2]
    assert cache.evict(2).tolist() == [3, 1]
    assert cache.size_info == (0, 0)
    cache.check_integrity()


def test_parents_go_after_their_children() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(ids(1, 2, 3), locs(0, 3))
    cache.insert_prefix(ids(1, 2, 4), locs(10, 3))
    cache.insert_prefix(ids(9), locs(20, 1))
    assert cache.evict(1).tolist() == [2]
    assert cache.evict(1).tolist() == [12]  # now the parent is a leaf, as recent as that was
    assert cache.evict(1).tolist() == [0, 1]
    assert cache.evict(1).tolist() == [20]


def test_a_cut_keeps_recency() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(ids(1, 2, 3, 4), locs(0, 4))
    cache.insert_prefix(ids(7), locs(7, 1))
    cache.match_prefix(ids(1, 2))  # the upper half is the most recent, the lower the oldest
    assert cache.evict(1).tolist() == [2, 3]
    assert cache.evict(1).tolist() == [7]
    assert cache.evict(1).tolist() == [0, 1]


def test_locked_prefixes_are_never_evicted() -> None:
    cache = RadixPrefixCache("cpu", 1)
    handle = cache.insert_prefix(ids(1, 2), locs(0, 2)).handle
    cache.lock_handle(handle)
    cache.insert_prefix(ids(1, 2, 3), locs(0, 3))
    cache.insert_prefix(ids(5), locs(5, 1))
    assert cache.evict(2).tolist() == [2, 5]
    with pytest.raises(RuntimeError, match="cannot evict 1 tokens: only 0 are evictable"):
        cache.evict(1)
    assert matched(cache, 1, 2) == [0, 1]


def test_asking_for_too_much_evicts_nothing() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(ids(1, 2), locs(0, 2))
    with pytest.raises(RuntimeError, match="cannot evict"):
        cache.evict(3)
    assert cache.size_info == (2, 0) and matched(cache, 1, 2) == [0, 1]


def test_evicting_nothing_gives_an_empty_tensor() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(ids(1), locs(0, 1))
    assert cache.evict(0).numel() == 0 and cache.evict(0).dtype == torch.int32
    assert cache.size_info == (1, 0)


def test_using_an_evicted_handle_is_our_mistake() -> None:
    cache = RadixPrefixCache("cpu", 1)
    handle = cache.insert_prefix(ids(1), locs(0, 1)).handle
    cache.evict(1)
    with pytest.raises(AssertionError, match="evicted"):
        cache.lock_handle(handle)


def test_reset_forgets_all_that_is_not_locked() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(ids(1, 2), locs(0, 2), salt="a")
    handle = cache.insert_prefix(ids(3, 4, 5), locs(2, 3)).handle
    cache.insert_prefix(ids(3, 6), locs(5, 2))
    cache.lock_handle(handle)
    assert sorted(cache.reset().tolist()) == [0, 1, 6]
    assert cache.size_info == (0, 3)
    assert sorted(cache.resident_indices().tolist()) == [2, 3, 4]
    cache.check_integrity([handle])


def test_salts_are_worlds_apart_and_leave_no_trace() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(ids(1, 2), locs(0, 2))
    cache.insert_prefix(ids(1, 2), locs(2, 2), salt="a")
    assert matched(cache, 1, 2) == [0, 1]
    assert matched(cache, 1, 2, salt="a") == [2, 3]
    assert matched(cache, 1, 2, salt="b") == []
    handle = cache.match_prefix(ids(1, 2), salt="b").cuda_handle
    cache.lock_handle(handle)
    cache.check_integrity([handle])
    cache.lock_handle(handle, unlock=True)
    assert list(cache._roots) == ["", "a"]
    cache.reset()
    assert list(cache._roots) == [""]
    cache.check_integrity([])


def test_halves_of_a_cut_node_do_not_hold_each_others_memory() -> None:
    cache = RadixPrefixCache("cpu", 1)
    cache.insert_prefix(torch.arange(1000, dtype=torch.int32), locs(0, 1000))
    upper = cache.match_prefix(ids(0, 1)).cuda_handle.node
    cache.evict(1)
    assert upper.indices.untyped_storage().nbytes() == 8 and upper.key.base is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_lists_and_other_integer_types_are_taken(page_size: int) -> None:
    cache = RadixPrefixCache("cpu", page_size)
    cache.insert_prefix([1, 2, 3, 4], torch.arange(4))  # type: ignore[arg-type]
    found = cache.match_prefix(torch.tensor([1, 2, 3, 4])).cuda_handle
    assert found.get_matched_indices().tolist() == [0, 1, 2, 3]


def _break_link(cache: RadixPrefixCache, handle: RadixCacheHandle) -> None:
    handle.node.parent = cache.root_node


def _break_key(cache: RadixPrefixCache, handle: RadixCacheHandle) -> None:
    handle.node.key[0] += 1


def _break_page(cache: RadixPrefixCache, handle: RadixCacheHandle) -> None:
    handle.node.key = handle.node.key[:-1]
    handle.node.indices = handle.node.indices[:-1]


def _break_recency(cache: RadixPrefixCache, handle: RadixCacheHandle) -> None:
    handle.node.last_use += 100


def _break_references(cache: RadixPrefixCache, handle: RadixCacheHandle) -> None:
    handle.node.ref_count += 1


def _break_size(cache: RadixPrefixCache, handle: RadixCacheHandle) -> None:
    cache._evictable_size += 1


def _break_queue(cache: RadixPrefixCache, handle: RadixCacheHandle) -> None:
    cache._recent.clear()


@pytest.mark.parametrize(
    "breakage",
    [
        _break_link,
        _break_key,
        _break_page,
        _break_recency,
        _break_references,
        _break_size,
        _break_queue,
    ],
)
def test_the_check_finds(breakage) -> None:  # type: ignore[no-untyped-def]
    cache = RadixPrefixCache("cpu", 2)
    cache.insert_prefix(ids(1, 2, 3, 4), locs(0, 4))
    cache.insert_prefix(ids(1, 2, 5, 6), locs(4, 4))
    handle = cache.match_prefix(ids(1, 2, 3, 4)).cuda_handle
    cache.check_integrity([])
    breakage(cache, handle)
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity([])


def test_the_check_counts_live_handles() -> None:
    cache = RadixPrefixCache("cpu", 1)
    handle = cache.insert_prefix(ids(1, 2), locs(0, 2)).handle
    cache.lock_handle(handle)
    cache.check_integrity()
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity([])
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity([handle, handle])
    cache.lock_handle(handle, unlock=True)
    cache.evict(2)
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity([handle])


def test_evicting_and_matching_do_not_slow_down_with_the_size_of_the_tree() -> None:
    small, large = (seconds_per_round(num_nodes, num_rounds=300)[0] for num_nodes in (500, 50_000))
    assert large < 10 * small, f"{small * 1e6:.1f} us with 500 nodes, {large * 1e6:.1f} with 50,000"


def test_one_eviction_after_many_uses_looks_at_few_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RadixPrefixCache("cpu", 1)
    for token in range(1000):
        cache.insert_prefix(ids(token), locs(token, 1))
    for token in range(999):
        cache.match_prefix(ids(token))
    looked_at = []
    is_evictable = RadixTreeNode.is_evictable.fget
    assert is_evictable is not None
    counted = property(lambda node: looked_at.append(node) or is_evictable(node))
    monkeypatch.setattr(RadixTreeNode, "is_evictable", counted)
    assert cache.evict(1).tolist() == [999]
    assert len(looked_at) < 5
