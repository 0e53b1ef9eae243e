"""The Triton kernel of grouped products. Importing this needs `triton`, part of torch for GPUs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_matmul_kernel(
    x, w, out, sorted_ids, expert_ids, num_padded, num_pairs, n, k, share, stride_expert,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`out[pair] = x[pair // share] @ w[expert(pair)]^T`: one program for each block and column."""
    block, column = tl.program_id(0), tl.program_id(1)
    if block * BLOCK_M < tl.load(num_padded):
        pairs = tl.load(sorted_ids + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        is_pair = pairs < num_pairs
        expert = tl.load(expert_ids + block).to(tl.int64)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = x + (pairs // share)[:, None] * k
        weights = w + expert * stride_expert + columns.to(tl.int64)[None, :] * k
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, k, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            a_mask = is_pair[:, None] & (at < k)[None, :]
            b_mask = (at < k)[:, None] & (columns < n)[None, :]
            a = tl.load(rows + at[None, :], mask=a_mask, other=0.0)
            b = tl.load(weights + at[:, None], mask=b_mask, other=0.0)
            total += tl.dot(a, b, input_precision="ieee")
        target = out + pairs[:, None] * n + columns[None, :]
        tl.store(target, total, mask=is_pair[:, None] & (columns < n)[None, :])
