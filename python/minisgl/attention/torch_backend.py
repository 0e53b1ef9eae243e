"""Attention in plain torch: it always exists, on every device, and is the twin of the fast ones.

There is one way for all batches. Requests with a single query token are gathered into groups by the
length of what they see, rounded up; all others are computed alone, in blocks of queries. So a
request's shapes, and its result, depend on the request itself and not on its neighbours. On a CPU
arithmetic is float32 whatever the storage type of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl.core import Batch, Context

from .base import BaseAttnBackend, BaseAttnMetadata

QUERY_BLOCK = 128
MIN_SPAN = 32


@dataclass(slots=True)
class _Work:
    """One call of the attention kernel: n requests with t queries each, seeing `span` tokens.

    queries: token rows (n * t,), or a slice if they are adjacent. locations: where K and V of what
    they see lie, (n * span,). mask: (n, 1, t * group, span), True where a query sees a token.
    """

    queries: torch.Tensor | slice
    locations: torch.Tensor
    mask: torch.Tensor
    num_reqs: int


class _Stored(NamedTuple):
    """K or V of one layer by location, `(locations, heads, dim)`, and the scales of integers."""

    tokens: torch.Tensor
    scale: torch.Tensor | None

    def gather(self, locations: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values at some locations."""
        values = self.tokens.index_select(0, locations)
        if self.scale is not None:
            values = values * self.scale.index_select(0, locations).unsqueeze(-1)
        return values.to(dtype)


@dataclass(slots=True)
class TorchAttnMetadata(BaseAttnMetadata):
    """Lengths of the requests in batch order, and a snapshot of their page-table rows."""

    query_lens: list[int]
    kv_lens: list[int]
    rows: torch.Tensor
    last_indices: torch.Tensor
    wanted_indices: torch.Tensor | None = None
    works: dict[tuple[int | None, int], list[_Work]] = field(default_factory=dict)

    def get_last_indices(self, n: int) -> torch.Tensor:
        """The token rows of the last positions."""
        return self.last_indices[:n]


class TorchAttnBackend(BaseAttnBackend):
    """Gathers K and V of each request and calls torch's scaled dot product attention."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def can_read(self, dtype: torch.dtype) -> bool:
        """Every type that a pool has."""
        return True

    def prepare_metadata(self, batch: Batch) -> None:
        """Take lengths and page-table rows as they are now."""
        reqs = batch.padded_reqs
        query_lens = [req.extend_len for req in reqs]
        kv_lens = [req.device_len for req in reqs]
        table = self._ctx.page_table
        indices = torch.tensor([req.table_idx for req in reqs], device=table.device)
        rows = table[:, : max(kv_lens, default=0)].index_select(0, indices)
        ends = torch.tensor(query_lens, dtype=torch.int64).cumsum(0) - 1
        last = ends.to(table.device)
        batch.attn_metadata = TorchAttnMetadata(query_lens, kv_lens, rows, last)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        batch: Batch,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Store, gather, attend; (tokens, heads, dim)."""
        pool = self._ctx.kv_cache
        pool.store_kv(k, v, batch.out_loc, layer_id)
        k_cache, v_cache = pool.k_cache(layer_id), pool.v_cache(layer_id)
        k_tokens = _Stored(k_cache.flatten(0, 1), pool.k_scale(layer_id))
        v_tokens = _Stored(v_cache.flatten(0, 1), pool.v_scale(layer_id))
        metadata = batch.attn_metadata
        assert isinstance(metadata, TorchAttnMetadata), type(metadata)
        group = q.shape[1] // k_cache.shape[2]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for work in plan(metadata, window, group):
            out[work.queries] = _attend(q[work.queries], k_tokens, v_tokens, work, scale)
        return out


def plan(metadata: TorchAttnMetadata, window: int | None, group: int) -> list[_Work]:
    """The kernel calls of a batch, made at its first layer and shared by all layers like it."""
    key = (window, group)
    if key not in metadata.works:
        metadata.works[key] = _plan_single(metadata, window) + _plan_multi(metadata, window, group)
    return metadata.works[key]


