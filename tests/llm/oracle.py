"""The default model in transformers, by a path that shares nothing with the engine.

Configuration from the GGUF file's metadata, weights through `gguf.quants.dequantize`, float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a q or k projection from the order of llama.cpp (pairs) to that of HF (halves)."""
    half = weight.shape[0] // num_heads // 2
    pairs = weight.view(num_heads, half, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def hf_name(name: str) -> str:
    """The Hugging Face name of a llama tensor in a GGUF file."""
    if name.startswith("blk."):
        _, layer, kind, _ = name.split(".")
        return f"model.layers.{layer}.{NAMES[kind]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight"}.get(name, "model.norm.weight")


def load_oracle(path: Path) -> Any:
    """`LlamaForCausalLM` of a llama GGUF file with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def meta(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    num_heads, num_kv_heads = meta("attention.head_count"), meta("attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weight = torch.from_numpy(data.copy()).float()
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = unpermute(weight, num_heads if ".attn_q." in tensor.name else num_kv_heads)
        weights[hf_name(tensor.name)] = weight
    config = LlamaConfig(
        vocab_size=meta("vocab_size"),
        hidden_size=meta("embedding_length"),
        intermediate_size=meta("feed_forward_length"),
        num_hidden_layers=meta("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=meta("context_length"),
        rms_norm_eps=meta("attention.layer_norm_rms_epsilon"),
        rope_theta=meta("rope.freq_base"),
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are no weights
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model.float().eval()


@torch.inference_mode()
def logits_along(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The model's logits `(len(answer), vocab)` before each token of the answer."""
    ids = torch.tensor([prompt + answer])
    return model(ids).logits[0, len(prompt) - 1 : -1].float()
