"""The native backend against the torch backend, and to the bit against itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from minisgl.attention import (
    ATTENTION_BACKENDS,
    BaseAttnBackend,
    TorchAttnBackend,
    create_attention_backend,
)
from minisgl.attention.native_backend import NativeAttnBackend, NativeAttnMetadata, can_run
from minisgl.core import Batch, Context, Req, SamplingParams
from minisgl.kernel import native, native_attention
from minisgl.kvcache import create_kvcache_pool
from minisgl.params import ConfigError

from tests.integer_kv import INTEGERS

DIM, KV_HEADS, GROUP, ROWS, LENGTH, LAYER = 16, 2, 3, 5, 400, 1
CPU = torch.device("cpu")
Span = tuple[int, int, int]  # row, tokens stored, tokens after this forward

if not can_run(Context(1), CPU):
    pytest.skip("this build has no native attention", allow_module_level=True)


class World:
    """Requests whose numbers depend on the row and position alone, in a pool full of NaN."""

    def __init__(
        self, page_size: int = 1, dtype: torch.dtype = torch.float32, name: str = "native"
    ) -> None:
        random = torch.Generator().manual_seed(0)
        self.ctx = Context(page_size)
        num_pages = ROWS * LENGTH // page_size
        self.ctx.kv_cache = create_kvcache_pool(
            num_kv_heads=KV_HEADS,
            num_layers=2,
            head_dim=DIM,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
            device="cpu",
        )
        for cache in (self.ctx.kv_cache.k_cache(LAYER), self.ctx.kv_cache.v_cache(LAYER)):
            cache.fill_(float("nan") if dtype.is_floating_point else 77)
        for scale in (self.ctx.kv_cache.k_scale(LAYER), self.ctx.kv_cache.v_scale(LAYER)):
            if scale is not None:
                scale.fill_(float("nan"))
        shape = (ROWS, LENGTH, KV_HEADS, DIM)
        self.k, self.v = (torch.randn(shape, generator=random) for _ in range(2))
        self.q = torch.randn((ROWS, LENGTH, KV_HEADS * GROUP, DIM), generator=random)
        pages = torch.randperm(num_pages, generator=random).view(ROWS, -1, 1) * page_size
        self.ctx.page_table = (pages + torch.arange(page_size)).view(ROWS, LENGTH).int()
        self.backend = create_attention_backend(name, self.ctx)
        self.ctx.attn_backend = self.backend

    def batch(self, spans: list[Span]) -> Batch:
        ids = torch.zeros(LENGTH, dtype=torch.int32)
        reqs = [Req(ids[:high], row, low, 1, row, SamplingParams()) for row, low, high in spans]
        batch = Batch(reqs, "prefill")
        batch.out_loc = self.gather(self.ctx.page_table, spans)
        self.backend.prepare_metadata(batch)
        return batch

    @staticmethod
    def gather(x: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        return torch.cat([x[row, low:high] for row, low, high in spans])

    def run(self, spans: list[Span], window: int | None = None) -> torch.Tensor:
        batch = self.batch(spans)
        q, k, v = (self.gather(x, spans) for x in (self.q, self.k, self.v))
        saved = self.ctx.page_table.clone()
        self.ctx.page_table.zero_()  # a batch in flight keeps its own snapshot of the table
        out = self.backend.forward(q, k, v, LAYER, batch, window=window)
        self.ctx.page_table.copy_(saved)
        return out


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = native.num_threads()
    native.set_num_threads(request.param)
    yield request.param
    native.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *INTEGERS])
@pytest.mark.parametrize("window", [None, 1, 5, 130])
def test_equals_the_torch_backend(window: int | None, dtype: torch.dtype, threads: int) -> None:
    worlds = [World(4, dtype, name) for name in ("native", "torch")]
    # With integers, kernels may round queries and weights to 13 bits.
    tolerance = 1e-5 if dtype.is_floating_point else 1e-3
    for spans in (
        [(0, 0, 9), (1, 0, 300), (2, 0, 1), (3, 0, 64)],
        [(1, 300, 301), (3, 64, 65), (0, 9, 10), (2, 1, 2)],
        [(0, 10, 11), (4, 0, 150), (3, 65, 80), (2, 2, 3), (1, 301, 302)],
    ):
        ours, twin = (world.run(spans, window) for world in worlds)
        assert (ours - twin).abs().max().item() < tolerance
    stored, twins = (world.ctx.kv_cache.read_pages(range(0, 500, 7)) for world in worlds)
    assert torch.equal(stored, twins)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_those_of_the_torch_twin_to_the_bit(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(4)
    pools = [create_kvcache_pool(3, 1, 20, 500, 1, dtype, "cpu") for _ in range(2)]
    k = torch.randn(500, 3, 20, generator=random)
    k *= torch.randn(500, 3, 1, generator=random).mul_(20).exp_()
    k[3, 1, 5], k[4, 0, 19], k[5, 2, 0] = float("nan"), float("inf"), -float("inf")
    k[6:9] = torch.tensor([0.0, -0.0, 1e-36]).view(3, 1, 1)
    k[9:12] *= torch.tensor([1e-36, 1e-38, 1e-42]).view(3, 1, 1)
    k[12:] = k[12:].clamp(-3e38, 3e38)
    v = torch.arange(20).mul(0.5).expand(500, 3, 20)  # ties
    where = torch.randperm(500, generator=random)
    native_attention.store_kv(native_attention.KVTensors.of_layer(pools[0], 0), where, k, v)
    pools[1].store_kv(k, v, where, 0)
    stored, twins = (pool.read_pages(range(500)) for pool in pools)
    assert torch.equal(stored, twins)


@pytest.mark.parametrize("dtype", [torch.float32, *INTEGERS])
@pytest.mark.parametrize("window", [None, 70])
def test_the_same_bits_in_any_pages_chunks_and_company(
    window: int | None, dtype: torch.dtype, threads: int
) -> None:
    whole = World(1, dtype).run([(0, 0, 290)], window)
    for page_size in (1, 4, 16):
        world = World(page_size, dtype)
        cuts = [0, 1, 2, 30, 128, 200, 201, 290]
        low = 0
        for index, (low, high) in enumerate(pairwise(cuts)):
            spans = [(1, index, index + 1), (0, low, high), (2, 0, 40)]
            assert torch.equal(world.run(spans, window)[1 : 1 + high - low], whole[low:high])


def test_metadata_is_a_snapshot_with_arrays_for_the_kernels() -> None:
    world = World()
    batch = world.batch([(0, 0, 3), (3, 7, 8), (2, 2, 7)])
    metadata = batch.attn_metadata
    assert isinstance(metadata, NativeAttnMetadata)
    assert metadata.wanted_indices is None
    assert metadata.get_last_indices(3).tolist() == [2, 3, 8]
    assert metadata.get_last_indices(2).dtype is torch.int64
    assert metadata.paged.query_start.tolist() == [0, 3, 4, 9]
    assert metadata.paged.kv_len.tolist() == [3, 8, 7]
    for row, (index, length) in enumerate([(0, 3), (3, 8), (2, 7)]):
        got = metadata.paged.rows[row, :length].tolist()
        assert got == world.ctx.page_table[index, :length].tolist()


def test_queries_in_the_middle_of_a_projection_and_in_half_precision_are_taken() -> None:
    world = World()
    spans = [(0, 0, 20)]
    expected = world.run(spans)
    batch = world.batch(spans)
    q, k, v = (world.gather(x, spans) for x in (world.q, world.k, world.v))
    merged = torch.cat([q, k, v], 1)
    parts = merged.split((KV_HEADS * GROUP, KV_HEADS, KV_HEADS), 1)
    assert torch.equal(world.backend.forward(*parts, LAYER, batch), expected)
    half = world.backend.forward(*(x.bfloat16() for x in parts), LAYER, batch)
    assert half.dtype is torch.bfloat16 and torch.allclose(half.float(), expected, atol=0.05)


def test_a_table_that_points_outside_the_pool_is_an_error() -> None:
    world = World()
    world.ctx.page_table[0, 5] = ROWS * LENGTH
    world.run([(0, 0, 5)])
    with pytest.raises(IndexError):
        world.run([(0, 5, 6)])


def test_auto_takes_the_native_backend_on_a_cpu_and_only_for_what_it_reads() -> None:
    world = World()
    assert isinstance(create_attention_backend("auto", world.ctx, "cpu"), NativeAttnBackend)
    assert isinstance(create_attention_backend("auto", world.ctx, "cuda"), TorchAttnBackend)
    with pytest.raises(ConfigError, match="runs on a CPU"):
        create_attention_backend("native", world.ctx, "cuda")
    world.ctx.kv_cache._kv_buffer = world.ctx.kv_cache._kv_buffer.double()
    assert isinstance(create_attention_backend("auto", world.ctx, "cpu"), TorchAttnBackend)
    with pytest.raises(ConfigError, match=r"NativeAttn.* torch.float64: choose another kv_"):
        create_attention_backend("native", world.ctx, "cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_integers_are_refused_where_they_cannot_be_read(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = World(1, dtype, "torch").ctx
    with pytest.raises(ConfigError, match=rf"on cuda .*{dtype}: choose another kv_dtype \(--kv-"):
        create_attention_backend("auto", ctx, "cuda")

    class FloatsOnly(TorchAttnBackend):
        can_read = BaseAttnBackend.can_read

    floats = {"floats": lambda ctx, device: FloatsOnly(ctx)}
    monkeypatch.setattr(ATTENTION_BACKENDS, "_items", floats)
    with pytest.raises(ConfigError, match=r"FloatsOnly on cpu .*\(--kv-dtype\), such as float16"):
        create_attention_backend("floats", ctx)
