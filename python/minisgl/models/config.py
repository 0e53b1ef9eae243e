"""A model's numbers, read from a Hugging Face config or from GGUF metadata.

Every number is checked here, so that the layers above may trust it. Invariant: a `ModelConfig`
describes a model that this build can run; anything else is a typed error that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl.layers import check_rope_scaling
from minisgl.utils.errors import ModelLoadError, UnsupportedModelError

from .metadata import Reader, gguf_as_hf

MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the models of one `model_type` have in common and their config does not say."""

    qkv_bias_default: bool = False
    o_proj_bias: bool = True  # where there is a bias at all
    mlp_bias: bool = False  # whether the config may ask for it
    qk_norm: bool = False
    is_moe: bool = False
    head_dim_default: int | None = None
    windows: Callable[[Reader, int], list[int | None]] = lambda read, count: [None] * count


def _same_window(read: Reader, num_layers: int) -> list[int | None]:
    window = read.get("sliding_window", 4096)
    return [None if window is None else read.checked("sliding_window", window)] * num_layers


def _qwen_windows(read: Reader, num_layers: int) -> list[int | None]:
    if not read.get("use_sliding_window", False) or read.get("sliding_window", 4096) is None:
        return [None] * num_layers
    window = read.checked("sliding_window", read.get("sliding_window", 4096))
    kinds = read.get("layer_types")
    if kinds is None:
        first = read.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise ModelLoadError(f"config: layer_types has {len(kinds)} entries, not {num_layers}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _qwen_moe_windows(read: Reader, num_layers: int) -> list[int | None]:
    if not read.get("use_sliding_window", False):
        return [None] * num_layers
    return _same_window(read, num_layers)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(mlp_bias=True),
    "mistral": Architecture(windows=_same_window),
    "qwen2": Architecture(qkv_bias_default=True, o_proj_bias=False, windows=_qwen_windows),
    "qwen3": Architecture(qk_norm=True, head_dim_default=128, windows=_qwen_windows),
    "qwen3_moe": Architecture(qk_norm=True, is_moe=True, windows=_qwen_moe_windows),
}


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

    layer_windows: per layer, how many tokens back it sees, or None for all. sparse_layers: the
    layers whose MLP is a mixture of experts. dtype: the name of the checkpoint's dtype, if known.
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
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
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

    @classmethod
    def from_hf(cls, cfg: Any) -> ModelConfig:
        """Read a transformers config object, a dict, or anything with its keys or attributes."""
        read = Reader(cfg)
        model_type = str(read.get("model_type", ""))
        if model_type not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"model_type {model_type!r} is not supported; "
                f"supported: {', '.join(sorted(ARCHITECTURES))}"
            )
        if read.get("quantization_config"):
            raise UnsupportedModelError(
                "config: quantization_config is not supported: take the float checkpoint or GGUF"
            )
        return _read_config(cls, read, model_type, ARCHITECTURES[model_type])

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Container[str] | None = None,
        rope_factors: list[float] | None = None,
    ) -> ModelConfig:
        """Read GGUF metadata.

        tensor_names tell whether the head is tied (assumed without them); rope_factors are the
        values of the `rope_freqs.weight` tensor.
        """
        return cls.from_hf(gguf_as_hf(metadata, tensor_names, rope_factors))


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
    head_dim = read.size("head_dim", arch.head_dim_default or max(1, hidden_size // num_qo_heads))
    hidden_act = str(read.get("hidden_act", "silu"))
    if hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {hidden_act!r} is not supported, only silu")
    has_bias = bool(read.get("attention_bias", arch.qkv_bias_default))
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
        rotary_config=_read_rotary(read, head_dim),
        tie_word_embeddings=bool(read.get("tie_word_embeddings", False)),
        attention_bias=has_bias,
        o_proj_bias=has_bias and arch.o_proj_bias,
        mlp_bias=arch.mlp_bias and bool(read.get("mlp_bias", False)),
        qk_norm=arch.qk_norm,
        layer_windows=tuple(arch.windows(read, num_layers)),
        hidden_act=hidden_act,
        dtype=_read_dtype(read),
        **(_read_experts(read, num_layers) if arch.is_moe else {}),
    )


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
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": read.size("moe_intermediate_size"),
        "norm_topk_prob": bool(read.get("norm_topk_prob", False)),
        "sparse_layers": frozenset(
            i for i in range(num_layers) if i not in dense and (i + 1) % step == 0
        ),
    }


def _read_rotary(read: Reader, head_dim: int) -> RotaryConfig:
    """Old spelling: `rope_theta` and `rope_scaling`; new (transformers 5): `rope_parameters`."""
    max_position = read.size("max_position_embeddings", 2048)
    rope = read.get("rope_parameters") or read.get("rope_scaling") or {}
    scaling = {str(key): value for key, value in dict(rope).items() if value is not None}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModelError("rope parameters that differ by layer are not supported")
    base = float(scaling.pop("rope_theta", None) or read.get("rope_theta") or 10000.0)
    partial = scaling.pop("partial_rotary_factor", None) or read.get("partial_rotary_factor") or 1.0
    rotary_dim = read.size("rotary_dim", int(head_dim * float(partial)))
    if not (base > 0.0 and 2 <= rotary_dim <= head_dim and rotary_dim % 2 == 0):
        raise ModelLoadError(f"config: rope base {base} or dimension {rotary_dim} makes no sense")
    original = read.get("original_max_position_embeddings")
    kind = str(scaling.pop("rope_type", None) or scaling.get("type") or "default")
    scaling.pop("type", None)
    if kind in ("default", "mrope"):
        return RotaryConfig(head_dim, rotary_dim, max_position, base)
    scaling["rope_type"] = kind
    scaling["max_position_embeddings"] = max_position
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    check_rope_scaling(scaling)
    if kind == "yarn" and "factor" in scaling and "original_max_position_embeddings" in scaling:
        reach = float(scaling["factor"]) * int(scaling["original_max_position_embeddings"])
        max_position = max(max_position, int(reach))
    return RotaryConfig(head_dim, rotary_dim, max_position, base, scaling)
