"""Who computes attention: flash-attn, our Triton kernels, or plain torch.

A backend is a few functions of one shape: for the prefill lanes of a step, for its decode lanes,
and for a mixed step of both. They read keys and values from the paged cache only. `select_backend`
turns the user's wish into a backend or an error that says what the wish lacks.

`torch` gathers each lane's blocks and calls scaled_dot_product_attention: it is the reference, runs
everywhere and takes any block size. `flash_attn` is version 3 on Hopper GPUs if it is installed,
else version 2. `triton` needs no compiled extension.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.utils.context import Context

AttentionFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Context, float], torch.Tensor]
"""(q, k_cache, v_cache, context, scale) -> (tokens, heads, head_dim), q's shape."""

# The decode gather of the torch backend works on groups of lanes of about this many elements.
_GATHER_ELEMENTS = 1 << 24


class AttentionBackend(NamedTuple):
    """Attention functions that go together."""

    prefill_name: str  # who runs prefill lanes, as reported by stats()
    decode_name: str  # and decode lanes
    prefill: AttentionFn
    decode: AttentionFn
    mixed: AttentionFn  # prefill lanes first
    needs_plan: bool = False  # whether decode wants Context.decode_plan
    is_capturable: bool = False  # whether decode may run inside a CUDA graph


def select_backend(
    wish: str, *, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
) -> AttentionBackend:
    """Return the backend for `wish`: auto, flash_attn, triton or torch.

    Raises:
        ValueError: An explicit wish can't take the device, dtype, block size or head dimension.
        ImportError: An explicit wish isn't installed.
    """
    if wish == "torch" or (wish == "auto" and device.type == "cpu"):
        return torch_backend()
    if device.type == "cpu":
        raise ValueError(f"attention_backend={wish!r} needs a GPU: use 'torch' (or 'auto') on CPU")
    if wish == "flash_attn":
        return _flash_attn_backend(dtype, block_size, head_dim)
    if wish == "triton":
        return _triton_backend(dtype, block_size, head_dim)
    return _best_backend(dtype, block_size, head_dim)


def torch_backend() -> AttentionBackend:
    """The reference, on any device."""
    mixed = _in_parts(prefill_torch, decode_torch)
    return AttentionBackend("torch", "torch", prefill_torch, decode_torch, mixed)


def _in_parts(prefill: AttentionFn, decode: AttentionFn) -> AttentionFn:
    """Prefill lanes, then decode lanes."""

    def mixed(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float
    ) -> torch.Tensor:
        prefill_q, decode_q = q[: ctx.num_prefill_tokens], q[ctx.num_prefill_tokens :]
        parts = (
            prefill(prefill_q, k_cache, v_cache, ctx, scale),
            decode(decode_q, k_cache, v_cache, ctx, scale),
        )
        return torch.cat(parts)

    return mixed


def _best_backend(dtype: torch.dtype, block_size: int, head_dim: int) -> AttentionBackend:
    """The measured best of what is installed and fits; see the README's performance notes.

    Our decode kernel beats both versions of flash-attn, our prefill kernel version 2 only.
    """
    candidates: dict[str, AttentionBackend] = {}
    for name, build in (("flash_attn", _flash_attn_backend), ("triton", _triton_backend)):
        try:
            candidates[name] = build(dtype, block_size, head_dim)
        except (ImportError, ValueError):
            continue  # not installed, or doesn't fit: auto never fails for that
    own, flash = candidates.get("triton"), candidates.get("flash_attn")
    if own is None:
        return flash or torch_backend()
    if flash is not None and flash.prefill_name == "flash_attn_3":
        return own._replace(prefill_name=flash.prefill_name, prefill=flash.prefill)
    return own


