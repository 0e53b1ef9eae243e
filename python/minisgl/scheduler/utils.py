"""The small records that the scheduler's parts hand to each other, and batch index arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minisgl.core import Batch, Req, SamplingParams

if TYPE_CHECKING:
    from .prefill import ChunkedReq
    from .protocols import ForwardOutputProtocol


@dataclass(eq=False)
class PendingReq:
    """A request in the queue. `chunked_req` holds what is computed of its prompt so far."""

    uid: int
    input_ids: torch.Tensor
    sampling_params: SamplingParams
    chunked_req: ChunkedReq | None = None
    salt: str = ""

    @property
    def input_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_ids)

    @property
    def output_len(self) -> int:
        """The most tokens it may generate."""
        return self.sampling_params.max_tokens


class ForwardInput(NamedTuple):
    """One step, ready to launch. `input_tuple` and `write_tuple` index the token pool."""

    batch: Batch
    sample_args: Any
    input_tuple: tuple[torch.Tensor, torch.Tensor]
    write_tuple: tuple[torch.Tensor, torch.Tensor]


ForwardData = tuple[ForwardInput, "ForwardOutputProtocol"]


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A host array on `device`; on CUDA through pinned memory, without waiting."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def make_positions(
    batch: Batch, device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Positions int32 `(tokens,)` of what the batch computes, and their index in a table."""
    reqs = batch.padded_reqs
    lens = np.array([req.extend_len for req in reqs], dtype=np.int64)
    starts = np.array([req.cached_len for req in reqs], dtype=np.int64)
    rows = np.repeat(np.array([req.table_idx for req in reqs], dtype=np.int64), lens)
    within = np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(lens) - lens, lens)
    columns = np.repeat(starts, lens) + within
    index = (to_device(rows, device), to_device(columns, device))
    return to_device(columns.astype(np.int32), device), index


def make_write_tuple(reqs: list[Req], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each request's next token goes in the token pool.

    A token that nobody will read goes to the last column: a prompt leaves room for at least one
    token, so no position that is ever computed lies there.
    """
    rows = np.array([req.table_idx for req in reqs], dtype=np.int64)
    columns = np.array([req.device_len if req.can_decode else -1 for req in reqs], dtype=np.int64)
    return to_device(rows, device), to_device(columns, device)
