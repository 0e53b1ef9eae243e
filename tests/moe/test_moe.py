"""Experts against the formula written out, and the alignment of tokens to blocks."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel import native
from minisgl.moe import TorchMoeBackend, create_moe_backend
from minisgl.moe.fused import FusedMoeBackend, moe_align_block_size
from minisgl.params import ConfigError
from minisgl.quant import ExpertWeights, FloatWeight, StackedWeight
from minisgl.quant.packed import PackedWeight

EXPERTS, HIDDEN, INNER = 5, 12, 7


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    x, w1, w2 = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, w1.to(dtype), w2.to(dtype), torch.randn(tokens, EXPERTS, generator=generator)


def written_out(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, gating: torch.Tensor, k: int, norm: bool
) -> torch.Tensor:
    """Token by token, expert by expert, float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        weights, ids = gating[token].double().softmax(-1).topk(k)
        weights = weights / weights.sum() if norm else weights
        for weight, expert in zip(weights, ids):
            gate, up = (w1[expert].double() @ row).chunk(2)
            out[token] += weight * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 1), (1, 3), (20, 2), (3, EXPERTS)])
def test_both_backends_compute_the_formula(
    tokens: int, topk: int, renormalize: bool, dtype: torch.dtype
) -> None:
    given = inputs(tokens, dtype)
    expected = written_out(*given, topk, renormalize)
    for backend in (TorchMoeBackend(), FusedMoeBackend()):
        got = backend.forward(*given, topk, renormalize)
        assert got.dtype == torch.float32
        assert (got - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize(("tokens", "topk"), [(1, 1), (20, 2), (3, EXPERTS)])
def test_experts_with_weights_of_their_own_compute_the_same(tokens: int, topk: int) -> None:
    x, w1, w2, gating = inputs(tokens)
    gate_up = ExpertWeights([StackedWeight(list(map(FloatWeight, w.chunk(2)))) for w in w1])
    down = ExpertWeights([FloatWeight(w) for w in w2])
    for backend in (TorchMoeBackend(), FusedMoeBackend()):
        got = backend.forward(x, gate_up, down, gating, topk, True)
        assert (got - written_out(x, w1, w2, gating, topk, True)).abs().max().item() < 1e-4


@pytest.mark.skipif(not native.available(), reason="built without native kernels")
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_experts_compute_the_formula_over_what_they_stand_for(bits: int) -> None:
    x, w1, w2, gating = inputs(20)
    packed = [[PackedWeight.from_float(matrix, bits) for matrix in w] for w in (w1, w2)]
    floats = [torch.stack([matrix.dequantize() for matrix in matrices]) for matrices in packed]
    gate_up, down = map(ExpertWeights, packed)
    expected = written_out(x, floats[0], floats[1], gating, 2, True)
    got = TorchMoeBackend().forward(x, gate_up, down, gating, 2, True)
    assert got.dtype == torch.float32
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < 0.02  # activations have 8 bits
    alone = [
        TorchMoeBackend().forward(x[i : i + 1], gate_up, down, gating[i : i + 1], 2, True)
        for i in range(20)
    ]
    assert torch.equal(torch.cat(alone), got)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_alignment_gives_each_expert_whole_blocks(block_size: int) -> None:
    ids = torch.tensor([[0, 3], [3, 1], [3, 0], [3, 1], [3, 0]])
    order, experts, used = moe_align_block_size(ids, block_size, EXPERTS)
    flat, filler = ids.flatten(), ids.numel()
    counts = torch.bincount(flat, minlength=EXPERTS)
    blocks = [-(-int(count) // block_size) for count in counts]
    assert int(used) == sum(blocks) * block_size
    expected = [expert for expert, n in enumerate(blocks) for _ in range(n)]
    assert experts[: len(expected)].tolist() == expected
    for block, expert in enumerate(expected):
        members = order[block * block_size : (block + 1) * block_size].tolist()
        assert all(flat[m] == expert for m in members if m != filler)
    assert sorted(m for m in order.tolist() if m != filler) == list(range(filler))
    assert (order.dtype, experts.dtype, used.dtype) == (torch.int32,) * 3


def test_backends_are_created_by_name() -> None:
    assert isinstance(create_moe_backend("auto", "cpu"), TorchMoeBackend)
    assert isinstance(create_moe_backend("fused", "cpu"), FusedMoeBackend)
    with pytest.raises(ConfigError, match="use one of auto, fused, torch"):
        create_moe_backend("best")
