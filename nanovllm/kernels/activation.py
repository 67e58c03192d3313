"""SiLU-and-multiply: the nonlinearity of a gated feed-forward layer, in one launch.

The merged projection writes gate and up side by side, so one kernel reads both halves of a row and
writes silu(gate)·up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.compiling import row_stride
from nanovllm.kernels.optional_triton import tl, triton

BLOCK = 1024


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up, where each row of x is gate, then up.

    Args:
        x: (tokens, 2·intermediate), any float dtype; rows may be strided, elements of a row are
            adjacent.

    Returns:
        A new (tokens, intermediate) tensor of x's dtype; float32 inside, rounded once. Moves 3 ×
        intermediate elements a token.

    Raises:
        ValueError: x is not two-dimensional, its width is odd, or a row's elements are not
            adjacent.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)} with strides {x.stride()}, "
            "expected (tokens, 2·intermediate) with adjacent elements"
        )
    num_tokens, intermediate = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, intermediate), dtype=x.dtype, device=x.device)
    if num_tokens:
        silu_and_mul_kernel[(num_tokens, triton.cdiv(intermediate, BLOCK))](
            x, out, row_stride(x), INTERMEDIATE=intermediate, BLOCK=BLOCK, num_warps=4
        )
    return out


def silu_and_mul_torch(x: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` in plain torch; x may have any number of leading dimensions."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, x_stride, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr):
    """One program for BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < INTERMEDIATE
    gate_ptr = x_ptr + token * x_stride + columns
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + INTERMEDIATE, mask=mask, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    out = product.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * INTERMEDIATE + columns, out, mask=mask)
