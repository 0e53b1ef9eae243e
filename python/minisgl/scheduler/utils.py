"""The small records that the scheduler's parts hand to each other, and batch index arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minisgl.core import Batch, Req, SamplingParams, Spans

if TYPE_CHECKING:
    from minisgl.core import PositionLogprobs

    from .prefill import ChunkedReq
    from .protocols import ForwardOutputProtocol


@dataclass(eq=False)
class PendingReq:
    """A request in the queue. `chunked_req` holds what is computed of its prompt so far.

    One that was preempted has the `num_generated` tokens of its answer so far behind its prompt.
    num_cached_tokens: how many were in the prefix cache when it was admitted for the first time.
    num_overtaken: how many that came later have started before it.
    """

    uid: int
    input_ids: torch.Tensor
    sampling_params: SamplingParams
    chunked_req: ChunkedReq | None = None
    salt: str = ""
    num_generated: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    priority: int = 0
    num_overtaken: int = 0

    @property
    def input_len(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.input_ids)

    @property
    def output_len(self) -> int:
        """The most tokens it may still generate."""
        return self.sampling_params.max_tokens - self.num_generated

    @property
    def tells_prompt(self) -> bool:
        """Whether the logits of its whole prompt are wanted; after a preemption they are told."""
        return self.sampling_params.prompt_logprobs is not None and not self.num_generated

    @property
    def match_len(self) -> int:
        """How many tokens may come from the cache: of the others the logits are wanted."""
        return 0 if self.tells_prompt else self.input_len - 1


# Integers where the scheduler works: an array on a CPU, else a tensor; both index and assign alike.
# (After a forward has swept the caches an operator of torch costs as much as several of numpy.)
Ints = Any


def cells(ints: torch.Tensor | Ints) -> Ints:
    """A tensor as what `Ints` is on its device; shares its memory."""
    return ints.numpy() if isinstance(ints, torch.Tensor) and ints.is_cpu else ints


def to_tensor(ints: Ints) -> torch.Tensor:
    """The inverse of `cells`."""
    return torch.from_numpy(ints) if isinstance(ints, np.ndarray) else ints


def to_device(array: np.ndarray[Any, Any], table: Ints) -> Ints:
    """A host array where `table` is; on CUDA through pinned memory, without waiting."""
    if isinstance(table, np.ndarray):
        return array
    return torch.from_numpy(array).pin_memory().to(table.device, non_blocking=True)


def index_on_device(index: tuple[Ints, Ints], table: Ints) -> tuple[Ints, Ints]:
    """Rows and columns where `table` is."""
    return to_device(index[0], table), to_device(index[1], table)


def clamped(tokens: torch.Tensor | Ints) -> Any:
    """What to write for sampled tokens, 0 for a row without one, which has -1."""
    if isinstance(tokens, torch.Tensor) and not tokens.is_cpu:
        return tokens.clamp(min=0)
    return [token if token > 0 else 0 for token in tokens.tolist()]


class ForwardInput(NamedTuple):
    """One step, ready to launch. `input_tuple` and `write_tuple` index the token pool."""

    batch: Batch
    sample_args: Any
    input_tuple: tuple[Ints, Ints]
    write_tuple: tuple[Ints, Ints]


ForwardData = tuple[ForwardInput, "ForwardOutputProtocol"]


def token_index(
    rows: Ints, starts: Ints, ends: Ints, num_tokens: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows and columns, int64 `(num_tokens,)`, of cells `[starts[i], ends[i])` of `rows[i]`.

    Where there are as many cells as rows each row has one.
    """
    if num_tokens == len(rows):
        return rows, starts
    counts = ends - starts
    rows = np.repeat(rows, counts)
    return rows, np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(num_tokens)


def count_tokens(batch: Batch) -> tuple[int, int]:
    """How many tokens a batch is about to compute, and how many of them are of prompts."""
    lens = [req.extend_len for req in batch.reqs]
    num_prompt = sum(n for req, n in zip(batch.reqs, lens) if req.is_prefilling)
    return sum(lens), num_prompt


def make_positions(spans: Spans, table: Ints) -> tuple[Ints, tuple[Ints, Ints]]:
    """Positions int32 `(tokens,)` of what a batch computes, and their index in a table."""
    index = token_index(*spans)
    positions = to_device(index[1].astype(np.int32), table)
    return positions, index_on_device(index, table)


def make_write_tuple(reqs: list[Req], spans: Spans, table: Ints) -> tuple[Ints, Ints]:
    """Where each request's next token goes in the token pool.

    A token that nobody will read goes to the last column: a prompt leaves room for at least one
    token, so no position that is ever computed lies there.
    """
    columns = np.array([req.device_len if req.can_decode else -1 for req in reqs], dtype=np.int64)
    return index_on_device((spans.rows[: len(reqs)], columns), table)
