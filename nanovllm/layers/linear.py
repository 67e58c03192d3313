"""Linear layers split over ranks.

A matrix product can be cut in two ways. *Column parallel*: each rank holds some of the output
features and nothing needs to be exchanged. *Row parallel*: each rank holds some of the input
features and the partial products are summed over the ranks. Qwen3's attention and feed-forward
each pair one of either kind, so a block costs two sums, which it leaves to the norms that follow.

Each parameter carries its `weight_loader`, which copies this rank's slice of a checkpoint tensor
into it; rank and size come from the Communicator given at construction, never from a look-up.

Source: Shoeybi et al., Megatron-LM, 2019.
"""

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.gemm import measured_config, small_batch_linear
from nanovllm.utils.distributed import Communicator
from nanovllm.utils.loader import LoadedTensor

WeightLoader = Callable[[nn.Parameter, LoadedTensor, Hashable | None], None]


def make_parameter(
    *shape: int, dtype: torch.dtype, weight_loader: WeightLoader | None = None
) -> nn.Parameter:
    """An inference parameter that knows how to load itself."""
    parameter = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    parameter.weight_loader = weight_loader or load_replicated  # type: ignore[attr-defined]
    return parameter


def load_replicated(param: nn.Parameter, loaded: LoadedTensor, shard_id: Hashable = None) -> None:
    """Copy a whole checkpoint tensor."""
    copy_checked(param.data, loaded, dim=0, start=0, total=param.shape[0])


def copy_checked(
    target: torch.Tensor, loaded: LoadedTensor, *, dim: int, start: int, total: int
) -> None:
    """Copy the part of `loaded` that begins at `start` of dimension `dim` into `target`.

    Args:
        target: This rank's part of a parameter.
        loaded: The whole checkpoint tensor, or its reader.
        dim: The dimension that ranks share out.
        start: Where this rank's part begins.
        total: Size of the whole in that dimension: a longer tensor must not load in part.

    Raises:
        ValueError: The checkpoint tensor has another shape than the whole parameter.
    """
    expected = (*target.shape[:dim], total, *target.shape[dim + 1 :])
    if tuple(loaded.shape) != expected:
        raise ValueError(
            f"its shape is {tuple(loaded.shape)}, config.json asks for {tuple(expected)}"
        )
    target.copy_(loaded.narrow(dim, start, target.shape[dim]))


def divide(total: int, parts: int, what: str) -> int:
    """`total / parts`, or a ValueError that names what doesn't divide."""
    if total % parts:
        raise ValueError(f"{what} {total} can't be split evenly over {parts} ranks")
    return total // parts


class LinearBase(nn.Module):
    """A weight (out_features, in_features) of this rank, and perhaps a bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        tp: Communicator,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = make_parameter(
            out_features, in_features, dtype=dtype, weight_loader=self.weight_loader
        )
        self.bias = (
            make_parameter(out_features, dtype=dtype, weight_loader=self.weight_loader)
            if bias
            else None
        )

    def weight_loader(
        self, param: nn.Parameter, loaded: LoadedTensor, shard_id: Hashable = None
    ) -> None:
        """Copy this rank's part of a checkpoint tensor."""
        load_replicated(param, loaded)

    def copy_share(self, target: torch.Tensor, loaded: LoadedTensor, dim: int) -> None:
        """Copy this rank's part, all being of one size; see `copy_checked`."""
        length = target.shape[dim]
        start, total = self.tp.rank * length, self.tp.size * length
        copy_checked(target, loaded, dim=dim, start=start, total=total)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class ReplicatedLinear(LinearBase):
    """Every rank holds the whole weight."""


