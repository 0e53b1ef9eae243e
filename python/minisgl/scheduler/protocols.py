"""What the scheduler needs from the outside: an engine and an IO object.

The engine of `minisgl.engine` implements the first, the simulated engine of the tests too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from minisgl.core import Batch, Constraint, Req
from minisgl.kvcache import PagedEngine
from minisgl.message import BaseBackendMsg, DetokenizeMsg


class EventProtocol(Protocol):
    """Becomes ready when the tokens of a step have reached the host."""

    def synchronize(self) -> None:
        """Wait until it is ready."""
        ...


class ForwardOutputProtocol(Protocol):
    """The tokens of one step; a row without a usable token holds -1.

    next_tokens_gpu: int32 `(requests,)` on the engine's device (a tensor, or an array on a CPU);
    next_tokens_cpu: the same on the host, valid after `copy_done_event`.
    """

    @property
    def next_tokens_gpu(self) -> Any:
        """On the engine's device."""
        ...

    @property
    def next_tokens_cpu(self) -> Any:
        """On the host."""
        ...

    @property
    def copy_done_event(self) -> EventProtocol:
        """Ready when the host's copy is."""
        ...

    @property
    def logprobs(self) -> Any:
        """`StepLogprobs` of the engine, read only for requests that ask for log-probabilities."""
        ...


class EngineProtocol(PagedEngine, Protocol):
    """Batch in, tokens out. Owns the page table `(rows + 1, tokens)` of token locations."""

    page_table: torch.Tensor
    num_pages: int
    max_seq_len: int
    vocab_size: int

    def prepare(self, batch: Batch) -> Any:
        """Take the batch's metadata from the page table; returns the sampling arguments."""
        ...

    def pad_batch(self, batch: Batch) -> None:
        """Set `batch.padded_reqs`."""
        ...

    def forward(self, batch: Batch) -> Any:
        """Launch the forward pass; returns what `sample` takes."""
        ...

    def sample(self, batch: Batch, logits: Any, args: Any) -> ForwardOutputProtocol:
        """Choose a token for each request of the batch."""
        ...

    def check_constraint(self, constraint: Constraint) -> None:
        """`InvalidRequestError` for one that cannot be used."""
        ...

    def matcher_of(self, req: Req) -> Any:
        """Where a request stands in its grammar (`is_complete_after`, `error`)."""
        ...

    def fingerprint(self) -> bytes:
        """The same only where the same tokens have the same KV bytes."""
        ...

    def shutdown(self) -> None:
        """Let go of everything."""
        ...


class IOProtocol(Protocol):
    """Where messages come from and replies go to."""

    def receive(self, blocking: bool) -> Sequence[BaseBackendMsg]:
        """All messages that have arrived; waits for one if `blocking`."""
        ...

    def send(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Hand over the replies of one step, in order."""
        ...
