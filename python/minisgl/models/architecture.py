"""What the models of one `model_type` have in common and their config does not say.

A new architecture is a file with its `ARCHITECTURE`, and a line in `config.ARCHITECTURES`; what
it does is in `blocks`, as flags or numbers of its `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl.utils.errors import ModelLoadError

from .metadata import Reader

Windows = list[int | None]  # by layer: how many tokens back it sees, None for all


def no_windows(read: Reader, num_layers: int) -> Windows:
    """All layers see everything."""
    return [None] * num_layers


def same_window(read: Reader, num_layers: int) -> Windows:
    """All layers see `sliding_window` tokens, or everything if that is null."""
    window = read.get("sliding_window")
    return [None if window is None else read.checked("sliding_window", window)] * num_layers


def windows_of_kinds(read: Reader, num_layers: int, default_kinds: list[str]) -> Windows:
    """The layers that `layer_types` (or the default) calls "sliding_attention" see a window."""
    kinds = read.get("layer_types") or default_kinds
    if not isinstance(kinds, (list, tuple)) or len(kinds) != num_layers:
        raise ModelLoadError(f"config: layer_types must be a list of {num_layers}, got {kinds!r}")
    window = read.size("sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]


@dataclass(frozen=True, slots=True)
class Architecture:
    """defaults: for keys that a config leaves out. renames: parts of stored names to ours.

    mlp_bias: whether the config may ask for one. o_proj_bias: whether there is one if Q, K and V
    have one. has_post_norms: a norm also behind attention and MLP. has_local_rope: layers with a
    window have a rotary base of their own. unsupported: keys that must be unset.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    o_proj_bias: bool = True
    mlp_bias: bool = False
    qk_norm: bool = False
    is_moe: bool = False
    has_post_norms: bool = False
    has_local_rope: bool = False
    scales_embedding: bool = False
    windows: Callable[[Reader, int], Windows] = no_windows
    unsupported: tuple[str, ...] = ()