def prefill_torch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: Context, scale: float
) -> torch.Tensor:
    """Causal attention of prefill lanes, one lane at a time."""
    out = torch.empty_like(q)
    starts = context.cu_seqlens_q.tolist()
    block_size = k_cache.shape[1]
    for lane, context_len in enumerate(context.context_lens[: context.num_prefills].tolist()):
        tokens = slice(starts[lane], starts[lane + 1])
        blocks = context.block_tables[lane, : -(-context_len // block_size)].long()
        k = k_cache[blocks].flatten(0, 1)[:context_len]  # (keys, kv_heads, head_dim)
        v = v_cache[blocks].flatten(0, 1)[:context_len]
        num_queries = tokens.stop - tokens.start
        mask = None
        if num_queries < context_len:
            mask = torch.ones(num_queries, context_len, dtype=torch.bool, device=q.device)
            mask = mask.tril(diagonal=context_len - num_queries)
        out[tokens] = F.scaled_dot_product_attention(
            q[tokens].transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        ).transpose(0, 1)
    return out


def decode_torch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: Context, scale: float
) -> torch.Tensor:
    """Attention of decode lanes, one query each, in groups of lanes that fit in memory."""
    out = torch.empty_like(q)
    context_lens = context.context_lens[context.num_prefills :]
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_blocks = -(-context.max_seqlen_k // block_size)
    tables = context.block_tables[context.num_prefills :, :num_blocks].long()
    # Columns beyond a lane's blocks are arbitrary: read its first block there, and mask it.
    columns = torch.arange(num_blocks, device=q.device)
    is_used = columns * block_size < context_lens.unsqueeze(1)
    tables = torch.where(is_used, tables, tables[:, :1])
    keys = torch.arange(num_blocks * block_size, device=q.device)
    mask = keys < context_lens.unsqueeze(1)  # (lanes, keys)
    lane_elements = num_blocks * block_size * num_kv_heads * head_dim
    group_size = max(1, _GATHER_ELEMENTS // lane_elements)
    for start in range(0, len(q), group_size):
        group = slice(start, start + group_size)
        k = k_cache[tables[group]].flatten(1, 2)  # (lanes, keys, kv_heads, head_dim)
        v = v_cache[tables[group]].flatten(1, 2)
        out[group] = F.scaled_dot_product_attention(
            q[group].unsqueeze(2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask[group, None, None],
            scale=scale,
            enable_gqa=True,
        ).squeeze(2)
    return out


def _flash_attn_backend(dtype: torch.dtype, block_size: int, head_dim: int) -> AttentionBackend:
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"attention_backend='flash_attn' needs bfloat16 or float16, not {dtype}")
    if head_dim > 256 or head_dim % 8:
        raise ValueError(
            f"attention_backend='flash_attn' needs head_dim a multiple of 8 up to 256, not "
            f"{head_dim}"
        )
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    if is_hopper and importlib.util.find_spec("flash_attn_interface") and block_size >= 16:
        return _flash_attn_3()
    if not importlib.util.find_spec("flash_attn"):
        raise ImportError(
            "attention_backend='flash_attn' needs flash-attn: pip install flash-attn, or use "
            "attention_backend='triton'"
        )
    if block_size % 256:
        raise ValueError(
            f"flash-attn 2 needs kvcache_block_size a multiple of 256, not {block_size}: change "
            "it or use attention_backend='triton'"
        )
    return _flash_attn_2()


def _flash_attn_2() -> AttentionBackend:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    def prefill(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float
    ) -> torch.Tensor:
        return flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=ctx.cu_seqlens_q,
            cu_seqlens_k=ctx.cu_seqlens_k,
            max_seqlen_q=ctx.max_seqlen_q,
            max_seqlen_k=ctx.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            block_table=ctx.block_tables[: ctx.num_prefills],
        )

    decode = _flash_attn_decode(flash_attn_with_kvcache, "block_table")
    name, mixed = "flash_attn_2", _in_parts(prefill, decode)
    return AttentionBackend(name, name, prefill, decode, mixed, is_capturable=True)


def _flash_attn_3() -> AttentionBackend:
    from flash_attn_interface import flash_attn_with_kvcache

    def prefill(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float
    ) -> torch.Tensor:
        return flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=ctx.context_lens[: ctx.num_prefills],
            page_table=ctx.block_tables[: ctx.num_prefills],
            cu_seqlens_q=ctx.cu_seqlens_q,
            max_seqlen_q=ctx.max_seqlen_q,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
        )

    decode = _flash_attn_decode(flash_attn_with_kvcache, "page_table")
    name, mixed = "flash_attn_3", _in_parts(prefill, decode)
    return AttentionBackend(name, name, prefill, decode, mixed, is_capturable=True)


def _flash_attn_decode(
    flash_attn_with_kvcache: Callable[..., torch.Tensor], table_name: str
) -> AttentionFn:
    """Decode by either version: they differ in what they call a block table."""

    def decode(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float
    ) -> torch.Tensor:
        return flash_attn_with_kvcache(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=ctx.context_lens[ctx.num_prefills :],
            softmax_scale=scale,
            causal=True,
            **{table_name: ctx.block_tables[ctx.num_prefills :]},
        ).squeeze(1)

    return decode


def _triton_backend(dtype: torch.dtype, block_size: int, head_dim: int) -> AttentionBackend:
    if not importlib.util.find_spec("triton"):
        raise ImportError(
            "attention_backend='triton' needs Triton (Linux only): pip install triton"
        )
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(
            f"attention_backend='triton' needs kvcache_block_size a power of two of at least 16, "
            f"not {block_size}"
        )
    from nanovllm.kernels.decode_attention import decode_attention
    from nanovllm.kernels.paged_attention import HEAD_DIMS
    from nanovllm.kernels.prefill_attention import prefill_attention

    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"attention_backend='triton' needs head_dim from 16 to 256, not {head_dim}: use "
            "attention_backend='torch'"
        )

    def prefill(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return prefill_attention(
            q, k_cache, v_cache, ctx.block_tables[: ctx.num_prefills], ctx.cu_seqlens_q,
            ctx.context_lens[: ctx.num_prefills], ctx.max_seqlen_q, scale, out=out,
        )  # fmt: skip

    def decode(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert ctx.decode_plan is not None, "the runner made no decode plan"
        return decode_attention(
            q, k_cache, v_cache, ctx.block_tables[ctx.num_prefills :],
            ctx.context_lens[ctx.num_prefills :], scale, ctx.decode_plan, out,
        )  # fmt: skip

    def mixed(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float
    ) -> torch.Tensor:
        out, caches = torch.empty_like(q), (k_cache, v_cache)
        prompts, decodes = slice(ctx.num_prefill_tokens), slice(ctx.num_prefill_tokens, None)
        # A few prompt tokens leave most of the GPU idle till the longest prompt ends: decode too.
        with _beside(ctx.side_stream):
            prefill(q[prompts], *caches, ctx, scale, out[prompts])
        decode(q[decodes], *caches, ctx, scale, out[decodes])
        _join(ctx.side_stream)
        return out

    return AttentionBackend(
        "triton", "triton", prefill, decode, mixed, needs_plan=True, is_capturable=True
    )


@contextmanager
def _beside(side_stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch the block's work on `side_stream`, after all launched so far; see `_join`."""
    if side_stream is None:
        yield
        return
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        yield


def _join(side_stream: torch.cuda.Stream | None) -> None:
    """Make what is launched next wait for `side_stream`."""
    if side_stream is not None:
        torch.cuda.current_stream().wait_stream(side_stream)
