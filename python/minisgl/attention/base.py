"""The interface of attention: metadata made once per batch, and one call per layer.

A backend reads `padded_reqs`, `positions`, `input_ids` and `out_loc` of a batch and the page table
of its context, nothing else. Invariant: metadata is a snapshot. Once `prepare_metadata` has
returned, neither the requests nor the page table are read again for this batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from minisgl.core import Batch


class BaseAttnMetadata(ABC):
    """What a backend needs to know about a batch.

    wanted_indices: token rows of the batch whose logits are computed, int64; None means the last
    one of each request. Set it before the forward to get others (prompt logprobs, speculation).
    """

    wanted_indices: torch.Tensor | None = None

    @abstractmethod
    def get_last_indices(self, n: int) -> torch.Tensor:
        """The token row of the last position of each of the first `n` requests, int64 (n,)."""


class BaseAttnBackend(ABC):
    """Attention over the paged KV pool."""

    # Whether a forward can be captured in a CUDA graph: nothing in it depends on lengths.
    supports_graph: bool = False

    @abstractmethod
    def prepare_metadata(self, batch: Batch) -> None:
        """Set `batch.attn_metadata`."""

    def prepare_for_capture(self, batch: Batch) -> None:
        """Give a batch of dummies the metadata in fixed memory that a captured graph will read."""
        raise NotImplementedError(f"{type(self).__name__} does not support graphs")

    def prepare_for_replay(self, batch: Batch) -> None:
        """Copy a batch's metadata to where the captured graph of its size reads it."""
        raise NotImplementedError(f"{type(self).__name__} does not support graphs")

    def can_read(self, dtype: torch.dtype) -> bool:
        """Whether K and V may be stored in this type; integers come with scales."""
        return dtype.is_floating_point

    @abstractmethod
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
        """Store K and V at `batch.out_loc`, then attend.

        q: (tokens, heads, dim); k, v: (tokens, kv heads, dim); returns (tokens, heads, dim).
        window: how many tokens back a query sees, itself included; None for all. scale: of the
        products of queries and keys; None for 1 / sqrt(dim).
        """
