"""Linear layers for the small batches of decode, where reading the weights is all the work.

A decode step multiplies each weight by few rows, so a projection of Qwen3-0.6B should take the 1 to
3 µs its weights need to stream in, yet a general library takes 5 to 12: it launches few tiles, and
each waits for memory several times in a row. Here a program owns a few output columns for all rows,
asks for its whole share of the weights at once, and shares the inner dimension out over its own
warps, whose sums meet in shared memory. So the machine is full without splitting the inner
dimension over programs, nothing is reduced through memory, and results repeat bit for bit.

- `gemv_kernel`, one or two rows: plain multiply-adds on weights that never leave registers.
- `linear_kernel`, up to 16 rows: tensor cores, `slices` of the inner dimension side by side.

Both may norm the rows first and add a residual or apply SiLU-and-multiply after, which saves a
launch each. More rows than that are the general library's: from 32 on it is as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F

from nanovllm.kernels.activation import silu_and_mul_torch
from nanovllm.kernels.compiling import row_stride
from nanovllm.kernels.norm import rms_norm_torch
from nanovllm.kernels.optional_triton import tl, triton

MAX_GEMV_ROWS = 2
MAX_SMALL_ROWS = 16  # the least that a tensor core multiplies
# Batch sizes that together need every kernel that any size needs.
ROWS_OF_EACH_KIND = (1, MAX_GEMV_ROWS, MAX_SMALL_ROWS, MAX_SMALL_ROWS + 1)
_SHARED_BYTES = 160 * 1024  # of a program's tiles; sm_90 has 227 kB, sm_80 163 kB


class Epilogue(IntEnum):
    """What happens to the product before it is stored."""

    NONE = 0
    ADD_RESIDUAL = 1  # out = residual + product, in place
    SILU_AND_MUL = 2  # out = silu(product with the weight's first half) · (with its second half)


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one product is cut up; all powers of two.

    `block_m` 1 or 2 means `gemv_kernel`, which takes the whole inner dimension at once and reads
    `block_n` and `num_warps` alone.
    """

    block_m: int  # rows at most: 1, 2 or 16
    block_n: int  # output columns a program
    block_k: int = 0  # inner dimension of one step of one slice
    slices: int = 1  # parts of the inner dimension that a program multiplies side by side
    num_warps: int = 4
    num_stages: int = 3  # steps in flight, where there are several

    @property
    def is_gemv(self) -> bool:
        """Whether the product runs without tensor cores."""
        return self.block_m <= MAX_GEMV_ROWS


def small_batch_linear(
    x: torch.Tensor, weight: torch.Tensor, config: GemmConfig | None = None
) -> torch.Tensor:
    """Return x @ weightᵀ, float32 inside, rounded once.

    Args:
        x: (rows, in_features), 1 to 16 rows; rows may be strided.
        weight: (out_features, in_features), contiguous, x's dtype.
        config: None = `default_config`.

    Returns:
        A new (rows, out_features) tensor. Moves the weight once, and x once a program.

    Raises:
        ValueError: shapes, strides or dtypes don't fit, or the config can't take them.
    """
    return _launch(x, weight, config, Epilogue.NONE)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, config: GemmConfig | None = None
) -> torch.Tensor:
    """Add x @ weightᵀ to the residual stream in place, and return it.

    As `small_batch_linear` otherwise.

    Args:
        residual: (rows, out_features), contiguous, x's dtype, **updated in place**.
    """
    if residual.shape != (x.shape[0], weight.shape[0]) or not residual.is_contiguous():
        raise ValueError(
            f"residual is {tuple(residual.shape)}, "
            f"expected contiguous ({x.shape[0]}, {weight.shape[0]})"
        )
    config = config or measured_config(x.shape[0], *weight.shape)
    return _launch(x, weight, config, Epilogue.ADD_RESIDUAL, residual=residual)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Return rms_norm(x, norm_weight, eps) @ weightᵀ; as `small_batch_linear` otherwise.

    The rows are scaled by 1 / rms after the product, so the norm costs no pass of its own.
    """
    return _launch(x, weight, config, Epilogue.NONE, norm=(norm_weight, eps))


def norm_linear_silu(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Return silu(gate) · up, where gate and up are the halves of rms_norm(x) @ weightᵀ.

    Args:
        weight: (2·intermediate, in_features): gate, then up.
    """
    return _launch(x, weight, config, Epilogue.SILU_AND_MUL, norm=(norm_weight, eps))


