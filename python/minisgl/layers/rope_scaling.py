"""The frequencies of rotary embedding under each kind of scaling, as plain functions.

`rope_frequencies` returns `(inverse frequencies, factor on cos and sin)`; frequencies are float32,
`(rotary_dim / 2,)`, or `(positions, rotary_dim / 2)` where they change with the position. Keys of
`scaling` are those of Hugging Face's `rope_scaling` / `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from minisgl.utils import Registry
from minisgl.utils.errors import UnsupportedModelError

Scaling = Mapping[str, Any]
Frequencies = tuple[torch.Tensor, float]
_KINDS: Registry[Callable[[int, int, float, Scaling], Frequencies]] = Registry("rope scaling")


def rope_kind(scaling: Scaling | None) -> str:
    """The kind named by the new key `rope_type` or the old key `type`."""
    if not scaling:
        return "default"
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def check_rope_scaling(scaling: Scaling | None, rotary_dim: int = 8) -> None:
    """`UnsupportedModelError` for a kind that is not one of ours, or whose numbers do not fit."""
    kind = rope_kind(scaling)
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(_KINDS.names())}"
        )
    try:
        rope_frequencies(rotary_dim, 64, 10000.0, scaling)
    except KeyError as error:
        raise UnsupportedModelError(f"rope scaling {kind!r} needs {error}") from error
    except (TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not usable: {error}") from error


def rope_frequencies(
    rotary_dim: int, max_position: int, base: float, scaling: Scaling | None
) -> Frequencies:
    """Inverse frequencies and the factor on cos and sin."""
    return _KINDS[rope_kind(scaling)](rotary_dim, max_position, base, scaling or {})


def _plain(rotary_dim: int, base: float) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return 1.0 / (base**exponents)


@_KINDS.register("default")
def _default(rotary_dim: int, max_position: int, base: float, scaling: Scaling) -> Frequencies:
    return _plain(rotary_dim, base), 1.0


@_KINDS.register("linear")
def _linear(rotary_dim: int, max_position: int, base: float, scaling: Scaling) -> Frequencies:
    return _plain(rotary_dim, base) / float(scaling["factor"]), 1.0


@_KINDS.register("factors")
def _factors(rotary_dim: int, max_position: int, base: float, scaling: Scaling) -> Frequencies:
    """A divisor for each frequency: the `rope_freqs` tensor of GGUF files."""
    return _plain(rotary_dim, base) / _divisors(scaling["factors"], rotary_dim), 1.0


def _divisors(factors: Sequence[float], rotary_dim: int) -> torch.Tensor:
    if len(factors) != rotary_dim // 2:
        raise ValueError(f"{len(factors)} factors, not {rotary_dim // 2}")
    return torch.tensor(factors, dtype=torch.float32, device="cpu")


@_KINDS.register("longrope")
def _longrope(rotary_dim: int, max_position: int, base: float, scaling: Scaling) -> Frequencies:
    """Divisors for short contexts, and others beyond the original one (arXiv:2402.13753).

    max_position: of the context that is served; all of it has the same divisors, so that keys in
    the cache serve every longer sequence. That of the model decides how attention is sharpened.
    """
    trained = int(scaling.get("max_position_embeddings") or max_position)
    original = original_length(scaling) or trained
    factor = float(scaling.get("factor") or trained / original)
    attention = scaling.get("attention_factor")
    if attention is None:
        extra = math.log(factor) / math.log(original) if factor > 1.0 else 0.0
        attention = math.sqrt(1.0 + extra)
    short, long = (_divisors(scaling[f"{name}_factor"], rotary_dim) for name in ("short", "long"))
    divisors = long if max_position > original else short
    return _plain(rotary_dim, base) / divisors, float(attention)


def original_length(scaling: Scaling | None) -> int:
    """The context that the model had before it was stretched; 0 if the scaling does not say."""
    return int((scaling or {}).get("original_max_position_embeddings") or 0)


@_KINDS.register("llama3")
def _llama3(rotary_dim: int, max_position: int, base: float, scaling: Scaling) -> Frequencies:
    """Slow the low frequencies down, keep the high ones, blend in between (Llama 3.1)."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling.get("original_max_position_embeddings") or max_position)
    plain = _plain(rotary_dim, base)
    turns = original * plain / (2 * math.pi)  # full turns within the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * blend + plain / factor * (1.0 - blend), 1.0


@_KINDS.register("dynamic")
def _dynamic(rotary_dim: int, max_position: int, base: float, scaling: Scaling) -> Frequencies:
    """Up to the trained length nothing changes; beyond it the base grows with the position.

    Each position is turned as if the sequence ended there, which is what decoding token by token
    with a KV cache does; so a position's K depends on nothing but the position.
    """
    factor = float(scaling["factor"])
    trained = int(scaling.get("max_position_embeddings") or max_position)
    length = torch.arange(1, max_position + 1, dtype=torch.float64, device="cpu").clamp_(trained)
    growth = factor * length / trained - (factor - 1.0)
    bases = base * growth ** (rotary_dim / (rotary_dim - 2))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return 1.0 / (bases.float().unsqueeze(1) ** exponents), 1.0


@_KINDS.register("yarn")
def _yarn(rotary_dim: int, max_position: int, base: float, scaling: Scaling) -> Frequencies:
    """Interpolate low frequencies, keep high ones, and sharpen attention (arXiv:2309.00071)."""
    original = int(scaling.get("original_max_position_embeddings") or max_position)
    factor = float(scaling.get("factor") or max_position / original)
    attention = scaling.get("attention_factor")
    if attention is None:
        scale, scale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = _yarn_mscale(factor, 1.0)
        if scale and scale_all:
            attention = _yarn_mscale(factor, scale) / _yarn_mscale(factor, scale_all)

    def dim_of(turns: float) -> float:
        """The (fractional) dimension that makes `turns` full turns in the original context."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dim_of(float(scaling.get("beta_fast") or 32))
    high = dim_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    steps = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((steps - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    plain = _plain(rotary_dim, base)
    return plain / factor * ramp + plain * (1.0 - ramp), float(attention)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
