"""A model driven by hand: pool, page table and batches without an engine or a scheduler."""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl.attention import create_attention_backend
from minisgl.core import Batch, Context, Req, SamplingParams
from minisgl.kvcache import create_kvcache_pool
from minisgl.models import CausalLM, create_model, load_model_config, load_model_weights
from minisgl.moe import create_moe_backend
from minisgl.utils import torch_dtype


class ByHand:
    """A loaded model with a small scattered KV pool; rows of the page table are taken in order."""

    def __init__(
        self, path: Path, dtype: torch.dtype = torch.float32, rows: int = 8, length: int = 128
    ) -> None:
        self.config = load_model_config(path)
        with torch.device("meta"), torch_dtype(dtype):
            self.model: CausalLM = create_model(self.config)
        load_model_weights(self.model, path, device="cpu", dtype=dtype)
        self.ctx = Context(page_size=1)
        self.ctx.kv_cache = create_kvcache_pool(
            num_kv_heads=self.config.num_kv_heads,
            num_layers=self.config.num_layers,
            head_dim=self.config.head_dim,
            num_pages=rows * length,
            page_size=1,
            dtype=dtype,
            device="cpu",
        )
        scattered = torch.randperm(rows * length, generator=torch.Generator().manual_seed(0))
        self.ctx.page_table = scattered.int().view(rows, length)
        self.ctx.attn_backend = create_attention_backend("auto", self.ctx, "cpu")
        self.ctx.moe_backend = create_moe_backend("auto", "cpu")

    def req(self, ids: list[int], row: int, cached_len: int = 0) -> Req:
        """A request in a table row; the first `cached_len` ids are computed already."""
        tokens = torch.tensor(ids, dtype=torch.int32)
        return Req(tokens, row, cached_len, 64, row, SamplingParams())

    def forward(self, reqs: list[Req], every_position: bool = False) -> torch.Tensor:
        """Logits at the last position of each request, or at every position computed."""
        batch = Batch(reqs, "prefill")
        spans = [(r.table_idx, r.cached_len, r.device_len) for r in reqs]
        batch.positions = torch.cat([torch.arange(low, high) for _, low, high in spans]).int()
        batch.input_ids = torch.cat([r.input_ids[r.cached_len : r.device_len] for r in reqs])
        batch.out_loc = torch.cat([self.ctx.page_table[row, lo:hi] for row, lo, hi in spans])
        self.ctx.attn_backend.prepare_metadata(batch)
        if every_position:
            batch.attn_metadata.wanted_indices = torch.arange(len(batch.positions))
        with self.ctx.forward_batch(batch):
            return self.model.forward()

    def logits(self, ids: list[int], chunks: list[int] | None = None, row: int = 0) -> torch.Tensor:
        """Logits at all positions of `ids`, computed in chunks of the given sizes."""
        pieces, start = [], 0
        for size in chunks or [len(ids)]:
            pieces.append(self.forward([self.req(ids[: start + size], row, start)], True))
            start += size
        return torch.cat(pieces)
