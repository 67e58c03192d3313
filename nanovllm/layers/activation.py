"""SiLU-and-multiply, the nonlinearity of Qwen3's gated feed-forward layer."""

import torch
from torch import nn

from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_torch


class SiluAndMul(nn.Module):
    """(tokens, 2 * inter), gate then up, to silu(gate) * up of (tokens, inter)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x) if x.is_cuda else silu_and_mul_torch(x)
