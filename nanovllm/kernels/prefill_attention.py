"""Varlen causal prefill attention over the paged cache.

Keys and values are stored before attention runs, so there is one path for fresh prompts, prompts
whose prefix is cached and later chunks of a long prompt: a sequence brings n new queries, has L
cached tokens, these included, and query i sees keys 0 .. L - n + i. All sequences are packed into
one (tokens, heads, head_dim) tensor, without padding.

A program computes a tile of query rows of one KV head. Rows are (token, head of the group) pairs,
so that the query heads that share a KV head read it once, for any group. Only the tiles of keys on
the diagonal and at the end need a mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nanovllm.kernels.optional_triton import tl, triton
from nanovllm.kernels.paged_attention import (
    attend_keys,
    check_heads,
    check_int32,
    check_queries,
    gather_kv,
    new_or_checked,
)
from nanovllm.kernels.store_kvcache import check_kv_cache

__all__ = ["prefill_attention", "prefill_attention_torch"]


class PrefillTuning(NamedTuple):
    """Constants of the prefill kernel."""

    block_m: int  # query rows a tile, (token, head) pairs
    block_n: int  # keys a tile
    num_warps: int
    num_stages: int
    split_loop: bool = False  # keys that all rows see in a loop of their own, without masks
    max_registers: int | None = None  # a thread; 128: two programs of 8 warps a multiprocessor


def prefill_tuning(
    head_dim: int, element_bytes: int, has_large_shared_memory: bool
) -> PrefillTuning:
    """Return the constants for a device; small ones fit 99 KB of shared memory a program."""
    if element_bytes > 2:
        block_n = 32 if head_dim <= 128 else 16
        return PrefillTuning(block_m=32, block_n=block_n, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillTuning(block_m=64, block_n=32, num_warps=4, num_stages=2, split_loop=True)
    if has_large_shared_memory:
        return PrefillTuning(block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=128)
    return PrefillTuning(block_m=128, block_n=64, num_warps=8, num_stages=2)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    tuning: PrefillTuning | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with the new tokens of each sequence, causally, over all of its cached keys.

    Args:
        q: (num_tokens, num_q_heads, head_dim), last dimension contiguous; the queries of all
            sequences, packed.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), q's dtype; block_size a power of
            two >= 16.
        v_cache: k_cache's shape and strides.
        block_tables: (num_seqs, max_blocks) int32, rows may be strided. Columns past a sequence's
            last block are never read through, whatever they hold.
        cu_seqlens_q: (num_seqs + 1,) int32: row of q where each sequence starts, and num_tokens.
            Rows of q before the first or after the last entry are not touched.
        context_lens: (num_seqs,) int32: tokens of each sequence in the cache, the new ones
            included.
        max_seqlen_q: upper bound on the new tokens of one sequence; bounds the grid.
        scale: factor of the scores, 1/sqrt(head_dim) as a rule.
        tuning: for experiments.
        out: where to write the result, contiguous, of q's shape and dtype; None: a new tensor.

    Returns:
        (num_tokens, num_q_heads, head_dim) in q's dtype.

    Raises:
        ValueError: if shapes, dtypes or strides don't fit together.

    Source: FlashAttention-2 (Dao 2023) for the loop order; packing a group's heads as rows as in
        FlashAttention-3.
    """
    _check_prefill(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens)
    num_tokens, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    check_heads(num_q_heads, num_kv_heads, head_dim, block_size)
    num_seqs = context_lens.shape[0]
    out = new_or_checked(out, q)
    if num_tokens == 0:
        return out
    if tuning is None:
        tuning = prefill_tuning(head_dim, q.element_size(), _has_large_shared_memory(q.device))
    group = num_q_heads // num_kv_heads
    # Every sequence ends in at most one partial tile.
    num_tiles = min(
        num_tokens * group // tuning.block_m + num_seqs,
        triton.cdiv(max_seqlen_q * group, tuning.block_m) * num_seqs,
    )
    prefill_attention_kernel[(num_tiles * num_kv_heads,)](
        out, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens,
        scale * math.log2(math.e), num_seqs, q.stride(0), q.stride(1), block_tables.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_SEQS=128,
        BLOCK_M=tuning.block_m, BLOCK_N=tuning.block_n, BLOCK_D=triton.next_power_of_2(head_dim),
        SPLIT_LOOP=tuning.split_loop, num_warps=tuning.num_warps, num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
    )  # fmt: skip
    return out


def prefill_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
) -> torch.Tensor:
    """`prefill_attention` in plain torch and float32, a sequence at a time; any block size."""
    _check_prefill(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens)
    out = torch.empty_like(q)
    starts = cu_seqlens_q.tolist()
    for seq, context_len in enumerate(context_lens.tolist()):
        num_new = starts[seq + 1] - starts[seq]
        assert num_new <= max_seqlen_q, (
            f"sequence {seq} has {num_new} new tokens, max_seqlen_q is {max_seqlen_q}"
        )
        key, value = gather_kv(k_cache, v_cache, block_tables[seq], context_len)
        heads = q[starts[seq] : starts[seq + 1]].float().unflatten(1, (key.shape[1], -1))
        scores = torch.einsum("mhgd,nhd->hgmn", heads, key) * scale
        is_hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(
            context_len - num_new + 1
        )
        probs = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        out[starts[seq] : starts[seq + 1]] = (
            torch.einsum("hgmn,nhd->mhgd", probs, value).flatten(1, 2).to(q.dtype)
        )
    return out


