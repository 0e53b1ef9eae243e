"""`BaseOP`: what is a weight, what it is called, and what loading refuses."""

from __future__ import annotations

import pytest
import torch

from minisgl.layers import BaseOP, LinearReplicated, MoELayer, OPList, RMSNorm
from minisgl.quant import ExpertWeights, FloatWeight


class Block(BaseOP):
    """A norm, a linear and things that are no weights."""

    def __init__(self) -> None:
        self.norm = RMSNorm(4, 1e-6)
        self.proj = LinearReplicated(4, 3, has_bias=True)
        self.size = 4
        self._hidden = torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj.forward(self.norm.forward(x))


class Model(BaseOP):
    """Two blocks."""

    def __init__(self) -> None:
        self.layers = OPList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


NAMES = [
    f"layers.{i}.{name}" for i in (0, 1) for name in ("norm.weight", "proj.weight", "proj.bias")
]


def random_state(model: Model) -> dict[str, torch.Tensor]:
    return {name: torch.randn(w.shape) for name, w in model.state_dict().items()}


def test_public_tensors_are_weights_named_by_their_path() -> None:
    assert list(Model().state_dict()) == NAMES


def test_loading_replaces_the_tensors_themselves() -> None:
    model = Model()
    state = random_state(model)
    model.load_state_dict(state)
    assert model.layers.op_list[1].proj.weight is state["layers.1.proj.weight"]
    assert all(model.state_dict()[name] is state[name] for name in NAMES)


def test_keys_too_many_too_few_or_misshapen_are_named() -> None:
    model = Model()
    state = random_state(model)
    with pytest.raises(RuntimeError, match=r"layers\.7\.extra"):
        model.load_state_dict({**state, "layers.7.extra": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"layers\.0\.norm\.weight has the shape \(5,\)"):
        model.load_state_dict({**state, "layers.0.norm.weight": torch.ones(5)})
    missing = dict(state)
    del missing["layers.1.proj.bias"]
    with pytest.raises(RuntimeError, match=r"missing.*layers\.1\.proj\.bias"):
        model.load_state_dict(missing)


def test_a_weight_that_multiplies_itself_takes_the_place_of_a_tensor() -> None:
    block = Block()
    matrix = torch.randn(3, 4)
    block.proj.weight, block.proj.bias = FloatWeight(matrix), torch.ones(3)
    x = torch.randn(2, 4)
    torch.testing.assert_close(block.proj.forward(x), x @ matrix.t() + 1)
    assert isinstance(block.state_dict()["proj.weight"], FloatWeight)


def test_writing_into_a_weight_takes_effect_at_once() -> None:
    layer = LinearReplicated(4, 3)
    layer.weight = torch.zeros(3, 4)
    layer.weight[0, 0] = 2.0
    assert layer.forward(torch.ones(1, 4)).tolist() == [[2.0, 0.0, 0.0]]


def test_experts_with_weights_of_their_own_are_one_weight() -> None:
    layer = MoELayer(2, 1, 4, 3, renormalize=True)
    experts = ExpertWeights([FloatWeight(torch.randn(6, 4)) for _ in range(2)])
    layer.load_state_dict({"gate_up_proj": experts, "down_proj": torch.randn(2, 4, 3)})
    assert layer.state_dict()["gate_up_proj"] is experts
    with pytest.raises(RuntimeError, match=r"gate_up_proj has the shape \(1, 6, 4\)"):
        fewer = ExpertWeights(experts.experts[:1])
        layer.load_state_dict({"gate_up_proj": fewer, "down_proj": torch.randn(2, 4, 3)})
