"""Embedding and head: tied, untied, and which rows get logits."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from minisgl.core import Batch, Context
from minisgl.layers import ParallelLMHead, VocabParallelEmbedding, vocab_range


def head_logits(head: ParallelLMHead, x: torch.Tensor, wanted: list[int] | None) -> torch.Tensor:
    batch = Batch([], "prefill")
    last = torch.tensor([1, 4])
    batch.attn_metadata = SimpleNamespace(  # type: ignore[assignment]
        wanted_indices=None if wanted is None else torch.tensor(wanted),
        get_last_indices=lambda n: last,
    )
    with Context(1).forward_batch(batch):
        return head.forward(x)


def test_a_tied_head_reads_the_embedding_and_has_no_weight_of_its_own() -> None:
    embedding = VocabParallelEmbedding(10, 4)
    embedding.weight = torch.randn(10, 4).bfloat16()
    head = ParallelLMHead(10, 4, tied_embedding=embedding)
    assert head.state_dict() == {} and head.ignored_keys() == {"weight"}
    x = torch.randn(5, 4)
    logits = head_logits(head, x, None)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x[[1, 4]] @ embedding.weight.float().t())


def test_an_untied_head_multiplies_the_wanted_rows_only() -> None:
    head = ParallelLMHead(10, 4, has_bias=True)
    head.weight, head.bias = torch.randn(10, 4), torch.randn(10)
    x = torch.randn(5, 4)
    expected = x @ head.weight.t() + head.bias
    torch.testing.assert_close(head_logits(head, x, [0, 3, 4]), expected[[0, 3, 4]])


def test_vocabulary_ranges_cover_everything_once() -> None:
    for vocab_size, size in ((10, 4), (8, 4), (5, 4), (3, 8)):
        spans = [vocab_range(vocab_size, rank, size) for rank in range(size)]
        ids = [i for start, length in spans for i in range(start, start + length)]
        assert ids == list(range(vocab_size))
