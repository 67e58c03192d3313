"""Ranks of one engine and what they tell each other.

A `Communicator` is one rank's end of a tensor-parallel group. Layers take it as an argument and ask
it for `rank` and `size`; nothing looks up a process group by itself, so a trainer that owns torch's
default group, or a second engine in the process, is never disturbed. Size 1 starts no group and
moves nothing.

Ranks of one engine are processes that own their default group (`join_group`, `leave_group`). They
meet at a file that they inherited, so there is no port to pick, to collide on, or for others to
reach.
"""

import os
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from nanovllm.utils.cores import num_cores
from nanovllm.utils.peer_all_reduce import PeerAllReduce

# Its name since torch 2.13, which warns of the old one.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SumAndNorm(Protocol):
    """Who may take a sum over the ranks together with the norm that follows it."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, turn: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None: ...
    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Communicator:
    """One rank of a tensor-parallel group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # None: a lone rank, or a shard built for a test
    peers: PeerAllReduce | None = None  # None: the group sums tensors of every size
    peer_norm: SumAndNorm | None = None  # None: a sum and the norm that follows are two kernels

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks; `tensor` may be overwritten with it."""
        if self.size == 1:
            return tensor
        total = self.peers(tensor) if self.peers is not None else None
        if total is not None:
            return total
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the ranks' tensors: (size, *shape)."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self.size * tensor.numel())
        _all_gather_flat(gathered, tensor.reshape(-1), group=self.group)
        return gathered.view(self.size, *tensor.shape)

    def min(self, value: int, device: torch.device) -> int:
        """The smallest `value` of all ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return int(tensor.item())

    @property
    def all_reduce_name(self) -> str:
        """Who sums: "gloo", "nccl", or who up to which size; "" for a lone rank."""
        if self.group is None:
            return ""
        name = dist.get_backend(self.group) if self.peers is None else self.peers.describe()
        fused = "" if self.peer_norm is None else self.peer_norm.describe()
        return ", ".join(part for part in (fused, name) if part)


def join_group(rank: int, size: int, device_type: str, path: str) -> Communicator:
    """Make this process a rank of a group of its own, and its GPU the current one.

    Args:
        rank: Also the index of its GPU.
        size: Number of ranks; returns when all have come.
        device_type: "cuda" (NCCL) or "cpu" (gloo).
        path: A file that is the same for all ranks and was empty before they came.
    """
    # All ranks are on this host: neither a name that doesn't resolve nor a firewall is in the way.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    # Multicast objects are never used here, and making one fails or does harm on some hosts.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    store = dist.FileStore(path, size)
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return Communicator(rank, size, dist.group.WORLD)


def with_peer_memory(
    tp: Communicator, row_elements: int, dtype: torch.dtype, max_rows: int
) -> Communicator:
    """The same ranks, summing small tensors over peer memory where that is measured to be faster.

    Args:
        tp: From `join_group` on CUDA; all its ranks call this together.
        row_elements: Elements for each token of the tensors that are summed.
        dtype: Theirs.
        max_rows: Most tokens of a decode step.
    """
    assert tp.group is not None, "a lone rank has no peers"
    if dtype not in (torch.bfloat16, torch.float32):
        return tp
    try:
        return replace(tp, peers=PeerAllReduce(tp.group, row_elements, dtype, max_rows))
    except RuntimeError as error:
        warnings.warn(f"no peer memory, NCCL sums everything: {error}", stacklevel=2)
        return tp


def leave_group() -> None:
    """End the group of `join_group`."""
    if dist.is_initialized():
        dist.destroy_process_group()


def limit_threads(size: int) -> None:
    """Share the host's cores among `size` ranks; never raises what the user has set."""
    torch.set_num_threads(max(1, min(torch.get_num_threads(), num_cores() // size)))
