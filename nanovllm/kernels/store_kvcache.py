"""Writing keys and values into the paged KV cache, whose layout the attention kernels share.

One contiguous KV region per sequence fails in three ways: it must be reserved at maximal length,
freed regions leave holes that no other length fits, and a sequence can't give memory back while it
waits. So the cache is a pool of equal blocks, `(num_blocks, block_size, num_kv_heads, head_dim)`,
and a sequence owns a list of them, its block table. The *slot* of a token is `block_id · block_size
+ offset`: a step's `slot_mapping` says where each new token goes, and -1 marks the padding of a
captured graph, which must not be stored.

Only the last dimension has to be contiguous: a pool laid out as [block, head, token, dim] works as
a view.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.optional_triton import tl, triton

__all__ = ["check_kv_cache", "store_kvcache", "store_kvcache_torch"]


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value into its cache slot, in place; moves 4 × key bytes.

    Args:
        key: (num_tokens, num_kv_heads, head_dim), a view of a fused qkv output is fine.
        value: like key; its strides may differ.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), key's dtype, last dimension
            contiguous.
        v_cache: k_cache's shape and strides.
        slot_mapping: (num_tokens,) int32: cache slot of each token; -1 = padding, not stored.
            Slots are not checked against the pool: that would need a device-to-host copy.

    Raises:
        ValueError: if shapes, dtypes or strides don't fit together.

    Source: the kernel of the same name in nano-vllm and vLLM.
    """
    _check_store(key, value, k_cache, v_cache, slot_mapping)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    store_kvcache_kernel[(num_tokens,)](
        key, value, k_cache, v_cache, slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        NUM_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[1],
        BLOCK_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
    )  # fmt: skip


def store_kvcache_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`store_kvcache` in plain torch, for any block size and device."""
    _check_store(key, value, k_cache, v_cache, slot_mapping)
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored].long()
    block_ids, offsets = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache[block_ids, offsets] = key[is_stored]
    v_cache[block_ids, offsets] = value[is_stored]


@triton.jit(do_not_specialize=["slot_mapping_ptr", "key_stride_token", "value_stride_token"])
def store_kvcache_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program a token: all its heads. Offsets into the pool are 64-bit, pools exceed 2**31
    elements.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    key_offsets = token * key_stride_token + heads * key_stride_head + dims
    value_offsets = token * value_stride_token + heads * value_stride_head + dims
    key = tl.load(key_ptr + key_offsets, mask=mask)
    value = tl.load(value_ptr + value_offsets, mask=mask)
    slot_offset = (slot // BLOCK_SIZE) * cache_stride_block + (
        slot % BLOCK_SIZE
    ) * cache_stride_token
    cache_offsets = slot_offset + heads * cache_stride_head + dims
    tl.store(k_cache_ptr + cache_offsets, key, mask=mask)
    tl.store(v_cache_ptr + cache_offsets, value, mask=mask)


def check_kv_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise ValueError unless the two are views of one pool in a layout that the kernels can
    address.
    """
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}: "
            "both must be (num_blocks, block_size, num_kv_heads, head_dim)"
        )
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(
            f"k_cache has strides {k_cache.stride()} and v_cache {v_cache.stride()}: "
            "they must be equal, with a contiguous last dimension; make both views of one pool"
        )
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache is {k_cache.dtype} and v_cache {v_cache.dtype}: they must be equal"
        )


def _check_store(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    check_kv_cache(k_cache, v_cache)
    if key.dim() != 3 or key.shape != value.shape or key.shape[1:] != k_cache.shape[2:]:
        raise ValueError(
            f"key is {tuple(key.shape)} and value {tuple(value.shape)}: "
            f"both must be (num_tokens, {k_cache.shape[2]}, {k_cache.shape[3]}) to fit the cache"
        )
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError(
            f"key has strides {key.stride()}, value {value.stride()}: "
            "the last dimension must be contiguous"
        )
    if key.dtype != k_cache.dtype or value.dtype != k_cache.dtype:
        raise ValueError(
            f"key is {key.dtype}, value {value.dtype}, the cache {k_cache.dtype}: must be equal"
        )
    if slot_mapping.shape != key.shape[:1] or slot_mapping.dtype != torch.int32:
        raise ValueError(
            f"slot_mapping is {tuple(slot_mapping.shape)} {slot_mapping.dtype}, "
            f"must be ({key.shape[0]},) int32"
        )
    if slot_mapping.stride(0) != 1 and key.shape[0] > 1:
        raise ValueError(f"slot_mapping has stride {slot_mapping.stride(0)}: make it contiguous")
