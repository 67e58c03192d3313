"""Qwen3, dense: the network and nothing else.

Parameter names are the checkpoint's, once `packed_modules_mapping` has said which checkpoint
tensors live side by side in one parameter. Activations are flat, (tokens, features), with no batch
dimension: which token belongs to which sequence is in the step's Context.

Source: Qwen3 Technical Report, 2025; transformers' Qwen3ForCausalLM for names and numerics.
"""

import torch
from torch import nn

from nanovllm.kernels.gemm import MAX_GEMV_ROWS, linear_add, norm_linear, norm_linear_silu
from nanovllm.kernels.norm import qk_norm_rope_store, qk_norm_rope_store_torch
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import AttentionBackend
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import ModelConfig
from nanovllm.utils.context import get_context
from nanovllm.utils.distributed import Communicator


class Qwen3Attention(nn.Module):
    """Grouped-query attention with per-head norms on queries and keys."""

    def __init__(
        self,
        config: ModelConfig,
        rotary_emb: RotaryEmbedding,
        backend: AttentionBackend,
        dtype: torch.dtype,
        tp: Communicator,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            dtype=dtype,
            tp=tp,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            dtype=dtype,
            tp=tp,
            reduce_results=False,
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.rotary_emb = rotary_emb
        self.attn = Attention(config.head_dim, backend)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.attend(positions, self.qkv_proj(hidden_states)))

    def attend(self, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """(tokens, q + k + v features) to (tokens, heads * head_dim)."""
        norm_rope_store = qk_norm_rope_store if qkv.is_cuda else qk_norm_rope_store_torch
        q = norm_rope_store(
            qkv,
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
            self.rotary_emb.cos_sin_cache,
            positions,
            self.attn.k_cache,
            self.attn.v_cache,
            get_context().slot_mapping,
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            self.qkv_proj.head_dim,
        )
        return self.attn.attend(q)


class Qwen3MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tp: Communicator) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2, dtype=dtype, tp=tp
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            dtype=dtype,
            tp=tp,
            reduce_results=False,
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Qwen3DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed residual stream.

    Under tensor parallelism either leaves each rank with a part of its result. The next norm sums
    the parts, because sum, residual and norm can be one kernel.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary_emb: RotaryEmbedding,
        backend: AttentionBackend,
        dtype: torch.dtype,
        tp: Communicator,
    ) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, rotary_emb, backend, dtype, tp)
        self.mlp = Qwen3MLP(config, dtype, tp)
        self.input_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=dtype, tp=tp, turn=1
        )
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=dtype, tp=tp, turn=0
        )

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual

    def forward_fused(self, positions: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """The same in six launches, for a row or two; the residual stream is updated in place."""
        attention, mlp = self.self_attn, self.mlp
        norm = self.input_layernorm
        qkv = norm_linear(stream, norm.weight, norm.eps, attention.qkv_proj.weight)
        linear_add(attention.attend(positions, qkv), attention.o_proj.weight, stream)
        norm = self.post_attention_layernorm
        gated = norm_linear_silu(stream, norm.weight, norm.eps, mlp.gate_up_proj.weight)
        return linear_add(gated, mlp.down_proj.weight, stream)


class Qwen3Model(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        tp: Communicator,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, dtype=dtype, tp=tp
        )
        rotary_emb = RotaryEmbedding(config.head_dim, max_model_len, config.rope_theta)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, rotary_emb, backend, dtype, tp)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, tp=tp, turn=1)
        # The residual is added before any all-reduce could be, and there is no place for a bias.
        self._can_fuse = tp.size == 1 and not config.attention_bias and dtype != torch.float32

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden_states, residual = self.embed_tokens(input_ids), None
        if self._runs_fused(hidden_states):
            for layer in self.layers:
                hidden_states = layer.forward_fused(positions, hidden_states)  # type: ignore[operator]
            return self.norm(hidden_states)[0]
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states, residual)[0]

    def _runs_fused(self, hidden_states: torch.Tensor) -> bool:
        """Whether a batch is so small that launches, not weights, are what a layer waits for."""
        is_small = hidden_states.is_cuda and hidden_states.shape[0] <= MAX_GEMV_ROWS
        return is_small and self._can_fuse


class Qwen3ForCausalLM(nn.Module):
    """The network of a dense Qwen3 checkpoint, this rank's part of it.

    Args:
        config: The checkpoint's facts.
        max_model_len: Positions that the rotary table must cover.
        backend: Who computes attention.
        dtype: Of parameters and activations.
        tp: This rank and how many there are.
    """

    # checkpoint name -> (parameter name, shard_id of its weight_loader)
    packed_modules_mapping = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_model_len: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        tp: Communicator,
    ) -> None:
        super().__init__()
        self.model = Qwen3Model(config, max_model_len, backend, dtype, tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, dtype=dtype, tp=tp)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(tokens,) ids and positions to (tokens, hidden)."""
        return self.model(input_ids, positions)

    def compute_logits(
        self, hidden_states: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(tokens, hidden) to (lanes, this rank's vocabulary), in `out` where it is given."""
        return self.lm_head(hidden_states, out)
