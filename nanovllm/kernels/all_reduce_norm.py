"""The sum over ranks, the residual and the RMSNorm after it, in one launch over peer memory.

In a decode step under tensor parallelism every o_proj and down_proj leaves each rank with a partial
product of a few hundred kilobytes. What their sum costs is latency, so here nobody asks for data or
waits at a barrier: every rank has an *inbox* that the others write, and a row is pushed there as
soon as it exists. Inboxes are filled with `EMPTY`, a NaN that no row contains, so data announces
itself: a program looks at its row until no element is `EMPTY`, adds the ranks' parts in rank order
(the same bits on every rank), and leaves the row `EMPTY` again. An element is a single access of 16
or 32 bits, so half an element is never seen, and elements may arrive in any order.

**Why nothing is overwritten or read too early.** Calls take turns between two halves of the
inbox, so turn 0 follows turn 1 follows turn 0. A rank pushes its rows of call n + 2 when its own
call n + 1 has ended, so it has seen a row of call n + 1 from every rank. Each rank pushed that
after its own call n had ended, with all rows of that half read and emptied. So calls n and n + 2
never meet, however many rows each has, and no barrier is needed at the end. This depends on:

- turns alternating, over layers, steps and graphs: every forward pass makes an even number of
  calls, and all of them go this way or none does;
- the same calls with the same number of rows in the same order on all ranks;
- one stream at a time, and no programmatic dependent launch of this kernel: a kernel starts when
  the one before it has ended, and what that one wrote is there;
- a pass that breaks off ends its rank. The group doesn't survive that anyway.

**Why it can't deadlock.** A program pushes before it waits, and waits for its own row alone. GPUs
start programs in order. So the lowest row that is unfinished anywhere has started on every rank,
has been pushed by all, and ends. Up to a few hundred rows all programs are resident at once anyway.
A rank that never comes ends in a trap, after minutes.

Source: TensorRT-LLM's one-shot all-reduce in the style of Lamport, fused with residual and RMSNorm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels.compiling import row_stride
from nanovllm.kernels.norm import rms_norm_torch
from nanovllm.kernels.optional_triton import tl, triton

MAX_ROWS = 512  # so many programs are resident at once on GPUs of 100 processors
EMPTY = -1  # all bits set: a NaN of any float dtype
_MAX_SPINS = 1 << 27  # looks of about a microsecond each: a peer may be compiling its kernels
# No program may hold an element twice: its copies could see different moments.
_MIN_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Inbox:
    """Memory of one rank that all ranks write, and where that of the others is."""

    own: torch.Tensor  # (turns, ranks, max rows, hidden) int16 or int32, as wide as the rows' dtype
    addresses: torch.Tensor  # (turns, ranks) int64: where each rank's `own[turn]` is mapped here
    rank: int

    @property
    def max_rows(self) -> int:
        """Most rows of a call."""
        return self.own.shape[2]


def inbox_shape(size: int, max_rows: int, hidden: int) -> tuple[int, int, int, int]:
    """Shape of `Inbox.own` for `size` ranks; all of it is to be `EMPTY` before the first call."""
    return 2, size, max_rows, hidden


def inbox_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of `Inbox.own` for rows of `dtype`."""
    return torch.int32 if dtype.itemsize == 4 else torch.int16


