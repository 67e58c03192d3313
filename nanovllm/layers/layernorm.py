"""RMSNorm, alone or after summing the ranks' parts and adding them to the residual."""

import torch
from torch import nn

from nanovllm.kernels.norm import rms_norm, rms_norm_torch
from nanovllm.layers.linear import make_parameter
from nanovllm.layers.peer_norm import sum_add_rms_norm
from nanovllm.utils.distributed import Communicator


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square, then by a weight; float32 inside.

    Args:
        hidden_size: Elements of a row.
        eps: Added to the mean of squares.
        dtype: Of the weight.
        tp: The ranks over which x is summed where there is a residual; None: x is whole.
        turn: 0 or 1, alternating from one norm with `tp` to the next.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        tp: Communicator | None = None,
        turn: int = 0,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.tp = tp or Communicator()
        self.turn = turn
        self.weight = make_parameter(hidden_size, dtype=dtype)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed rows and the residual stream they were taken from.

        Args:
            x: (tokens, hidden); with a residual this rank's part, which may be overwritten.
            residual: (tokens, hidden), updated in place with the sum; None: x is the stream.
        """
        if residual is None:
            norm = rms_norm if x.is_cuda else rms_norm_torch
            return norm(x, self.weight, self.eps), x
        return sum_add_rms_norm(self.tp, x, residual, self.weight, self.eps, self.turn)
