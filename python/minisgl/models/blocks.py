"""The blocks that all supported decoders share, from a `ModelConfig` to layers.

Names of attributes are the names of the weights. Where architectures differ (biases, norms on
heads, windows, experts), the config says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.core import get_global_ctx
from minisgl.layers import (
    AttentionLayer,
    BaseOP,
    LinearColParallelMerged,
    LinearOProj,
    LinearQKVMerged,
    LinearReplicated,
    LinearRowParallel,
    MoELayer,
    OPList,
    ParallelLMHead,
    RMSNorm,
    RMSNormFused,
    RotaryEmbedding,
    VocabParallelEmbedding,
    gate_and_mul,
    get_rope,
    native_parts,
)

from .config import ModelConfig, RotaryConfig

if TYPE_CHECKING:
    from minisgl.kernel.program import Buffer, Recorder

CosSin = tuple[torch.Tensor, torch.Tensor]


class SelfAttention(BaseOP):
    """Merged QKV projection, attention, output projection."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        heads = (config.num_qo_heads, config.num_kv_heads)
        self.qkv_proj = LinearQKVMerged(
            config.hidden_size, config.head_dim, *heads, has_bias=config.attention_bias
        )
        if config.qk_norm:
            norm = (config.head_dim, config.rms_norm_eps, config.norm_weight_offset)
            self.q_norm, self.k_norm = RMSNorm(*norm), RMSNorm(*norm)
        self.o_proj = LinearOProj(
            config.num_qo_heads * config.head_dim, config.hidden_size, config.o_proj_bias
        )
        self._attention = AttentionLayer(
            layer_id,
            *heads,
            config.head_dim,
            q_norm=self.q_norm if config.qk_norm else None,
            k_norm=self.k_norm if config.qk_norm else None,
            window=config.window(layer_id),
            scale=config.attention_scale,
        )

    def forward(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """(tokens, hidden) to the same."""
        qkv = self.qkv_proj.forward(x)
        return self.o_proj.forward(self._attention.forward(qkv, cos_sin))

    def record(self, program: Recorder, x: Buffer, tables: CosSin) -> Buffer:
        """As `forward`; tables: cos and sin by position."""
        qkv = self.qkv_proj.record(program, x)
        return self.o_proj.record(program, self._attention.record(program, qkv, tables))


class GatedMLP(BaseOP):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        self._activation = config.hidden_act
        sizes = [config.intermediate_size] * 2
        self.gate_up_proj = LinearColParallelMerged(config.hidden_size, sizes, config.mlp_bias)
        self.down_proj = LinearRowParallel(
            config.intermediate_size, config.hidden_size, config.mlp_bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) to the same."""
        gate_up = self.gate_up_proj.forward(x)
        return self.down_proj.forward(gate_and_mul(gate_up, self._activation))

    def record(self, program: Recorder, x: Buffer) -> Buffer:
        """As `forward`."""
        if self.gate_up_proj.bias is None and self.down_proj.bias is None:
            gate_up = native_parts(self.gate_up_proj.weight)
            down = native_parts(self.down_proj.weight)
            if len(down) == 1:
                out = program.gated_mlp(x, gate_up, self._activation, down[0])
                if out is not None:
                    return out
        gated = program.gate_mul(self.gate_up_proj.record(program, x), self._activation)
        return self.down_proj.record(program, gated)


class SparseMLP(BaseOP):
    """A router and its experts."""

    def __init__(self, config: ModelConfig) -> None:
        self.gate = LinearReplicated(config.hidden_size, config.num_experts)
        self.experts = MoELayer(
            config.num_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.moe_intermediate_size,
            config.norm_topk_prob,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) to the same."""
        return self.experts.forward(x, self.gate.forward(x))

    def record(self, program: Recorder, x: Buffer) -> Buffer:
        """As `forward`."""
        return self.experts.record(program, x, self.gate.record(program, x))


def _norm_of_rows(config: ModelConfig) -> tuple[int, float, float]:
    return config.hidden_size, config.rms_norm_eps, config.norm_weight_offset


class DecoderLayer(BaseOP):
    """Attention and MLP, each behind a norm that also keeps the residual stream."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        self.self_attn = SelfAttention(config, layer_id)
        is_sparse = layer_id in config.sparse_layers
        self.mlp = SparseMLP(config) if is_sparse else GatedMLP(config)
        norm = _norm_of_rows(config)
        self.input_layernorm = RMSNormFused(*norm)
        self.post_attention_layernorm = RMSNormFused(*norm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual); the next norm adds them."""
        x, residual = self.input_layernorm.forward(x, residual)
        x = self.self_attn.forward(x, cos_sin)
        x, residual = self.post_attention_layernorm.forward(x, residual)
        return self.mlp.forward(x), residual

    def record(
        self, program: Recorder, x: Buffer, residual: Buffer | None, tables: CosSin, is_last: bool
    ) -> tuple[Buffer, Buffer]:
        """As `forward`; behind the last attention only the wanted rows go on."""
        x, residual = self.input_layernorm.record(program, x, residual)
        x = self.self_attn.record(program, x, tables)
        if is_last:
            x, residual = program.wanted(x), program.wanted(residual)
        x, residual = self.post_attention_layernorm.record(program, x, residual)
        return self.mlp.record(program, x), residual


class SandwichLayer(BaseOP):
    """Attention and MLP, each between two norms; the residual stream takes what is normed."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        self.self_attn = SelfAttention(config, layer_id)
        self.mlp = GatedMLP(config)
        norm = _norm_of_rows(config)
        self.input_layernorm = RMSNormFused(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.pre_feedforward_layernorm = RMSNormFused(*norm)
        self.post_feedforward_layernorm = RMSNorm(*norm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`."""
        x, residual = self.input_layernorm.forward(x, residual)
        x = self.post_attention_layernorm.forward(self.self_attn.forward(x, cos_sin))
        x, residual = self.pre_feedforward_layernorm.forward(x, residual)
        return self.post_feedforward_layernorm.forward(self.mlp.forward(x)), residual

    def record(
        self, program: Recorder, x: Buffer, residual: Buffer | None, tables: CosSin, is_last: bool
    ) -> tuple[Buffer, Buffer]:
        """As `DecoderLayer.record`."""
        x, residual = self.input_layernorm.record(program, x, residual)
        x = self.self_attn.record(program, x, tables)
        if is_last:
            x, residual = program.wanted(x), program.wanted(residual)
        x = self.post_attention_layernorm.record(program, x)
        x, residual = self.pre_feedforward_layernorm.record(program, x, residual)
        x = self.mlp.record(program, x)
        return self.post_feedforward_layernorm.record(program, x), residual


def _rope(config: RotaryConfig) -> RotaryEmbedding:
    return get_rope(
        config.head_dim, config.rotary_dim, config.max_position, config.base, config.scaling
    )


class Decoder(BaseOP):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig) -> None:
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, config.embedding_scale
        )
        kind = SandwichLayer if config.has_post_norms else DecoderLayer
        self.layers: OPList[SandwichLayer | DecoderLayer] = OPList(
            [kind(config, i) for i in range(config.num_layers)]
        )
        self.norm = RMSNormFused(*_norm_of_rows(config))
        self._rotary = [_rope(config.rotary(i)) for i in range(config.num_layers)]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(tokens,) each to normed (tokens, hidden)."""
        num_positions = get_global_ctx().page_table.shape[1]
        cos_sin = {
            rope: rope.within(num_positions).cos_sin(positions)
            for rope in dict.fromkeys(self._rotary)
        }
        x = self.embed_tokens.forward(input_ids)
        residual: torch.Tensor | None = None
        for layer, rope in zip(self.layers.op_list, self._rotary, strict=True):
            x, residual = layer.forward(x, residual, cos_sin[rope])
        return self.norm.forward(x, residual)[0]

    def record(self, program: Recorder) -> Buffer:
        """As `forward`, for the wanted rows."""
        num_positions = program.num_positions
        x = self.embed_tokens.record(program)
        residual: Buffer | None = None
        for layer, rope in zip(self.layers.op_list, self._rotary, strict=True):
            tables = rope.within(num_positions).tables(num_positions)
            is_last = layer is self.layers.op_list[-1]
            x, residual = layer.record(program, x, residual, tables, is_last)
        return self.norm.record(program, x, residual)[0]


class CausalLM(BaseOP):
    """A decoder and its output head; `forward` takes everything from the current context."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.model = Decoder(config)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            tied_embedding=self.model.embed_tokens if config.tie_word_embeddings else None,
        )

    @property
    def config(self) -> ModelConfig:
        """The numbers it was made from."""
        return self._config

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """Float32 logits (padded requests, vocabulary): the last position of each."""
        batch = get_global_ctx().batch
        return self.lm_head.forward(self.model.forward(batch.input_ids, batch.positions))

    def record(self, program: Recorder) -> None:
        """The same as steps of a native program; `CannotRecord` where there is no such step."""
        self.lm_head.record(program, self.model.record(program))


def create_model(config: ModelConfig) -> CausalLM:
    """A model with empty weights of the default dtype on the default device (also meta)."""
    return CausalLM(config)
