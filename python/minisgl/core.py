"""The three things every layer speaks of: a request, a batch, and the context of a forward pass.

Invariant of a request: `0 <= cached_len < device_len <= max_device_len`. Tokens `[0, cached_len)`
have their K and V stored; `[cached_len, device_len)` are what the next forward computes. Imports
`utils` and `params`, and re-exports what the layers above need of the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from minisgl.params import (
    ConfigError,
    Constraint,
    EngineError,
    ErrorKind,
    FinishReason,
    InvalidRequestError,
    Logprob,
    MinisglError,
    PositionLogprobs,
    SamplingParams,
)

if TYPE_CHECKING:
    from minisgl.attention import BaseAttnBackend, BaseAttnMetadata
    from minisgl.kvcache import BaseCacheHandle, BaseKVCachePool
    from minisgl.moe import BaseMoeBackend
    from minisgl.scheduler.utils import PendingReq

Phase = Literal["prefill", "decode", "mixed"]

__all__ = [
    "Batch",
    "ConfigError",
    "Constraint",
    "Context",
    "EngineError",
    "ErrorKind",
    "FinishReason",
    "InvalidRequestError",
    "Logprob",
    "MinisglError",
    "Phase",
    "PositionLogprobs",
    "Req",
    "SamplingParams",
    "Spans",
    "get_global_ctx",
    "reset_global_ctx",
    "set_global_ctx",
]


class Req:
    """One running request, from the moment it holds a table row until it is freed.

    input_ids: CPU int32, the prompt and what was generated so far; the last one is not computed
    yet. num_input: how many it was made with. output_len: the most tokens it may generate.
    cache_handle: its locked prefix, None by hand. num_generated: how many of the ids that it was
    made with are answer, from before a preemption. pending: the entry of the queue that it was made
    from.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        table_idx: int,
        cached_len: int,
        output_len: int,
        uid: int,
        sampling_params: SamplingParams,
        cache_handle: BaseCacheHandle | None = None,
        *,
        salt: str = "",
        num_generated: int = 0,
        pending: PendingReq | None = None,
    ) -> None:
        self.input_ids = input_ids
        self.num_input = self.num_ids
        self.table_idx = table_idx
        self.cached_len = cached_len
        self.device_len = self.num_ids
        self.max_device_len = self.num_ids + output_len - num_generated
        self.output_len = output_len
        self.uid = uid
        self.sampling_params = sampling_params
        self.cache_handle = cache_handle
        self.salt = salt
        self.pending = pending
        # If its prompt is told: what is known of it, and the id that comes after a chunk of it.
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.next_id: int | None = None
        self.finish_reason: FinishReason | None = None
        self.has_bad_kv = False
        assert 0 <= self.cached_len < self.device_len <= self.max_device_len, self

    @property
    def input_ids(self) -> torch.Tensor:
        """All tokens known on the host, CPU int32: a view, valid until the next append."""
        return torch.from_numpy(self._ids[: self.num_ids])

    @input_ids.setter
    def input_ids(self, ids: torch.Tensor) -> None:
        self._ids: np.ndarray = ids.numpy()
        self.num_ids, self._owns_ids = len(ids), False

    @property
    def remain_len(self) -> int:
        """How many more tokens it may generate."""
        return self.max_device_len - self.device_len

    @property
    def num_prompt(self) -> int:
        """How many tokens its prompt has."""
        return self.max_device_len - self.output_len

    @property
    def is_prefilling(self) -> bool:
        """Whether the next forward computes what it was made with, and no token sampled since."""
        return self.cached_len < self.num_input

    @property
    def extend_len(self) -> int:
        """How many tokens the next forward computes."""
        return self.device_len - self.cached_len

    @property
    def can_decode(self) -> bool:
        """Whether it may be in a decode batch."""
        return self.device_len < self.max_device_len

    @property
    def is_sampled(self) -> bool:
        """Whether the forward's last position becomes a token."""
        return True

    def complete_one(self) -> None:
        """Account for one forward: all of `device_len` is stored, and one token was sampled."""
        self.cached_len = self.device_len
        self.device_len += 1

    def append_host(self, next_token: torch.Tensor | int) -> None:
        """Append one sampled token to `input_ids`, in amortised constant time."""
        if not self._owns_ids or self.num_ids == len(self._ids):
            grown = np.empty(max(2 * self.num_ids, 16), dtype=np.int32)
            grown[: self.num_ids] = self._ids[: self.num_ids]
            self._ids, self._owns_ids = grown, True
        self._ids[self.num_ids] = int(next_token)
        self.num_ids += 1

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(uid={self.uid}, row={self.table_idx}, "
            f"cached={self.cached_len}, device={self.device_len}, max={self.max_device_len})"
        )


