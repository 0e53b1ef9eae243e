"""Native paged attention, storing of K and V, and the fused rotation, behind checks.

Like `native`, this module hands addresses to the extension only after it has checked type, device,
shape and stride; what lies in index arrays is checked by the extension itself (`IndexError`). A KV
pool is `KVTensors`; who asks what is `PagedBatch`, a snapshot that all layers of a forward share.
Twins: `attention/torch_backend.py`, and `store_cache`, `rotate_` and `rmsnorm` of `torch_ops`.
May import `env` and `utils`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from . import native

# Numbers that csrc/attention.h gives to kinds of keys and values.
KV_KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.int16: 4,
}
INT_BYTES = 4


def _floats(name: str, x: torch.Tensor | None, shape: tuple[int, ...]) -> int:
    """The address of contiguous float32 numbers on the CPU; 0 for None."""
    if x is None:
        return 0
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        raise TypeError(f"{name} must be float32 on the CPU, not {x.dtype} on {x.device}")
    if x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {shape}, not {tuple(x.shape)}")
    return x.data_ptr()


@dataclass(frozen=True, slots=True)
class KVTensors:
    """K and V of one layer: `(..., kv heads, head_dim)`, contiguous.

    All leading dimensions together count token locations. Integers need scales, float32
    `(locations, kv heads)` each: value = code * scale.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    pool: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        for name, x in (("k", k), ("v", v)):
            if x.dtype not in KV_KINDS or x.device.type != "cpu" or x.dtype != k.dtype:
                raise TypeError(f"{name} cannot be {x.dtype} on {x.device}")
            if x.dim() < 3 or x.shape != k.shape or not x.is_contiguous():
                raise ValueError(
                    f"k and v must be contiguous (..., heads, dim): {name} is {tuple(x.shape)}"
                    f" with strides {x.stride()}"
                )
        is_scaled = self.k_scale is not None and self.v_scale is not None
        if not (k.dtype.is_floating_point or is_scaled):
            raise TypeError(f"keys and values of {k.dtype} need scales")
        shape = (self.num_locations, self.num_heads)
        scales = (
            _floats("k_scale", self.k_scale, shape),
            _floats("v_scale", self.v_scale, shape),
        )
        stride = self.num_heads * self.head_dim
        pool = (KV_KINDS[k.dtype], k.data_ptr(), v.data_ptr(), stride, *scales, self.num_locations)
        object.__setattr__(self, "pool", pool)

    @classmethod
    def of_layer(cls, cache: Any, layer_id: int) -> KVTensors:
        """Those of one layer of a KV pool."""
        return cls(
            cache.k_cache(layer_id),
            cache.v_cache(layer_id),
            cache.k_scale(layer_id),
            cache.v_scale(layer_id),
        )

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.k.shape[-1]

    @property
    def num_locations(self) -> int:
        """Token locations of the pool."""
        return self.k.shape[:-2].numel()


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Who asks for what, as the kernels read it (csrc/attention.h), in one contiguous int32 array.

    ints holds, one after the other: query_start (n + 1), token rows of request r are
    [query_start[r], query_start[r + 1]), the last of which stands at position kv_len[r] - 1; kv_len
    (n); the rows of the page table (n); and `rows` (n, longest), the location of each position, of
    which only the first kv_len[r] of row r mean anything.
    """

    ints: np.ndarray
    num_reqs: int
    longest: int
    addresses: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        n, start = self.num_reqs, _address("ints", self.ints)
        if self.ints.shape != (3 * n + 1 + n * self.longest,):
            raise ValueError(f"{n} requests of {self.longest} in {self.ints.shape} ints")
        lengths, rows = start + (n + 1) * INT_BYTES, start + (3 * n + 1) * INT_BYTES
        object.__setattr__(self, "addresses", (n, start, lengths, rows, self.longest))

    @property
    def query_start(self) -> np.ndarray:
        """int32 (n + 1,)."""
        return self.ints[: self.num_reqs + 1]

    @property
    def kv_len(self) -> np.ndarray:
        """int32 (n,)."""
        return self.ints[self.num_reqs + 1 : 2 * self.num_reqs + 1]

    @property
    def rows(self) -> np.ndarray:
        """int32 (n, longest)."""
        return self.ints[3 * self.num_reqs + 1 :].reshape(self.num_reqs, self.longest)

    @property
    def last_rows(self) -> np.ndarray:
        """The token row of the last position of each request, int64 (n,)."""
        rows: np.ndarray = self.query_start[1:].astype(np.int64) - 1
        return rows

    @property
    def num_tokens(self) -> int:
        """Query tokens of all requests."""
        return int(self.ints[self.num_reqs])


def _address(name: str, x: np.ndarray) -> int:
    """The address of a contiguous int32 array."""
    address: int = native.load().vector_address(x.__array_struct__, INT_BYTES)
    if not address:
        raise TypeError(f"{name} must be a contiguous int32 array, not {x.dtype}")
    return address


class PageTable:
    """An int32 matrix of locations on the CPU, with contiguous rows, checked once for all steps."""

    def __init__(self, table: torch.Tensor) -> None:
        if table.dtype is not torch.int32 or table.device.type != "cpu":
            raise TypeError(f"the page table must be int32 on the CPU, not {table.dtype}")
        if table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
            raise ValueError("the page table must be a matrix with contiguous rows")
        self.tensor = table
        self.width = table.shape[1]
        self._native = (table.data_ptr(), table.shape[0], table.stride(0), self.width)

    def snapshot(
        self,
        rows: Sequence[int],
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        num_locations: int,
    ) -> PagedBatch:
        """A copy of some rows, as far as each is used.

        `IndexError` if a row, a length or a location lies outside.
        """
        n = len(kv_lens)
        if len(rows) != n or len(query_lens) != n:
            raise ValueError(f"{len(rows)} rows and {len(query_lens)} counts, {n} lengths")
        longest = max(kv_lens, default=0)
        if longest > self.width:
            raise IndexError(f"a request of {longest} tokens, a page table of {self.width}")
        ints = np.empty(3 * n + 1 + n * longest, np.int32)
        # Lists: for few requests they cost less than as many operators of numpy.
        ints[: 3 * n + 1] = [0, *accumulate(query_lens), *kv_lens, *rows]
        batch = PagedBatch(ints, n, longest)
        _, _, lengths, to, _ = batch.addresses
        native.load().snapshot_rows(
            *self._native, lengths + n * INT_BYTES, lengths, n, to, longest, num_locations
        )
        return batch


def snapshot(
    page_table: torch.Tensor,
    rows: Sequence[int],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_locations: int,
) -> PagedBatch:
    """`PageTable.snapshot` of a table that is used once."""
    return PageTable(page_table).snapshot(rows, query_lens, kv_lens, num_locations)


def _heads(name: str, x: torch.Tensor, heads: int | None, dim: int) -> torch.Tensor:
    """`x` as float32 (tokens, heads, dim) with the heads of a token next to each other."""
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32 or x.device.type != "cpu":
        raise TypeError(f"{name} must be a float32 tensor on the CPU")
    if x.dim() != 3 or x.shape[2] != dim or (heads is not None and x.shape[1] != heads):
        wanted = "heads" if heads is None else heads
        raise ValueError(f"{name} must be (tokens, {wanted}, {dim}), not {tuple(x.shape)}")
    return x


def _heads_together(x: torch.Tensor) -> bool:
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])


def _int32(name: str, x: torch.Tensor, length: int) -> torch.Tensor:
    if x.device.type != "cpu" or x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64 on the CPU, not {x.dtype} on {x.device}")
    if x.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), not {tuple(x.shape)}")
    return x.to(torch.int32).contiguous()


def attention(
    q: torch.Tensor,
    kv: KVTensors,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of `q` (tokens, heads, dim) over the pages; returns the same shape.

    scale: 1 / sqrt(dim) by default. window: how many tokens back a query sees, itself included.
    The locations in `batch.rows` are not checked again: make it with `snapshot`.
    """
    q = _heads("q", q, None, kv.head_dim)
    if not _heads_together(q):
        q = q.contiguous()
    tokens, heads, dim = q.shape
    if batch.num_tokens != tokens:
        raise ValueError(f"the batch has {batch.num_tokens} tokens, but q has {tokens}")
    if window is not None and window < 1:
        raise ValueError(f"the window must be positive, not {window}")
    if out is None:
        out = torch.empty(q.shape)
    _heads("out", out, heads, dim)
    if (
        out.shape != q.shape
        or not _heads_together(out)
        or (tokens > 1 and out.stride(0) < heads * dim)
    ):
        raise ValueError(f"out must be {tuple(q.shape)} with disjoint rows of whole tokens")
    native.load().paged_attention(
        batch.addresses,
        kv.pool,
        heads,
        kv.num_heads,
        dim,
        dim**-0.5 if scale is None else scale,
        window or 0,
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        tokens,
    )
    return out


