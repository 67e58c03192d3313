"""Paged split-KV decode attention: one new token a sequence attends to everything it has cached.

Decoding reads the whole KV cache once a step and does almost no arithmetic, so the only goal is to
keep every multiprocessor streaming until the end. Sequences differ in length, so each is cut into
*chunks*, and a chunk of one KV head is the unit of work. `plan_decode_kernel` lists the chunks once
a step, for all layers: it picks the chunk length from the sum of the lengths, so that the list fits
`num_seqs + spare_items` rows of a grid whatever the lengths are, and puts long chunks first, since
short ones fill the gaps at the end. If a somewhat longer chunk lets all programs run at once, it
takes that: a few left for a second wave would be most of a short launch. The grid doesn't depend on
max_model_len, and one captured CUDA graph serves every context length.

A sequence of one chunk is written at once; of several, each chunk leaves a float32 partial result,
and the program that ends last adds them up in the order of the chunks, so that results don't depend
on the order of events. A second kernel for that would cost a launch in every layer. The query heads
that share a KV head (grouped-query attention) are the rows of one matrix product, padded to 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

__all__ = [
    "DecodePlan",
    "DecodeTuning",
    "decode_attention",
    "decode_attention_torch",
    "decode_tuning",
]

ITEM_FIELDS = (
    "lane",
    "first key",
    "end of keys",
    "chunks of the lane, 0 = no work",
    "first item of the lane",
    "last item of the lane, its remainder",
)
ITEM_WORDS = 8  # 32 bytes, what one access to memory brings
MIN_QUERY_ROWS = 16  # tl.dot takes no fewer rows


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Constants of the decode kernels; none depends on the batch."""

    block_n: int  # keys a tile
    num_warps: int
    num_stages: int  # tiles in flight, K and V each
    min_chunk: int = 128  # tokens, a multiple of block_n; shorter ones cost more than they balance
    spare_items: int = 64  # work items beyond one a lane; more if KV heads are 4 or fewer
    programs_per_sm: float = 4.6  # that run at once, set a little low