def linear_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`small_batch_linear` in plain torch."""
    return F.linear(x, weight)


def linear_add_torch(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """`linear_add` in plain torch."""
    return residual.add_(F.linear(x, weight))


def norm_linear_torch(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> torch.Tensor:
    """`norm_linear` in plain torch."""
    return F.linear(rms_norm_torch(x, norm_weight, eps), weight)


def norm_linear_silu_torch(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> torch.Tensor:
    """`norm_linear_silu` in plain torch."""
    return silu_and_mul_torch(norm_linear_torch(x, norm_weight, eps, weight))


def default_config(num_rows: int, in_features: int) -> GemmConfig:
    """Return a config that is right everywhere and good on an H200.

    Raises:
        ValueError: more rows than these kernels are for.
    """
    if not 1 <= num_rows <= MAX_SMALL_ROWS:
        raise ValueError(f"{num_rows} rows, expected 1 to {MAX_SMALL_ROWS}: use F.linear for more")
    # Weights in registers: 4 columns of 4096 are 64 per thread.
    if num_rows <= MAX_GEMV_ROWS and in_features <= 4096:
        return GemmConfig(num_rows, 4, num_warps=8)
    return sliced_config(in_features, block_n=8, slices=8, block_k=64)


def sliced_config(in_features: int, *, block_n: int, slices: int, block_k: int) -> GemmConfig:
    """Tensor cores with one slice a warp; where rows are short, all steps are in flight at once."""
    steps = triton.cdiv(in_features, slices * block_k)
    step_bytes = 2 * slices * block_k * (MAX_SMALL_ROWS + block_n)
    num_stages = 1 if steps == 1 else max(2, min(steps + 1, 6, _SHARED_BYTES // step_bytes))
    return GemmConfig(MAX_SMALL_ROWS, block_n, block_k, slices, slices, num_stages)


def measured_config(num_rows: int, out_features: int, in_features: int) -> GemmConfig | None:
    """The config that beats cuBLAS for a product that narrows (out <= in), or None where none does.

    Measured on an H200 in bfloat16 for o_proj and down_proj of Qwen3-0.6B and 8B: 3.3 and 4.6 µs
    against 12.8 and 6.8 for one row, 3.9 and 4.7 against 5.9 and 6.9 for 16. Products that widen
    are left to cuBLAS.
    """
    if num_rows > MAX_SMALL_ROWS or out_features > in_features:
        return None
    if num_rows <= MAX_GEMV_ROWS and in_features <= 2048:
        return GemmConfig(num_rows, 4, num_warps=8)
    return GemmConfig(MAX_SMALL_ROWS, 8 if out_features <= 2048 else 16, 64, 4, 4, 6)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemmConfig | None,
    epilogue: Epilogue,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Check the operands, pick the kernel, and return where it writes."""
    _check_operands(x, weight)
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // (2 if epilogue is Epilogue.SILU_AND_MUL else 1)
    config = config or default_config(num_rows, in_features)
    if num_rows > config.block_m:
        raise ValueError(
            f"{num_rows} rows, block_m is {config.block_m}: it takes no more than that"
        )
    out = residual
    if out is None:
        out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    norm_weight, eps = norm or (weight, 0.0)
    arguments = (x, weight, norm_weight, out, row_stride(x), num_rows, eps)
    constants = {
        "N": out_features,
        "K": in_features,
        "HAS_NORM": norm is not None,
        "EPILOGUE": int(epilogue),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }
    grid = (triton.cdiv(out_features, config.block_n),)
    if config.is_gemv:
        gemv_kernel[grid](
            *arguments, **constants, BLOCK_K=triton.next_power_of_2(in_features),
            num_warps=config.num_warps,
        )  # fmt: skip
    else:
        linear_kernel[grid](
            *arguments, **constants, BLOCK_K=config.block_k, SLICES=config.slices,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def gemv_kernel(
    x_ptr,
    weight_ptr,
    norm_weight_ptr,
    out_ptr,
    x_stride,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for BLOCK_N output columns of one or two rows; its weights stay in registers."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    inner_mask = inner < K
    weight_mask = (columns < N)[:, None] & inner_mask[None, :]
    weight_ptrs = weight_ptr + columns.to(tl.int64)[:, None] * K + inner[None, :]
    weight = tl.load(weight_ptrs, mask=weight_mask, other=0.0)  # (columns, inner)
    up_weight = weight
    if EPILOGUE == 2:
        up_weight = tl.load(weight_ptrs + N * K, mask=weight_mask, other=0.0)
    norm_weight = inner
    if HAS_NORM:
        norm_weight = tl.load(norm_weight_ptr + inner, mask=inner_mask, other=0.0).to(tl.float32)
    # Both rows are asked for before either is used.
    x = tl.load(x_ptr + inner, mask=inner_mask, other=0.0)
    if BLOCK_M == 2:
        second_mask = inner < tl.where(num_rows > 1, K, 0)
        second_x = tl.load(x_ptr + x_stride + inner, mask=second_mask, other=0.0)
    out_ptrs = out_ptr + columns
    _gemv_row(x, weight, up_weight, norm_weight, out_ptrs, columns < N, eps, K, HAS_NORM, EPILOGUE)
    if BLOCK_M == 2:
        out_mask = columns < tl.where(num_rows > 1, N, 0)
        _gemv_row(
            second_x, weight, up_weight, norm_weight, out_ptrs + N, out_mask, eps, K, HAS_NORM,
            EPILOGUE,
        )  # fmt: skip


@triton.jit
def _gemv_row(
    x,
    weight,
    up_weight,
    norm_weight,
    out_ptrs,
    out_mask,
    eps,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Multiply one row (inner,) by (columns, inner) weights and store it."""
    x = x.to(tl.float32)
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / K + eps)
        x = x * norm_weight
    product = tl.sum(weight.to(tl.float32) * x[None, :], axis=1) * scale
    if EPILOGUE == 1:
        product += tl.load(out_ptrs, mask=out_mask, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1) * scale
        product = product * tl.sigmoid(product) * up
    tl.store(out_ptrs, product.to(out_ptrs.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    norm_weight_ptr,
    out_ptr,
    x_stride,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """One program for BLOCK_N output columns of all rows, at most BLOCK_M.

    All tiles have a leading dimension of slices, so that each warp multiplies its own part of the
    inner dimension, and the sums of the warps are added at the end.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    column_mask = columns < N
    row_mask = rows < num_rows
    inner = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    weight_inner, x_inner = inner[:, :, None], inner[:, None, :]
    x_row_mask, weight_column_mask = row_mask[None, :, None], column_mask[None, None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :, None] * x_stride
    weight_ptrs = weight_ptr + columns.to(tl.int64)[None, None, :] * K
    product = tl.zeros((SLICES, BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((SLICES, BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((SLICES, BLOCK_M), tl.float32)

    for step in range(0, K, SLICES * BLOCK_K):
        k_weight, k_x = step + weight_inner, step + x_inner
        if K % (SLICES * BLOCK_K) == 0:
            weight_mask, x_mask = weight_column_mask, x_row_mask
        else:
            weight_mask, x_mask = weight_column_mask & (k_weight < K), x_row_mask & (k_x < K)
        weight = tl.load(weight_ptrs + k_weight, mask=weight_mask, other=0.0)
        if EPILOGUE == 2:
            up_weight = tl.load(weight_ptrs + N * K + k_weight, mask=weight_mask, other=0.0)
        x = tl.load(x_ptrs + k_x, mask=x_mask, other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=2)
            norm_weight = tl.load(norm_weight_ptr + k_x, mask=k_x < K, other=0.0)
            x = (wide * norm_weight.to(tl.float32)).to(x.dtype)
        product = tl.dot(x, weight, product, input_precision="ieee")
        if EPILOGUE == 2:
            up = tl.dot(x, up_weight, up, input_precision="ieee")

    product, up, squares = tl.sum(product, axis=0), tl.sum(up, axis=0), tl.sum(squares, axis=0)
    if HAS_NORM:
        scale = (1.0 / tl.sqrt(squares / K + eps))[:, None]
        product, up = product * scale, up * scale
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    out_mask = row_mask[:, None] & column_mask[None, :]
    if EPILOGUE == 1:
        product += tl.load(out_ptrs, mask=out_mask, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        product = product * tl.sigmoid(product) * up
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=out_mask)


def _check_operands(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}: "
            "expected (rows, in) and (out, in)"
        )
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"x has strides {x.stride()}, weight {weight.stride()}: "
            "make x's rows and weight contiguous"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}: make them equal")
