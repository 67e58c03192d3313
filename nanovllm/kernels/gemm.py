"""Linear layers for the small batches of decode, where reading the weights is all the work.

A decode step multiplies each weight by few rows, so a projection of Qwen3-0.6B should take the 1 to
3 µs its weights need to stream in, yet a general library takes 5 to 12: it launches few tiles, and
each waits for memory several times in a row. Here a program owns a few output columns for all rows,
asks for its whole share of the weights at once, and shares the inner dimension out over its own
warps, whose sums meet in shared memory. So the machine is full without splitting the inner
dimension over programs, and nothing is reduced through memory.

- `gemv_kernel`, one or two rows: plain multiply-adds on weights that never leave registers.
- `linear_kernel`, any number of rows: tensor cores; `slices` shares the inner dimension out inside
  a program, `split_k` over programs, for the 32 to 256 rows where tiles are few. Partial sums are
  float32 and are added in a fixed order, so results repeat bit for bit.

Both may norm the rows first and add a residual or apply SiLU-and-multiply after, which saves a
launch each. Programmatic dependent launch (`use_pdl`, sm_90 on) lets a program ask for its weights,
which are constants, while the kernel before it still runs; it touches what that kernel wrote only
after waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
import torch.nn.functional as F

from nanovllm.kernels.activation import silu_and_mul_torch
from nanovllm.kernels.norm import rms_norm_torch
from nanovllm.kernels.optional_triton import tl, triton

MAX_GEMV_ROWS = 2
MAX_SMALL_ROWS = 16
MAX_ROWS = 256
# Batches that between them need every kernel that batches of any size need.
ROWS_OF_EACH_KIND = (1, MAX_GEMV_ROWS, MAX_SMALL_ROWS, MAX_SMALL_ROWS + 1)
SHARED_BYTES = 160 * 1024  # of a program's tiles; sm_90 has 227 kB, sm_80 163 kB


class Epilogue(IntEnum):
    """What happens to the product before it is stored."""

    NONE = 0
    ADD_RESIDUAL = 1  # out = residual + product, in place
    SILU_AND_MUL = (
        2  # out = silu(product with the first half of the weight) · (with the second half)
    )


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one product is cut up; all powers of two.

    `block_m` 1 or 2 means `gemv_kernel`, which takes the whole inner dimension at once and reads
    `block_n` and `num_warps` alone.
    """

    block_m: int  # rows a program
    block_n: int  # output columns a program
    block_k: int = 0  # inner dimension of one step of one slice
    slices: int = 1  # parts of the inner dimension inside a program; 1 = one plain matrix product
    split_k: int = 1  # parts of the inner dimension over programs
    num_warps: int = 4
    num_stages: int = 3  # steps in flight, where there are several
    use_pdl: bool = False

    @property
    def is_gemv(self) -> bool:
        """Whether the product runs without tensor cores."""
        return self.block_m <= MAX_GEMV_ROWS


def small_batch_linear(
    x: torch.Tensor, weight: torch.Tensor, config: GemmConfig | None = None
) -> torch.Tensor:
    """Return x @ weightᵀ, float32 inside, rounded once.

    Args:
        x: (rows, in_features), 1 to 256 rows; rows may be strided.
        weight: (out_features, in_features), contiguous, x's dtype.
        config: None = `default_config`.

    Returns:
        A new (rows, out_features) tensor. Moves the weight once, and x once a program.

    Raises:
        ValueError: shapes, strides or dtypes don't fit, or the config can't take them.
    """
    return _launch(x, weight, config, Epilogue.NONE)


def split_linear(
    x: torch.Tensor, weight: torch.Tensor, config: GemmConfig | None = None
) -> torch.Tensor:
    """Return (split_k, rows, out_features) float32 parts whose sum is x @ weightᵀ.

    `norm.add_rms_norm` adds them on the way, which saves the launch that would; otherwise as
    `small_batch_linear`.
    """
    config = config or default_config(x.shape[0], weight.shape[0], x.shape[1])
    return _launch(x, weight, config, Epilogue.NONE, keep_parts=True)


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


