"""The torch backend against attention written out: decode, chunks, mixes, windows, groups."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from minisgl.attention import create_attention_backend
from minisgl.attention.torch_backend import QUERY_BLOCK, rounded_span
from minisgl.core import Batch, Context, Req, SamplingParams
from minisgl.kvcache import create_kvcache_pool
from minisgl.params import ConfigError

DIM, KV_HEADS, LENGTH = 16, 2, 400


def as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is left of `x` in a pool of this type."""
    if dtype.is_floating_point:
        return x.to(dtype).float()
    step = x.abs().amax(-1, keepdim=True) / {torch.int8: 127, torch.int16: 4095}[dtype]
    return (x / step).round() * step


class World:
    """A pool full of NaN in which only stored tokens are numbers, and what each row should hold."""

    def __init__(self, group: int, page_size: int = 1, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.group = group
        self.ctx = Context(page_size)
        num_pages = 6 * LENGTH // page_size
        self.ctx.kv_cache = create_kvcache_pool(
            num_kv_heads=KV_HEADS,
            num_layers=2,
            head_dim=DIM,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
            device="cpu",
        )
        for cache in (self.ctx.kv_cache.k_cache(1), self.ctx.kv_cache.v_cache(1)):
            cache.fill_(float("nan") if dtype.is_floating_point else 77)
        for scale in (self.ctx.kv_cache.k_scale(1), self.ctx.kv_cache.v_scale(1)):
            if scale is not None:
                scale.fill_(float("nan"))
        pages = torch.randperm(num_pages).view(6, -1, 1) * page_size
        self.ctx.page_table = (pages + torch.arange(page_size)).view(6, LENGTH).int()
        self.backend = create_attention_backend("torch", self.ctx)
        self.k, self.v = (as_stored(x, dtype) for x in torch.randn(2, 6, LENGTH, KV_HEADS, DIM))
        self.q = torch.randn(6, LENGTH, KV_HEADS * group, DIM)

    def run(self, spans: list[tuple[int, int, int]], window: int | None = None) -> torch.Tensor:
        """Spans are (row, cached, length); returns the output for all tokens computed."""
        ids = torch.zeros(LENGTH, dtype=torch.int32)
        reqs = [Req(ids[:n], row, low, 1, row, SamplingParams()) for row, low, n in spans]
        batch = Batch(reqs, "prefill")
        batch.positions = torch.cat([torch.arange(low, n) for _, low, n in spans])
        batch.input_ids = torch.zeros_like(batch.positions)
        batch.out_loc = torch.cat([self.ctx.page_table[row, lo:n] for row, lo, n in spans])
        self.backend.prepare_metadata(batch)
        self.last = batch.attn_metadata.get_last_indices(len(reqs)).tolist()
        q, k, v = (
            torch.cat([x[row, lo:n] for row, lo, n in spans]) for x in (self.q, self.k, self.v)
        )
        saved, self.ctx.page_table = self.ctx.page_table, torch.zeros(6, LENGTH, dtype=torch.int32)
        try:  # a batch in flight keeps its own snapshot of the table
            return self.backend.forward(q, k, v, 1, batch, window=window)
        finally:
            self.ctx.page_table = saved

    def expected(self, row: int, low: int, length: int, window: int | None) -> torch.Tensor:
        """Attention of one row written out, float64."""
        k = self.k[row, :length].double().repeat_interleave(self.group, 1)
        v = self.v[row, :length].double().repeat_interleave(self.group, 1)
        q = self.q[row, low:length].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        q_pos, k_pos = torch.arange(low, length).unsqueeze(1), torch.arange(length)
        hidden = (k_pos > q_pos) | (k_pos <= q_pos - (window or LENGTH + 1))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def check(self, spans: list[tuple[int, int, int]], window: int | None = None) -> None:
        got = self.run(spans, window)
        expected = torch.cat([self.expected(*span, window) for span in spans])
        assert (got - expected).abs().max().item() < 1e-5


WINDOWS = pytest.mark.parametrize("window", [None, 1, 5, 130])


@WINDOWS
@pytest.mark.parametrize("group", [1, 3])
def test_prefill_then_decode_then_mixed(group: int, window: int | None) -> None:
    world = World(group)
    world.check([(0, 0, 9), (1, 0, 300), (2, 0, 1), (3, 0, 64)], window)
    world.check([(1, 300, 301), (3, 64, 65), (0, 9, 10), (2, 1, 2)], window)
    world.check([(0, 10, 11), (4, 0, 150), (3, 65, 80), (2, 2, 3), (1, 301, 302)], window)


@WINDOWS
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chunks_equal_the_whole(page_size: int, window: int | None) -> None:
    world = World(2, page_size)
    whole = world.run([(0, 0, 290)], window)
    cuts = [0, 1, 2, 30, QUERY_BLOCK, 200, 201, 290]
    chunks = [world.run([(0, a, b)], window) for a, b in pairwise(cuts)]
    assert (torch.cat(chunks) - whole).abs().max().item() < 1e-5


def test_a_row_is_the_same_to_the_bit_alone_and_among_others() -> None:
    world = World(3)
    spans = [(row, 0, n) for row, n in enumerate((399, 31, 120, 5))]
    world.run(spans)
    decodes = [(row, n, n + 1) for row, _, n in spans]
    together = world.run(decodes)
    for index, span in enumerate(decodes):
        assert torch.equal(world.run([span])[0], together[index])
    chunks = world.run([(4, 0, 50), (5, 0, 170)])
    assert torch.equal(world.run([(5, 0, 170)]), chunks[50:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int16])
def test_kv_is_read_as_stored(dtype: torch.dtype) -> None:
    world = World(2, dtype=dtype)
    world.check([(0, 0, 40), (1, 0, 1)])
    world.check([(0, 40, 41), (1, 1, 7)])


def test_last_indices_point_at_the_last_token_of_each_request() -> None:
    world = World(1)
    world.run([(0, 0, 3), (1, 0, 1), (2, 0, 5)])
    assert world.last == [2, 3, 8]


def test_spans_waste_at_most_half() -> None:
    assert [rounded_span(n) for n in (1, 32, 33, 48, 49, 64, 65, 96, 97)] == [
        32, 32, 48, 48, 64, 64, 96, 96, 128,
    ]  # fmt: skip
    assert all(n <= rounded_span(n) <= max(32, 1.5 * n) for n in range(1, 5000))


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="use one of auto, native, torch"):
        create_attention_backend("flash", Context(1))
