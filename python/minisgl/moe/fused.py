"""Experts in Triton: all tokens of all experts in two launches, for CUDA.

`moe_align_block_size` sorts (token, choice) pairs by expert and pads each expert to whole blocks,
so that one block of the kernel belongs to one expert. Triton is imported when the first GPU
forward needs it; on any other device the torch backend answers.
"""

from __future__ import annotations

import torch

from minisgl.kernel.torch_ops import gate_and_mul
from minisgl.quant import Experts
from minisgl.utils import div_ceil

from .base import BaseMoeBackend, route
from .torch_backend import TorchMoeBackend

BLOCK_N, BLOCK_K = 64, 64


def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sorted_ids, expert_ids, num_padded) of routed tokens; int32, on the same device.

    sorted_ids: flat indices into `topk_ids` expert by expert, each expert filled up to whole blocks
    with `topk_ids.numel()`. expert_ids: the expert of each block. num_padded: how many of
    sorted_ids are in use, (1,). Sizes depend on the shape of `topk_ids` alone.
    """
    flat = topk_ids.flatten().long()
    num_pairs, device = flat.numel(), flat.device
    capacity = num_pairs + num_experts * (block_size - 1)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    experts = flat[order]
    rank = torch.arange(num_pairs, device=device) - (counts.cumsum(0) - counts)[experts]
    sorted_ids = torch.full((capacity,), num_pairs, dtype=torch.int32, device=device)
    sorted_ids[(ends - padded)[experts] + rank] = order.int()
    starts = torch.arange(div_ceil(capacity, block_size), device=device) * block_size
    expert_ids = torch.searchsorted(ends, starts, right=True).clamp_(max=num_experts - 1).int()
    return sorted_ids, expert_ids, ends[-1:].int()


def grouped_matmul(
    x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, share: int, block_m: int
) -> torch.Tensor:
    """(pairs, n) of `x` (pairs / share, k) by experts `w` (experts, n, k); ids: (tokens, topk)."""
    sorted_ids, expert_ids, num_padded = moe_align_block_size(ids, block_m, w.shape[0])
    num_pairs, n, k = ids.numel(), w.shape[1], w.shape[2]
    out = torch.empty(num_pairs, n, dtype=x.dtype, device=x.device)
    grid = (len(expert_ids), div_ceil(n, BLOCK_N))
    missing = len(expert_ids) * block_m - len(sorted_ids)
    sorted_ids = torch.nn.functional.pad(sorted_ids, (0, missing), value=num_pairs)
    from .triton_kernel import grouped_matmul_kernel

    grouped_matmul_kernel[grid](
        x, w, out, sorted_ids, expert_ids, num_padded, num_pairs, n, k, share, w.stride(0),
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return out


class FusedMoeBackend(BaseMoeBackend):
    """Two grouped products and the activation between them."""

    def __init__(self) -> None:
        self._elsewhere = TorchMoeBackend()

    def forward(
        self,
        x: torch.Tensor,
        w1: Experts,
        w2: Experts,
        gating: torch.Tensor,
        topk: int,
        renormalize: bool,
    ) -> torch.Tensor:
        """As `BaseMoeBackend.forward`; a token's experts are summed in the order of weight."""
        if x.device.type != "cuda":
            return self._elsewhere.forward(x, w1, w2, gating, topk, renormalize)
        assert isinstance(w1, torch.Tensor) and isinstance(w2, torch.Tensor)  # packed on a CPU only
        weights, ids = route(gating, topk, renormalize)
        block_m = 16 if len(x) * topk <= 16 * w1.shape[0] else 64
        hidden = gate_and_mul(grouped_matmul(x.contiguous(), w1.contiguous(), ids, topk, block_m))
        results = grouped_matmul(hidden, w2.contiguous(), ids, 1, block_m)
        scaled = results.view(len(x), topk, -1).float() * weights.unsqueeze(-1)
        return scaled.sum(1).to(x.dtype)