@triton.jit(
    do_not_specialize=[
        "block_tables_ptr", "cu_seqlens_q_ptr", "context_lens_ptr", "num_seqs", "q_stride_token",
        "table_stride",
    ]
)  # fmt: skip
def prefill_attention_kernel(
    out_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    scale_log2,
    num_seqs,
    q_stride_token,
    q_stride_head,
    table_stride,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_LOOP: tl.constexpr,
):
    """One tile of one KV head a program; tiles are dense over the sequences."""
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    seq, tile, first_token, num_new, context_len = _find_tile(
        cu_seqlens_q_ptr,
        context_lens_ptr,
        num_seqs,
        tl.program_id(0) // NUM_KV_HEADS,
        GROUP,
        BLOCK_M,
        BLOCK_SEQS,
    )
    if seq >= num_seqs:
        return
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    k_cache_ptr += kv_head * cache_stride_head
    v_cache_ptr += kv_head * cache_stride_head

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    q_mask = (token < num_new)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (first_token + token).to(tl.int64)
    q = tl.load(
        q_ptr + (q_rows * q_stride_token + head * q_stride_head)[:, None] + dims[None, :],
        mask=q_mask,
        other=0.0,
    )

    last_key = context_len - num_new + token  # the last key each row may see
    first_row_key = context_len - num_new + tile * BLOCK_M // GROUP
    end = tl.minimum(
        context_len, context_len - num_new + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1
    )
    end_unmasked = tl.minimum(first_row_key + 1, context_len) // BLOCK_N * BLOCK_N
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if SPLIT_LOOP:
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, k_cache_ptr, v_cache_ptr, table_ptr, 0, end_unmasked,
            end_unmasked, last_key, scale_log2, cache_stride_block, cache_stride_token,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, False, False,
        )  # fmt: skip
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, k_cache_ptr, v_cache_ptr, table_ptr, end_unmasked, end,
            end_unmasked, last_key, scale_log2, cache_stride_block, cache_stride_token,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, True, False,
        )  # fmt: skip
    else:
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, k_cache_ptr, v_cache_ptr, table_ptr, 0, end,
            end_unmasked, last_key, scale_log2, cache_stride_block, cache_stride_token,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, True, True,
        )  # fmt: skip
    out_rows = q_rows * (NUM_KV_HEADS * GROUP) + head
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], out, mask=q_mask)


@triton.jit
def _find_tile(
    cu_seqlens_q_ptr,
    context_lens_ptr,
    num_seqs,
    index,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    """Return the sequence of the index-th tile, which tile of it this is, its first token, new
    tokens and context.

    The sequence is num_seqs if there are fewer tiles. Tiles of a sequence count down: its last has
    the most keys, and long work should start first. All loads are issued together, since a short
    prompt's tile is mostly latency.
    """
    seq = 0
    end_tile = 0  # index past the sequence's last tile
    first_token = 0
    num_new = 0
    context_len = 0
    num_tiles = 0  # of the sequences looked at so far
    for first in range(0, num_seqs, BLOCK_SEQS):
        seqs = first + tl.arange(0, BLOCK_SEQS)
        is_seq = seqs < num_seqs
        starts = tl.load(cu_seqlens_q_ptr + seqs, mask=is_seq, other=0)
        seq_lens = tl.load(cu_seqlens_q_ptr + seqs + 1, mask=is_seq, other=0) - starts
        context_lens = tl.load(context_lens_ptr + seqs, mask=is_seq, other=0)
        seq_tiles = tl.cdiv(seq_lens * GROUP, BLOCK_M)
        seq_ends = num_tiles + tl.cumsum(seq_tiles, axis=0)
        is_here = (seq_ends > index) & (seq_ends - seq_tiles <= index)
        seq += tl.sum(((seq_ends <= index) & is_seq).to(tl.int32), axis=0)
        end_tile += tl.sum(tl.where(is_here, seq_ends, 0), axis=0)
        first_token += tl.sum(tl.where(is_here, starts, 0), axis=0)
        num_new += tl.sum(tl.where(is_here, seq_lens, 0), axis=0)
        context_len += tl.sum(tl.where(is_here, context_lens, 0), axis=0)
        num_tiles += tl.sum(seq_tiles, axis=0)
    return seq, end_tile - 1 - index, first_token, num_new, context_len


def _has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may use about 227 KB, as on Hopper and datacenter Blackwell."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _check_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    check_kv_cache(k_cache, v_cache)
    check_queries(q, k_cache)
    num_seqs = block_tables.shape[0]
    check_int32(block_tables=block_tables, cu_seqlens_q=cu_seqlens_q, context_lens=context_lens)
    if (
        cu_seqlens_q.shape != (num_seqs + 1,)
        or context_lens.shape != (num_seqs,)
        or block_tables.dim() != 2
    ):
        raise ValueError(
            f"block_tables is {tuple(block_tables.shape)}, "
            f"cu_seqlens_q {tuple(cu_seqlens_q.shape)}, context_lens "
            f"{tuple(context_lens.shape)}: must be (num_seqs, max_blocks), "
            "(num_seqs + 1,) and (num_seqs,)"
        )
