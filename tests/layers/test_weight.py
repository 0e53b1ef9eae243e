"""`FloatWeight` and `StackedWeight`: the same product, whatever the storage."""

from __future__ import annotations

import pytest
import torch

from minisgl.quant import ExpertWeights, FloatWeight, StackedWeight
from minisgl.quant import weight as weight_module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_storage_type_changes_nothing_but_the_stored_values(
    dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_module, "BLOCK_ELEMENTS", 40)
    stored = torch.randn(7, 16).to(dtype)
    x = torch.randn(tokens, 16)
    expected = x.double() @ stored.double().t()
    got = FloatWeight(stored).matmul(x)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 1e-5
    out = torch.zeros(tokens, 9)
    FloatWeight(stored).matmul(x, out[:, 1:8])
    assert (out[:, 1:8] - expected).abs().max() < 1e-5
    assert out[:, [0, 8]].abs().sum() == 0


def test_rows_are_looked_up_as_float32() -> None:
    stored = torch.randn(7, 4).bfloat16()
    ids = torch.tensor([[6, 0], [3, 3]], dtype=torch.int32)
    assert torch.equal(FloatWeight(stored).rows(ids), stored[ids.long()].float())
    stacked = StackedWeight([FloatWeight(stored[:4]), FloatWeight(stored[4:])])
    assert torch.equal(stacked.rows(ids), stored[ids.long()].float())


def test_a_stack_of_formats_multiplies_as_one_matrix() -> None:
    parts = [FloatWeight(torch.randn(3, 8)), FloatWeight(torch.randn(5, 8).bfloat16())]
    stacked = StackedWeight(parts)
    assert stacked.shape == (8, 8) and stacked.nbytes == 3 * 8 * 4 + 5 * 8 * 2
    x = torch.randn(2, 8)
    assert torch.equal(stacked.matmul(x), torch.cat([p.matmul(x) for p in parts], dim=1))


def test_experts_are_matrices_of_one_shape() -> None:
    experts = [FloatWeight(torch.randn(3, 8)), FloatWeight(torch.randn(3, 8).bfloat16())]
    weights = ExpertWeights(experts)
    assert weights.shape == (2, 3, 8) and len(weights) == 2
    assert weights.nbytes == 3 * 8 * (4 + 2) and weights[1] is experts[1]
    with pytest.raises(ValueError, match="one shape"):
        ExpertWeights([*experts, FloatWeight(torch.randn(3, 7))])
    with pytest.raises(ValueError, match="one shape"):
        ExpertWeights([])
