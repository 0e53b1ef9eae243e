"""The native row operations (`csrc/elementwise.h`) behind checks: norms, gates, and sampling.

Each is the fast version of a function in `torch_ops` or in the sampler. A row's result depends on
that row alone, to the bit, whatever the instruction set and the number of threads. May import `env`
and `utils`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .native import load

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

Draw = tuple[float, int, float, float, float]  # temperature, top_k, top_p, min_p, one of [0, 1)


def float_rows(name: str, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """`x` if it is a contiguous float32 CPU tensor (..., width); `TypeError`, `ValueError` else."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.dtype is not torch.float32 or not x.is_cpu:
        raise TypeError(f"{name} must be float32 on the CPU, not {x.dtype} on {x.device}")
    shape = x.shape
    if not shape or shape[-1] < 1 or (width is not None and shape[-1] != width):
        wanted = "at least 1" if width is None else width
        raise ValueError(f"{name} must have rows of {wanted}, its shape is {tuple(shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, its strides are {x.stride()}")
    return x


def _logits(x: torch.Tensor) -> torch.Tensor:
    float_rows("logits", x)
    if x.dim() != 2 or x.shape[1] >= 1 << 31:
        raise ValueError(f"logits must be (rows, vocabulary), not {tuple(x.shape)}")
    return x


def _num_rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension."""
    width = float_rows("x", x).shape[-1]
    float_rows("weight", weight.reshape(-1), width)
    out = torch.empty_like(x)
    load().rms_norm(
        x.data_ptr(), width, weight.data_ptr(), eps, _num_rows(x), width, out.data_ptr(), width
    )
    return out


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """In place: `residual += x`, then `x = rmsnorm(residual)`."""
    width = float_rows("x", x).shape[-1]
    float_rows("residual", residual, width)
    float_rows("weight", weight.reshape(-1), width)
    if residual.shape != x.shape:
        raise ValueError(f"residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
    load().add_rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, _num_rows(x), width
    )


def gate_and_mul(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """`activation(gate) * up` where the last dimension of `x` is gate and up side by side."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, not {activation!r}")
    width = float_rows("x", x).shape[-1]
    if width % 2:
        raise ValueError(f"gate and up must be of one size, together they have {width}")
    out = torch.empty((*x.shape[:-1], width // 2))
    kind = ACTIVATIONS[activation]
    load().gate_mul(kind, x.data_ptr(), _num_rows(x), width // 2, out.data_ptr())
    return out


def add_bias(x: torch.Tensor, bias: torch.Tensor) -> None:
    """In place: `x += bias` for every row."""
    width = float_rows("x", x).shape[-1]
    float_rows("bias", bias.reshape(-1), width)
    load().add_bias(x.data_ptr(), bias.data_ptr(), _num_rows(x), width)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values float32, first indices int64) of the largest of each row; NaN where a row has one."""
    rows, width = _logits(logits).shape
    values, indices = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    load().arg_max(logits.data_ptr(), rows, width, width, values.data_ptr(), indices.data_ptr())
    return values, indices


class LogitRows:
    """Logits to choose from, float32 `(rows, vocabulary)`, checked once.

    source: what they were made of; what is written to it later counts.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        rows, width = _logits(source).shape
        self._native = (source.data_ptr(), rows, width, width)

    def choose_tokens(self, draws: Sequence[Draw] = ()) -> list[int]:
        """A token for each row, -1 where its maximum is not finite; csrc/sample.h says how.

        draws: one for each row; none: all greedy.
        """
        tokens: list[int] = load().choose_tokens(*self._native, draws)
        return tokens


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw] = ()) -> list[int]:
    """`LogitRows.choose_tokens` of logits that are used once."""
    return LogitRows(logits).choose_tokens(draws)


def route(gating: torch.Tensor, topk: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, expert ids int32), both (tokens, topk), best first, equal ones by id.

    gating: float32 `(tokens, experts)`. As `minisgl.moe.route`; csrc/experts.h says the rest.
    """
    tokens, num_experts = _logits(gating).shape
    weights = torch.empty(tokens, topk)
    ids = torch.empty(tokens, topk, dtype=torch.int32)
    load().route(
        gating.data_ptr(), tokens, num_experts, topk, renormalize, ids.data_ptr(),
        weights.data_ptr(),
    )  # fmt: skip
    return weights, ids


def softmax_stats(
    logits: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(max, sum of `exp((logits - max) / temperature)`) of each row."""
    rows, width = _logits(logits).shape
    inverse = 1.0 / float_rows("temperatures", temperatures, rows if rows else None)
    if bool((temperatures <= 0).any()):
        raise ValueError("temperatures must be positive")
    stats = torch.empty(rows, 2)
    load().softmax_stats(
        logits.data_ptr(), inverse.data_ptr(), rows, width, width, stats.data_ptr()
    )
    return stats[:, 0], stats[:, 1]


def top_candidates(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of each row without sorting the rest: (values, indices int32, counts int32).

    Values fall; equal ones come by rising index. `count` of a row is below k only where the
    vocabulary or the NaNs in it leave fewer; what lies behind is -inf and index 0.
    """
    rows, width = _logits(logits).shape
    if k < 1:
        raise ValueError(f"k must be positive, not {k}")
    k = min(k, width)
    values = torch.full((rows, k), float("-inf"))
    indices = torch.zeros((rows, k), dtype=torch.int32)
    counts = torch.zeros(rows, dtype=torch.int32)
    load().candidates(
        logits.data_ptr(), rows, width, width, k,
        values.data_ptr(), indices.data_ptr(), counts.data_ptr(),
    )  # fmt: skip
    return values, indices, counts


def penalize(
    logits: torch.Tensor,
    counts: torch.Tensor,
    seen: torch.Tensor,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> None:
    """Penalties on one row `(vocab,)` in place; counts: int32, seen: bool `(vocab,)`."""
    width = float_rows("logits", logits.reshape(-1)).shape[0]
    for name, given, dtype in (("counts", counts, torch.int32), ("seen", seen, torch.bool)):
        if given.dtype is not dtype or given.device.type != "cpu":
            raise TypeError(f"{name} must be {dtype} on the CPU, not {given.dtype}")
        if given.shape != (width,) or not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous ({width},), not {tuple(given.shape)}")
    if not repetition > 0:
        raise ValueError(f"the repetition penalty must be positive, not {repetition}")
    load().penalize(
        logits.data_ptr(), width, repetition, frequency, presence,
        counts.data_ptr(), seen.data_ptr(),
    )  # fmt: skip
