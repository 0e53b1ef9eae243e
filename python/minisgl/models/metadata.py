"""Reading numbers out of configs, and GGUF metadata in the words of a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from minisgl.utils.errors import ModelLoadError, UnsupportedModelError

MAX_SIZE = 1 << 24

# GGUF general.architecture -> model_type
GGUF_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
GEMMA3_27B_LAYERS = 62  # the one size whose queries are not scaled by the size of a head


class Reader:
    """Looks up keys of a mapping or attributes of an object; numbers are checked.

    defaults: for keys that the config leaves out, before those given at a call.
    """

    def __init__(self, cfg: Any, defaults: Mapping[str, Any] | None = None) -> None:
        self._cfg = cfg
        self._defaults = defaults or {}

    def get(self, key: str, default: Any = None) -> Any:
        """The value, which may be None if the config says so, or the default if it is silent."""
        default = self._defaults.get(key, default)
        if isinstance(self._cfg, Mapping):
            return self._cfg.get(key, default)
        return getattr(self._cfg, key, default)

    def size(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """A positive whole number up to `limit`."""
        value = self.get(key)
        return self.checked(key, default if value is None else value, limit)

    def checked(self, key: str, value: Any, limit: int = MAX_SIZE) -> int:
        """`value` if it is a positive whole number up to `limit`."""
        if value is None:
            raise ModelLoadError(f"config: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise ModelLoadError(f"config: {key} must be a number from 1 to {limit}, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive float."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelLoadError(f"config: {key} must be a number, got {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise ModelLoadError(f"config: {key} must be positive, got {value!r}")
        return float(value)


def gguf_as_hf(
    metadata: Mapping[str, Any],
    tensor_names: Container[str] | None,
    rope_factors: Mapping[str, list[float]],
) -> dict[str, Any]:
    """The config that a Hugging Face folder of the same model would have.

    rope_factors: the values of the tensors `rope_freqs`, `rope_factors_long`, `rope_factors_short`
    that the file has.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not supported; "
            f"supported: {', '.join(sorted(GGUF_ARCHITECTURES))}"
        )

    def get(key: str) -> Any:
        value = metadata.get(f"{arch}.{key}")
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            return value.flat[0].item()  # some files say it for each layer
        return value

    num_heads = get("attention.head_count")
    head_dim = get("attention.key_length") or _divide(get("embedding_length"), num_heads)
    if get("attention.value_length") not in (None, head_dim):
        raise UnsupportedModelError("GGUF: values of another size than keys are not supported")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_size = get("vocab_size") or (len(tokens) if isinstance(tokens, list) else None)
    rotary_dim = get("rope.dimension_count") or head_dim
    for values in rope_factors.values():
        fits = isinstance(rotary_dim, int) and len(values) == rotary_dim // 2
        if not fits or not all(0.0 < value < math.inf for value in values):
            raise ModelLoadError(f"GGUF: {len(values)} rope factors do not fit {rotary_dim!r}")
    cfg: dict[str, Any] = {
        "model_type": GGUF_ARCHITECTURES[arch],
        "num_hidden_layers": get("block_count"),
        "hidden_size": get("embedding_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "vocab_size": vocab_size,
        "intermediate_size": get("feed_forward_length") or get("expert_feed_forward_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _gguf_rope_scaling(get, rope_factors),
        "tie_word_embeddings": tensor_names is None or "output.weight" not in tensor_names,
        "dtype": "bfloat16",
    }
    if tensor_names is not None:
        cfg["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
        cfg["mlp_bias"] = "blk.0.ffn_down.bias" in tensor_names
    if get("attention.sliding_window"):
        cfg |= {"sliding_window": get("attention.sliding_window"), "use_sliding_window": True}
        if arch == "llama":  # Mistral's files have the architecture of Llama
            cfg["model_type"] = "mistral"
    if get("expert_count"):
        cfg |= _gguf_experts(arch, get)
    cfg |= _gguf_extras(arch, get, head_dim)
    return {key: value for key, value in cfg.items() if value is not None}


def _gguf_experts(arch: str, get: Any) -> dict[str, Any]:
    """The numbers of a mixture of experts; Mixtral's files have the architecture of Llama."""
    found = {
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }
    if arch == "llama":
        return {**found, "model_type": "mixtral"}
    if arch != "qwen3moe":
        raise UnsupportedModelError(f"GGUF architecture {arch!r} with experts is not supported")
    return found


def _gguf_extras(arch: str, get: Any, head_dim: Any) -> dict[str, Any]:
    """What one architecture has besides, said by its file or true of all its models."""
    if arch == "gemma3":
        by_width = _divide(get("embedding_length"), get("attention.head_count"))
        return {
            "norm_weight_offset": 0.0,  # the file has the 1 added
            "query_pre_attn_scalar": (
                by_width if get("block_count") == GEMMA3_27B_LAYERS else head_dim
            ),
            "rope_local_base_freq": get("rope.freq_base_swa") or 10000.0,
            "layer_types": _gemma_layer_types(get),
            "final_logit_softcapping": get("final_logit_softcapping"),
        }
    if arch == "phi3":
        original = get("rope.scaling.original_context_length")
        return {"original_max_position_embeddings": original or get("context_length")}
    return {}


def _gemma_layer_types(get: Any) -> list[str] | None:
    """Five layers of six see the window, unless the file says otherwise."""
    num_layers, pattern = get("block_count"), get("attention.sliding_window_pattern")
    if not isinstance(num_layers, int):
        return None
    period = pattern if isinstance(pattern, int) and pattern > 0 else 6
    sees_window = [bool((i + 1) % period) for i in range(min(num_layers, MAX_SIZE))]
    if isinstance(pattern, np.ndarray):
        sees_window = [bool(value) for value in pattern]
    if not get("attention.sliding_window"):
        sees_window = [False] * len(sees_window)
    return ["sliding_attention" if windowed else "full_attention" for windowed in sees_window]


def _divide(a: Any, b: Any) -> int | None:
    return a // b if isinstance(a, int) and isinstance(b, int) and b > 0 else None


def _gguf_rope_scaling(get: Any, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    if "rope_freqs" in factors:
        return {"rope_type": "factors", "factors": factors["rope_freqs"]}
    if {"rope_factors_long", "rope_factors_short"} <= factors.keys():
        longrope = {
            "rope_type": "longrope",
            "long_factor": factors["rope_factors_long"],
            "short_factor": factors["rope_factors_short"],
            "attention_factor": get("rope.scaling.attn_factor"),
        }
        return {key: value for key, value in longrope.items() if value is not None}
    kind = get("rope.scaling.type") or ("linear" if get("rope.scale_linear") else "none")
    if kind == "none":
        return None
    scaling = {
        "rope_type": kind,
        "factor": get("rope.scaling.factor") or get("rope.scale_linear"),
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        "beta_fast": get("rope.scaling.yarn_beta_fast"),
        "beta_slow": get("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in scaling.items() if value is not None}
