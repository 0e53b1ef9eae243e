"""Rotary embedding: in place, on flat q and k; every kind of scaling against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minisgl.layers import check_rope_scaling, get_rope, set_rope_device
from minisgl.layers.rope_scaling import rope_frequencies
from minisgl.params import UnsupportedModelError

DIM, MAX, BASE = 64, 512, 20000.0
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {
        "short_factor": [1 + i / 9 for i in range(DIM // 2)],
        "long_factor": [2 + i for i in range(DIM // 2)],
        "original_max_position_embeddings": 128,
    },
}
YARNS: list[dict[str, Any]] = [
    {},
    {"beta_fast": 16, "beta_slow": 2},
    {"attention_factor": 0.8},
    {"mscale": 0.707, "mscale_all_dim": 0.9},
    {"truncate": False},
]


def reference_config(scaling: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=DIM,
        num_attention_heads=1,
        max_position_embeddings=MAX,
        rope_parameters={**scaling, "rope_theta": BASE},
    )


@pytest.mark.parametrize("kind", [*SCALINGS, "yarn-variants"])
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    variants = [SCALINGS[kind]] if kind in SCALINGS else [{**SCALINGS["yarn"], **v} for v in YARNS]
    for numbers in variants:
        scaling = {**numbers, "rope_type": kind.removesuffix("-variants")}
        function = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
        expected, expected_factor = function(reference_config(scaling), "cpu", seq_len=MAX)
        got, factor = rope_frequencies(DIM, MAX, BASE, scaling)
        rows = got if got.dim() == 2 else got.unsqueeze(0)
        for row in rows:
            torch.testing.assert_close(row, expected, rtol=1e-6, atol=0)
        assert factor == pytest.approx(expected_factor)


def test_dynamic_scaling_grows_with_the_position_beyond_the_trained_length() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": MAX}
    got, _ = rope_frequencies(DIM, 2 * MAX, BASE, scaling)
    config = reference_config({"rope_type": "dynamic", "factor": 2.0})
    for length in (MAX, MAX + 1, 700, 2 * MAX):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
        torch.testing.assert_close(got[length - 1], expected, rtol=1e-5, atol=0)


def test_longrope_has_other_divisors_for_a_context_as_short_as_the_original() -> None:
    scaling = {**SCALINGS["longrope"], "rope_type": "longrope"}
    config = reference_config(scaling)
    rope = get_rope(DIM, DIM, MAX, BASE, scaling)
    assert rope.within(MAX) is rope and rope.within(129) is rope
    steps = torch.arange(100.0).unsqueeze(1)
    for num_positions in (100, 128, 129):
        expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=num_positions)
        cos, _ = rope.within(num_positions).tables(100)
        torch.testing.assert_close(cos, (steps * expected).cos() * factor)


def test_rotation_is_in_place_on_flat_tensors_and_equals_transformers() -> None:
    set_rope_device("cpu")
    q, k = torch.randn(5, 3 * DIM), torch.randn(5, 2 * DIM)
    positions = torch.tensor([0, 7, 3, 300, 2000], dtype=torch.int32)
    rotary = LlamaRotaryEmbedding(reference_config({"rope_type": "default"}))
    cos, sin = rotary(q, positions[None])
    by_head = (x.view(1, 5, -1, DIM).transpose(1, 2).clone() for x in (q, k))
    expected = [x.transpose(1, 2).reshape(5, -1) for x in apply_rotary_pos_emb(*by_head, cos, sin)]
    got = get_rope(DIM, DIM, MAX, BASE).forward(positions, q, k)
    assert got[0] is q and got[1] is k
    torch.testing.assert_close(q, expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(k, expected[1], rtol=0, atol=2e-6)


def test_only_the_first_rotary_dim_of_each_head_turns() -> None:
    q, k = torch.randn(2, 32), torch.randn(2, 16)
    before = q.clone()
    get_rope(16, 8, MAX, BASE).forward(torch.tensor([4, 9]), q, k)
    rest = q.view(2, 2, 16)[..., 8:]
    assert torch.equal(rest, before.view(2, 2, 16)[..., 8:])
    assert not torch.equal(q, before)


def test_one_object_serves_all_who_ask_for_the_same_numbers() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert get_rope(16, 16, 64, 1e4, scaling) is get_rope(16, 16, 64, 1e4, dict(scaling))
    assert get_rope(16, 16, 64, 1e4) is not get_rope(16, 16, 64, 1e4, scaling)


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="default, dynamic, factors, linear, llama3"):
        check_rope_scaling({"rope_type": "ntk"})


def test_tables_have_every_digit_of_float32_however_long() -> None:
    """torch's cos, called first in a process and with threads, may have half of them."""
    frequencies, _ = rope_frequencies(64, 8192, 12345.0, None)
    angles = (torch.arange(8192.0).unsqueeze(1) * frequencies).double()
    tables = get_rope(64, 64, 8192, 12345.0).tables(8192)
    for got, expected in zip(tables, (angles.cos(), angles.sin()), strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, expected.float(), rtol=6e-8, atol=1e-14)
