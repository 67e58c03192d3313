"""RMSNorm alone, with the residual added first, and with everything that stands between a QKV
projection and attention.

A decode step is a row of small operations that each read and write a few kilobytes, so its cost is
the number of launches. `add_rms_norm` is one launch where the textbook has four, and
`qk_norm_rope_store` folds Qwen3's per-head norms, the rotary embedding and the write into the paged
KV cache into one. All arithmetic is float32 and is rounded once, at the store; the torch references
do the same, and are what CPU installs run.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compiling import row_stride
from nanovllm.kernels.optional_triton import tl, triton
from nanovllm.kernels.store_kvcache import check_kv_cache, store_kvcache_torch

MAX_HEADS_PER_PROGRAM = 8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight for every row.

    Args:
        x: (tokens, hidden), any float dtype; rows may be strided, elements of a row are adjacent.
        weight: (hidden,).
        eps: added to the mean of squares.

    Returns:
        A new (tokens, hidden) tensor of x's dtype. Moves 2 × hidden elements a token.

    Raises:
        ValueError: shapes don't match, or a row's elements are not adjacent.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    _check_rows(x, weight.numel(), "x")
    num_tokens, hidden = x.shape
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = triton.next_power_of_2(hidden)
        rms_norm_kernel[(num_tokens,)](
            x, x, weight, out, row_stride(x), 0, eps, HIDDEN=hidden, BLOCK_HIDDEN=block,
            HAS_RESIDUAL=False, num_warps=_num_warps(block),
        )  # fmt: skip
    return out


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in plain torch; x may have any number of leading dimensions."""
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream and return (rms_norm(residual), residual).

    Args:
        x: (tokens, hidden) of the residual's dtype; rows may be strided.
        residual: (tokens, hidden), **updated in place** with the rounded sum; the norm
            is that of the rounded sum, so it doesn't depend on which kernel added.
        weight: (hidden,).
        eps: added to the mean of squares.

    Returns:
        A new tensor with the normed rows, and `residual` itself. Moves 4 × hidden elements a token.

    Raises:
        ValueError: shapes or dtypes don't match, or a row's elements are not adjacent.
    """
    hidden = weight.numel()
    _check_rows(residual, hidden, "residual")
    _check_addend(x, residual)
    num_tokens = residual.shape[0]
    out = torch.empty((num_tokens, hidden), dtype=residual.dtype, device=residual.device)
    if num_tokens:
        block = triton.next_power_of_2(hidden)
        rms_norm_kernel[(num_tokens,)](
            x, residual, weight, out, row_stride(x), row_stride(residual), eps, HIDDEN=hidden,
            BLOCK_HIDDEN=block, HAS_RESIDUAL=True, num_warps=_num_warps(block),
        )  # fmt: skip
    return out, residual


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain torch; `residual` is updated in place here too."""
    residual += x
    return rms_norm_torch(residual, weight, eps), residual


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program a token: the whole row stays in registers between the sum of squares and the
    store.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_HIDDEN)
    mask = columns < HIDDEN
    row = tl.load(x_ptr + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + token * residual_stride + columns
        row += tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
        rounded = row.to(residual_ptr.dtype.element_ty)
        tl.store(residual_row, rounded, mask=mask)
        row = rounded.to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    normed = row * inverse_rms * weight
    tl.store(out_ptr + token * HIDDEN + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """Norm and rotate the queries and keys of one layer, store keys and values, and return the
    queries.

    Every head of q and k is RMS-normed with its weight, then rotated: with (a, b) the halves of a
    head, (a·cos − b·sin, b·cos + a·sin) at the token's position. k and the untouched v go to the
    token's cache slot. One launch.

    Args:
        qkv: (tokens, (num_q_heads + 2·num_kv_heads)·head_dim): queries, keys, values; rows may be
            strided.
        q_weight, k_weight: (head_dim,) norm weights, shared by all heads.
        eps: added to the mean of squares.
        cos_sin_cache: (max_position, head_dim) float32, contiguous: cosines, then sines, half of
            head_dim each.
        positions: (tokens,) int32 or int64, position of each token in its sequence.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), **written in place**;
            the same strides, elements of a head adjacent. Otherwise any layout, so a transposed
            view does.
        slot_mapping: (tokens,) int32, block · block_size + offset; -1 = padding, not stored.
        num_q_heads, num_kv_heads, head_dim: this rank's shapes; head_dim is even.

    Returns:
        The rotated queries, (tokens, num_q_heads, head_dim), contiguous, of qkv's dtype. Moves 2 ×
        qkv.

    Raises:
        ValueError: shapes, strides or dtypes don't fit together.

    Source: rotate-half embedding as in GPT-NeoX and Qwen3; per-head norms as in Qwen3.
    """
    num_heads = num_q_heads + 2 * num_kv_heads
    _check_rows(qkv, num_heads * head_dim, "qkv")
    _check_caches(qkv, cos_sin_cache, k_cache, v_cache, (num_kv_heads, head_dim))
    num_tokens = qkv.shape[0]
    q = torch.empty((num_tokens, num_q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        heads_per_program = _heads_per_program(num_q_heads, num_kv_heads)
        qk_norm_rope_store_kernel[(num_tokens, num_heads // heads_per_program)](
            qkv, q_weight, k_weight, cos_sin_cache, positions, slot_mapping, q, k_cache, v_cache,
            row_stride(qkv), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), eps,
            NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_SIZE=k_cache.shape[1], BLOCK_HEADS=heads_per_program,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2), num_warps=4,
        )  # fmt: skip
    return q


def qk_norm_rope_store_torch(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """`qk_norm_rope_store` in plain torch."""
    heads = qkv.view(qkv.shape[0], -1, head_dim)  # (tokens, heads, head_dim)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    cos_sin = cos_sin_cache[positions].unsqueeze(1)  # (tokens, 1, head_dim)
    q = _norm_and_rotate(q, q_weight, eps, cos_sin)
    k = _norm_and_rotate(k, k_weight, eps, cos_sin)
    store_kvcache_torch(k, v, k_cache, v_cache, slot_mapping)
    return q.contiguous()


def _norm_and_rotate(
    heads: torch.Tensor, weight: torch.Tensor, eps: float, cos_sin: torch.Tensor
) -> torch.Tensor:
    """Norm and rotate (tokens, heads, head_dim) by (tokens, 1, head_dim) cosines and sines; rounds
    once.
    """
    first, second = rms_norm_torch(heads.float(), weight, eps).chunk(2, dim=-1)
    cos, sin = cos_sin.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(heads.dtype)


# Slices of a packed buffer may start anywhere, which must not compile the kernel anew.
@triton.jit(do_not_specialize=["positions_ptr", "slot_mapping_ptr"])
def qk_norm_rope_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    qkv_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    eps,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One program for BLOCK_HEADS heads of one token, all of one kind (q, k or v): the branches are
    uniform.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_HEADS
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    mask = dims < HALF

    source = qkv_ptr + token * qkv_stride + (first_head + heads) * HEAD_DIM + dims
    first = tl.load(source, mask=mask, other=0.0)  # the two halves of (heads, head_dim)
    second = tl.load(source + HALF, mask=mask, other=0.0)

    if first_head < NUM_Q_HEADS + NUM_KV_HEADS:
        weight_ptr = k_weight_ptr
        if first_head < NUM_Q_HEADS:
            weight_ptr = q_weight_ptr
        position = tl.load(positions_ptr + token).to(tl.int64)
        rotated_first, rotated_second = _norm_rope(
            first.to(tl.float32), second.to(tl.float32), weight_ptr + dims,
            cos_sin_ptr + position * HEAD_DIM + dims, mask, eps, HEAD_DIM,
        )  # fmt: skip
        first = rotated_first.to(first.dtype)
        second = rotated_second.to(second.dtype)

    if first_head < NUM_Q_HEADS:
        target = q_ptr + (token * NUM_Q_HEADS + first_head + heads) * HEAD_DIM + dims
        tl.store(target, first, mask=mask)
        tl.store(target + HALF, second, mask=mask)
    else:
        kv_head = first_head - NUM_Q_HEADS
        cache_ptr = k_cache_ptr
        if kv_head >= NUM_KV_HEADS:
            kv_head -= NUM_KV_HEADS
            cache_ptr = v_cache_ptr
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot >= 0:
            target = cache_ptr + (slot // BLOCK_SIZE) * cache_block_stride
            target += (slot % BLOCK_SIZE) * cache_token_stride
            target += (kv_head + heads) * cache_head_stride + dims
            tl.store(target, first, mask=mask)
            tl.store(target + HALF, second, mask=mask)


@triton.jit
def _norm_rope(first, second, weight_ptr, cos_sin_ptr, mask, eps, HEAD_DIM: tl.constexpr):
    """Norm and rotate the float32 halves (heads, head_dim / 2) of one token's heads."""
    HALF: tl.constexpr = HEAD_DIM // 2
    sum_of_squares = tl.sum(first * first + second * second, axis=1)
    inverse_rms = (1.0 / tl.sqrt(sum_of_squares / HEAD_DIM + eps))[:, None]
    first = first * inverse_rms * tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
    second = second * inverse_rms * tl.load(weight_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin_ptr, mask=mask, other=0.0)
    sin = tl.load(cos_sin_ptr + HALF, mask=mask, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


def _heads_per_program(num_q_heads: int, num_kv_heads: int) -> int:
    """Largest power of two, at most 8, that divides both head counts, so that no program mixes
    kinds.
    """
    heads = MAX_HEADS_PER_PROGRAM
    while num_q_heads % heads or num_kv_heads % heads:
        heads //= 2
    return heads


def _num_warps(block: int) -> int:
    """Warps for a row of `block` elements: 8 elements a thread, one 16-byte load in bfloat16."""
    return min(max(block // 256, 1), 8)


def _check_rows(x: torch.Tensor, width: int, name: str) -> None:
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"{name} is {tuple(x.shape)}, expected (tokens, {width})")
    if x.stride(1) != 1:
        raise ValueError(
            f"{name} has element stride {x.stride(1)}, expected 1: make its rows contiguous"
        )


def _check_addend(x: torch.Tensor, residual: torch.Tensor) -> None:
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, residual {tuple(residual.shape)} "
            f"{residual.dtype}: make shapes and dtypes equal"
        )
    if x.stride(-1) != 1:
        raise ValueError(f"x has strides {x.stride()}: make its rows contiguous")


def _check_caches(
    qkv: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads_shape: tuple[int, int],
) -> None:
    check_kv_cache(k_cache, v_cache)
    if tuple(k_cache.shape[2:]) != heads_shape or k_cache.dtype != qkv.dtype:
        raise ValueError(
            f"k_cache and v_cache are {tuple(k_cache.shape)} {k_cache.dtype}, expected "
            f"(num_blocks, block_size, {heads_shape[0]}, {heads_shape[1]}) and qkv's {qkv.dtype}"
        )
    if cos_sin_cache.dtype != torch.float32 or not cos_sin_cache.is_contiguous():
        raise ValueError(f"cos_sin_cache is {cos_sin_cache.dtype}, expected contiguous float32")
