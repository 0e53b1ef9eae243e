"""Token embedding and output head, split over the vocabulary; tied, they share one tensor.

The head multiplies only the rows whose logits are wanted: the last position of each request, unless
the attention metadata of the batch asks for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.core import get_global_ctx
from minisgl.distributed import DistributedCommunicator, current_tp_info
from minisgl.kernel.program import CannotRecord
from minisgl.quant import Matrix, as_weight
from minisgl.utils import div_ceil

from .base import BaseOP, native_parts

if TYPE_CHECKING:
    from minisgl.kernel.program import Buffer, Recorder


def vocab_range(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """(first id, number of ids) of one rank; the last rank may have fewer than the others."""
    per_rank = div_ceil(vocab_size, size)
    start = min(rank * per_rank, vocab_size)
    return start, min(per_rank, vocab_size - start)


class VocabParallelEmbedding(BaseOP):
    """Looks up rows by token id, times `scale`.

    Ids of other ranks give zeros, and the ranks' rows add up.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, scale: float = 1.0) -> None:
        tp_info = current_tp_info()
        self._num_embeddings = num_embeddings
        self._scale = scale
        self._tp_size = tp_info.size
        self._start, length = vocab_range(num_embeddings, tp_info.rank, tp_info.size)
        self._comm = DistributedCommunicator()
        self.weight: Matrix = torch.empty(length, embedding_dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) to (tokens, embedding_dim)."""
        rows = self._rows(ids)
        return rows if self._scale == 1.0 else rows * self._scale

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        weight = as_weight(self.weight)
        if self._tp_size == 1:
            return weight.rows(ids)
        local = ids - self._start
        outside = (local < 0) | (local >= weight.shape[0])
        rows = weight.rows(local.masked_fill(outside, 0)).masked_fill(outside.unsqueeze(-1), 0)
        return self._comm.all_reduce(rows)

    def record(self, program: Recorder) -> Buffer:
        """As `forward` of the batch's ids, on one rank."""
        parts = native_parts(self.weight)
        if len(parts) > 1:
            raise CannotRecord("an embedding of several formats")
        return program.embed(parts[0], self._scale)


class ParallelLMHead(BaseOP):
    """Logits of the wanted positions, float32, the whole vocabulary on every rank."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tied_embedding: VocabParallelEmbedding | None = None,
        has_bias: bool = False,
    ) -> None:
        tp_info = current_tp_info()
        self._num_embeddings = num_embeddings
        self._tp_size = tp_info.size
        self._tied_embedding = tied_embedding
        self._comm = DistributedCommunicator()
        _, length = vocab_range(num_embeddings, tp_info.rank, tp_info.size)
        if tied_embedding is None:
            self.weight: Matrix = torch.empty(length, embedding_dim)
        self.bias = torch.empty(length) if has_bias else None

    def ignored_keys(self, prefix: str = "") -> set[str]:
        """A tied checkpoint may store the head's weight a second time."""
        return {f"{prefix}weight"} if self._tied_embedding is not None else set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, embedding_dim) to (wanted positions, vocabulary)."""
        batch = get_global_ctx().batch
        wanted = batch.attn_metadata.wanted_indices
        if wanted is None:
            wanted = batch.attn_metadata.get_last_indices(batch.padded_size)
        return self.project(x.index_select(0, wanted))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, embedding_dim) to float32 (rows, vocabulary)."""
        owner = self if self._tied_embedding is None else self._tied_embedding
        logits = as_weight(owner.weight).matmul(x).float()
        if self.bias is not None:
            logits.add_(self.bias)
        return logits if self._tp_size == 1 else self._gather(logits)

    def record(self, program: Recorder, x: Buffer) -> None:
        """As `project`, on one rank."""
        owner = self if self._tied_embedding is None else self._tied_embedding
        program.logits(x, native_parts(owner.weight), self.bias)

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        per_rank = div_ceil(self._num_embeddings, self._tp_size)
        padded = logits.new_zeros(logits.shape[0], per_rank)
        padded[:, : logits.shape[1]] = logits
        by_rank = self._comm.all_gather(padded).view(self._tp_size, -1, per_rank)
        return by_rank.transpose(0, 1).reshape(len(logits), -1)[:, : self._num_embeddings]
