"""A model's forward recorded once and replayed natively, without Python in its way.

A `Recorder` is handed through the layers' `record` methods. Each call notes a step over virtual
buffers (a row per token); `finish()` gives buffers that are never alive together the same memory
and makes the native program. Weights are named by address, so the program keeps all of them
alive; a float32 weight that is written in place takes effect, one that is replaced does not.

Invariant: a row of the result depends on that row's request alone, to the bit. May import `env` and
`utils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .native import FLOAT_KINDS, FORMATS, load
from .native_attention import KVTensors, PagedBatch
from .native_ops import ACTIVATIONS

Ints = torch.Tensor | np.ndarray
GROUP = 32  # columns that share a scale
LOGITS = -1  # the native name of the caller's logits


class CannotRecord(Exception):
    """This model or device has no native program; the message says why."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A float32 matrix with a row per token, known by its number while recording."""

    index: int
    width: int


@dataclass(slots=True)
class _Step:
    """A call of `method` with what `arguments` makes of the native numbers of `buffers`."""

    method: str
    buffers: tuple[Buffer, ...]
    arguments: Callable[..., tuple[Any, ...]]


class Recorder:
    """Notes the steps of a forward.

    num_ids: token ids are below it, and there are as many logits. kv_cache: the pool
    whose layers are written and read. num_positions: positions are below.
    """

    def __init__(self, num_ids: int, kv_cache: Any, num_positions: int) -> None:
        self.num_positions = num_positions
        self._num_ids = num_ids
        self._kv_cache = kv_cache
        self._num_locations = self._padding = 0
        self._steps: list[_Step] = []
        self._widths: list[int] = []
        self._kept: list[Any] = []
        self._pinned: set[int] = set()  # buffers whose memory is nobody else's

    def embed(self, weight: Any, scale: float = 1.0) -> Buffer:
        """The row of `weight` for each token, times `scale`."""
        matrix = self._matrix(weight)
        out = self._buffer(matrix[4])
        self._note("embed", (out,), lambda out: (matrix, scale, out))
        return out

    def rms_norm(self, x: Buffer, weight: torch.Tensor, eps: float) -> Buffer:
        """`rmsnorm(x)` in a buffer of its own."""
        address = self._vector(weight, x.width)
        out = self._buffer(x.width)
        self._note("rms_norm", (x, out), lambda x, out: (x, address, eps, out))
        return out

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: torch.Tensor, eps: float) -> None:
        """In place: `residual += x`, then `x = rmsnorm(residual)`."""
        address = self._vector(weight, x.width)
        self._note("add_rms_norm", (x, residual), lambda x, r: (x, r, address, eps))

    def gate_mul(self, x: Buffer, activation: str = "silu") -> Buffer:
        """`activation(gate) * up` of gate and up side by side."""
        kind = ACTIVATIONS[activation]
        out = self._buffer(x.width // 2)
        self._note("gate_mul", (x, out), lambda x, out: (kind, x, out))
        return out

    def linear(self, x: Buffer, parts: Sequence[Any], bias: torch.Tensor | None = None) -> Buffer:
        """`x @ W^T + bias`, the rows of W being those of all `parts`."""
        matrices = [self._matrix(part) for part in parts]
        out = self._buffer(sum(matrix[3] for matrix in matrices))
        self._note("linear", (x, out), lambda x, out: (x, matrices, out))
        if bias is not None:
            address, width = self._vector(bias, out.width), out.width
            self._note("bias", (out,), lambda out: (out, address, width))
        return out

    def gated_mlp(
        self, x: Buffer, gate_up: Sequence[Any], activation: str, down: Any
    ) -> Buffer | None:
        """`down(activation(gate(x)) * up(x))` without biases; None if it must be three steps.

        gate_up: both on top of each other, or one after the other. What is between them and `down`
        is combined and quantised piece by piece and never written out, so all must be packed.
        """
        parts = [self._matrix(part) for part in gate_up]
        last = self._matrix(down)
        inner = last[4]
        is_even = len(parts) == 1 or [part[3] for part in parts] == [inner, inner]
        if not (last[0] and all(part[0] for part in parts) and is_even and inner % GROUP == 0):
            return None
        kind = ACTIVATIONS[activation]
        out = self._buffer(last[3])
        self._note("gated_mlp", (x, out), lambda x, out: (x, parts, kind, last, out))
        return out

    def experts(
        self,
        x: Buffer,
        gating: Buffer,
        gate_up: Sequence[Sequence[Any]],
        down: Sequence[Sequence[Any]],
        top_k: int,
        renormalize: bool,
        activation: str = "silu",
    ) -> Buffer:
        """The weighted sum of the `top_k` experts that the router's logits `gating` choose.

        gate_up, down: of each expert the parts of its matrices, from top to bottom.
        """
        matrices = [
            ([self._matrix(part) for part in parts], [self._matrix(part) for part in ends])
            for parts, ends in zip(gate_up, down, strict=True)
        ]
        kind = ACTIVATIONS[activation]
        out = self._buffer(sum(matrix[3] for matrix in matrices[0][1]))
        self._note(
            "experts",
            (x, gating, out),
            lambda x, gating, out: (x, gating, matrices, kind, top_k, renormalize, out),
        )
        return out

    def attention(
        self,
        qkv: Buffer,
        layer_id: int,
        num_q: int,
        num_kv: int,
        tables: tuple[torch.Tensor, torch.Tensor],
        window: int | None = None,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
        scale: float | None = None,
    ) -> Buffer:
        """Norm (if asked to) and rotate q and k, store k and v, attend; qkv is overwritten.

        tables: cos and sin, float32 (num_positions, rotary_dim / 2). norms: the weights for heads
        of q and of k, and epsilon. scale: of products of q and k, 1 / sqrt(dim) by default.
        """
        try:
            kv = KVTensors.of_layer(self._kv_cache, layer_id)
        except (TypeError, ValueError) as error:
            raise CannotRecord(str(error)) from error
        self._num_locations = kv.num_locations
        self._padding = kv.num_locations - math.prod(kv.k.shape[1:-2])  # the last page, if any
        dim = kv.head_dim
        half = tables[0].shape[1]
        for table in tables:
            if table.shape != (self.num_positions, half) or table.dtype is not torch.float32:
                raise ValueError(f"rotary table of shape {tuple(table.shape)}, {table.dtype}")
        cos, sin = (table.contiguous() for table in tables)
        self._kept += [kv, cos, sin]
        heads = (num_q, num_kv, dim, scale or dim**-0.5, window or 0)
        rotary = (cos.data_ptr(), sin.data_ptr(), half)
        normed = (0, 0, 0.0)
        if norms is not None:
            normed = (self._vector(norms[0], dim), self._vector(norms[1], dim), norms[2])
        out = self._buffer(num_q * dim)
        self._note(
            "attention", (qkv, out), lambda qkv, out: (qkv, out, heads, kv.pool[:6], rotary, normed)
        )
        return out

    def wanted(self, x: Buffer) -> Buffer:
        """The rows whose logits are wanted; from here on only those are computed."""
        out = self._buffer(x.width)
        # Selected rows wait while later tokens run; those they come from, while earlier ones end.
        self._pinned |= {x.index, out.index}
        self._note("select", (x, out), lambda x, out: (x, out))
        return out

    def logits(self, x: Buffer, parts: Sequence[Any], bias: torch.Tensor | None = None) -> None:
        """The end: the output head, into the caller's matrix."""
        matrices = [self._matrix(part) for part in parts]
        self._note("linear", (x,), lambda x: (x, matrices, LOGITS))
        if bias is not None:
            address = self._vector(bias, self._num_ids)
            self._note("bias", (), lambda: (LOGITS, address, self._num_ids))

    def finish(self) -> Program:
        """The program of everything that was noted."""
        native = load().Program(
            self._num_ids, self._num_locations, self.num_positions, self._padding
        )
        last_use = {
            buffer.index: i for i, step in enumerate(self._steps) for buffer in step.buffers
        }
        numbers: dict[int, int] = {}
        free: dict[int, list[int]] = {}
        for i, step in enumerate(self._steps):
            for buffer in step.buffers:
                if buffer.index in numbers:
                    continue
                reusable = free.get(buffer.width, [])
                can_reuse = reusable and buffer.index not in self._pinned
                number = reusable.pop() if can_reuse else native.add_buffer(buffer.width)
                numbers[buffer.index] = number
            arguments = step.arguments(*(numbers[buffer.index] for buffer in step.buffers))
            getattr(native, step.method)(*arguments)
            for buffer in step.buffers:
                if last_use[buffer.index] == i and buffer.index not in self._pinned:
                    free.setdefault(buffer.width, []).append(numbers[buffer.index])
        return Program(native, self._num_ids, self._kept)

    def _note(
        self, method: str, buffers: tuple[Buffer, ...], arguments: Callable[..., tuple[Any, ...]]
    ) -> None:
        self._steps.append(_Step(method, buffers, arguments))

    def _buffer(self, width: int) -> Buffer:
        self._widths.append(width)
        return Buffer(len(self._widths) - 1, width)

    def _matrix(self, weight: Any) -> tuple[bool, int, int, int, int, int]:
        """(is packed, format, address, rows, columns, stride) of a native or a torch matrix."""
        self._kept.append(weight)
        if not isinstance(weight, torch.Tensor):
            rows, columns = weight.rows, weight.columns
            return True, FORMATS[weight.format], weight.address, rows, columns, columns
        if weight.dtype not in FLOAT_KINDS or weight.device.type != "cpu" or weight.dim() != 2:
            raise CannotRecord(f"a weight is {weight.dtype} on {weight.device}")
        if weight.stride(1) != 1 or weight.stride(0) < weight.shape[1]:
            raise CannotRecord(f"a weight has the strides {weight.stride()}")
        kind = FLOAT_KINDS[weight.dtype]
        return False, kind, weight.data_ptr(), *weight.shape, weight.stride(0)

    def _vector(self, weight: torch.Tensor, size: int) -> int:
        """The address of `size` floats."""
        if weight.device.type != "cpu" or not weight.dtype.is_floating_point:
            raise CannotRecord(f"a weight is {weight.dtype} on {weight.device}")
        if weight.shape != (size,):
            raise ValueError(f"expected a vector of {size}, not {tuple(weight.shape)}")
        floats = weight.float().contiguous()
        self._kept.append(floats)
        return floats.data_ptr()


class Program:
    """A recorded forward. `run` may be called for any batch, by one thread after the other."""

    def __init__(self, native: Any, vocab_size: int, kept: list[Any]) -> None:
        self._native = native
        self._vocab_size = vocab_size
        self._kept = kept
        self._num_wanted, self._logits, self._logits_at = -1, torch.empty(0), 0

    def run(
        self,
        input_ids: Ints,
        positions: Ints,
        out_loc: Ints,
        requests: PagedBatch,
        wanted: Ints | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float32 logits (wanted, vocabulary), into `out` if given, else into memory that the next
        run uses again; K and V go to `out_loc`.

        input_ids, positions, out_loc: ints (tokens,), request after request; arrays cost less than
        tensors. wanted: token rows (n,) that do not fall; None: the last of each request.
        `ValueError` or `IndexError` before anything is written.
        """
        input_ids, num_tokens, ids_at = _ints("input_ids", input_ids)
        positions, _, positions_at = _ints("positions", positions, num_tokens)
        out_loc, _, out_loc_at = _ints("out_loc", out_loc, num_tokens)
        num_wanted, wanted_at = requests.num_reqs, 0
        if wanted is not None:
            wanted, num_wanted, wanted_at = _ints("wanted", wanted, dtype=torch.int64)
        shape = (num_wanted, self._vocab_size)
        if out is not None:
            logits = _output(out, shape)
            logits_at, stride = out.data_ptr(), out.stride(0)
        else:
            if num_wanted != self._num_wanted:
                self._num_wanted, self._logits = num_wanted, torch.empty(shape)
                self._logits_at = self._logits.data_ptr()
            logits, logits_at, stride = self._logits, self._logits_at, self._vocab_size
        self._native.run(
            num_tokens, ids_at, positions_at, out_loc_at, requests.addresses,
            num_wanted, wanted_at, logits_at, stride,
        )  # fmt: skip
        return logits

    @property
    def num_steps(self) -> int:
        """How many native steps a forward takes."""
        return self._native.num_steps

    def set_profile(self, is_on: bool) -> None:
        """Whether runs note how long each step takes."""
        self._native.set_profile(is_on)

    def take_profile(self) -> list[tuple[str, int, int]]:
        """(name, nanoseconds, bytes of weights read) of each step since the last call, in order."""
        return self._native.take_profile()


def _ints(
    name: str, values: Ints, size: int | None = None, dtype: torch.dtype = torch.int32
) -> tuple[Ints, int, int]:
    """`values` as a contiguous vector of `dtype` on the CPU, its length and its address."""
    if isinstance(values, np.ndarray):
        address = load().vector_address(values.__array_struct__, dtype.itemsize)
        if address and size in (None, len(values)):
            return values, len(values), address
        values = torch.from_numpy(values)
    if not isinstance(values, torch.Tensor) or values.device.type != "cpu":
        raise TypeError(f"{name} must be a tensor on the CPU")
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype is torch.bool:
        raise TypeError(f"{name} must be integers, not {values.dtype}")
    if values.dim() != 1 or size not in (None, values.shape[0]):
        expected = f"({'n' if size is None else size},)"
        raise ValueError(f"{name} has the shape {tuple(values.shape)}, expected {expected}")
    values = values.to(dtype).contiguous()
    return values, values.shape[0], values.data_ptr()


def _output(out: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    if out.dtype is not torch.float32 or out.device.type != "cpu":
        raise TypeError(f"out must be float32 on the CPU, not {out.dtype} on {out.device}")
    if tuple(out.shape) != shape or out.stride(1) != 1 or out.stride(0) < shape[1]:
        raise ValueError(f"out is {tuple(out.shape)} with strides {out.stride()}, not {shape}")
    return out
