"""The torch twin of every native kernel: the definition that the fast versions are tested against.

Everything here is a plain function on tensors. Arithmetic is float32 whatever the storage type, and
results come back in the type of the input. May import `env` and `utils`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
) -> None:
    """Write K and V of `n` tokens at `n` token locations, converting to the caches' type.

    k, v: (n, ...), flat or by head; the caches: any shape with contiguous rows of `heads * dim`.
    """
    num_tokens = len(indices)
    if num_tokens == 0:
        return
    where = indices.long()
    for cache, new in ((k_cache, k), (v_cache, v)):
        width = new.numel() // num_tokens
        cache.view(-1, width).index_copy_(0, where, new.reshape(num_tokens, width).to(cache.dtype))


def fast_compare_key(a: torch.Tensor, b: torch.Tensor) -> int:
    """The length of the common prefix of two one-dimensional CPU tensors."""
    length = min(len(a), len(b))
    different = a[:length].ne(b[:length])
    first = int(different.int().argmax()) if length else 0
    return first if length and bool(different[first]) else length
