"""RMSNorm, its fusions and SiluAndMul: torch references against transformers' formulas, kernels
against references.
"""

import subprocess
import sys

import pytest
import torch
from compiling import CAPABILITIES, DEVICE, compile_for, needs_compiler, needs_launch

from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_kernel, silu_and_mul_torch
from nanovllm.kernels.norm import (
    add_rms_norm,
    add_rms_norm_torch,
    qk_norm_rope_store,
    qk_norm_rope_store_kernel,
    qk_norm_rope_store_torch,
    rms_norm,
    rms_norm_kernel,
    rms_norm_torch,
)

EPS = 1e-6
# One rounding of the result: the unit of the last place, relative, plus float32 noise of the sums.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL_DTYPES = (torch.float32, torch.float16)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def strided(rows: torch.Tensor) -> torch.Tensor:
    """The same rows inside a wider tensor whose other columns are NaN."""
    wide = torch.full(
        (rows.shape[0], rows.shape[1] + 16), float("nan"), dtype=rows.dtype, device=rows.device
    )
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


class Attention:
    """Inputs of `qk_norm_rope_store`: 5 tokens, one of them padding, in a cache of NaN."""

    def __init__(self, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.heads = (q_heads, kv_heads, head_dim)
        self.qkv = draw(5, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype)
        self.weights = (draw(head_dim, dtype=dtype, seed=1), draw(head_dim, dtype=dtype, seed=2))
        angles = draw(40, head_dim // 2, seed=3)
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.positions = torch.tensor([3, 7, 39, 0, 1], device=DEVICE)
        self.slots = torch.tensor([5, -1, 47, 16, 0], dtype=torch.int32, device=DEVICE)
        self.caches = self.new_caches()

    def new_caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        _, kv_heads, head_dim = self.heads
        pool = torch.full(
            (2, 3, 16, kv_heads, head_dim), float("nan"), dtype=self.qkv.dtype, device=DEVICE
        )
        return pool[0], pool[1]

    def run(self, function, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return function(
            self.qkv,
            *self.weights,
            EPS,
            self.cos_sin_cache,
            self.positions,
            *caches,
            self.slots,
            *self.heads,
        )


def test_rms_norm_torch_equals_qwen3() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    norm = modeling.Qwen3RMSNorm(48, eps=EPS)
    weight, x = draw(48).cpu(), draw(5, 48, seed=1).cpu()
    norm.weight.data = weight
    torch.testing.assert_close(rms_norm_torch(x, weight, EPS), norm(x))


def test_add_rms_norm_torch_updates_the_residual_in_place() -> None:
    x, residual, weight = draw(3, 8), draw(3, 8, seed=1), draw(8, seed=2)
    total = x + residual
    out, same = add_rms_norm_torch(x, residual, weight, EPS)
    assert same is residual
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, rms_norm_torch(total, weight, EPS))


def test_qk_norm_rope_store_torch_equals_qwen3() -> None:
    """The norms, the rotation and the layout of the cache, against transformers' own functions."""
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    case = Attention(4, 2, 16, torch.float32)
    q = case.run(qk_norm_rope_store_torch, case.caches)

    heads = case.qkv.view(5, 8, 16)
    expected_q, expected_k = (
        rms_norm_torch(part, weight, EPS).transpose(0, 1)
        for part, weight in zip((heads[:, :4], heads[:, 4:6]), case.weights, strict=True)
    )
    cos, sin = (part.repeat(1, 2) for part in case.cos_sin_cache[case.positions].chunk(2, dim=-1))
    expected_q, expected_k = modeling.apply_rotary_pos_emb(
        expected_q, expected_k, cos, sin, unsqueeze_dim=0
    )
    k_cache, v_cache = case.caches
    stored = [0, 2, 3, 4]
    slots = case.slots[stored].long()
    torch.testing.assert_close(q, expected_q.transpose(0, 1))
    torch.testing.assert_close(k_cache.flatten(0, 1)[slots], expected_k.transpose(0, 1)[stored])
    torch.testing.assert_close(v_cache.flatten(0, 1)[slots], heads[stored, 6:])
    assert k_cache.isnan().all(dim=(2, 3)).sum() == v_cache.isnan().all(dim=(2, 3)).sum() == 48 - 4


@needs_launch
@pytest.mark.parametrize("dtype", SMALL_DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (3, 96), (2, 300)])
def test_rms_norm_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = strided(draw(*shape, dtype=dtype)), draw(shape[1], dtype=dtype, seed=1)
    assert_close(rms_norm(x, weight, EPS), rms_norm_torch(x, weight, EPS))


@needs_launch
@pytest.mark.parametrize("dtype", SMALL_DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (3, 96), (2, 300)])
def test_add_rms_norm_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = strided(draw(*shape, dtype=dtype)), draw(shape[1], dtype=dtype, seed=1)
    residual = draw(*shape, dtype=dtype, seed=2)
    expected, expected_residual = add_rms_norm_torch(x, residual.clone(), weight, EPS)
    out, same = add_rms_norm(x, residual, weight, EPS)
    assert same is residual
    assert_close(out, expected)
    assert_close(residual, expected_residual)


