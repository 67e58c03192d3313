"""The vocabulary at both ends of the network, split over ranks.

Each rank holds a run of ceil(vocab_size / size) rows, the last one perhaps fewer.
"""

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import copy_checked, make_parameter
from nanovllm.utils.context import get_context
from nanovllm.utils.distributed import Communicator
from nanovllm.utils.loader import LoadedTensor


class VocabParallelEmbedding(nn.Module):
    """Token ids to hidden states; a rank adds the rows it holds, the others add zero."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, tp: Communicator
    ) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.shard_size = -(-vocab_size // tp.size)
        self.vocab_start = min(tp.rank * self.shard_size, vocab_size)
        self.num_rows = min(self.shard_size, vocab_size - self.vocab_start)  # of this rank
        if self.num_rows <= 0:
            raise ValueError(f"vocab_size {vocab_size} leaves rank {tp.rank} of {tp.size} nothing")
        self.weight = make_parameter(
            self.num_rows, hidden_size, dtype=dtype, weight_loader=self.weight_loader
        )

    def weight_loader(
        self, param: nn.Parameter, loaded: LoadedTensor, shard_id: Hashable = None
    ) -> None:
        copy_checked(param.data, loaded, dim=0, start=self.vocab_start, total=self.vocab_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) ids to (tokens, hidden)."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local_ids = token_ids - self.vocab_start
        is_here = (local_ids >= 0) & (local_ids < self.num_rows)
        hidden = F.embedding(local_ids * is_here, self.weight) * is_here.unsqueeze(1)
        return self.tp.all_reduce(hidden)


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states to the logits of this rank's part of the vocabulary, for sampled rows only.

    A prefill step runs thousands of tokens and samples one per sequence: with 152k logits a token
    the head would cost more than the network if it ran on all of them.
    """

    def forward(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens, hidden) to (lanes, rows of this rank), written to `out` where there is one.

        No rank sees another's logits.
        """
        indices = get_context().logits_indices
        if indices is not None:
            hidden_states = hidden_states[indices]
        if out is not None:
            return torch.mm(hidden_states, self.weight.t(), out=out)
        return F.linear(hidden_states, self.weight)
