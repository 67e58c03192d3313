"""Ranks of one engine and what they tell each other.

A `Communicator` is one rank's end of a tensor-parallel group. Layers take it as an argument and ask
it for `rank` and `size`; nothing looks up a process group by itself, so a trainer that owns torch's
default group, or a second engine in the process, is never disturbed. Size 1 starts no group and
moves nothing.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Communicator:
    """One rank of a tensor-parallel group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # None: a lone rank, or a shard built for a test

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the ranks' tensors: (size, *shape)."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def min(self, value: int, device: torch.device) -> int:
        """The smallest `value` of all ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return int(tensor.item())
