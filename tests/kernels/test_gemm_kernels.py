"""Small-batch linear layers: every kernel, prologue and epilogue against plain torch."""

from __future__ import annotations

import pytest
import torch
from compiling import CAPABILITIES, DEVICE, compile_for, needs_compiler, needs_launch

from nanovllm.kernels.gemm import (
    GemmConfig,
    default_config,
    gemv_kernel,
    linear_add,
    linear_add_torch,
    linear_kernel,
    linear_torch,
    norm_linear,
    norm_linear_silu,
    norm_linear_silu_torch,
    norm_linear_torch,
    small_batch_linear,
)

EPS = 1e-6
# Relative to the largest output: float32 sums in another order; half types round inputs of the
# second product (x · norm weight, or the normed x) and the output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
GEMV = GemmConfig(block_m=1, block_n=4)
GEMV_PAIR = GemmConfig(block_m=2, block_n=8)
SLICED = GemmConfig(block_m=16, block_n=8, block_k=16, slices=4)
CASES = [
    pytest.param(config, rows, inner, id=f"{name}-{rows}x{inner}")
    for name, config, rows, inner in [
        ("gemv", GEMV, 1, 96),
        ("gemv_pair", GEMV_PAIR, 1, 64),
        ("gemv_pair", GEMV_PAIR, 2, 50),
        ("sliced", SLICED, 1, 64),
        ("sliced", SLICED, 5, 100),
        ("sliced", SLICED, 16, 192),
        ("sliced", SLICED, 7, 70),
    ]
]
needs_small_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with a float32 reference, relative to its largest element."""
    error = (actual.float() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[actual.dtype], f"relative error {error}"


def poisoned_rows(rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows inside a wider tensor whose other rows and columns are NaN."""
    wide = torch.full((rows + 3, inner + 8), float("nan"), dtype=dtype, device=DEVICE)
    wide[:rows, :inner] = draw(rows, inner, dtype=dtype)
    return wide[:rows, :inner]


@needs_launch
@needs_small_dtypes
@pytest.mark.parametrize(("config", "rows", "inner"), CASES)
def test_small_batch_linear_equals_torch(
    config: GemmConfig, rows: int, inner: int, dtype: torch.dtype
) -> None:
    """43 columns end inside a tile; the inner dimension inside a step."""
    x, weight = poisoned_rows(rows, inner, dtype), draw(43, inner, dtype=dtype, seed=1)
    out = small_batch_linear(x, weight, config)
    assert out.dtype == dtype
    assert_close(out, linear_torch(x.float(), weight.float()))


@needs_launch
@needs_small_dtypes
@pytest.mark.parametrize(("config", "rows", "inner"), CASES)
def test_linear_add_updates_the_residual_in_place(
    config: GemmConfig, rows: int, inner: int, dtype: torch.dtype
) -> None:
    x, weight = poisoned_rows(rows, inner, dtype), draw(43, inner, dtype=dtype, seed=1)
    residual = draw(rows, 43, dtype=dtype, seed=2)
    expected = linear_add_torch(x.float(), weight.float(), residual.float())
    assert linear_add(x, weight, residual, config) is residual
    assert_close(residual, expected)


@needs_launch
@needs_small_dtypes
@pytest.mark.parametrize(("config", "rows", "inner"), CASES)
def test_norm_linear_norms_the_rows_first(
    config: GemmConfig, rows: int, inner: int, dtype: torch.dtype
) -> None:
    x, weight = poisoned_rows(rows, inner, dtype), draw(43, inner, dtype=dtype, seed=1)
    norm_weight = draw(inner, dtype=dtype, seed=2)
    expected = norm_linear_torch(x.float(), norm_weight.float(), EPS, weight.float())
    assert_close(norm_linear(x, norm_weight, EPS, weight, config), expected)


@needs_launch
@needs_small_dtypes
@pytest.mark.parametrize(("config", "rows", "inner"), CASES)
def test_norm_linear_silu_pairs_gate_and_up(
    config: GemmConfig, rows: int, inner: int, dtype: torch.dtype
) -> None:
    x, weight = poisoned_rows(rows, inner, dtype), draw(2 * 21, inner, dtype=dtype, seed=1)
    norm_weight = draw(inner, dtype=dtype, seed=2)
    expected = norm_linear_silu_torch(x.float(), norm_weight.float(), EPS, weight.float())
    out = norm_linear_silu(x, norm_weight, EPS, weight, config)
    assert out.shape == (rows, 21)
    assert_close(out, expected)


