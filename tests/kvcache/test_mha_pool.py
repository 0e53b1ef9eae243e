"""The KV pool: shapes, storing, opaque pages, memory that costs only what is used."""

from __future__ import annotations

import os

import pytest
import torch

from minisgl.distributed import reset_tp_info, set_tp_info
from minisgl.kvcache import MHAKVCache, create_kvcache_pool

from tests.integer_kv import INTEGERS


def make(dtype: torch.dtype = torch.float32, num_kv_heads: int = 2) -> MHAKVCache:
    return MHAKVCache(num_kv_heads, 3, 8, 5, 4, dtype, "cpu")


def test_the_buffer_has_the_contract_shape() -> None:
    pool = make()
    assert pool._kv_buffer.shape == (2, 3, 5, 4, 2, 8)
    assert pool.k_cache(1).shape == pool.v_cache(2).shape == (5, 4, 2, 8)
    assert pool.k_cache(1).data_ptr() % 64 == 0 and pool._kv_buffer.is_contiguous()
    assert not pool._kv_buffer.is_inference() and pool._kv_buffer.device.type == "cpu"
    assert isinstance(create_kvcache_pool(2, 3, 8, 5, 4, torch.float32, "cpu"), MHAKVCache)
    assert pool.k_scale(0) is None and pool.v_scale(0) is None


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_come_with_a_scale_for_each_location_and_head(dtype: torch.dtype) -> None:
    pool = make(dtype)
    k, v = torch.randn(2, 3, 2, 8)
    where = torch.tensor([0, 7, 19])
    pool.store_kv(k.view(3, 16), v.view(3, 16), where, 1)
    for cache, scale, x in (
        (pool.k_cache(1), pool.k_scale(1), k),
        (pool.v_cache(1), pool.v_scale(1), v),
    ):
        assert scale is not None and (scale.shape, scale.dtype) == ((20, 2), torch.float32)
        assert scale.count_nonzero() == 6 and scale.is_contiguous()
        limit = {torch.int8: 127, torch.int16: 4095}[dtype]
        codes = cache.view(20, 2, 8)[where]
        assert (codes.abs().amax(-1) == limit).all()
        values = codes * scale[where].unsqueeze(-1)
        assert ((values - x).abs() <= 0.501 / limit * x.abs().amax(-1, keepdim=True)).all()
    assert not any(pool._scales[:, [0, 2]].flatten()), "another layer was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_flat", [True, False])
def test_store_kv_takes_flat_and_split_heads(dtype: torch.dtype, is_flat: bool) -> None:
    pool = make(dtype)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    where = torch.tensor([0, 7, 19], dtype=torch.int32)
    shape = (3, 16) if is_flat else (3, 2, 8)
    pool.store_kv(k.to(dtype).view(shape), v.to(dtype).view(shape), where, 1)
    assert torch.equal(pool.k_cache(1).view(20, 2, 8)[where.long()], k.to(dtype))
    assert torch.equal(pool.v_cache(1).view(20, 2, 8)[where.long()], v.to(dtype))
    assert not pool.k_cache(0).any() and not pool.v_cache(2).any()
    assert pool.k_cache(1).count_nonzero() <= 48


@pytest.mark.parametrize("dim", [8, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *INTEGERS])
def test_pages_are_opaque_bytes_that_move_between_pools(dtype: torch.dtype, dim: int) -> None:
    source, target = (MHAKVCache(1, 3, dim, 5, 1, dtype, "cpu") for _ in range(2))
    for layer in range(3):
        source.store_kv(*torch.randn(2, 5, dim), torch.arange(5), layer)
    data = source.read_pages([4, 0, 2])
    assert data.dtype == torch.uint8 and data.shape == (3, source.page_bytes)
    scale_bytes = 0 if dtype.is_floating_point else 4
    assert source.page_bytes == 2 * 3 * (dim * dtype.itemsize + scale_bytes)
    target.write_pages(torch.tensor([1, 2], dtype=torch.int32), data[:2])
    target.write_pages([3], data[2:])  # wherever in memory its bytes begin
    pages, origins = [1, 2, 3], [4, 0, 2]
    for layer in range(3):
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            ours, theirs = (getattr(pool, name)(layer) for pool in (target, source))
            assert ours is theirs or torch.equal(ours[pages], theirs[origins]), name
    assert not target.read_pages([0, 4]).any()
    assert source.read_pages([]).shape == (0, source.page_bytes)


def test_pages_of_another_size_are_refused() -> None:
    pool = make()
    data = pool.read_pages([1])
    with pytest.raises(ValueError, match="expected uint8"):
        pool.write_pages([1, 2], data)
    with pytest.raises(ValueError, match="expected uint8"):
        pool.write_pages([1], data.view(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_slots_that_were_never_written_read_as_zero(dtype: torch.dtype) -> None:
    poison = [torch.full((1 << 16,), float("nan")) for _ in range(8)]
    del poison
    pool = MHAKVCache(1, 1, 64, 16, 16, dtype, "cpu")
    assert not pool.read_pages(range(16)).any()


def test_a_pool_that_no_memory_can_hold_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        MHAKVCache(1, 1, 1 << 40, 1 << 20, 1, torch.float32, "cpu")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16])
def test_memory_is_committed_as_it_is_used(dtype: torch.dtype) -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    pool = MHAKVCache(8, 4, 128, 2048, 64, dtype, "cpu")
    assert pool._kv_buffer.nbytes == 1 << 31
    for layer in range(4):  # the first page of a layer's K or V is 128 kB
        pool.k_cache(layer)[0].fill_(1)
        pool.v_cache(layer)[0].fill_(1)
    assert resident_bytes() - before < 8 << 20


@pytest.mark.parametrize(("size", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_each_rank_keeps_its_share_of_the_heads(size: int, heads: int) -> None:
    reset_tp_info()
    set_tp_info(0, size)
    try:
        pool = make(num_kv_heads=4)
    finally:
        reset_tp_info()
    assert pool.num_kv_heads == heads == pool.k_cache(0).shape[2]


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    reset_tp_info()
    set_tp_info(0, 3)
    try:
        with pytest.raises(ValueError, match="divided evenly"):
            make(num_kv_heads=4)
    finally:
        reset_tp_info()
