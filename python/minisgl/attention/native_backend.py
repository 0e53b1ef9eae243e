"""Attention on the native CPU kernels: K and V are read where they lie, nothing is gathered.

All batches are one call: decode, chunks and mixes differ in `query_start` only. The result of one
query and head is the same to the bit alone and among others, whatever the chunks of the prompt, the
page size, the number of threads or the instruction set (csrc/attention.h says how). `paged` of the
metadata is what a native program needs to run attention itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.core import Batch, Context
from minisgl.kernel import native, native_attention
from minisgl.kernel.native_attention import KVTensors, PagedBatch, PageTable
from minisgl.kvcache import BaseKVCachePool

from .base import BaseAttnBackend, BaseAttnMetadata


@dataclass(slots=True)
class NativeAttnMetadata(BaseAttnMetadata):
    """paged: lengths and a snapshot of the page-table rows, int32 arrays for the kernels."""

    paged: PagedBatch
    wanted_indices: torch.Tensor | None = None

    def get_last_indices(self, n: int) -> torch.Tensor:
        """The token row of the last position of each of the first `n` requests, int64 (n,)."""
        return torch.from_numpy(self.paged.last_rows[:n])


class NativeAttnBackend(BaseAttnBackend):
    """`minisgl._native`'s paged attention; `ImportError` if this installation was built without."""

    def __init__(self, ctx: Context) -> None:
        native.load()
        self._ctx = ctx
        self._pool: BaseKVCachePool | None = None
        self._table: PageTable | None = None
        self._layers: dict[int, KVTensors] = {}

    def prepare_metadata(self, batch: Batch) -> None:
        """Copy the rows of the page table; `IndexError` if they point outside of the pool."""
        reqs = batch.padded_reqs
        if self._table is None or self._table.tensor is not self._ctx.page_table:
            self._table = PageTable(self._ctx.page_table)
        paged = self._table.snapshot(
            [req.table_idx for req in reqs],
            [req.extend_len for req in reqs],
            [req.device_len for req in reqs],
            self._layer(0).pool[-1],
        )
        batch.attn_metadata = NativeAttnMetadata(paged)

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
        """Store K and V, then attend in float32; the result has the type of `q`."""
        metadata = batch.attn_metadata
        assert isinstance(metadata, NativeAttnMetadata), type(metadata)
        kv = self._layer(layer_id)
        native_attention.store_kv(kv, batch.out_loc, k.float(), v.float())
        out = native_attention.attention(q.float(), kv, metadata.paged, scale=scale, window=window)
        return out.to(q.dtype)

    def can_read(self, dtype: torch.dtype) -> bool:
        """Whether the kernels have this type."""
        return dtype in native_attention.KV_KINDS

    def _layer(self, layer_id: int) -> KVTensors:
        """The pool's tensors of one layer, checked once."""
        pool = self._ctx.kv_cache
        if pool is not self._pool:
            self._pool = pool
            self._layers.clear()
        kv = self._layers.get(layer_id)
        if kv is None:
            kv = self._layers[layer_id] = KVTensors.of_layer(pool, layer_id)
        return kv


def can_run(ctx: Context, device: torch.device) -> bool:
    """Whether this machine, this build and this pool let the native backend run."""
    if device.type != "cpu" or not native.available():
        return False
    pool = getattr(ctx, "kv_cache", None)
    return hasattr(native.load(), "paged_attention") and (
        pool is None or pool.k_cache(0).dtype in native_attention.KV_KINDS
    )