class Spans(NamedTuple):
    """What each request of a batch computes next, asked once for all who lay out its arrays.

    rows, starts, ends: int64 `(requests,)`, the table row and the positions `[start, end)`.
    num_tokens: of all together.
    """

    rows: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]
    num_tokens: int

    @classmethod
    def of(cls, reqs: Sequence[Req]) -> Spans:
        """As the requests are now."""
        rows, starts = [req.table_idx for req in reqs], [req.cached_len for req in reqs]
        ends = [req.device_len for req in reqs]
        num_tokens = sum(ends) - sum(starts)
        return cls(
            np.array(rows, dtype=np.int64),
            np.array(starts, dtype=np.int64),
            np.array(ends, dtype=np.int64),
            num_tokens,
        )


class TokenInts:
    """A field of integers `(tokens,)`: set from a tensor or a numpy array, it reads as a tensor."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, obj: Any, owner: type | None = None) -> torch.Tensor:
        try:
            values = obj.ints[self._name]
        except KeyError:
            raise AttributeError(f"{self._name} of this batch is not set yet") from None
        return torch.from_numpy(values) if isinstance(values, np.ndarray) else values

    def __set__(self, obj: Any, values: torch.Tensor | np.ndarray) -> None:
        obj.ints[self._name] = values


class Batch:
    """The requests of one forward. Everything but `reqs` and `phase` is filled in before it runs.

    phase: "prefill" computes prompts, "decode" the newest token of each request, "mixed" both.
    positions, input_ids, out_loc: ints `(tokens,)` over the padded requests; `out_loc` is where
    each token's K and V go. `ints` has them by name as they were set, so that arrays can go to a
    native program without becoming tensors. `padded_reqs` may end in dummy requests; `spans` is
    what `Spans.of` gives for them, if it was asked for.
    """

    input_ids = TokenInts()
    positions = TokenInts()
    out_loc = TokenInts()
    attn_metadata: BaseAttnMetadata

    def __init__(self, reqs: Sequence[Req], phase: Phase) -> None:
        self.reqs = list(reqs)
        self.phase = phase
        self.padded_reqs = self.reqs
        self.spans: Spans | None = None
        self.ints: dict[str, torch.Tensor | np.ndarray] = {}

    @property
    def is_prefill(self) -> bool:
        """Whether it computes nothing but prompts."""
        return self.phase == "prefill"

    @property
    def is_decode(self) -> bool:
        """Whether each request computes its newest token, and nothing else."""
        return self.phase == "decode"

    @property
    def size(self) -> int:
        """Number of real requests."""
        return len(self.reqs)

    @property
    def padded_size(self) -> int:
        """Number of requests including the dummy ones."""
        return len(self.padded_reqs)


class Context:
    """What a model's forward needs besides its weights: the batch, the KV pool, the backends."""

    kv_cache: BaseKVCachePool
    page_table: torch.Tensor
    attn_backend: BaseAttnBackend
    moe_backend: BaseMoeBackend

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._batch: Batch | None = None

    @property
    def batch(self) -> Batch:
        """The batch whose forward is running."""
        assert self._batch is not None, "Context.batch is only there inside forward_batch(batch)"
        return self._batch

    @contextmanager
    def forward_batch(self, batch: Batch) -> Iterator[None]:
        """Make `batch` the current batch, and this context the current one, for one forward."""
        assert self._batch is None, "forward_batch cannot be nested"
        token = _running_ctx.set(self)
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None
            _running_ctx.reset(token)


_running_ctx: ContextVar[Context | None] = ContextVar("minisgl_running_ctx", default=None)
_last_set: list[Context] = []


def set_global_ctx(ctx: Context) -> None:
    """Make `ctx` the current context while no forward is running."""
    _last_set[:] = [ctx]


def get_global_ctx() -> Context:
    """The context whose forward is running, else the one that was set last."""
    running = _running_ctx.get()
    if running is not None:
        return running
    assert _last_set, "no context is set: call set_global_ctx first"
    return _last_set[0]


def reset_global_ctx(ctx: Context | None = None) -> None:
    """Forget the context that was set; given one, only if it is that one."""
    if ctx is None or ctx in _last_set:
        _last_set.clear()
