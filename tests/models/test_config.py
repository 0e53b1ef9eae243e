"""`ModelConfig` from Hugging Face configs and GGUF metadata: defaults, spellings, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.models import ModelConfig, create_model
from minisgl.params import ModelLoadError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 256,
    "llama.rope.freq_base": 5e5,
    "tokenizer.ggml.tokens": ["a"] * 100,
}


def test_what_a_config_leaves_out_has_the_defaults_of_transformers() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rotary_config.base, config.rotary_config.max_position) == (10000.0, 2048)
    assert not config.tie_word_embeddings and not config.attention_bias and not config.is_moe
    assert config.layer_windows == (None,) * 4


def test_an_object_with_attributes_reads_as_a_dict_does() -> None:
    assert ModelConfig.from_hf(SimpleNamespace(**LLAMA)) == ModelConfig.from_hf(LLAMA)


def test_only_qwen2_has_a_bias_that_the_config_does_not_mention() -> None:
    kinds = ("llama", "mistral", "qwen2", "qwen3")
    biased = [ModelConfig.from_hf({**LLAMA, "model_type": k}).attention_bias for k in kinds]
    assert biased == [False, False, True, False]
    assert not ModelConfig.from_hf({**LLAMA, "model_type": "qwen2"}).o_proj_bias


def test_windows_are_per_layer() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    qwen2 = ModelConfig.from_hf({**LLAMA, "model_type": "qwen2", **windows})
    assert qwen2.layer_windows == (None, None, None, 8)
    mistral = ModelConfig.from_hf({**LLAMA, "model_type": "mistral"})
    assert mistral.layer_windows == (4096,) * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    listed = {**LLAMA, "model_type": "qwen3", **windows, "layer_types": kinds}
    assert ModelConfig.from_hf(listed).layer_windows == (8, None, 8, None)


def test_old_and_new_spellings_of_rope_are_one() -> None:
    old = {**LLAMA, "rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}
    assert ModelConfig.from_hf(old).rotary_config == ModelConfig.from_hf(new).rotary_config


def test_gemma3_has_two_ropes_and_what_its_config_leaves_out() -> None:
    gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 64}
    linear = {"type": "linear", "factor": 8.0}
    old = {**gemma, "rope_theta": 7.0, "rope_local_base_freq": 5.0, "rope_scaling": linear}
    config = ModelConfig.from_hf({**old, "sliding_window_pattern": 2, "sliding_window": 9})
    assert config.layer_windows == (9, None, 9, None)
    local, whole = config.rotary(0), config.rotary(1)
    assert (local.base, local.scaling, whole.base) == (5.0, None, 7.0)
    assert whole.scaling is not None and whole.scaling["factor"] == 8.0
    assert config.tie_word_embeddings and config.hidden_act == "gelu_tanh"
    assert (config.norm_weight_offset, config.embedding_scale) == (1.0, 8.0)
    assert config.attention_scale == 1 / 8
    plain = ModelConfig.from_hf(gemma)
    assert (plain.rotary_config.base, plain.layer_windows) == (1e6, (4096,) * 4)
    new = {
        **gemma,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
        },
    }
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(old)


def test_yarn_reaches_as_far_as_its_factor_says() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = ModelConfig.from_hf({**LLAMA, "max_position_embeddings": 512, "rope_scaling": yarn})
    assert config.rotary_config.max_position == 2048


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: gemma3_text, llama"),
        ({"model_type": None}, "model_type is missing; supported: gemma3_text, llama"),
        ({"rope_scaling": {"type": "ntk"}}, "rope scaling 'ntk' is not supported; supported: def"),
        ({"rope_scaling": {"type": "su", "long_factor": [1.0] * 8}}, "'longrope' needs 'short_f"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0] * 8}},
            "'longrope' is not usable: 1 factors, not 8",
        ),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "needs 'low_freq_factor'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "mixtral", "hidden_act": "gelu_pytorch_tanh"}, "only silu"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_a_sound_model_that_cannot_run_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        ModelConfig.from_hf({**LLAMA, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None},
        {"hidden_size": 1 << 40},
        {"num_hidden_layers": 0},
        {"vocab_size": "many"},
        {"num_key_value_heads": 3},
        {"num_attention_heads": -4},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": -1.0},
        {"rope_theta": "many"},
        {"rope_scaling": [8.0]},
        {"model_type": "gemma3_text", "layer_types": ["full_attention"]},
        {"model_type": "gemma3_text", "layer_types": 4},
        {"model_type": "gemma3_text", "sliding_window": None},
        {"model_type": "gemma3_text", "query_pre_attn_scalar": 0},
        {"head_dim": True},
        {"model_type": "mixtral", "mlp_only_layers": "all"},
        {"model_type": "mixtral", "mlp_only_layers": 1},
        {"model_type": "mixtral", "mlp_only_layers": [None]},
    ],
)
def test_absurd_numbers_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError):
        ModelConfig.from_hf({**LLAMA, **change})


def test_gguf_metadata_reads_as_a_config() -> None:
    config = ModelConfig.from_gguf(GGUF)
    assert (config.model_type, config.num_layers, config.num_kv_heads) == ("llama", 2, 2)
    assert (config.head_dim, config.vocab_size, config.rotary_config.base) == (16, 100, 5e5)
    assert config.tie_word_embeddings
    assert not ModelConfig.from_gguf(GGUF, {"output.weight"}).tie_word_embeddings
    with pytest.raises(UnsupportedModelError, match="'gpt2' is not supported; supported: gemma3"):
        ModelConfig.from_gguf({"general.architecture": "gpt2"})


def test_a_model_on_meta_takes_no_memory_and_has_all_names() -> None:
    with torch.device("meta"):
        model = create_model(ModelConfig.from_hf({**LLAMA, "attention_bias": True}))
    state = model.state_dict()
    assert {w.device.type for w in state.values()} == {"meta"}
    names = [name for name in state if name.startswith("model.layers.3.")]
    assert [name.removeprefix("model.layers.3.") for name in names] == [
        "self_attn.qkv_proj.weight",
        "self_attn.qkv_proj.bias",
        "self_attn.o_proj.weight",
        "self_attn.o_proj.bias",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
