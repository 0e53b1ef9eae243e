"""Every architecture, on tiny random models, against transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from minisgl.models import ModelConfig, create_model, load_model_config, load_weight

from tests.models.by_hand import ByHand

IDS = [(7 * i * i + 3 * i + 1) % 96 for i in range(40)]
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 1.8],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
}
PHI3 = {"pad_token_id": 0}
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 20,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama no groups": ("llama", {"num_key_value_heads": 4, "head_dim": 20}),
    "llama linear rope": ("llama", {"rope_scaling": LINEAR}),
    "llama dynamic rope": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama yarn rope": ("llama", {"rope_scaling": YARN}),
    "llama yarn mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1}}),
    "llama3 rope": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 50000.0}),
    "mistral windowed": ("mistral", {"sliding_window": 5, "head_dim": 16}),
    "mistral whole": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 windowed": ("qwen2", WINDOWED),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3 tied biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 windowed": ("qwen3", {**WINDOWED, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe mixed": (
        "qwen3_moe",
        {**MOE, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    ),
    "mistral tied yarn": ("mistral", {"tie_word_embeddings": True, "rope_scaling": YARN}),
    "mixtral linear": ("mixtral", {**EXPERTS, "rope_scaling": LINEAR}),
    "qwen2 tied yarn": ("qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN}),
    "qwen3 llama3 rope": ("qwen3", {"head_dim": 24, "rope_scaling": LLAMA3}),
    "qwen3_moe tied dynamic": (
        "qwen3_moe",
        {
            **MOE,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
    ),
    "llama odd heads": ("llama", {"head_dim": 14}),
    "llama longrope": (
        "llama",
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mixtral": ("mixtral", EXPERTS),
    "mixtral windowed tied": (
        "mixtral",
        {**EXPERTS, "sliding_window": 7, "tie_word_embeddings": True, "head_dim": 10},
    ),
    "phi3": ("phi3", {**PHI3, "sliding_window": 7}),
    "phi3 tied": ("phi3", {**PHI3, "tie_word_embeddings": True}),
    "phi3 partial rope": ("phi3", {**PHI3, "rope_scaling": {"partial_rotary_factor": 0.5}}),
    "phi3 longrope": (
        "phi3",
        {**PHI3, "rope_scaling": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "phi3 partial longrope": (
        "phi3",
        {
            **PHI3,
            "num_attention_heads": 2,
            "rope_scaling": {**LONGROPE, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 16,
        },
    ),
    "phi3 short longrope": (
        "phi3",
        {**PHI3, "rope_scaling": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 untied linear": (
        "gemma3_text",
        {
            **GEMMA3,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3 by list": (
        "gemma3_text",
        {
            **GEMMA3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 9e4,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
            },
        },
    ),
}


def make_reference(model_type: str, changes: dict[str, Any], folder: Path) -> Any:
    """A random transformers model, saved to `folder`; biases and norms are random too."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                is_scale = "norm" in name and model_type != "gemma3_text"
                weight.normal_(1.0 if is_scale else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert (ours - theirs).abs().max().item() < 1e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_whole_and_in_chunks(case: str, tmp_path: Path) -> None:
    reference = make_reference(*CASES[case], tmp_path)
    expected = reference_logits(reference, IDS)
    by_hand = ByHand(tmp_path)
    assert_close(by_hand.logits(IDS), expected)
    assert_close(by_hand.logits(IDS, [1, 13, 1, 1, 24], row=1), expected)


def test_a_decode_batch_of_mixed_lengths_agrees_row_by_row(tmp_path: Path) -> None:
    reference = make_reference(*CASES["mistral windowed"], tmp_path)
    by_hand = ByHand(tmp_path)
    lengths = [3, 40, 17, 6]
    by_hand.forward([by_hand.req(IDS[: n - 1], row) for row, n in enumerate(lengths)])
    got = by_hand.forward([by_hand.req(IDS[:n], row, n - 1) for row, n in enumerate(lengths)])
    expected = torch.stack([reference_logits(reference, IDS[:n])[-1] for n in lengths])
    assert_close(got, expected)


def test_chunks_and_decodes_may_share_a_batch(tmp_path: Path) -> None:
    reference = make_reference(*CASES["qwen3"], tmp_path)
    by_hand = ByHand(tmp_path)
    by_hand.forward([by_hand.req(IDS[:10], 0), by_hand.req(IDS[5:20], 1)])
    got = by_hand.forward(
        [by_hand.req(IDS[:11], 0, 10), by_hand.req(IDS[5:30], 1, 15), by_hand.req(IDS, 2)]
    )
    prompts = [IDS[:11], IDS[5:30], IDS]
    assert_close(got, torch.stack([reference_logits(reference, p)[-1] for p in prompts]))


def test_a_decoded_row_hardly_depends_on_its_neighbours(tmp_path: Path) -> None:
    make_reference(*CASES["llama"], tmp_path)
    by_hand = ByHand(tmp_path)
    for row, n in enumerate((39, 12, 25)):
        by_hand.forward([by_hand.req(IDS[:n], row)])
    alone = by_hand.forward([by_hand.req(IDS[:40], 0, 39)])
    together = by_hand.forward(
        [by_hand.req(IDS[:13], 1, 12), by_hand.req(IDS[:40], 0, 39), by_hand.req(IDS[:26], 2, 25)]
    )
    assert (alone[0] - together[1]).abs().max().item() < 1e-5


def test_storage_in_bfloat16_still_computes_in_float32(tmp_path: Path) -> None:
    reference = make_reference(*CASES["llama"], tmp_path).bfloat16().float()
    by_hand = ByHand(tmp_path, dtype=torch.bfloat16)
    for weight in by_hand.model.state_dict().values():  # vectors cost nothing and stay exact
        assert weight.dtype == (torch.bfloat16 if weight.dim() > 1 else torch.float32)
    got = by_hand.logits(IDS)
    assert got.dtype == torch.float32
    # Only K and V are rounded on the way; everything else is as in the reference.
    assert (got - reference_logits(reference, IDS)).abs().max().item() < 0.1


def test_from_hf_takes_the_config_object_and_the_old_spelling(tmp_path: Path) -> None:
    new = transformers.LlamaConfig(**SMALL, rope_parameters={**LLAMA3, "rope_theta": 50000.0})
    old = {**SMALL, "model_type": "llama", "rope_theta": 50000.0, "rope_scaling": LLAMA3}
    (tmp_path / "config.json").write_text(json.dumps(old))
    from_object, from_dict = ModelConfig.from_hf(new), ModelConfig.from_hf(old)
    assert from_object.rotary_config == from_dict.rotary_config
    assert from_dict.rotary_config.base == 50000.0
    assert load_model_config(tmp_path) == from_dict


@pytest.mark.parametrize("case", [name for name in CASES if name != "gemma3 by list"])
def test_the_old_spelling_of_a_config_says_the_same(case: str) -> None:
    """`rope_theta`, `rope_scaling` with `type`, a pattern of windows, bases by name."""
    model_type, changes = CASES[case]
    new = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes}).to_dict()
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    rope = dict(new["rope_parameters"])
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
        old["sliding_window_pattern"] = changes["sliding_window_pattern"]
        del old["layer_types"]
    old["rope_theta"] = rope.pop("rope_theta")
    kind = {"longrope": "su"}.get(rope["rope_type"], rope["rope_type"])
    old["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    del rope["rope_type"]
    old["rope_scaling"] = {**rope, "type": kind} if kind != "default" else None
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)


def test_experts_of_mixtral_may_have_their_first_names(tmp_path: Path) -> None:
    reference = make_reference(*CASES["mixtral"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    theirs = [name for name in stored if "block_sparse_moe.experts.0.w" in name]
    assert len(theirs) == 9, sorted(stored)
    assert_close(ByHand(tmp_path).logits(IDS), reference_logits(reference, IDS))


@pytest.mark.parametrize(
    "case", ["llama tied", "qwen2", "qwen3_moe mixed", "mixtral", "phi3", "gemma3"]
)
def test_load_weight_gives_exactly_the_keys_of_the_model(case: str, tmp_path: Path) -> None:
    make_reference(*CASES[case], tmp_path)
    with torch.device("meta"):
        model = create_model(load_model_config(tmp_path))
    weights = dict(load_weight(tmp_path, "cpu"))
    assert {n: tuple(w.shape) for n, w in weights.items()} == {
        n: tuple(w.shape) for n, w in model.state_dict().items()
    }
    model.load_state_dict(weights)
    assert all(model.state_dict()[name] is weight for name, weight in weights.items())