def rounded_span(length: int) -> int:
    """`length` rounded up to one of 32, 48, 64, 96, 128, 192, ...: at most half of it is waste."""
    span = MIN_SPAN
    while span < length:
        span *= 2
    return span // 4 * 3 if MIN_SPAN < span and length <= span // 4 * 3 else span


def _plan_single(metadata: TorchAttnMetadata, window: int | None) -> list[_Work]:
    """Requests with one query token each, in groups of one rounded span."""
    groups: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for index, (num_queries, kv_len) in enumerate(
        zip(metadata.query_lens, metadata.kv_lens, strict=True)
    ):
        if num_queries == 1:
            seen = kv_len if window is None else min(kv_len, window)
            groups.setdefault(rounded_span(seen), []).append((index, start))
        start += num_queries
    works = []
    device = metadata.rows.device
    for span, members in groups.items():
        indices = torch.tensor([index for index, _ in members], device=device)
        ends = torch.tensor([metadata.kv_lens[index] for index, _ in members], device=device)
        ends = ends.unsqueeze(1)
        seen_lens = ends if window is None else ends.clamp(max=window)
        columns = torch.arange(span, device=device).unsqueeze(0)
        mask = columns < seen_lens
        # A slot past the end may hold anything, so masked columns repeat the request's own token.
        columns = (columns + ends - seen_lens).minimum(ends - 1)
        locations = metadata.rows.index_select(0, indices).gather(1, columns)
        queries: torch.Tensor | slice = torch.tensor([row for _, row in members], device=device)
        if members[-1][1] - members[0][1] == len(members) - 1:
            queries = slice(members[0][1], members[-1][1] + 1)
        works.append(_Work(queries, locations.flatten(), mask[:, None, None], len(members)))
    return works


def _plan_multi(metadata: TorchAttnMetadata, window: int | None, group: int) -> list[_Work]:
    """Requests with several query tokens, alone, in blocks at fixed absolute positions."""
    works = []
    start = 0
    device = metadata.rows.device
    for index, (num_queries, kv_len) in enumerate(
        zip(metadata.query_lens, metadata.kv_lens, strict=True)
    ):
        position = kv_len - num_queries
        offset = start - position  # of a token's row in the batch from its position
        start += num_queries
        while num_queries > 1 and position < kv_len:
            stop = min((position // QUERY_BLOCK + 1) * QUERY_BLOCK, kv_len)
            low = 0 if window is None else max(0, position - window + 1)
            q_pos = torch.arange(position, stop, device=device).unsqueeze(1)
            kv_pos = torch.arange(low, stop, device=device).unsqueeze(0)
            mask = kv_pos <= q_pos
            if window is not None:
                mask &= kv_pos > q_pos - window
            queries = slice(position + offset, stop + offset)
            locations = metadata.rows[index, low:stop]
            grouped = mask.repeat_interleave(group, 0)[None, None]
            works.append(_Work(queries, locations, grouped, 1))
            position = stop
    return works


def _attend(
    q: torch.Tensor,
    k_tokens: _Stored,
    v_tokens: _Stored,
    work: _Work,
    scale: float | None = None,
) -> torch.Tensor:
    """(n * t, heads, dim) queries over the tokens at `work.locations`.

    The query heads of one KV head become further queries, so that no K or V is repeated.
    """
    num_heads, dim = q.shape[1:]
    num_kv_heads = k_tokens.tokens.shape[1]
    num_reqs, num_queries = work.num_reqs, q.shape[0] // work.num_reqs
    k = k_tokens.gather(work.locations, q.dtype)
    v = v_tokens.gather(work.locations, q.dtype)
    k = k.view(num_reqs, -1, num_kv_heads, dim).transpose(1, 2)
    v = v.view(num_reqs, -1, num_kv_heads, dim).transpose(1, 2)
    by_kv_head = q.reshape(num_reqs, num_queries, num_kv_heads, -1, dim).transpose(1, 2)
    folded = by_kv_head.reshape(num_reqs, num_kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=work.mask, scale=scale)
    out = out.view(num_reqs, num_kv_heads, num_queries, -1, dim).transpose(1, 2)
    return out.reshape(q.shape[0], num_heads, dim)
