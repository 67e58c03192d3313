"""What follows a row-parallel product: the sum over ranks, the residual, the norm.

`sum_add_rms_norm` does it in two kernels or in one. For the batches of decode it may be the one of
`kernels.all_reduce_norm`, which says how it works and what it depends on. `PeerNorm` owns the
memory for it, checks it against plain sums, and measures it against two kernels when an engine
starts. Every rank measures and the slowest counts, so all ranks choose the same.

The memory is torch's symmetric memory, without its multicast.
"""

import warnings
from dataclasses import replace

import torch
import torch.distributed as dist

from nanovllm.kernels.all_reduce_norm import (
    EMPTY,
    MAX_ROWS,
    Inbox,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_torch,
    inbox_dtype,
    inbox_shape,
)
from nanovllm.kernels.norm import add_rms_norm, add_rms_norm_torch
from nanovllm.utils.distributed import Communicator
from nanovllm.utils.peer_all_reduce import ATOL_OF_MAX, MAX_BYTES, measured_rows, time_us

_EPS = 1e-6  # of measurements


def sum_add_rms_norm(
    tp: Communicator,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    turn: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the sum of the ranks' x to the residual and return (rms_norm(residual), residual).

    Args:
        tp: The ranks.
        x: (tokens, hidden), this rank's part; may be overwritten.
        residual: (tokens, hidden), updated in place.
        weight: (hidden,).
        eps: Added to the mean of squares.
        turn: 0 or 1, other than the last call's.
    """
    if tp.peer_norm is not None:
        normed = tp.peer_norm(x, residual, weight, eps, turn)
        if normed is not None:
            return normed
    add_norm = add_rms_norm if x.is_cuda else add_rms_norm_torch
    return add_norm(tp.all_reduce(x), residual, weight, eps)


def with_peer_norm(
    tp: Communicator, hidden: int, dtype: torch.dtype, max_rows: int
) -> Communicator:
    """The same ranks, with sums and norms in one kernel where that is measured to be faster.

    Args:
        tp: From `join_group` on CUDA; all its ranks call this together.
        hidden: Elements of a row.
        dtype: Theirs.
        max_rows: Most tokens of a decode step.
    """
    assert tp.group is not None, "a lone rank has no peers"
    try:
        return replace(tp, peer_norm=PeerNorm(tp, hidden, dtype, max_rows))
    except RuntimeError as error:
        warnings.warn(f"no peer memory for sums with norms: {error}", stacklevel=2)
        return tp


class PeerNorm:
    """The fused kernel up to the batch size at which it was measured to be faster.

    Invariant: all ranks call it in the same order with the same shapes, and turns alternate.

    Raises:
        RuntimeError: The GPUs can't map one another's memory.
    """

    def __init__(self, tp: Communicator, hidden: int, dtype: torch.dtype, max_rows: int) -> None:
        """Map the inboxes, check and measure; all ranks together.

        Args:
            tp: Ranks on one host, with all that they have in place of this kernel.
            hidden: Elements of a row.
            dtype: bfloat16, float16 or float32.
            max_rows: Most rows of a decode step.
        """
        assert tp.group is not None, "a lone rank has no peers"
        self._tp, self._group = tp, tp.group
        self._hidden = hidden
        self._dtype = dtype
        self._device = torch.device("cuda", torch.cuda.current_device())
        num_rows = min(max_rows, MAX_ROWS, MAX_BYTES // (hidden * dtype.itemsize))
        self._inbox = self._map_inbox(max(num_rows, 1))
        self.max_rows = self._measured_max_rows()  # 0: the kernel isn't used

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, turn: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `all_reduce_add_rms_norm`; None where the ranks should sum otherwise."""
        if x.dtype is not self._dtype or not 0 < x.shape[0] <= self.max_rows:
            return None
        return all_reduce_add_rms_norm(self._inbox, turn, x, residual, weight, eps)

    def describe(self) -> str:
        """Up to which size it is used: "fused with norms to 1024 KiB"; "" where it isn't."""
        num_bytes = self.max_rows * self._hidden * self._dtype.itemsize
        return f"fused with norms to {num_bytes // 1024} KiB" if num_bytes else ""

    def run_both_turns(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        """Two calls, as a layer makes them, whatever was measured."""
        for turn in range(2):
            all_reduce_add_rms_norm(self._inbox, turn, x, residual, weight, _EPS)

    def draw_rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random x, which differs between ranks, and residual and weight, which don't."""
        shared = torch.Generator(device=self._device).manual_seed(num_rows)
        own = torch.Generator(device=self._device).manual_seed(num_rows + 1 + self._tp.rank)
        shape = (num_rows, self._hidden)
        x, residual, weight = (
            torch.randn(size, generator=generator, device=self._device).to(self._dtype)
            for size, generator in ((shape, own), (shape, shared), (self._hidden, shared))
        )
        return x, residual, weight

    def _map_inbox(self, max_rows: int) -> Inbox:
        """An empty inbox on every rank, seen by all."""
        import torch.distributed._symmetric_memory as symm_mem

        rank, size = self._tp.rank, self._tp.size
        shape, dtype = inbox_shape(size, max_rows, self._hidden), inbox_dtype(self._dtype)
        own = symm_mem.empty(shape, dtype=dtype, device=self._device)
        handle = symm_mem.rendezvous(own, self._group.group_name)
        self._handle = handle  # holds the mappings
        # The tensor may be a part of the memory that was mapped: the same part on all ranks.
        offset = (own.data_ptr() - handle.buffer_ptrs[rank]) // own.element_size()
        inboxes = [handle.get_buffer(peer, shape, dtype, offset) for peer in range(size)]
        if not self._agree(self._reaches_peers(own, inboxes)):
            raise RuntimeError("what is written to a peer's memory doesn't arrive")
        own.fill_(EMPTY)
        self._wait_for_all()  # nobody writes before all are empty
        addresses = [[inbox[turn].data_ptr() for inbox in inboxes] for turn in range(2)]
        return Inbox(own, torch.tensor(addresses, device=self._device), rank)

    def _reaches_peers(self, own: torch.Tensor, inboxes: list[torch.Tensor]) -> bool:
        """Whether each rank finds in its inbox what every rank writes there."""
        own.fill_(EMPTY)
        self._wait_for_all()
        for inbox in inboxes:
            inbox[:, self._tp.rank] = self._tp.rank
        self._wait_for_all()
        names = torch.arange(len(inboxes), dtype=own.dtype, device=self._device)
        is_right = bool((own == names[:, None, None]).all())
        self._wait_for_all()
        return is_right

    def _wait_for_all(self) -> None:
        """Return when every rank is here and its device has done everything."""
        torch.cuda.synchronize()
        dist.barrier(self._group)
        torch.cuda.synchronize()

    def _measured_max_rows(self) -> int:
        """The largest size measured at which the kernel wins; 0 if none, or if it is wrong."""
        sizes = measured_rows(self._inbox.max_rows)
        # A list: all() must not skip sizes on one rank.
        if not self._agree(all([self._is_right(num_rows) for num_rows in sizes])):
            warnings.warn("the fused all-reduce and norm gives wrong sums: not used", stacklevel=2)
            return 0
        wins = [num_rows for num_rows in sizes if self._is_faster(num_rows)]
        return max(wins, default=0)

    def _is_right(self, num_rows: int) -> bool:
        """Whether the kernel gives this rank what plain sums give, in both turns."""
        x, residual, weight = self.draw_rows(num_rows)
        parts = self._tp.all_gather(x)
        right = []
        for turn in range(2):
            expected = all_reduce_add_rms_norm_torch(parts, residual.clone(), weight, _EPS)
            found = all_reduce_add_rms_norm(self._inbox, turn, x, residual.clone(), weight, _EPS)
            right += [
                bool((a - b).abs().max() <= ATOL_OF_MAX * b.abs().max())
                for a, b in zip(found, expected, strict=True)
            ]
        return all(right)

    def _is_faster(self, num_rows: int) -> bool:
        x, residual, weight = self.draw_rows(num_rows)
        times_us = torch.tensor(
            [
                time_us(lambda: self.run_both_turns(x, residual, weight)) / 2,
                time_us(lambda: sum_add_rms_norm(self._tp, x, residual, weight, _EPS, 0)),
            ],
            device=self._device,
        )
        dist.all_reduce(times_us, op=dist.ReduceOp.MAX, group=self._group)
        return bool(times_us[0] < times_us[1])

    def _agree(self, is_right: bool) -> bool:
        """Whether it is so on every rank."""
        return bool(self._tp.min(int(is_right), self._device))
