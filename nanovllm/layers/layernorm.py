"""RMSNorm, alone or with the residual added first."""

import torch
from torch import nn

from nanovllm.kernels.norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from nanovllm.layers.linear import make_parameter


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square, then by a weight; float32 inside.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_parameter(hidden_size, dtype=dtype)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed rows and the residual stream they were taken from.

        Args:
            x: (tokens, hidden).
            residual: (tokens, hidden), updated in place with the sum; None: x is the stream.
        """
        if residual is None:
            norm = rms_norm if x.is_cuda else rms_norm_torch
            return norm(x, self.weight, self.eps), x
        add_norm = add_rms_norm if x.is_cuda else add_rms_norm_torch
        return add_norm(x, residual, self.weight, self.eps)
