"""Row operations and sampling kernels against torch, at every instruction set of this machine."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
import torch
import torch.nn.functional as F

native = pytest.importorskip("minisgl.kernel.native")
if not native.available():
    pytest.skip("this installation has no native kernels", allow_module_level=True)

from minisgl.kernel import native_ops, torch_ops
from minisgl.moe import route

ISAS = native.available_isas()
WIDTHS = (1, 5, 16, 33, 576, 1537)


@pytest.fixture(autouse=True)
def restore_native_settings():
    isa, threads = native.isa(), native.num_threads()
    yield
    native.set_isa(isa)
    native.set_num_threads(threads)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(isa: str, width: int) -> list[torch.Tensor]:
    """Every row operation on the same random rows."""
    native.set_isa(isa)
    x, weight = normal(7, width), normal(width, seed=1)
    residual, added = normal(7, width, seed=2), x.clone()
    native_ops.fused_add_rmsnorm(added, residual, weight, 1e-5)
    biased = x.clone()
    native_ops.add_bias(biased, weight)
    values, indices = native_ops.argmax(x)
    stats = native_ops.softmax_stats(x, torch.full((7,), 0.7))
    gates = normal(7, 2 * width) * 4
    kinds = [native_ops.gate_and_mul(gates, kind) for kind in ("silu", "gelu_tanh")]
    normed = native_ops.rmsnorm(x, weight, 1e-5)
    return [normed, added, residual, biased, values, indices, *stats, *kinds]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_operation_equals_its_torch_twin(width: int) -> None:
    actual = results(ISAS[-1], width)
    x, weight, residual = normal(7, width), normal(width, seed=1), normal(7, width, seed=2)
    added = x.clone()
    torch_ops.fused_add_rmsnorm(added, residual, weight, 1e-5)
    best = x.max(-1)
    gate, up = (normal(7, 2 * width) * 4).chunk(2, -1)
    sums = ((x - best.values[:, None]) / 0.7).exp().sum(-1)
    wanted = [
        torch_ops.rmsnorm(x, weight, 1e-5), added, residual, x + weight, best.values, best.indices,
        best.values, sums, F.silu(gate) * up, F.gelu(gate, approximate="tanh") * up,
    ]  # fmt: skip
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_instruction_set_gives_the_same_bits(isa: str, width: int) -> None:
    for one, other in zip(results(isa, width), results("portable", width), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gives_the_same_bits_alone_and_among_others(threads: int) -> None:
    native.set_num_threads(threads)
    x, weight = normal(600, 576), normal(576, seed=1)
    together = native_ops.rmsnorm(x, weight, 1e-6), native_ops.gate_and_mul(x)
    for i in (0, 7, 599):
        alone = x[i : i + 1].contiguous()
        assert torch.equal(native_ops.rmsnorm(alone, weight, 1e-6), together[0][i : i + 1])
        assert torch.equal(native_ops.gate_and_mul(alone), together[1][i : i + 1])


@pytest.mark.parametrize("isa", ISAS)
def test_the_exponential_holds_over_its_whole_range(isa: str) -> None:
    native.set_isa(isa)
    gate = torch.linspace(-87, 100, 100_001)[None]
    actual = native_ops.gate_and_mul(torch.cat([gate, torch.ones_like(gate)], -1))
    wanted = F.silu(gate.double())
    assert ((actual - wanted).abs() <= 4e-7 * wanted.abs() + 1e-37).all()


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_a_gate_at_the_ends_of_what_floats_hold(kind: str) -> None:
    gate = torch.tensor([[inf, 3e38, 1e6, 1e-40, 0.0, -0.0, -1e6, -1e30, -inf, nan]])
    actual = native_ops.gate_and_mul(torch.cat([gate, torch.ones_like(gate)], -1), kind)[0]
    assert torch.equal(actual[:3], gate[0, :3])
    torch.testing.assert_close(actual[3:8], torch.tensor([5e-41, 0, 0, 0, 0]), atol=1e-7, rtol=0)
    assert not actual[8:].isfinite().any()


def test_not_a_number_spoils_its_own_row_only() -> None:
    x = normal(3, 64)
    x[1, 5] = float("nan")
    x[2, 7] = float("inf")
    normed = native_ops.rmsnorm(x, torch.ones(64), 1e-6)
    assert normed[0].isfinite().all() and normed[1].isnan().all()
    values, indices = native_ops.argmax(x)
    assert values[1].isnan() and indices[1] == 5 and indices[2] == 7
    assert native_ops.gate_and_mul(x)[1].isnan().sum() == 1


def test_argmax_takes_the_first_of_equals() -> None:
    x = torch.zeros(4, 1000)
    x[1, [40, 41, 990]] = 1.0
    x[2] = float("-inf")
    x[3, 999] = 1.0
    assert native_ops.argmax(x)[1].tolist() == [0, 40, 0, 999]


@pytest.mark.parametrize("width", [1, 7, 1000, 49152])
def test_candidates_are_the_largest_in_order(width: int) -> None:
    rng = np.random.default_rng(width)
    x = torch.from_numpy(rng.standard_normal((5, width)).astype(np.float32))
    x[1] = x[1].round()  # many equals
    x[2] = 3.0
    x[3] = -x[3].abs() * 1e-30
    for k in (1, 2, 50, 1024, width):
        values, indices, counts = native_ops.top_candidates(x, k)
        for row in range(5):
            order = np.lexsort((np.arange(width), -x[row].numpy()))[:k]
            assert indices[row].tolist() == order.tolist()
            assert torch.equal(values[row], x[row][torch.from_numpy(order)])
            assert counts[row] == min(k, width)


def test_candidates_leave_out_what_is_not_a_number() -> None:
    x = torch.full((2, 100), float("nan"))
    x[0, [3, 99]] = torch.tensor([float("-inf"), 2.0])
    values, indices, counts = native_ops.top_candidates(x, 4)
    assert counts.tolist() == [2, 0]
    assert indices[0, :2].tolist() == [99, 3] and values[0, 0] == 2.0


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (8, 2), (60, 4), (128, 8), (5, 5)])
def test_routing_equals_its_torch_twin(experts: int, topk: int, renormalize: bool) -> None:
    gating = normal(40, experts) * 3
    weights, ids = native_ops.route(gating, topk, renormalize)
    expected, expected_ids = route(gating, topk, renormalize)
    assert torch.equal(ids, expected_ids.int())
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_routing_is_the_same_bits_alone_and_on_every_instruction_set(isa: str) -> None:
    gating = normal(9, 64)
    native.set_isa(isa)
    found = native_ops.route(gating, 6, True)
    alone = [native_ops.route(row, 6, True) for row in gating.split(1)]
    native.set_isa("portable")
    for one, other, single in zip(found, native_ops.route(gating, 6, True), zip(*alone)):
        assert torch.equal(one, other) and torch.equal(one, torch.cat(single))


def test_routing_takes_the_first_of_equals_and_tells_what_is_not_a_number() -> None:
    gating = torch.zeros(4, 5)
    gating[1, 3], gating[2, 4], gating[3] = 1.0, nan, nan
    weights, ids = native_ops.route(gating, 2, True)
    assert ids[:2].tolist() == [[0, 1], [3, 0]]
    assert weights[0].tolist() == [0.5, 0.5] and weights[1].sum() == 1.0
    assert weights[2:].isnan().all() and all(len(set(row.tolist())) == 2 for row in ids)
    with pytest.raises(ValueError):
        native_ops.route(gating, 6, True)


def test_penalties_equal_the_formulas_of_the_sampler() -> None:
    x = normal(500)
    counts = torch.randint(0, 3, (500,), generator=torch.Generator().manual_seed(1)).int()
    seen = counts.bool() | (torch.arange(500) < 50)
    wanted = torch.where(seen, torch.where(x > 0, x / 1.3, x * 1.3), x)
    wanted = wanted - 0.5 * counts - 0.25 * (counts > 0)
    native_ops.penalize(x, counts, seen, 1.3, 0.5, 0.25)
    torch.testing.assert_close(x, wanted)


def test_wrong_inputs_raise() -> None:
    x = normal(4, 32)
    with pytest.raises(ValueError, match="rows of 32"):
        native_ops.rmsnorm(x, torch.ones(31), 1e-6)
    with pytest.raises(TypeError, match="float32"):
        native_ops.rmsnorm(x.double(), torch.ones(32), 1e-6)
    with pytest.raises(TypeError, match="tensor"):
        native_ops.argmax([1.0])
    with pytest.raises(ValueError, match="contiguous"):
        native_ops.rmsnorm(x.t(), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="one size"):
        native_ops.gate_and_mul(normal(4, 33))
    with pytest.raises(ValueError, match="activation"):
        native_ops.gate_and_mul(x, "relu")
    with pytest.raises(ValueError, match="residual"):
        native_ops.fused_add_rmsnorm(x, normal(3, 32), torch.ones(32), 1e-6)
    with pytest.raises(ValueError, match="positive"):
        native_ops.top_candidates(x, 0)
    with pytest.raises(ValueError, match="positive"):
        native_ops.softmax_stats(x, torch.zeros(4))
    with pytest.raises(ValueError, match="counts"):
        native_ops.penalize(x[0], torch.zeros(3, dtype=torch.int32), torch.zeros(32).bool())


@pytest.mark.parametrize("rows", [0, 1])
def test_few_or_no_rows_are_fine(rows: int) -> None:
    x = normal(rows, 48)
    assert native_ops.rmsnorm(x, torch.ones(48), 1e-6).shape == (rows, 48)
    assert native_ops.argmax(x)[1].shape == (rows,)
    assert native_ops.top_candidates(x, 3)[1].shape == (rows, 3)
