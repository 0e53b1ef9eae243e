"""The torch twins: small exact cases."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel import torch_ops


def test_rmsnorm_divides_by_the_root_mean_square_in_float32() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    w = torch.tensor([1.0, 2.0])
    expected = torch.tensor([[3.0, 8.0], [0.0, 0.0]]) / 12.5**0.5
    torch.testing.assert_close(torch_ops.rmsnorm(x, w, 0.0).nan_to_num(), expected)
    half = torch_ops.rmsnorm(x.bfloat16(), w.bfloat16(), 1e-6)
    assert half.dtype == torch.bfloat16
    assert torch.equal(torch_ops.rmsnorm(x, w.bfloat16(), 1e-6), torch_ops.rmsnorm(x, w, 1e-6))


def test_fused_add_rmsnorm_changes_both_in_place() -> None:
    x, residual, w = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    total = x + residual
    torch_ops.fused_add_rmsnorm(x, residual, w, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(x, torch_ops.rmsnorm(total, w, 1e-5))


def test_indexing_gives_zeros_outside_of_the_range() -> None:
    weights = torch.arange(1.0, 7.0).view(3, 2)
    ids = torch.tensor([4, 5, 6, 7, 3])
    rows = torch_ops.indexing(weights, ids, vocab_range=(4, 3))
    assert rows.tolist() == [[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]]
    assert torch_ops.indexing(weights, torch.tensor([2, 0], dtype=torch.int32)).tolist() == [
        [5, 6],
        [1, 2],
    ]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_cache_writes_rows_and_converts(flat: bool, dtype: torch.dtype) -> None:
    k_cache, v_cache = torch.zeros(2, 6, 1, 2, 4, dtype=dtype)
    k, v = torch.randn(2, 3, 2, 4)
    where = torch.tensor([5, 0, 3], dtype=torch.int32)
    given = (k.view(3, 8), v.view(3, 8)) if flat else (k, v)
    torch_ops.store_cache(k_cache, v_cache, where, *given)
    assert torch.equal(k_cache[where.long(), 0], k.to(dtype))
    assert torch.equal(v_cache[where.long(), 0], v.to(dtype))
    assert k_cache[[1, 2, 4]].abs().sum() == 0
    torch_ops.store_cache(k_cache, v_cache, where[:0], given[0][:0], given[1][:0])


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2], [1, 2, 4], 2),
        ([1, 2], [1, 2], 2),
        ([5], [1, 2], 0),
        ([], [1], 0),
        ([], [], 0),
    ],
)
def test_fast_compare_key_is_the_length_of_the_common_prefix(
    a: list[int], b: list[int], length: int
) -> None:
    keys = (torch.tensor(a, dtype=torch.int32), torch.tensor(b, dtype=torch.int32))
    assert torch_ops.fast_compare_key(*keys) == length
    assert torch_ops.fast_compare_key(*keys[::-1]) == length


def test_gate_and_mul_takes_gate_then_up() -> None:
    x = torch.randn(4, 10)
    expected = torch.nn.functional.silu(x[:, :5]) * x[:, 5:]
    torch.testing.assert_close(torch_ops.gate_and_mul(x), expected)
    assert torch_ops.gate_and_mul(x.half()).dtype == torch.float16


def test_rotate_turns_pairs_of_halves_and_leaves_the_rest() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 9.0]]])
    cos, sin = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    torch_ops.rotate_(x, cos, sin)
    assert x.tolist() == [[[-3.0, 2.0, 1.0, 4.0, 9.0]]]
    half = torch.randn(3, 2, 4).bfloat16()
    before = half.clone()
    torch_ops.rotate_(half, torch.ones(3, 1, 2), torch.zeros(3, 1, 2))
    assert torch.equal(half, before)
