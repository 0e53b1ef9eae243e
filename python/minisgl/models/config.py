"""A model's numbers, read from a Hugging Face config or from GGUF metadata.

Every number is checked here, so that the layers above may trust it. Invariant: a `ModelConfig`
describes a model that this build can run; anything else is a typed error that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl.layers import check_rope_scaling
from minisgl.utils.errors import ModelLoadError, UnsupportedModelError

from . import gemma3_text, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from .architecture import Architecture
from .metadata import Reader, gguf_as_hf

MAX_LAYERS = 4096


ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama.ARCHITECTURE,
    "mistral": mistral.ARCHITECTURE,
    "mixtral": mixtral.ARCHITECTURE,
    "qwen2": qwen2.ARCHITECTURE,
    "qwen3": qwen3.ARCHITECTURE,
    "qwen3_moe": qwen3_moe.ARCHITECTURE,
    "phi3": phi3.ARCHITECTURE,
    "gemma3_text": gemma3_text.ARCHITECTURE,
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """How positions turn queries and keys; `scaling` has Hugging Face's keys."""

    head_dim: int
    rotary_dim: int
    max_position: int
    base: float
    scaling: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of one model.

    layer_windows: per layer, how many tokens back it sees, or None for all. local_rotary_config:
    that of the layers with a window, if they have their own. sparse_layers: the layers whose MLP is
    a mixture of experts. norm_weight_offset: what is added to the weights of norms.
    attention_scale: of the products of queries and keys, if not 1 / sqrt(head_dim). hidden_act: one
    of ACTIVATIONS' values. dtype: the name of the checkpoint's dtype, if known.
    """

    model_type: str
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    rms_norm_eps: float
    rotary_config: RotaryConfig
    local_rotary_config: RotaryConfig | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    has_post_norms: bool = False
    norm_weight_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    layer_windows: tuple[int | None, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse_layers: frozenset[int] = field(default_factory=frozenset)
    hidden_act: str = "silu"
    dtype: str | None = None

    @property
    def is_moe(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return bool(self.sparse_layers)

    @property
    def max_position(self) -> int:
        """The longest sequence the model was made for."""
        return self.rotary_config.max_position

    def window(self, layer_id: int) -> int | None:
        """How many tokens back a layer sees, or None for all."""
        return self.layer_windows[layer_id] if self.layer_windows else None

    def rotary(self, layer_id: int) -> RotaryConfig:
        """How a layer turns queries and keys."""
        local = self.local_rotary_config
        return self.rotary_config if local is None or self.window(layer_id) is None else local

    @classmethod
    def from_hf(cls, cfg: Any) -> ModelConfig:
        """Read a transformers config object, a dict, or anything with its keys or attributes."""
        model_type = str(Reader(cfg).get("model_type") or "")
        if model_type not in ARCHITECTURES:
            what = f"model_type {model_type!r} is not supported"
            what = what if model_type else "config: model_type is missing"
            raise UnsupportedModelError(f"{what}; supported: {', '.join(sorted(ARCHITECTURES))}")
        arch = ARCHITECTURES[model_type]
        read = Reader(cfg, arch.defaults)
        if read.get("quantization_config"):
            raise UnsupportedModelError(
                "config: quantization_config is not supported: take the float checkpoint or GGUF"
            )
        for key in arch.unsupported:
            if read.get(key):
                raise UnsupportedModelError(f"config: {key} of {model_type} is not supported")
        return _read_config(cls, read, model_type, arch)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Container[str] | None = None,
        rope_factors: Mapping[str, list[float]] | None = None,
    ) -> ModelConfig:
        """Read GGUF metadata.

        tensor_names tell whether the head is tied (assumed without them); rope_factors are the
        values of the tensors that `sources.ROPE_FACTORS` names.
        """
        return cls.from_hf(gguf_as_hf(metadata, tensor_names, rope_factors or {}))


def _read_config(
    cls: type[ModelConfig], read: Reader, kind: str, arch: Architecture
) -> ModelConfig:
    num_layers = read.size("num_hidden_layers", limit=MAX_LAYERS)
    hidden_size = read.size("hidden_size")
    num_qo_heads = read.size("num_attention_heads")
    num_kv_heads = read.size("num_key_value_heads", num_qo_heads)
    if num_qo_heads % num_kv_heads:
        raise ModelLoadError(
            f"config: {num_qo_heads} attention heads cannot share {num_kv_heads} key-value heads"
        )
    head_dim = read.size("head_dim", max(1, hidden_size // num_qo_heads))
    has_bias = bool(read.get("attention_bias", False))
    rope, local_rope = _rope_parameters(read, arch.has_local_rope)
    query_scalar = read.get("query_pre_attn_scalar")
    return cls(
        model_type=kind,
        num_layers=num_layers,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        vocab_size=read.size("vocab_size"),
        intermediate_size=read.size("intermediate_size"),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rotary_config=_read_rotary(read, head_dim, rope, "rope_theta"),
        local_rotary_config=(
            _read_rotary(read, head_dim, local_rope, "rope_local_base_freq")
            if arch.has_local_rope
            else None
        ),
        tie_word_embeddings=bool(read.get("tie_word_embeddings", False)),
        attention_bias=has_bias,
        o_proj_bias=has_bias and arch.o_proj_bias,
        mlp_bias=arch.mlp_bias and bool(read.get("mlp_bias", False)),
        qk_norm=arch.qk_norm,
        has_post_norms=arch.has_post_norms,
        norm_weight_offset=1.0 if read.get("norm_weight_offset") else 0.0,
        embedding_scale=hidden_size**0.5 if arch.scales_embedding else 1.0,
        attention_scale=(
            None if query_scalar is None else read.number("query_pre_attn_scalar", 1.0) ** -0.5
        ),
        layer_windows=tuple(arch.windows(read, num_layers)),
        hidden_act=_read_activation(read, arch),
        dtype=_read_dtype(read),
        **(_read_experts(read, num_layers) if arch.is_moe else {}),
    )


def _read_activation(read: Reader, arch: Architecture) -> str:
    name = str(read.get("hidden_activation") or read.get("hidden_act") or "silu")
    activation = ACTIVATIONS.get(name)
    if activation is None or (arch.is_moe and activation != "silu"):
        known = "silu" if arch.is_moe else ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(f"hidden_act {name!r} is not supported, only {known}")
    return activation


def _read_dtype(read: Reader) -> str | None:
    dtype = read.get("dtype") or read.get("torch_dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _read_experts(read: Reader, num_layers: int) -> dict[str, Any]:
    num_experts = read.size("num_experts", read.get("num_local_experts"))
    top_k = read.size("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelLoadError(f"config: {top_k} experts per token of only {num_experts}")
    step = read.size("decoder_sparse_step", 1)
    dense = read.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise ModelLoadError(f"config: mlp_only_layers must be a list of layers, got {dense!r}")
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": read.size("moe_intermediate_size", read.get("intermediate_size")),
        "norm_topk_prob": bool(read.get("norm_topk_prob", False)),
        "sparse_layers": frozenset(
            i for i in range(num_layers) if i not in dense and (i + 1) % step == 0
        ),
    }


Rope = Mapping[str, Any]


def _rope_parameters(read: Reader, has_local: bool) -> tuple[Rope, Rope]:
    """Of layers that see everything, and of those with a window.

    Old spelling: `rope_scaling`, of the former alone; new (transformers 5): `rope_parameters`, by
    kind of layer where they differ.
    """
    rope: Rope = read.get("rope_parameters") or read.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelLoadError(f"config: rope parameters must be an object, got {rope!r}")
    if has_local and any(isinstance(value, Mapping) for value in rope.values()):
        return rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
    return rope, {}


def _read_rotary(read: Reader, head_dim: int, rope: Rope, base_key: str) -> RotaryConfig:
    """base_key: where the old spelling has the base."""
    max_position = read.size("max_position_embeddings", 2048)
    scaling = {str(key): value for key, value in rope.items() if value is not None}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModelError("rope parameters that differ by layer are not supported")
    base = scaling.pop("rope_theta", None) or read.get(base_key) or 10000.0
    partial = scaling.pop("partial_rotary_factor", None) or read.get("partial_rotary_factor") or 1.0
    try:
        base, turned = float(base), int(head_dim * float(partial))
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelLoadError(f"config: rope parameters: {error}") from error
    rotary_dim = read.size("rotary_dim", turned)
    if not (base > 0.0 and 2 <= rotary_dim <= head_dim and rotary_dim % 2 == 0):
        raise ModelLoadError(f"config: rope base {base} or dimension {rotary_dim} makes no sense")
    original = read.get("original_max_position_embeddings")
    kind = str(scaling.pop("rope_type", None) or scaling.get("type") or "default")
    if kind == "su" or "short_factor" in scaling:  # what early Phi 3 called it
        kind = "longrope"
    scaling.pop("type", None)
    if kind in ("default", "mrope"):
        return RotaryConfig(head_dim, rotary_dim, max_position, base)
    scaling["rope_type"] = kind
    scaling["max_position_embeddings"] = max_position
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    check_rope_scaling(scaling, rotary_dim)
    if kind == "yarn" and "factor" in scaling and "original_max_position_embeddings" in scaling:
        reach = float(scaling["factor"]) * int(scaling["original_max_position_embeddings"])
        max_position = max(max_position, int(reach))
    return RotaryConfig(head_dim, rotary_dim, max_position, base, scaling)