def all_reduce_add_rms_norm(
    inbox: Inbox,
    turn: int,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the ranks' x to the residual stream and return (rms_norm(residual), residual).

    All ranks call it together, see the module's conditions. The sum is float32, in rank order, and
    is rounded once, with the residual added.

    Args:
        turn: 0 or 1, other than the last call's.
        x: (rows, hidden), this rank's part; rows may be strided.
        residual: (rows, hidden), the same on every rank, **updated in place**.
        weight: (hidden,).
        eps: added to the mean of squares.

    Returns:
        A new tensor with the normed rows, and `residual` itself: the same bits on every rank. Sends
        and receives (ranks - 1) × rows × hidden elements.

    Raises:
        ValueError: shapes or dtypes don't fit together.
    """
    _check(inbox, x, residual, weight)
    (num_rows, hidden), size = x.shape, inbox.own.shape[1]
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    if num_rows:
        block = max(triton.next_power_of_2(hidden), _MIN_BLOCK)
        all_reduce_add_rms_norm_kernel[(num_rows,)](
            x, residual, weight, out, inbox.own[turn], inbox.addresses[turn], inbox.rank,
            row_stride(x), row_stride(residual), inbox.own.stride(1), eps,
            SIZE=size, HIDDEN=hidden, BLOCK_SIZE=triton.next_power_of_2(size), BLOCK_HIDDEN=block,
            EMPTY=EMPTY, MAX_SPINS=_MAX_SPINS, num_warps=min(block // 256, 8),
        )  # fmt: skip
    return out, residual


def all_reduce_add_rms_norm_torch(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`all_reduce_add_rms_norm` in plain torch, of the (ranks, rows, hidden) parts of all ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    residual.copy_(residual.float() + total)
    return rms_norm_torch(residual, weight, eps), residual


@triton.jit(do_not_specialize=["addresses_ptr", "rank"])
def all_reduce_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    inbox_ptr,
    addresses_ptr,
    rank,
    x_stride,
    residual_stride,
    rank_stride,
    eps,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    EMPTY: tl.constexpr,
    MAX_SPINS: tl.constexpr,
):
    """One program a row: push it to every other rank, wait for theirs, add, norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_HIDDEN)
    mask = columns < HIDDEN
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    bits = x.to(inbox_ptr.dtype.element_ty, bitcast=True)
    bits = tl.where(bits == EMPTY, EMPTY - 1, bits)  # another NaN
    place = rank.to(tl.int64) * rank_stride + row * HIDDEN
    # Each rank begins with the next one, so that no rank is everybody's first.
    for distance in tl.static_range(1, SIZE):
        address = tl.load(addresses_ptr + (rank + distance) % SIZE)
        peer_inbox = address.to(tl.pointer_type(inbox_ptr.dtype.element_ty))
        peer_inbox = tl.multiple_of(peer_inbox, 16)
        tl.store(peer_inbox + place + columns, bits.to(inbox_ptr.dtype.element_ty), mask=mask)

    # These are on their way while the program waits.
    residual_row = residual_ptr + row * residual_stride + columns
    residual = tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)

    ranks = tl.arange(0, BLOCK_SIZE)[:, None]
    arrivals = inbox_ptr + ranks.to(tl.int64) * rank_stride + row * HIDDEN + columns[None, :]
    arrival_mask = (ranks < SIZE) & (ranks != rank) & mask[None, :]
    # Volatile: read anew from memory every time.
    parts = tl.load(arrivals, mask=arrival_mask, other=0, volatile=True)
    num_spins = 0
    while tl.max((parts == EMPTY).to(tl.int32)) > 0:
        parts = tl.load(arrivals, mask=arrival_mask, other=0, volatile=True)
        num_spins += 1
        if num_spins == MAX_SPINS:
            _trap()
    tl.store(arrivals, tl.full((BLOCK_SIZE, BLOCK_HIDDEN), EMPTY, parts.dtype), mask=arrival_mask)

    parts = parts.to(x.dtype, bitcast=True).to(tl.float32)
    parts = tl.where(ranks == rank, x.to(tl.float32)[None, :], parts)
    rounded = (residual + tl.sum(parts, axis=0)).to(x.dtype)
    tl.store(residual_row, rounded, mask=mask)
    total = rounded.to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / HIDDEN + eps)
    normed = total * inverse_rms * weight
    tl.store(out_ptr + row * HIDDEN + columns, normed.to(x.dtype), mask=mask)


@triton.jit
def _trap():
    """End the kernel with an error: a peer is gone, and spinning on would hold the GPU."""
    tl.inline_asm_elementwise(
        "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


def _check(inbox: Inbox, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    hidden = inbox.own.shape[3]
    if x.dim() != 2 or x.shape != residual.shape or x.shape[1] != hidden:
        raise ValueError(
            f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}: "
            f"expected (rows, {hidden}) for both"
        )
    if x.shape[0] > inbox.max_rows:
        raise ValueError(f"{x.shape[0]} rows, the inbox holds {inbox.max_rows}: sum them otherwise")
    if weight.shape != (hidden,):
        raise ValueError(f"weight is {tuple(weight.shape)}, expected ({hidden},)")
    if x.dtype != residual.dtype or inbox_dtype(x.dtype) != inbox.own.dtype:
        raise ValueError(
            f"x is {x.dtype}, residual {residual.dtype}, the inbox {inbox.own.dtype}: "
            "make them equal, and as wide as the inbox"
        )
    if x.stride(1) != 1 or residual.stride(1) != 1:
        raise ValueError(
            f"x has strides {x.stride()}, residual {residual.stride()}: make their rows contiguous"
        )
