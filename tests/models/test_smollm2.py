"""The default model's GGUF file, through the attention backend, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from minisgl.models import load_weight

from tests.models.by_hand import ByHand

TEXTS = [
    [1, 4093, 198, 504, 2365, 282, 4649, 314, 2, 198],
    [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4784, 314],
]


def unmerge(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A merged weight under the names of transformers."""
    if "qkv_proj" in name:
        parts = zip("qkv", weight.split([576, 192, 192]), strict=True)
        return {name.replace("qkv_proj", f"{letter}_proj"): part for letter, part in parts}
    if "gate_up_proj" in name:
        gate, up = weight.chunk(2)
        return {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return {name: weight}


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_weight(default_model_path, "cpu"):
        weights |= unmerge(name, weight)
    left = model.load_state_dict(weights, strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def by_hand(default_model_path: Path) -> ByHand:
    return ByHand(default_model_path, rows=4)


@pytest.mark.parametrize("ids", TEXTS)
def test_logits_agree_with_transformers(
    ids: list[int], reference: transformers.LlamaForCausalLM, by_hand: ByHand
) -> None:
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    got = by_hand.logits(ids)
    assert (got - expected).abs().max().item() < 1e-4
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_it_continues_as_transformers_does_token_by_token(
    reference: transformers.LlamaForCausalLM, by_hand: ByHand
) -> None:
    start = TEXTS[1]
    expected = reference.generate(
        torch.tensor([start]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )[0].tolist()
    ids = list(start)
    cached = 0
    while len(ids) < len(expected):
        logits = by_hand.forward([by_hand.req(ids, 1, cached)])
        cached = len(ids)
        ids.append(int(logits.argmax()))
    assert ids == expected


def test_tied_weights_are_one_tensor(by_hand: ByHand) -> None:
    assert "lm_head.weight" not in by_hand.model.state_dict()
    assert by_hand.config.tie_word_embeddings
