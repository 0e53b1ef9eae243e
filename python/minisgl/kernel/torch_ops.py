"""The torch twin of every native kernel: the definition that the fast versions are tested against.

Everything here is a plain function on tensors. Arithmetic is float32 whatever the storage type, and
results come back in the type of the input. May import `env` and `utils`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# The largest code of K and V that are kept as integers.
CODE_LIMITS = {torch.int8: 127, torch.int16: 4095}
LEAST_STEP = 1e-38  # a head whose scale would be below is nothing: limit / largest overflows


def rmsnorm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * w` over the last dimension (arXiv:1910.07467)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return wide.mul(scale).mul_(w.float()).to(x.dtype)


def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float) -> None:
    """In place: `residual += x`, then `x = rmsnorm(residual)`."""
    residual.add_(x)
    x.copy_(rmsnorm(residual, w, eps))


def gate_and_mul(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """`activation(gate) * up` where the last dimension of `x` is gate and up side by side.

    activation: "silu", or "gelu_tanh" (arXiv:1606.08415, the approximation).
    """
    half = x.shape[-1] // 2
    gate, up = x[..., :half].float(), x[..., half:]
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate.mul_(up).to(x.dtype)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first `2 * half` of each head in place; halves are paired, not neighbours.

    x: (tokens, heads, head_dim); cos, sin: float32 (tokens, 1, half) (arXiv:2104.09864).
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    if x.dtype == torch.float32:
        turned = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1.0)
        second.mul_(cos).add_(turned)
        return
    wide_first, wide_second = first.float(), second.float()
    first.copy_(wide_first * cos - wide_second * sin)
    second.copy_(wide_second * cos + wide_first * sin)


def indexing(
    weights: torch.Tensor, ids: torch.Tensor, vocab_range: tuple[int, int] | None = None
) -> torch.Tensor:
    """Rows of `weights` by id; with `vocab_range=(start, length)`, zeros for ids outside of it."""
    if vocab_range is None:
        return F.embedding(ids, weights)
    start, length = vocab_range
    local = ids - start
    outside = (local < 0) | (local >= length)
    rows = F.embedding(local.masked_fill(outside, 0), weights)
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


def store_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write K and V of `n` tokens at `n` token locations, converting to the caches' type.

    k, v: (n, ...), flat or by head; the caches: any shape with contiguous rows of `heads * dim`.
    With scales, (locations, heads), the caches hold integers, and k and v come by head.
    """
    num_tokens = len(indices)
    if num_tokens == 0:
        return
    where = indices.long()
    for cache, scales, new in ((k_cache, k_scale, k), (v_cache, v_scale, v)):
        width = new.numel() // num_tokens
        if scales is not None:
            new, scale = to_codes(new, cache.dtype)
            scales.index_copy_(0, where, scale)
        cache.view(-1, width).index_copy_(0, where, new.reshape(num_tokens, width).to(cache.dtype))


def to_codes(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` (..., dim) as integers of `dtype`, and the float32 scale (...) of each row.

    The largest magnitude gets the largest code. A NaN or an infinity gives codes of 0 and a NaN
    for a scale: it spoils its own row, visibly.
    """
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    limit = torch.tensor(float(CODE_LIMITS[dtype]), device=x.device)
    is_finite = largest < float("inf")
    is_something = is_finite & (largest > limit * LEAST_STEP)
    factor = torch.where(is_something, limit / largest, 0.0)
    codes = torch.where(is_finite, wide, 0.0).mul_(factor).round_().to(dtype)
    scale = torch.where(is_something, largest / limit, 0.0)
    return codes, scale.masked_fill_(~is_finite, float("nan")).squeeze(-1)


def fast_compare_key(a: torch.Tensor, b: torch.Tensor) -> int:
    """The length of the common prefix of two one-dimensional CPU tensors."""
    length = min(len(a), len(b))
    different = a[:length].ne(b[:length])
    first = int(different.int().argmax()) if length else 0
    return first if length and bool(different[first]) else length