@needs_launch
def test_default_configs_serve_every_batch_size() -> None:
    weight = draw(40, 64, seed=1)
    for rows in (1, 2, 3, 16):
        x = draw(rows, 64)
        assert_close(small_batch_linear(x, weight), linear_torch(x, weight))


def test_default_configs_cover_their_rows_and_fit_in_shared_memory() -> None:
    for inner in (1024, 2048, 2560, 3072, 4096, 12288):
        for rows in (1, 2, 3, 8, 16):
            config = default_config(rows, inner)
            assert config.is_gemv == (config.block_m < 16)
            assert rows <= config.block_m
            step_bytes = 2 * config.block_k * config.slices * (config.block_m + config.block_n)
            assert step_bytes * config.num_stages <= 163 * 1024


def test_wrong_operands_and_configs_raise_naming_them() -> None:
    x, weight = draw(3, 64), draw(8, 64)
    with pytest.raises(ValueError, match=r"weight \(8, 32\)"):
        small_batch_linear(x, weight[:, :32])
    with pytest.raises(ValueError, match="strides"):
        small_batch_linear(draw(64, 3).t(), weight)
    with pytest.raises(ValueError, match="float16"):
        small_batch_linear(x, weight.half())
    with pytest.raises(ValueError, match="3 rows, block_m is 1"):
        small_batch_linear(x, weight, GEMV)
    with pytest.raises(ValueError, match="17 rows, block_m is 16"):
        small_batch_linear(draw(17, 64), weight, SLICED)
    with pytest.raises(ValueError, match="residual"):
        linear_add(x, weight, draw(3, 9))
    with pytest.raises(ValueError, match=r"17 rows.*F\.linear"):
        small_batch_linear(draw(17, 64), weight)


def compile_linear(
    capability: int, config: GemmConfig, columns: int, inner: int, *, is_fused: bool, dtype: str
) -> object:
    """Compile one config, plain or with the norm and SiLU-and-multiply."""
    pointers = ("x_ptr", "weight_ptr", "norm_weight_ptr", "out_ptr")
    signature = dict.fromkeys(pointers, f"*{dtype}")
    signature |= {"x_stride": "i32", "num_rows": "i32", "eps": "fp32"}
    constexprs = {"N": columns, "K": inner, "HAS_NORM": is_fused, "EPILOGUE": 2 if is_fused else 0}
    constexprs |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    if config.is_gemv:
        kernel = gemv_kernel
        constexprs["BLOCK_K"] = 1 << (inner - 1).bit_length()
    else:
        kernel = linear_kernel
        constexprs |= {"BLOCK_K": config.block_k, "SLICES": config.slices}
    return compile_for(
        capability,
        kernel,
        signature,
        constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@needs_compiler
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_default_configs_compile_for_gpus_that_are_not_there(capability: int, rows: int) -> None:
    plain, fused = default_config(rows, 2048), default_config(rows, 1024)
    compile_linear(capability, plain, 1024, 2048, is_fused=False, dtype="bf16")
    compile_linear(capability, fused, 3072, 1024, is_fused=True, dtype="bf16")


@needs_compiler
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes_compile(dtype: str) -> None:
    for config in (GEMV_PAIR, SLICED):
        compile_linear(80, config, 96, 128, is_fused=True, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("columns", "inner"), [(4096, 1024), (1024, 2048), (1024, 3072), (4096, 12288)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_small_batch_linear_at_real_sizes(rows: int, columns: int, inner: int) -> None:
    """Every default in bfloat16, plain and fused, twice with the same bits."""
    x = poisoned_rows(rows, inner, torch.bfloat16)
    weight = draw(columns, inner, dtype=torch.bfloat16, seed=1)
    norm_weight = draw(inner, dtype=torch.bfloat16, seed=2)
    out = small_batch_linear(x, weight)
    assert torch.equal(out, small_batch_linear(x, weight))
    assert_close(out, linear_torch(x.float(), weight.float()))

    expected = norm_linear_silu_torch(x.float(), norm_weight.float(), EPS, weight.float())
    assert_close(norm_linear_silu(x, norm_weight, EPS, weight), expected)
    residual = draw(rows, columns, dtype=torch.bfloat16, seed=3)
    expected = linear_add_torch(x.float(), weight.float(), residual.float())
    assert_close(linear_add(x, weight, residual), expected)
