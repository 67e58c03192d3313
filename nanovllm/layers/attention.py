"""Attention over the paged KV cache.

A step's keys and values are stored before anything attends, for all lanes at once. That order is
what lets two prompts of one step share a prefix: the second reads blocks that the first has just
written. Prefill lanes bring many queries each and are bound by arithmetic; decode lanes bring one
query each and are bound by reading the cache; a backend has a function for either, and one for
steps of both.
"""

import torch
from torch import nn

from nanovllm.kernels.store_kvcache import store_kvcache, store_kvcache_torch
from nanovllm.layers.attention_backend import AttentionBackend
from nanovllm.utils.context import get_context


class Attention(nn.Module):
    """Grouped-query attention of one layer on one rank.

    `k_cache` and `v_cache`, (blocks, block_size, kv_heads, head_dim), are views of the runner's one
    pool; `bind_kv_cache` sets them.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def __init__(self, head_dim: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.scale = head_dim**-0.5
        self.backend = backend

    def bind_kv_cache(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Make the layer store to and read from these views."""
        self.k_cache, self.v_cache = k_cache, v_cache

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v, (tokens, kv_heads, head_dim), and attend; see `attend`.

        Qwen3 calls `attend` alone, since the kernel that norms and rotates stores k and v too.
        """
        store = store_kvcache if k.is_cuda else store_kvcache_torch
        store(k, v, self.k_cache, self.v_cache, get_context().slot_mapping)
        return self.attend(q)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Attend with the step's keys already in the cache.

        Args:
            q: (tokens, heads, head_dim), prefill lanes first.

        Returns:
            (tokens, heads * head_dim).
        """
        context, backend = get_context(), self.backend
        run = backend.mixed
        if context.num_decodes == 0:
            run = backend.prefill
        elif context.num_prefills == 0:
            run = backend.decode
        return run(q, self.k_cache, self.v_cache, context, self.scale).flatten(1)
