"""What attention of prompts and of decode lanes share: the walk over a sequence's paged keys.

A block table is followed one tile of keys at a time, with an online softmax, so that neither the
scores nor a contiguous copy of the keys are ever in memory. The callers, `prefill_attention` and
`decode_attention`, say whose keys and which of them a row may see.

Source: FlashAttention-2 (Dao 2023); PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import torch

from nanovllm.kernels.optional_triton import tl, triton

HEAD_DIMS = range(16, 257)  # that the kernels are made for


@triton.jit
def attend_keys(
    acc,
    row_max,
    row_sum,
    q,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    start,
    end,
    end_unmasked,
    last_key,
    scale_log2,
    cache_stride_block,
    cache_stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    BRANCHED: tl.constexpr,
):
    """Online softmax of query rows over keys start .. end - 1; row i sees keys up to last_key[i].

    MASKED: a tile may have keys that are hidden from a row; else every row sees whole tiles.
    BRANCHED, with MASKED: only tiles from end_unmasked on have such keys.
    """
    dims = tl.arange(0, BLOCK_D)
    block_ids = load_block_ids(table_ptr, start, end, BLOCK_SIZE, BLOCK_N)
    for first in range(start, end, BLOCK_N):
        offsets = kv_row_offsets(
            block_ids, first, cache_stride_block, cache_stride_token, BLOCK_SIZE, BLOCK_N
        )
        block_ids = load_block_ids(table_ptr, first + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        offsets = offsets[:, None] + dims[None, :]
        keys = first + tl.arange(0, BLOCK_N)
        if MASKED:
            # Zeros, not whatever the slot holds: a probability of 0 times NaN is NaN.
            kv_mask = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_cache_ptr + offsets, mask=kv_mask, other=0.0)
            v = tl.load(v_cache_ptr + offsets, mask=kv_mask, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_cache_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_cache_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_cache_ptr + offsets)
            v = tl.load(v_cache_ptr + offsets)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BRANCHED:
            if first >= end_unmasked:
                is_hidden = (keys[None, :] > last_key[:, None]) | (keys >= end)[None, :]
                scores = tl.where(is_hidden, float("-inf"), scores)
        elif MASKED:
            is_hidden = (keys[None, :] > last_key[:, None]) | (keys >= end)[None, :]
            scores = tl.where(is_hidden, float("-inf"), scores)
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
        probs = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(probs, axis=1)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def load_block_ids(table_ptr, first, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ids of the blocks that hold BLOCK_N positions from `first` on; one id if that is one block.

    Positions from `end` on get block 0. Call it a tile ahead: left beside the loads of K and V that
    need it, it takes one of the stages of Triton's software pipeline.
    """
    if BLOCK_SIZE >= BLOCK_N:
        return tl.load(table_ptr + first // BLOCK_SIZE, mask=first < end, other=0)
    else:
        positions = first + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def kv_row_offsets(
    block_ids,
    first,
    cache_stride_block,
    cache_stride_token,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Offsets (BLOCK_N,) int64 of the cache rows of positions from `first` on."""
    rows = tl.arange(0, BLOCK_N)
    blocks = block_ids.to(tl.int64) * cache_stride_block
    if BLOCK_SIZE >= BLOCK_N:
        return blocks + (first % BLOCK_SIZE) * cache_stride_token + rows * cache_stride_token
    else:
        return blocks + (rows % BLOCK_SIZE) * cache_stride_token


def gather_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, context_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence's keys and values, (context_len, num_kv_heads, head_dim) float32."""
    block_ids = block_table[: triton.cdiv(context_len, k_cache.shape[1])].long()
    key, value = (
        cache[block_ids].flatten(0, 1)[:context_len].float() for cache in (k_cache, v_cache)
    )
    return key, value


def new_or_checked(out: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """Where the attention of `q` is written: `out`, which must fit, or a new tensor."""
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}, expected "
            f"contiguous {tuple(q.shape)} {q.dtype}"
        )
    return out


def check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Raise ValueError for shapes that the kernels are not made for."""
    if num_q_heads % num_kv_heads or num_q_heads // num_kv_heads > 16:
        raise ValueError(
            f"{num_q_heads} query heads for {num_kv_heads} KV heads: must be a multiple of 1 to 16"
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim is {head_dim}, must be 16 to 256: use attention_backend='torch'"
        )
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size is {block_size}, must be a power of two >= 16")


def check_queries(q: torch.Tensor, k_cache: torch.Tensor) -> None:
    """Raise ValueError unless q (tokens, heads, head_dim) can attend over the cache."""
    if q.dim() != 3 or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"q is {tuple(q.shape)}, the cache {tuple(k_cache.shape)}: heads or head_dim don't fit"
        )
    if q.dtype != k_cache.dtype or q.stride(2) != 1:
        raise ValueError(
            f"q is {q.dtype} with strides {q.stride()}: must be {k_cache.dtype}, "
            "last dimension contiguous"
        )


def check_int32(**tensors: torch.Tensor) -> None:
    """Raise ValueError for one that isn't int32 with a contiguous last dimension."""
    for name, tensor in tensors.items():
        is_contiguous = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
        if tensor.dtype != torch.int32 or not is_contiguous:
            raise ValueError(
                f"{name} is {tensor.dtype} with strides {tensor.stride()}: must be int32, "
                "last dimension contiguous"
            )
