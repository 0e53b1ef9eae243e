"""Gemma 3: most layers see a window, norms on all sides of attention and MLP (arXiv:2503.19786).

Stored norm weights are distances from 1; GGUF files hold them with the 1 added, so their config
says `norm_weight_offset` 0.
"""

from __future__ import annotations

from .architecture import Architecture, Windows, windows_of_kinds
from .metadata import Reader


def _windows(read: Reader, num_layers: int) -> Windows:
    period = read.size("sliding_window_pattern")
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention"
             for i in range(num_layers)]  # fmt: skip
    return windows_of_kinds(read, num_layers, kinds)


ARCHITECTURE = Architecture(
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "norm_weight_offset": 1.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    qk_norm=True,
    has_post_norms=True,
    has_local_rope=True,
    scales_embedding=True,
    windows=_windows,
    unsupported=(
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ),
)