def default_config(num_rows: int, out_features: int, in_features: int) -> GemmConfig:
    """Return a config that is right everywhere and expected to be good on an H200.

    Args:
        num_rows: 1 to 256.
        out_features: of the output: half the weight's rows under SiLU-and-multiply.
    """
    return linear_candidates(num_rows, out_features, in_features)[0]


def measured_config(num_rows: int, out_features: int, in_features: int) -> GemmConfig | None:
    """The config that beats cuBLAS for a product that narrows (out <= in), or None where none does.

    Measured on an H200 in bfloat16 for o_proj and down_proj of Qwen3-0.6B and 8B: 3.3 and 4.6 µs
    against 12.8 and 6.8 for one row, 3.9 and 4.7 against 5.9 and 6.9 for 16. Products that widen
    are cuBLAS's from three rows on.
    """
    if num_rows > MAX_SMALL_ROWS or out_features > in_features:
        return None
    if num_rows <= MAX_GEMV_ROWS and in_features <= 2048:
        return GemmConfig(num_rows, 4, num_warps=8)
    return GemmConfig(MAX_SMALL_ROWS, 8 if out_features <= 2048 else 16, 64, 4, 1, 4, 6)


def linear_candidates(
    num_rows: int, out_features: int, in_features: int, *, is_fused: bool = False
) -> tuple[GemmConfig, ...]:
    """Return the configs worth measuring for a shape, the one expected to be fastest first.

    Args:
        is_fused: leave out those that can't norm rows or fuse an epilogue (`split_k` above 1).

    Raises:
        ValueError: more rows than these kernels are for.
    """
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"{num_rows} rows, expected 1 to {MAX_ROWS}: use F.linear for more")
    if num_rows <= MAX_SMALL_ROWS:
        return tuple(_gemv_candidates(num_rows, in_features) + _sliced_candidates(in_features))
    split = _split_candidates(num_rows, out_features, in_features)
    return tuple(dict.fromkeys(replace(c, split_k=1) if is_fused else c for c in split))


def _gemv_candidates(num_rows: int, in_features: int) -> list[GemmConfig]:
    """Weights in registers: up to 128 of a thread's, which makes 16 to 64 kB a program."""
    if num_rows > MAX_GEMV_ROWS or in_features > 4096:
        return []
    return [GemmConfig(num_rows, n, num_warps=warps) for n in (4, 8) for warps in (8, 4)]