def store_kv(kv: KVTensors, out_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store k and v, float32 (tokens, kv heads, dim), at the locations `out_loc` (tokens,)."""
    k = _heads("k", k, kv.num_heads, kv.head_dim)
    v = _heads("v", v, kv.num_heads, kv.head_dim)
    if len(k) != len(v):
        raise ValueError(f"{len(k)} keys, but {len(v)} values")
    locations = _int32("out_loc", out_loc, len(k))
    k = k if _heads_together(k) else k.contiguous()
    v = v if _heads_together(v) else v.contiguous()
    native.load().store_kv(
        kv.pool,
        kv.num_heads,
        kv.head_dim,
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        locations.data_ptr(),
        len(k),
    )


def rope_and_store(
    qkv: torch.Tensor,
    num_q_heads: int,
    kv: KVTensors,
    out_loc: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Norm and rotate q in place and store the rotated k, and v; returns q as a view of `qkv`.

    qkv: float32 (tokens, (q + 2 kv heads) * dim); its k and v stay as they were. cos, sin: float32
    (rows, half), `half` columns turn with the `half` after them; `positions` (tokens,) chooses the
    row, without it token t takes row t. q_norm, k_norm: weights (dim,) of an RMS norm per head.
    """
    tokens, dim = len(qkv), kv.head_dim
    width = (num_q_heads + 2 * kv.num_heads) * dim
    if qkv.dtype is not torch.float32 or qkv.device.type != "cpu":
        raise TypeError(f"qkv must be float32 on the CPU, not {qkv.dtype} on {qkv.device}")
    if qkv.dim() != 2 or qkv.shape[1] != width or qkv.stride(1) != 1:
        raise ValueError(f"qkv must be (tokens, {width}) with contiguous rows: {tuple(qkv.shape)}")
    if tokens > 1 and qkv.stride(0) < width:
        raise ValueError("the rows of qkv overlap")
    if cos.dim() != 2:
        raise ValueError(f"cos and sin must be matrices, not {tuple(cos.shape)}")
    tables = _floats("cos", cos, tuple(cos.shape)), _floats("sin", sin, tuple(cos.shape))
    norms = _floats("q_norm", q_norm, (dim,)), _floats("k_norm", k_norm, (dim,))
    where = None if positions is None else _int32("positions", positions, tokens)
    locations = _int32("out_loc", out_loc, tokens)
    native.load().rope_and_store(
        kv.pool,
        num_q_heads,
        kv.num_heads,
        dim,
        qkv.data_ptr(),
        qkv.stride(0),
        tokens,
        (*tables, *cos.shape, 0 if where is None else where.data_ptr()),
        (*norms, eps),
        locations.data_ptr(),
    )
    return qkv[:, : num_q_heads * dim].view(tokens, num_q_heads, dim)
