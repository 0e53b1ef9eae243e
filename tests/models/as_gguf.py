"""A transformers model as the GGUF file that llama.cpp's converter would make of it.

Names come from the gguf package's own map, so that ours is compared and not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch

from tests.models.k_quants import quantize

BYTE_VOCABULARY = 258  # tokens; a model with so many comes with them

Kind = gguf.GGMLQuantizationType | None
KindOf = Callable[[str], Kind]

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}


def write_as_gguf(
    model: Any,
    path: Path,
    kind: Kind | KindOf = None,
    parts: int = 1,
    experts_apart: bool = False,
) -> Path:
    """Write `model`, matrices in the type `kind` (float32 if None); the path of the first part.

    kind: may also be a function of the tensor's GGUF name; else a router stays float32.
    experts_apart: a tensor for each expert, as the first files of Mixtral have them.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    size = {"split_max_tensors": -(-len(model.state_dict()) // parts)} if parts > 1 else {}
    writer = gguf.GGUFWriter(path, arch, **size)
    _write_metadata(writer, config, arch)
    if config.vocab_size == BYTE_VOCABULARY:
        _add_byte_vocabulary(writer)
    arch_id = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):  # transformers 5 stacks them: (E, 2 * ff, hidden)
            layer = int(name.split(".")[2])
            gate, up = np.split(array, 2, axis=1)
            _add_experts(writer, f"blk.{layer}.ffn_gate", gate, kind, experts_apart)
            _add_experts(writer, f"blk.{layer}.ffn_up", up, kind, experts_apart)
            continue
        if name.endswith("experts.down_proj"):
            prefix = f"blk.{name.split('.')[2]}.ffn_down"
            _add_experts(writer, prefix, array, kind, experts_apart)
            continue
        if arch == "llama" and ".q_proj." in name:
            array = _interleave(array, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            array = _interleave(array, config.num_key_value_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1.0
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        _add(writer, found, array, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def _add_byte_vocabulary(writer: gguf.GGUFWriter) -> None:
    """A token for each byte, one merge (a file must have some), and the end of a text."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, "ĠĠ", "<eos>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(257)


def _add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: Kind | KindOf) -> None:
    if callable(kind):
        kind = kind(name)
    elif "ffn_gate_inp" in name:
        kind = None
    if kind is None or array.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    else:
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)


def _add_experts(
    writer: gguf.GGUFWriter, prefix: str, experts: np.ndarray, kind: Kind | KindOf, apart: bool
) -> None:
    if not apart:
        return _add(writer, f"{prefix}_exps.weight", experts, kind)
    for index, expert in enumerate(experts):
        _add(writer, f"{prefix}.{index}.weight", expert, kind)


def _interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves to pairs, as ggml rotates Llama's."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(array.shape)


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    rope = dict(config.rope_parameters)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type in ("mistral", "gemma3_text", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "gemma3":  # one set of rope parameters for each kind of layer
        rope = dict(rope["full_attention"])
    writer.add_rope_freq_base(rope["rope_theta"])
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotary_dim)
    rope_type = rope.get("rope_type", "default")
    if rope_type == "llama3":
        factors = _llama3_factors(rope, rotary_dim)
        writer.add_tensor("rope_freqs.weight", factors)
    elif rope_type == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for name in ("long", "short"):
            values = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", values)
    elif rope_type != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_type))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _llama3_factors(rope: dict[str, Any], rotary_dim: int) -> np.ndarray:
    """What each frequency is divided by, straight from the definition of Llama 3.1's scaling."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    wavelengths = 2 * torch.pi * rope["rope_theta"] ** exponents
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).float().numpy()