def decode_tuning(head_dim: int, element_bytes: int = 2) -> DecodeTuning:
    """Return the constants for a cache; tuned on one H200 in bfloat16."""
    if element_bytes > 2:
        return DecodeTuning(block_n=32, num_warps=8, num_stages=2)
    if head_dim > 128:
        return DecodeTuning(block_n=64, num_warps=4, num_stages=2)
    return DecodeTuning(block_n=32, num_warps=2, num_stages=4)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How one step's work is cut up, shared by all layers; the owner of the partial results.

    Addresses never change, so a plan may be captured: `update` and every `decode_attention` that
    follows it in the same stream belong together. Each layer overwrites the partial results.
    """

    tuning: DecodeTuning
    items: torch.Tensor  # (max_items, ITEM_WORDS) int32: ITEM_FIELDS
    num_done: torch.Tensor  # (max_num_seqs, num_kv_heads) int32: chunks done; 0 between launches
    partial_out: torch.Tensor  # (max_items, num_q_heads, head_dim) float32: weighted sums of V
    partial_max: torch.Tensor  # (max_items, num_q_heads) float32: largest score, base 2
    partial_sum: torch.Tensor  # (max_items, num_q_heads) float32: sum of exponentials
    spare_items: int
    resident_items: int  # items whose programs, one a KV head, all run at once; 0: not known

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        tuning: DecodeTuning | None = None,
    ) -> DecodePlan:
        """Allocate a plan for up to max_num_seqs lanes.

        Args:
            max_num_seqs, num_q_heads, num_kv_heads, head_dim: of this rank.
            block_size: tokens a cache block.
            device: of the cache.
            dtype: of the cache.
            tuning: for experiments.

        Raises:
            ValueError: if the heads or the block size are not among those that the kernels take.
        """
        check_heads(num_q_heads, num_kv_heads, head_dim, block_size)
        if tuning is None:
            tuning = decode_tuning(head_dim, dtype.itemsize)
        if tuning.min_chunk % tuning.block_n:
            raise ValueError(
                f"min_chunk is {tuning.min_chunk}, must be a multiple of block_n, {tuning.block_n}"
            )
        spare_items = tuning.spare_items * max(1, 8 // num_kv_heads)
        max_items = max_num_seqs + spare_items
        num_programs = int(tuning.programs_per_sm * _num_sms(torch.device(device)))

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            tuning=tuning,
            items=zeros(max_items, ITEM_WORDS, dtype=torch.int32),
            num_done=zeros(max_num_seqs, num_kv_heads, dtype=torch.int32),
            partial_out=zeros(max_items, num_q_heads, head_dim, dtype=torch.float32),
            partial_max=zeros(max_items, num_q_heads, dtype=torch.float32),
            partial_sum=zeros(max_items, num_q_heads, dtype=torch.float32),
            spare_items=spare_items,
            resident_items=num_programs // num_kv_heads,
        )

    def update(self, context_lens: torch.Tensor) -> None:
        """Plan a step: list the work of all lanes, in one launch.

        Args:
            context_lens: (num_seqs,) int32: tokens each query may see; 0 = padded lane.

        Raises:
            ValueError: if there are more lanes than were allocated, or the dtype is not int32.
        """
        num_seqs = self._check_lanes(context_lens)
        plan_decode_kernel[(triton.cdiv(num_seqs, 16),)](
            context_lens, self.items, num_seqs, self.num_items(num_seqs),
            self.tuning.min_chunk, self.tuning.block_n, self.resident_items,
            ITEM_WORDS=ITEM_WORDS, BLOCK_LANES=16, BLOCK_SEQS=256, BLOCK_CHUNKS=16,
        )  # fmt: skip

    def num_items(self, num_seqs: int) -> int:
        """Rows of the grid for num_seqs lanes: an upper bound on the work items of any lengths."""
        return num_seqs + self.spare_items

    def _check_lanes(self, context_lens: torch.Tensor) -> int:
        max_num_seqs = self.num_done.shape[0]
        if context_lens.dim() != 1 or not 0 < context_lens.shape[0] <= max_num_seqs:
            raise ValueError(
                f"context_lens is {tuple(context_lens.shape)}, the plan has room for 1 to "
                f"{max_num_seqs} sequences: allocate it for more"
            )
        check_int32(context_lens=context_lens)
        return context_lens.shape[0]


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with one query a sequence over its cached keys, in one launch.

    Reads each cached key and value once: 2 × sum of context_lens × num_kv_heads × head_dim.

    Args:
        q: (num_seqs, num_q_heads, head_dim), last dimension contiguous.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), q's dtype; block_size a power of
            two >= 16.
        v_cache: k_cache's shape and strides.
        block_tables: (num_seqs, max_blocks) int32, rows may be strided. Columns past a sequence's
            last block are never read through, whatever they hold.
        context_lens: (num_seqs,) int32: tokens each query may see, the new one included; 0 = padded
            lane.
        scale: factor of the scores, 1/sqrt(head_dim) as a rule.
        plan: made for these heads, updated with these context_lens.
        out: where to write the result, contiguous, of q's shape and dtype; None: a new tensor.

    Returns:
        (num_seqs, num_q_heads, head_dim) in q's dtype; padded lanes are 0.

    Raises:
        ValueError: if shapes, dtypes, strides or the plan don't fit together.

    Source: Flash-Decoding (Dao et al. 2023) for splitting over keys; PagedAttention (Kwon et al.
        2023).
    """
    num_seqs = plan._check_lanes(context_lens)
    _check_attention(q, k_cache, v_cache, block_tables, context_lens)
    num_q_heads, head_dim = q.shape[1:]
    _, block_size, num_kv_heads, _ = k_cache.shape
    check_heads(num_q_heads, num_kv_heads, head_dim, block_size)
    if plan.partial_out.shape[1:] != q.shape[1:]:
        raise ValueError(
            f"the plan is for {tuple(plan.partial_out.shape[1:])} (query heads, head_dim), "
            f"q has {tuple(q.shape[1:])}: allocate one for these heads"
        )
    out = new_or_checked(out, q)
    group = num_q_heads // num_kv_heads
    decode_attention_kernel[(plan.num_items(num_seqs) * num_kv_heads,)](
        out, q, k_cache, v_cache, block_tables,
        plan.items, plan.num_done, plan.partial_out, plan.partial_max, plan.partial_sum,
        scale * math.log2(math.e), q.stride(0), q.stride(1), block_tables.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        ITEM_WORDS=ITEM_WORDS,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_M=MIN_QUERY_ROWS, BLOCK_N=plan.tuning.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_GROUP=triton.next_power_of_2(group),
        num_warps=plan.tuning.num_warps, num_stages=plan.tuning.num_stages,
    )  # fmt: skip
    return out


