"""Rotary position embedding: the table of cosines and sines that queries and keys are rotated by.

The rotation itself is one step of `kernels.norm.qk_norm_rope_store`, which norms, rotates and
stores in one launch.
"""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position, float32, shared by all layers.

    `cos_sin_cache` is (max_position, head_dim): head_dim / 2 cosines, then as many sines.

    Source: Su et al., RoFormer, 2021; halves rotated as in GPT-NeoX and Qwen3.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, head_dim: int, max_position: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / theta**exponents
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("cos_sin_cache", cos_sin_cache, persistent=False)