def _sliced_candidates(in_features: int) -> list[GemmConfig]:
    """Tensor cores with one slice a warp; where rows are short, all steps are in flight at once."""
    cuts = [
        (8, 8, 64),
        (8, 4, 64),
        (8, 8, 128),
        (16, 8, 64),
        (16, 4, 64),
        (16, 4, 128),
        (32, 4, 64),
    ]
    if in_features <= 2048:
        cuts.append((8, 8, triton.next_power_of_2(in_features) // 8))
    candidates = []
    for block_n, slices, block_k in cuts:
        steps = triton.cdiv(in_features, slices * block_k)
        step_bytes = 2 * slices * block_k * (MAX_SMALL_ROWS + block_n)
        num_stages = 1 if steps == 1 else max(2, min(steps + 1, 6, SHARED_BYTES // step_bytes))
        config = GemmConfig(16, block_n, block_k, slices, 1, slices, num_stages)
        candidates.append(config)
    return list(dict.fromkeys(candidates))


def _split_candidates(num_rows: int, out_features: int, in_features: int) -> list[GemmConfig]:
    """Tiles whose inner dimension is split until a GPU of 132 processors has one or two each."""
    rows = triton.next_power_of_2(num_rows)
    candidates = []
    for tile_m, block_n, stages in (
        (64, 64, 4),
        (64, 32, 5),
        (128, 64, 4),
        (64, 128, 3),
        (32, 32, 5),
    ):
        block_m = min(tile_m, rows)
        tiles = triton.cdiv(rows, block_m) * triton.cdiv(out_features, block_n)
        for programs in (132, 264):
            split_k = _largest_split(programs // tiles, in_features)
            candidates.append(GemmConfig(block_m, block_n, 64, 1, split_k, 4, stages))
    return list(dict.fromkeys(candidates))


def _largest_split(limit: int, in_features: int) -> int:
    """Largest power of two, at most 16 and `limit`, that leaves each part whole steps of 64."""
    split_k = 1
    while split_k * 2 <= min(limit, 16) and in_features % (split_k * 2 * 64) == 0:
        split_k *= 2
    return split_k


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemmConfig | None,
    epilogue: Epilogue,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    keep_parts: bool = False,
) -> torch.Tensor:
    """Check the operands, pick the kernel, and add up what `split_k` left in parts."""
    _check_operands(x, weight)
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // (2 if epilogue is Epilogue.SILU_AND_MUL else 1)
    config = config or default_config(num_rows, out_features, in_features)
    _check_config(config, num_rows, norm is not None or epilogue is not Epilogue.NONE)
    shape = (num_rows, out_features)
    target = residual
    if config.split_k > 1 or keep_parts:
        target = torch.empty((config.split_k, *shape), dtype=torch.float32, device=x.device)
    elif target is None:
        target = torch.empty(shape, dtype=x.dtype, device=x.device)
    norm_weight, eps = norm or (weight, 0.0)
    row_stride = x.stride(0) if num_rows > 1 else in_features
    arguments = (x, weight, norm_weight, target, row_stride, num_rows, eps)
    constants = {
        "N": out_features,
        "K": in_features,
        "HAS_NORM": norm is not None,
        "EPILOGUE": int(epilogue),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "USE_PDL": config.use_pdl,
    }
    (_launch_gemv if config.is_gemv else _launch_linear)(arguments, constants, config)
    if config.split_k == 1 or keep_parts:
        return target
    return _reduce(target, torch.empty(shape, dtype=x.dtype, device=x.device))


def _launch_gemv(
    arguments: tuple[object, ...], constants: dict[str, int], config: GemmConfig
) -> None:
    gemv_kernel[(triton.cdiv(constants["N"], config.block_n),)](
        *arguments, **constants, BLOCK_K=triton.next_power_of_2(constants["K"]),
        num_warps=config.num_warps, **_pdl_option(config),
    )  # fmt: skip


def _launch_linear(
    arguments: tuple[object, ...], constants: dict[str, int], config: GemmConfig
) -> None:
    num_rows = arguments[5]
    column_tiles = triton.cdiv(constants["N"], config.block_n)
    linear_kernel[(column_tiles, config.split_k, triton.cdiv(num_rows, config.block_m))](
        *arguments, **constants, BLOCK_K=config.block_k, SLICES=config.slices,
        SPLIT_K=config.split_k, num_warps=config.num_warps, num_stages=config.num_stages,
        **_pdl_option(config),
    )  # fmt: skip


def _pdl_option(config: GemmConfig) -> dict[str, bool]:
    """The launch option, left out where unused: only NVIDIA's backend knows it."""
    return {"launch_pdl": True} if config.use_pdl else {}


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
    USE_PDL: tl.constexpr,
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
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

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
            second_x,
            weight,
            up_weight,
            norm_weight,
            out_ptrs + N,
            out_mask,
            eps,
            K,
            HAS_NORM,
            EPILOGUE,
        )


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
    SPLIT_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program for a (BLOCK_M, BLOCK_N) tile of one part of the inner dimension.

    With SLICES > 1 all tiles have a leading dimension of slices, so each warp multiplies its own
    part of the inner dimension, and the sums of the warps are added at the end.
    """
    K_PART: tl.constexpr = (K + SPLIT_K - 1) // SPLIT_K
    STEP: tl.constexpr = SLICES * BLOCK_K
    split = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_mask = columns < N
    row_mask = rows < num_rows
    # Offsets and masks of (inner, columns) and (rows, inner) tiles, behind a dimension of slices
    # if there are several.
    if SLICES == 1:
        inner = tl.arange(0, BLOCK_K)
        weight_inner, x_inner = inner[:, None], inner[None, :]
        x_rows, x_row_mask = rows[:, None], row_mask[:, None]
        weight_columns, weight_column_mask = columns[None, :], column_mask[None, :]
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_M,), tl.float32)
    else:
        inner = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        weight_inner, x_inner = inner[:, :, None], inner[:, None, :]
        x_rows, x_row_mask = rows[None, :, None], row_mask[None, :, None]
        weight_columns, weight_column_mask = columns[None, None, :], column_mask[None, None, :]
        product = tl.zeros((SLICES, BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((SLICES, BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((SLICES, BLOCK_M), tl.float32)
    first = split * K_PART
    last = min(first + K_PART, K)
    weight_ptrs = weight_ptr + weight_columns.to(tl.int64) * K
    x_ptrs = x_ptr + x_rows.to(tl.int64) * x_stride

    if USE_PDL and K_PART > STEP:
        tl.extra.cuda.gdc_launch_dependents()
        if SPLIT_K == 1:
            _prefetch_weights(weight_ptr, N, K, BLOCK_N)
            if EPILOGUE == 2:
                _prefetch_weights(weight_ptr + N * K, N, K, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    for step in range(0, K_PART, STEP):
        k_weight, k_x = first + step + weight_inner, first + step + x_inner
        if K_PART % STEP == 0 and K % SPLIT_K == 0:
            weight_mask, x_mask = weight_column_mask, x_row_mask
        else:
            weight_mask, x_mask = weight_column_mask & (k_weight < last), x_row_mask & (k_x < last)
        weight = tl.load(weight_ptrs + k_weight, mask=weight_mask, other=0.0)
        if EPILOGUE == 2:
            up_weight = tl.load(weight_ptrs + N * K + k_weight, mask=weight_mask, other=0.0)
        if USE_PDL and K_PART <= STEP:
            # The weights are on their way; only x depends on the kernel before.
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptrs + k_x, mask=x_mask, other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=len(x.shape) - 1)
            norm_weight = tl.load(norm_weight_ptr + k_x, mask=k_x < last, other=0.0)
            x = (wide * norm_weight.to(tl.float32)).to(x.dtype)
        product = tl.dot(x, weight, product, input_precision="ieee")
        if EPILOGUE == 2:
            up = tl.dot(x, up_weight, up, input_precision="ieee")

    if SLICES > 1:
        product, up, squares = tl.sum(product, axis=0), tl.sum(up, axis=0), tl.sum(squares, axis=0)
    if HAS_NORM:
        scale = (1.0 / tl.sqrt(squares / K + eps))[:, None]
        product, up = product * scale, up * scale
    out_ptr += split.to(tl.int64) * num_rows * N
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    out_mask = row_mask[:, None] & column_mask[None, :]
    if EPILOGUE == 1:
        product += tl.load(out_ptrs, mask=out_mask, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        product = product * tl.sigmoid(product) * up
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _prefetch_weights(weight_ptr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Bring this program's rows of the weight, which are adjacent, into L2.

    One instruction of one thread.
    """
    first = tl.program_id(0) * BLOCK_N
    num_bytes = tl.minimum(BLOCK_N, N - first) * (
        K * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    )
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred is_first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 is_first, thread, 0;
            @is_first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [weight_ptr + first.to(tl.int64) * K, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def _reduce(parts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the sum of (split_k, rows, columns) float32 parts, first to last, to `out`."""
    grid = (triton.cdiv(out.numel(), 512),)
    reduce_kernel[grid](parts, out, out.numel(), SPLIT_K=parts.shape[0], BLOCK=512, num_warps=4)
    return out


@triton.jit(do_not_specialize=["size"])
def reduce_kernel(parts_ptr, out_ptr, size, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr):
    """One program for BLOCK elements of the output; parts are added in order."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(parts_ptr + split * size + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


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


def _check_config(config: GemmConfig, num_rows: int, is_fused: bool) -> None:
    if config.is_gemv and num_rows > config.block_m:
        raise ValueError(
            f"{num_rows} rows, block_m is {config.block_m}: "
            "a gemv config takes no more rows than that"
        )
    if is_fused and config.split_k > 1:
        raise ValueError(
            f"split_k is {config.split_k}, expected 1: a norm or an epilogue needs whole sums"
        )
