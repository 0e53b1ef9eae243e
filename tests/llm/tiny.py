"""Tiny random models in Hugging Face format, written in milliseconds and without transformers.

The tokenizer has one token per byte, ids 0 to 255, then the special tokens; so an id below 256 is
also a byte, and any text can be encoded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

BOS, EOS, EOS_2, EOS_3 = 256, 257, 258, 259
VOCAB_SIZE = 260
SPECIAL_TOKENS = {"<bos>": BOS, "<eos>": EOS, "<end>": EOS_2, "<stop>": EOS_3}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by their Hugging Face names, large enough to make the logits differ clearly."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config["head_dim"]
    q_size = config["num_attention_heads"] * dim
    kv_size = config["num_key_value_heads"] * dim
    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden),
        "model.norm.weight": 1 + normal(hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": 1 + normal(hidden),
            f"{layer}.post_attention_layernorm.weight": 1 + normal(hidden),
            f"{layer}.self_attn.q_proj.weight": normal(q_size, hidden),
            f"{layer}.self_attn.k_proj.weight": normal(kv_size, hidden),
            f"{layer}.self_attn.v_proj.weight": normal(kv_size, hidden),
            f"{layer}.self_attn.o_proj.weight": normal(hidden, q_size),
            f"{layer}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{layer}.mlp.up_proj.weight": normal(inner, hidden),
            f"{layer}.mlp.down_proj.weight": normal(hidden, inner),
        }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden)
    return weights


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json with a token for each byte."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    assert {name: backend.token_to_id(name) for name in SPECIAL_TOKENS} == SPECIAL_TOKENS
    backend.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def write_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A whole model folder; `changes` go into config.json, None takes a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights({**CONFIG, **config}, seed), folder / "model.safetensors")
    write_tokenizer(folder)
    return folder
