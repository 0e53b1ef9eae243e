"""The attention layer between the merged QKV projection and the output projection.

It norms (where the model does) and rotates q and k in place, inside the projection's own buffer,
and hands all three to the backend of the current context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from minisgl.core import get_global_ctx
from minisgl.distributed import current_tp_info
from minisgl.kernel.torch_ops import rotate_
from minisgl.utils import div_even

from .base import StateLessOP
from .norm import RMSNorm

if TYPE_CHECKING:
    from minisgl.kernel.program import Buffer, Recorder


class AttentionLayer(StateLessOP):
    """Attention of one layer on this rank's heads.

    window: how many tokens back a token sees, itself included; None for all. scale: of products of
    queries and keys; None for 1 / sqrt(head_dim).
    """

    def __init__(
        self,
        layer_id: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> None:
        size = current_tp_info().size
        self._layer_id = layer_id
        self._num_q = div_even(num_qo_heads, size)
        self._num_kv = div_even(num_kv_heads, size, allow_replicate=True)
        self._head_dim = head_dim
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._window = window
        self._scale = scale

    def forward(
        self, qkv: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """(tokens, (q + 2 kv heads) * dim), overwritten, to (tokens, q heads * dim).

        cos_sin: of the tokens' positions, from the model's `RotaryEmbedding`.
        """
        ctx = get_global_ctx()
        batch = ctx.batch
        num_q, num_kv = self._num_q, self._num_kv
        heads = qkv.view(len(qkv), num_q + 2 * num_kv, self._head_dim)
        q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
        if self._q_norm is not None:
            self._q_norm.forward_inplace(q)
        if self._k_norm is not None:
            self._k_norm.forward_inplace(k)
        rotate_(heads[:, : num_q + num_kv], *cos_sin)
        asked = {"window": self._window, "scale": self._scale}
        options: dict[str, Any] = {k: a for k, a in asked.items() if a is not None}
        out = ctx.attn_backend.forward(q, k, v, self._layer_id, batch, **options)
        return out.reshape(len(qkv), num_q * self._head_dim)

    def record(
        self, program: Recorder, qkv: Buffer, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> Buffer:
        """As `forward`; tables: cos and sin by position."""
        norms = None
        if self._q_norm is not None and self._k_norm is not None:
            norms = (self._q_norm.scale, self._k_norm.scale, self._q_norm.eps)
        heads = (self._num_q, self._num_kv)
        return program.attention(
            qkv, self._layer_id, *heads, tables, self._window, norms, self._scale
        )