def decode_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`decode_attention` in plain torch and float32, a sequence at a time; any block size."""
    _check_attention(q, k_cache, v_cache, block_tables, context_lens)
    out = torch.zeros_like(q)
    for lane, context_len in enumerate(context_lens.tolist()):
        if context_len:
            key, value = gather_kv(k_cache, v_cache, block_tables[lane], context_len)
            heads = q[lane].float().unflatten(0, (key.shape[1], -1))  # (kv_heads, group, head_dim)
            probs = (torch.einsum("hgd,nhd->hgn", heads, key) * scale).softmax(-1)
            out[lane] = torch.einsum("hgn,nhd->hgd", probs, value).flatten(0, 1).to(q.dtype)
    return out


@triton.jit(
    do_not_specialize=[
        "context_lens_ptr", "num_seqs", "num_items", "min_chunk", "chunk_step", "resident_items",
    ]
)  # fmt: skip
def plan_decode_kernel(
    context_lens_ptr,
    items_ptr,
    num_seqs,
    num_items,
    min_chunk,
    chunk_step,
    resident_items,
    ITEM_WORDS: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """List full chunks by lane, then remainders by length, then items without work.

    A program lists the chunks of BLOCK_LANES lanes. A padded lane has one item of no keys, so that
    its output is written too. Programs don't communicate: each counts, over all lanes, what stands
    before its own.
    """
    program = tl.program_id(0)
    chunk = _pick_chunk(
        context_lens_ptr, num_seqs, num_items - num_seqs, min_chunk, chunk_step, BLOCK_SEQS
    )
    if num_seqs < resident_items:
        chunk = _lengthen_chunk(
            context_lens_ptr, num_seqs, chunk, chunk_step, resident_items, BLOCK_SEQS
        )
    lanes = program * BLOCK_LANES + tl.arange(0, BLOCK_LANES)
    lens = tl.load(context_lens_ptr + lanes, mask=lanes < num_seqs, other=0)
    num_full = lens // chunk
    rest = lens - num_full * chunk
    has_rest = (lanes < num_seqs) & ((rest > 0) | (lens == 0))
    first_item, rank, total_full, total_rest = _count_before(
        context_lens_ptr, num_seqs, chunk, lanes, rest, BLOCK_LANES, BLOCK_SEQS
    )
    num_chunks = num_full + has_rest.to(tl.int32)
    rest_item = total_full + rank
    last_item = tl.where(has_rest, rest_item, first_item + num_full - 1)
    for first in range(0, tl.max(num_full, axis=0), BLOCK_CHUNKS):
        index = first + tl.arange(0, BLOCK_CHUNKS)[None, :]
        _store_items(
            items_ptr, first_item[:, None] + index, lanes[:, None], index * chunk,
            index * chunk + chunk, num_chunks[:, None], first_item[:, None], last_item[:, None],
            index < num_full[:, None], ITEM_WORDS,
        )  # fmt: skip
    _store_items(
        items_ptr, rest_item, lanes, lens - rest, lens, num_chunks, first_item, last_item, has_rest,
        ITEM_WORDS,
    )  # fmt: skip

    first_unused = total_full + total_rest + program * BLOCK_SEQS
    for first in range(first_unused, num_items, tl.num_programs(0) * BLOCK_SEQS):
        unused = first + tl.arange(0, BLOCK_SEQS)
        _store_items(items_ptr, unused, 0, 0, 0, 0, 0, 0, unused < num_items, ITEM_WORDS)


@triton.jit
def _pick_chunk(
    context_lens_ptr, num_seqs, spare_items, min_chunk, chunk_step, BLOCK_SEQS: tl.constexpr
):
    """total / spare_items tokens, in whole steps: then no more than spare_items chunks are full.

    That leaves one item a lane for its remainder. Few long chunks beat many short ones, except
    that a small total would make too few.
    """
    total = 0
    for first in range(0, num_seqs, BLOCK_SEQS):
        seqs = first + tl.arange(0, BLOCK_SEQS)
        total += tl.sum(tl.load(context_lens_ptr + seqs, mask=seqs < num_seqs, other=0), axis=0)
    chunk = tl.maximum(tl.cdiv(total, spare_items), min_chunk)
    return tl.cdiv(chunk, chunk_step) * chunk_step


@triton.jit
def _lengthen_chunk(
    context_lens_ptr, num_seqs, chunk, chunk_step, resident_items, BLOCK_SEQS: tl.constexpr
):
    """The shortest of chunk to 1.25 · chunk that makes at most resident_items items, else chunk."""
    parts = 32 + tl.arange(0, 16)
    candidates = tl.cdiv(tl.cdiv(chunk * parts, 32), chunk_step) * chunk_step
    num_items = tl.zeros([16], tl.int32)
    for first in range(0, num_seqs, BLOCK_SEQS):
        seqs = first + tl.arange(0, BLOCK_SEQS)
        lens = tl.load(context_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
        num_items += tl.sum(tl.cdiv(lens[:, None], candidates[None, :]), axis=0)
    fits = (num_items <= resident_items) & (parts <= 40)
    longest = candidates + tl.where(fits, 0, 1 << 30)
    shortest = tl.min(longest, axis=0)
    return tl.where(shortest < (1 << 30), shortest, chunk)


@triton.jit
def _count_before(
    context_lens_ptr,
    num_seqs,
    chunk,
    lanes,
    rest,
    BLOCK_LANES: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    """Full chunks of the lanes before each of `lanes`, rank of its remainder, and both totals."""
    first_item = tl.zeros([BLOCK_LANES], tl.int32)
    rank = tl.zeros([BLOCK_LANES], tl.int32)  # among all remainders, longest first
    total_full = 0
    total_rest = 0
    for first in range(0, num_seqs, BLOCK_SEQS):
        others = first + tl.arange(0, BLOCK_SEQS)
        other_lens = tl.load(context_lens_ptr + others, mask=others < num_seqs, other=0)
        other_full = other_lens // chunk
        other_rest = other_lens - other_full * chunk
        other_has_rest = (others < num_seqs) & ((other_rest > 0) | (other_lens == 0))
        is_earlier = others[None, :] < lanes[:, None]
        is_longer = other_rest[None, :] > rest[:, None]
        is_before = is_longer | ((other_rest[None, :] == rest[:, None]) & is_earlier)
        first_item += tl.sum(tl.where(is_earlier, other_full[None, :], 0), axis=1)
        rank += tl.sum((is_before & other_has_rest[None, :]).to(tl.int32), axis=1)
        total_full += tl.sum(other_full, axis=0)
        total_rest += tl.sum(other_has_rest.to(tl.int32), axis=0)
    return first_item, rank, total_full, total_rest


@triton.jit
def _store_items(
    items_ptr,
    item,
    lane,
    start,
    end,
    num_chunks,
    first_item,
    last_item,
    mask,
    ITEM_WORDS: tl.constexpr,
):
    """Write work items; everything broadcasts against `item`."""
    fields = items_ptr + item * ITEM_WORDS
    tl.store(fields, lane, mask=mask)
    tl.store(fields + 1, start, mask=mask)
    tl.store(fields + 2, end, mask=mask)
    tl.store(fields + 3, num_chunks, mask=mask)
    tl.store(fields + 4, first_item, mask=mask)
    tl.store(fields + 5, last_item, mask=mask)


@triton.jit(do_not_specialize=["block_tables_ptr", "q_stride_lane", "table_stride"])
def decode_attention_kernel(
    out_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    items_ptr,
    num_done_ptr,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    scale_log2,
    q_stride_lane,
    q_stride_head,
    table_stride,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    ITEM_WORDS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """One work item of one KV head a program; neighbours share the item and read adjacent rows."""
    item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    fields = items_ptr + item * ITEM_WORDS
    lane = tl.load(fields).to(tl.int64)
    start = tl.load(fields + 1)
    end = tl.load(fields + 2)
    num_chunks = tl.load(fields + 3)
    first_item = tl.load(fields + 4)
    last_item = tl.load(fields + 5)
    if num_chunks == 0:
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + rows
    row_mask = rows < GROUP
    tile_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = lane * q_stride_lane + head[:, None] * q_stride_head + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=tile_mask, other=0.0)
    table_ptr = block_tables_ptr + lane * table_stride
    k_cache_ptr += kv_head * cache_stride_head
    v_cache_ptr += kv_head * cache_stride_head

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last_key = tl.zeros([BLOCK_M], tl.int32) + end - 1
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q, k_cache_ptr, v_cache_ptr, table_ptr, start, end, start, last_key,
        scale_log2, cache_stride_block, cache_stride_token,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, True, False,
    )  # fmt: skip

    num_q_heads = NUM_KV_HEADS * GROUP
    if num_chunks == 1:
        row_sum = tl.where(end == 0, 1.0, row_sum)  # a padded lane
        out_offsets = (lane * num_q_heads + head[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(
            out_ptr + out_offsets,
            (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty),
            mask=tile_mask,
        )
    else:
        partial_row = item * num_q_heads + head
        tl.store(partial_max_ptr + partial_row, row_max, mask=row_mask)
        tl.store(partial_sum_ptr + partial_row, row_sum, mask=row_mask)
        tl.store(
            partial_out_ptr + partial_row[:, None] * HEAD_DIM + dims[None, :], acc, mask=tile_mask
        )
        # The barrier puts the stores of all threads before the counter's release, by one thread.
        tl.debug_barrier()
        num_done_ptr += lane * NUM_KV_HEADS + kv_head
        if tl.atomic_add(num_done_ptr, 1, sem="acq_rel") == num_chunks - 1:
            tl.store(num_done_ptr, 0)
            _combine_chunks(
                out_ptr, partial_out_ptr, partial_max_ptr, partial_sum_ptr, lane, kv_head,
                num_chunks, first_item, last_item,
                NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_GROUP, BLOCK_D,
            )  # fmt: skip


@triton.jit
def _combine_chunks(
    out_ptr,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    lane,
    kv_head,
    num_chunks,
    first_item,
    last_item,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up a lane's partial results for the heads of one KV head, in the order of its chunks."""
    BLOCK_CHUNKS: tl.constexpr = 32 // BLOCK_GROUP  # loads in flight
    num_q_heads = NUM_KV_HEADS * GROUP
    rows = tl.arange(0, BLOCK_GROUP)
    head = kv_head * GROUP + rows
    dims = tl.arange(0, BLOCK_D)
    row_mask = rows < GROUP
    dim_mask = dims < HEAD_DIM

    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_D], tl.float32)
    for first in range(0, num_chunks, BLOCK_CHUNKS):
        index = first + tl.arange(0, BLOCK_CHUNKS)
        item = tl.where(index == num_chunks - 1, last_item, first_item + index)
        partial_row = item[:, None] * num_q_heads + head[None, :]  # (chunks, group)
        mask = (index < num_chunks)[:, None] & row_mask[None, :]
        chunk_max = tl.load(partial_max_ptr + partial_row, mask=mask, other=float("-inf"))
        chunk_sum = tl.load(partial_sum_ptr + partial_row, mask=mask, other=0.0)
        chunk_out = tl.load(
            partial_out_ptr + partial_row[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=mask[:, :, None] & dim_mask[None, None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(chunk_max, axis=0))
        new_top = tl.where(row_mask, new_top, 0.0)  # rows beyond the group have only -inf
        weight = tl.exp2(chunk_max - new_top[None, :])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(chunk_sum * weight, axis=0)
        acc = acc * rescale[:, None] + tl.sum(chunk_out * weight[:, :, None], axis=0)
        top = new_top
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_offsets = (lane * num_q_heads + head[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, out, mask=row_mask[:, None] & dim_mask[None, :])


def _check_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    check_kv_cache(k_cache, v_cache)
    check_queries(q, k_cache)
    check_int32(block_tables=block_tables, context_lens=context_lens)
    if (
        context_lens.shape != q.shape[:1]
        or block_tables.dim() != 2
        or block_tables.shape[0] != q.shape[0]
    ):
        raise ValueError(
            f"q is {tuple(q.shape)}, context_lens {tuple(context_lens.shape)}, block_tables "
            f"{tuple(block_tables.shape)}: the first dimensions must agree"
        )
