"""The plain sampler: one token a row by the Gumbel-max trick; see `kernels.sampling`.

Each rank finds the winner among its own part of the vocabulary, and ranks exchange one
(score, token id) pair a row, never the logits.
"""

import torch
from torch import nn

from nanovllm.kernels.sampling import combine_shards, sample, sample_torch
from nanovllm.utils.distributed import Communicator


class Sampler(nn.Module):
    """Draws tokens from logits that may be one rank's part of the vocabulary."""

    def __init__(self, tp: Communicator, vocab_start: int) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_start = vocab_start

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return (rows,) int32 token ids, the same on every rank.

        Args:
            logits: (rows, this rank's vocabulary).
            temperatures: (rows,) float32; below 1e-5 is greedy.
            seeds: (rows,) int64.
            positions: (rows,) position of the token to draw in its sequence.
        """
        draw = sample if logits.is_cuda else sample_torch
        sampled = draw(logits, temperatures, seeds, positions, self.vocab_start)
        if self.tp.size == 1:
            return sampled.token_ids
        # One exchange for both: a score travels as the bits of an int32.
        pairs = torch.stack((sampled.values.view(torch.int32), sampled.token_ids))
        pairs = self.tp.all_gather(pairs)  # (ranks, 2, rows)
        values = pairs[:, 0].contiguous().view(torch.float32)
        return combine_shards(values, pairs[:, 1]).token_ids