class ColumnParallelLinear(LinearBase):
    """Each rank holds `out_features / size` output features."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        tp: Communicator,
        bias: bool = False,
    ) -> None:
        shard = divide(out_features, tp.size, "output features")
        super().__init__(in_features, shard, dtype=dtype, tp=tp, bias=bias)

    def weight_loader(
        self, param: nn.Parameter, loaded: LoadedTensor, shard_id: Hashable = None
    ) -> None:
        self.copy_share(param.data, loaded, dim=0)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel weights in one, side by side: one product instead of several.

    A checkpoint tensor is one of them; its shard_id is its index in `out_features`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: list[int],
        *,
        dtype: torch.dtype,
        tp: Communicator,
        bias: bool = False,
    ) -> None:
        self.shards = [divide(size, tp.size, "output features") for size in out_features]
        super().__init__(in_features, sum(self.shards), dtype=dtype, tp=tp, bias=bias)

    def weight_loader(
        self, param: nn.Parameter, loaded: LoadedTensor, shard_id: Hashable = None
    ) -> None:
        assert isinstance(shard_id, int), f"shard_id is {shard_id!r}, expected an index"
        offset, length = sum(self.shards[:shard_id]), self.shards[shard_id]
        self.copy_share(param.data.narrow(0, offset, length), loaded, dim=0)


class QKVParallelLinear(LinearBase):
    """Query, key and value projections in one weight, split by heads.

    With fewer KV heads than ranks each KV head is held by size / num_kv_heads ranks. A checkpoint
    tensor's shard_id is "q", "k" or "v".
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        dtype: torch.dtype,
        tp: Communicator,
        bias: bool = False,
    ) -> None:
        self.head_dim = head_dim
        self.total_sizes = {"q": num_heads * head_dim, "kv": num_kv_heads * head_dim}
        self.num_heads = divide(num_heads, tp.size, "num_attention_heads")
        self.num_kv_heads = num_kv_heads_of_rank(num_kv_heads, tp.size)
        self.kv_rank = tp.rank * num_kv_heads // tp.size if num_kv_heads < tp.size else tp.rank
        out_features = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        super().__init__(hidden_size, out_features, dtype=dtype, tp=tp, bias=bias)

    def weight_loader(
        self, param: nn.Parameter, loaded: LoadedTensor, shard_id: Hashable = None
    ) -> None:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        offset, length, rank, total = {
            "q": (0, q_size, self.tp.rank, self.total_sizes["q"]),
            "k": (q_size, kv_size, self.kv_rank, self.total_sizes["kv"]),
            "v": (q_size + kv_size, kv_size, self.kv_rank, self.total_sizes["kv"]),
        }[str(shard_id)]
        target = param.data.narrow(0, offset, length)
        copy_checked(target, loaded, dim=0, start=rank * length, total=total)


def num_kv_heads_of_rank(num_kv_heads: int, size: int) -> int:
    """KV heads that one of `size` ranks holds: its share, or one that other ranks hold too."""
    if num_kv_heads >= size:
        return divide(num_kv_heads, size, "num_key_value_heads")
    divide(size, num_kv_heads, f"for {num_kv_heads} num_key_value_heads: ranks")
    return 1


class RowParallelLinear(LinearBase):
    """Each rank holds `in_features / size` input features; the products are summed over ranks.

    With `reduce_results` False the sum is left to the caller.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        tp: Communicator,
        bias: bool = False,
        reduce_results: bool = True,
    ) -> None:
        self.reduce_results = reduce_results
        shard = divide(in_features, tp.size, "input features")
        super().__init__(shard, out_features, dtype=dtype, tp=tp, bias=bias)

    def weight_loader(
        self, param: nn.Parameter, loaded: LoadedTensor, shard_id: Hashable = None
    ) -> None:
        if param.dim() == 1:
            load_replicated(param, loaded)
        else:
            self.copy_share(param.data, loaded, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The bias is added once, by rank 0, because the sum runs over all ranks.
        bias = self.bias if self.tp.rank == 0 else None
        product = narrowing_linear(x, self.weight, bias)
        return self.tp.all_reduce(product) if self.reduce_results else product


def narrowing_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """F.linear, or our own kernel where measured to be faster: few rows, outputs <= inputs."""
    if x.is_cuda and bias is None and x.dtype != torch.float32:
        config = measured_config(x.shape[0], *weight.shape)
        if config is not None:
            return small_batch_linear(x, weight, config)
    return F.linear(x, weight, bias)