@needs_launch
@pytest.mark.parametrize("dtype", SMALL_DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 90), (2, 2100)])
def test_silu_and_mul_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = strided(10 * draw(*shape, dtype=dtype))
    assert_close(silu_and_mul(x), silu_and_mul_torch(x))


@needs_launch
def test_silu_and_mul_has_no_nan_at_extreme_gates() -> None:
    x = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device=DEVICE)
    assert silu_and_mul(x).tolist() == [[0.0, 3e4]]


@needs_launch
@pytest.mark.parametrize("dtype", SMALL_DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (5, 1, 128), (8, 8, 32), (6, 2, 96)])
def test_qk_norm_rope_store_equals_its_reference(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Unused cache slots stay NaN, which the comparison includes."""
    case = Attention(*heads, dtype)
    case.qkv = strided(case.qkv)
    expected_caches = case.new_caches()
    expected = case.run(qk_norm_rope_store_torch, expected_caches)
    assert_close(case.run(qk_norm_rope_store, case.caches), expected)
    for cache, expected_cache in zip(case.caches, expected_caches, strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            cache, expected_cache, rtol=tolerance, atol=tolerance, equal_nan=True
        )


@needs_launch
def test_qk_norm_rope_store_takes_any_cache_layout() -> None:
    """A pool laid out [block, head, token, dim], seen through a transposed view."""
    case = Attention(4, 2, 16, torch.float32)
    case.run(qk_norm_rope_store_torch, case.caches)
    views = tuple(torch.zeros(3, 2, 16, 16, device=DEVICE).transpose(1, 2) for _ in range(2))
    case.run(qk_norm_rope_store, views)
    for view, expected in zip(views, case.caches, strict=True):
        assert_close(view, expected.nan_to_num(0.0))


@needs_launch
def test_empty_batches_return_empty_tensors() -> None:
    assert rms_norm(draw(0, 16), draw(16), EPS).shape == (0, 16)
    assert silu_and_mul(draw(0, 16)).shape == (0, 8)


def test_wrong_shapes_raise_naming_both() -> None:
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(tokens, 16\)"):
        rms_norm(draw(2, 8), draw(16), EPS)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(draw(2, 8), draw(3, 8), draw(8), EPS)
    with pytest.raises(ValueError, match=r"float16, residual \(2, 8\) torch\.float32"):
        add_rms_norm(draw(2, 8).half(), draw(2, 8), draw(8), EPS)
    with pytest.raises(ValueError, match=r"strides \(1, 2\)"):
        add_rms_norm(draw(8, 2).t(), draw(2, 8), draw(8), EPS)
    with pytest.raises(ValueError, match="element stride"):
        rms_norm(draw(8, 2).t(), draw(8), EPS)
    with pytest.raises(ValueError, match="2·intermediate"):
        silu_and_mul(draw(2, 7))
    case = Attention(4, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="k_cache"):
        case.run(qk_norm_rope_store, (case.caches[0], case.caches[1][:, :, :1]))
    for caches in (
        [cache[:, :, :1] for cache in case.caches],
        [cache.half() for cache in case.caches],
    ):
        with pytest.raises(ValueError, match=r"expected \(num_blocks, block_size, 2, 16\)"):
            case.run(qk_norm_rope_store, caches)


def test_references_run_without_triton_and_kernels_name_the_remedy() -> None:
    program = """
import sys
sys.modules["triton"] = None  # makes its import fail
import torch
from nanovllm.kernels import activation, gemm, norm, sampling
x = torch.ones(2, 8)
norm.rms_norm_torch(x, x[0], 1e-6), activation.silu_and_mul_torch(x)
ones = torch.ones(2, dtype=torch.int64)
sampling.sample_torch(x, x[:, 0].contiguous(), ones, ones)
try:
    norm.rms_norm(x, x[0], 1e-6)
except ImportError as error:
    assert "pip install triton" in str(error)
else:
    raise AssertionError("no ImportError")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@needs_compiler
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_fused_kernels_compile_for_gpus_that_are_not_there(capability: int) -> None:
    row = {"x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16"}
    strides = {"x_stride": "i32", "residual_stride": "i32", "eps": "fp32"}
    shape = {"HIDDEN": 1024, "BLOCK_HIDDEN": 1024, "HAS_RESIDUAL": True}
    compile_for(capability, rms_norm_kernel, row | strides, shape, num_warps=4)
    compile_for(
        capability,
        silu_and_mul_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*bf16", "x_stride": "i32"},
        {"INTERMEDIATE": 3072, "BLOCK": 1024},
    )
    names = (
        "qkv",
        "q_weight",
        "k_weight",
        "cos_sin",
        "positions",
        "slot_mapping",
        "q",
        "k_cache",
        "v_cache",
    )
    types = dict.fromkeys((f"{name}_ptr" for name in names), "*bf16")
    types |= {"cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "slot_mapping_ptr": "*i32"}
    types |= dict.fromkeys(
        ("qkv_stride", "cache_block_stride", "cache_token_stride", "cache_head_stride"), "i32"
    )
    heads = {"NUM_Q_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 256}
    compile_for(
        capability,
        qk_norm_rope_store_kernel,
        types | {"eps": "fp32"},
        heads | {"BLOCK_HEADS": 8, "BLOCK_HALF": 64},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 33, 4097])
@pytest.mark.parametrize("hidden", [1024, 4096])
def test_norms_and_activation_at_real_sizes(num_tokens: int, hidden: int) -> None:
    """bfloat16 kernels against float32 references of the same inputs."""
    x, weight = draw(num_tokens, hidden, dtype=torch.bfloat16), draw(hidden, dtype=torch.bfloat16)
    residual = draw(num_tokens, hidden, dtype=torch.bfloat16, seed=1)
    assert_close(rms_norm(x, weight, EPS), rms_norm_torch(x.float(), weight, EPS).bfloat16())
    expected, expected_residual = add_rms_norm_torch(x, residual.clone(), weight, EPS)
    out, _ = add_rms_norm(x, residual, weight, EPS)
    assert_close(out, expected)
    assert torch.equal(residual, expected_residual)
    assert_close(silu_and_mul(x), silu_and_mul_torch(x.float()).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("num_q_heads", [16, 32])
@pytest.mark.parametrize("num_tokens", [1, 33, 4097])
def test_qk_norm_rope_store_at_real_sizes(num_q_heads: int, num_tokens: int) -> None:
    """Random slots of a bfloat16 cache whose other slots are poisoned."""
    case = Attention(num_q_heads, 8, 128, torch.bfloat16)
    case.qkv = draw(num_tokens, (num_q_heads + 16) * 128, dtype=torch.bfloat16)
    case.positions = torch.arange(num_tokens, device=DEVICE) % 40
    case.slots = torch.randperm(20 * 256, device=DEVICE)[:num_tokens].int()
    case.slots[::7] = -1
    pools = torch.full((4, 20, 256, 8, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    q = case.run(qk_norm_rope_store, (pools[0], pools[1]))
    assert_close(q, case.run(qk_norm_rope_store_torch, (pools[2], pools[3])))
    torch.testing.assert_close(pools[:2], pools[2:], rtol=8e-3, atol=8e-3, equal_nan=True)
