"""The attention kernels and the cache write against their torch references.

The kernels run three ways: in Triton's interpreter on the CPU at small, odd sizes (it has to be
chosen before Triton decorates a kernel, so those tests run in a pytest of their own, started by one
test of this file), compiled for GPUs that need not be there, and on a GPU at an engine's sizes.

Every case is poisoned: blocks that no sequence owns, and slots past a sequence's end, hold NaN;
unused columns of a block table hold ids that would be out of bounds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.kernels import decode_attention as decode  # noqa: E402
from nanovllm.kernels import prefill_attention as prefill  # noqa: E402
from nanovllm.kernels import store_kvcache as store  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(IS_INTERPRETED, reason="needs the compiler")

POISON_BLOCK_ID = 2**30
HALF_TOLERANCE = 2e-3  # one rounding of the probabilities and one of the output, 2**-11 each
BF16_TOLERANCE = 1e-2  # the same with 2**-8
SMALL_TUNING = decode.DecodeTuning(
    block_n=16, num_warps=4, num_stages=2, min_chunk=16, spare_items=5
)


@compiled
def test_kernels_match_references_in_interpreter() -> None:
    """All tests marked `interpreted`, in a process where Triton interprets kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    result = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=600
    )
    if "only 0-dimensional arrays can be converted" in result.stdout:
        pytest.skip("the interpreter of Triton 3.6 can't run a loop with NumPy 2.4 or later")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@dataclass(frozen=True)
class PagedCase:
    """Random queries over a poisoned paged cache."""

    q: torch.Tensor  # (tokens, heads, head_dim), a strided view of a wider projection
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    max_seqlen_q: int
    scale: float

    @classmethod
    def random(
        cls,
        context_lens: list[int],
        num_new: list[int] | None = None,
        *,
        group: int = 2,
        num_kv_heads: int = 2,
        head_dim: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        heads_first: bool = False,
    ) -> PagedCase:
        torch.manual_seed(sum(context_lens) + group)
        num_new = num_new or [1] * len(context_lens)
        num_blocks = [-(-length // block_size) for length in context_lens]
        pool_blocks = sum(num_blocks) + 3
        shape = (2, pool_blocks, block_size, num_kv_heads, head_dim)
        if heads_first:
            shape = (2, pool_blocks, num_kv_heads, block_size, head_dim)
        pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
        if heads_first:
            pool = pool.transpose(2, 3)
        block_tables = torch.full(
            (len(context_lens), max(num_blocks) + 2), POISON_BLOCK_ID, dtype=torch.int32
        )
        free = (torch.randperm(pool_blocks - 1) + 1).to(torch.int32)
        for row, (length, count) in enumerate(zip(context_lens, num_blocks, strict=True)):
            block_tables[row, :count], free = free[:count], free[count:]
            slots = block_tables[row, :count].long().repeat_interleave(block_size) * block_size
            slots = (slots + torch.arange(block_size).repeat(count))[:length].to(device)
            values = torch.randn(2, length, num_kv_heads, head_dim, device=device).to(dtype)
            pool[:, slots // block_size, slots % block_size] = values
        num_q_heads = num_kv_heads * group
        qkv = torch.randn(
            sum(num_new), (num_q_heads + 2 * num_kv_heads) * head_dim, device=device
        ).to(dtype)
        ends = torch.tensor([0, *num_new]).cumsum(0).to(torch.int32)
        return cls(
            q=qkv[:, : num_q_heads * head_dim].unflatten(1, (num_q_heads, head_dim)),
            k_cache=pool[0],
            v_cache=pool[1],
            block_tables=block_tables.to(device),
            cu_seqlens_q=ends.to(device),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            max_seqlen_q=max(num_new),
            scale=head_dim**-0.5,
        )

    def plan(self, tuning: decode.DecodeTuning | None = None) -> decode.DecodePlan:
        _, block_size, num_kv_heads, head_dim = self.k_cache.shape
        num_seqs, num_q_heads = len(self.context_lens), self.q.shape[1]
        return decode.DecodePlan.allocate(
            num_seqs,
            num_q_heads,
            num_kv_heads,
            head_dim,
            block_size,
            self.q.device,
            self.q.dtype,
            tuning,
        )

    def decode(self, plan: decode.DecodePlan) -> torch.Tensor:
        return decode.decode_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.context_lens,
            self.scale,
            plan,
        )

    def decode_torch(self) -> torch.Tensor:
        return decode.decode_attention_torch(
            self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens, self.scale
        )

    def prefill(self, tuning: prefill.PrefillTuning | None = None) -> torch.Tensor:
        return prefill.prefill_attention(*self._prefill_arguments(), tuning=tuning)

    def prefill_torch(self) -> torch.Tensor:
        return prefill.prefill_attention_torch(*self._prefill_arguments())

    def _prefill_arguments(self) -> tuple:
        return (
            self.q, self.k_cache, self.v_cache, self.block_tables, self.cu_seqlens_q,
            self.context_lens,
            self.max_seqlen_q, self.scale,
        )  # fmt: skip


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: HALF_TOLERANCE, torch.bfloat16: BF16_TOLERANCE}[
        dtype
    ]


def assert_rows_close(out: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Relative error of every (token, head) row; NaN never passes."""
    error = (out.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp_min(
        1e-6
    )
    assert error.max().item() <= limit, (
        f"worst row is off by {error.max().item():.2e}, limit {limit:.0e}"
    )


# The cache write


@interpreted
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_dim"), [(1, 1, 16), (7, 3, 24), (5, 8, 64)]
)
@pytest.mark.parametrize("heads_first", [False, True])
def test_store_kvcache_writes_only_the_named_slots(
    num_tokens: int, num_kv_heads: int, head_dim: int, heads_first: bool
) -> None:
    check_store(num_tokens, num_kv_heads, head_dim, torch.float16, "cpu", heads_first)


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [False, True])
def test_store_kvcache_on_gpu_writes_only_the_named_slots(heads_first: bool) -> None:
    for num_tokens in (1, 17, 2048):
        check_store(num_tokens, 8, 128, torch.bfloat16, "cuda", heads_first)


def check_store(
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    heads_first: bool,
) -> None:
    block_size = 16
    num_blocks = num_tokens // block_size + 2
    width = num_kv_heads * head_dim
    qkv = torch.randn(num_tokens, 4 * width, device=device).to(dtype)
    key = qkv[:, 2 * width : 3 * width].unflatten(1, (num_kv_heads, head_dim))
    value = qkv[:, 3 * width :].unflatten(1, (num_kv_heads, head_dim))
    slots = torch.randperm(num_blocks * block_size)[:num_tokens].to(torch.int32)
    slots[num_tokens // 2] = -1
    shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device).transpose(2, 3)
    if not heads_first:
        pool = pool.contiguous()
    expected = pool.clone()
    store.store_kvcache(key, value, pool[0], pool[1], slots.to(device))
    store.store_kvcache_torch(key, value, expected[0], expected[1], slots.to(device))
    assert torch.equal(pool, expected)
    stored = expected[0].flatten(0, 1)[slots[slots >= 0].long()]
    assert torch.equal(stored, key[(slots >= 0).to(device)])


# The decode plan


@interpreted
@pytest.mark.parametrize(
    "context_lens",
    [
        [1],
        [0],
        [16],
        [17],
        [1000],
        [16, 16, 16, 0, 3],
        [5] * 20,
        [1, 1000, 3, 40, 40, 0, 41],
        list(range(1, 60)),
    ],
)
def test_decode_plan_lists_every_chunk_once_long_ones_first(context_lens: list[int]) -> None:
    check_plan(context_lens, SMALL_TUNING, "cpu")


@interpreted
@pytest.mark.parametrize(("context_lens", "resident_items", "chunk"), [
    ([160] * 4, 0, 128),  # 640 tokens over 5 spare items
    ([160] * 4, 8, 128),  # as it is they all run at once
    ([160] * 4, 7, 160),  # a quarter longer: one chunk each
    ([250, 150, 150, 90], 5, 160),
    ([250, 150, 150, 90], 4, 128),  # never more than a quarter longer
])  # fmt: skip
def test_chunks_grow_a_little_so_that_all_run_at_once(
    context_lens: list[int], resident_items: int, chunk: int
) -> None:
    plan = decode.DecodePlan.allocate(8, 16, 8, 32, 16, "cpu", tuning=SMALL_TUNING)
    plan = replace(plan, resident_items=resident_items)
    plan.update(torch.tensor(context_lens, dtype=torch.int32))
    assert max(end - start for _, start, end, *_ in plan.items.tolist()) == chunk


@pytest.mark.gpu
@pytest.mark.parametrize(
    "context_lens", [[131072], [1] * 512, list(range(1, 2049, 4)), [32768, *[7] * 300]]
)
def test_decode_plan_on_gpu_lists_every_chunk_once_long_ones_first(context_lens: list[int]) -> None:
    check_plan(context_lens, decode.decode_tuning(128), "cuda")


def check_plan(context_lens: list[int], tuning: decode.DecodeTuning, device: str) -> None:
    plan = decode.DecodePlan.allocate(len(context_lens) + 1, 4, 2, 32, 16, device, tuning=tuning)
    plan.items.fill_(POISON_BLOCK_ID)
    plan.update(torch.tensor(context_lens, dtype=torch.int32, device=device))
    items = plan.items[: plan.num_items(len(context_lens))].tolist()
    work = [item for item in items if item[3] > 0]
    assert items[: len(work)] == work, "items without work must come last"
    lengths = [end - start for _, start, end, *_ in work]
    assert lengths == sorted(lengths, reverse=True)
    chunk = max(lengths)
    assert (
        chunk % tuning.block_n == 0 or chunk <= tuning.min_chunk or len(work) == len(context_lens)
    )
    for lane, length in enumerate(context_lens):
        owned = {
            (start, end): row for row, (owner, start, end, *_) in enumerate(work) if owner == lane
        }
        chunks = [
            (start, min(start + chunk, length)) for start in range(0, max(length, 1), max(chunk, 1))
        ]
        assert sorted(owned) == chunks
        ((count, first_item, last_item),) = {tuple(item[3:6]) for item in work if item[0] == lane}
        assert count == len(chunks)
        rows = [*range(first_item, first_item + len(chunks) - 1), last_item]
        assert rows == [owned[keys] for keys in chunks]


# Decode


@interpreted
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 16])
@pytest.mark.parametrize("context_lens", [[1], [15, 16, 17], [0, 40, 1, 0, 97]])
def test_decode_matches_reference(group: int, context_lens: list[int]) -> None:
    case = PagedCase.random(context_lens, group=group)
    plan = case.plan(SMALL_TUNING)
    plan.update(case.context_lens)
    assert_rows_close(case.decode(plan), case.decode_torch(), tolerance(torch.float32))


@interpreted
@pytest.mark.parametrize(("block_size", "block_n"), [(16, 32), (32, 32), (64, 16), (16, 64)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_decode_takes_any_block_size_and_cache_layout(
    block_size: int, block_n: int, heads_first: bool
) -> None:
    tuning = decode.DecodeTuning(
        block_n=block_n, num_warps=4, num_stages=2, min_chunk=block_n, spare_items=3
    )
    lens = [block_size - 1, block_size, block_size + 1, 3 * block_size + 5]
    case = PagedCase.random(
        lens, block_size=block_size, head_dim=24, dtype=torch.float16, heads_first=heads_first
    )
    plan = case.plan(tuning)
    plan.update(case.context_lens)
    assert_rows_close(case.decode(plan), case.decode_torch(), tolerance(torch.float16))


@interpreted
def test_decode_plan_serves_fewer_lanes_than_allocated() -> None:
    """A plan made for a wide batch serves a narrow one, with whatever the wide one left in it."""
    wide, narrow = PagedCase.random([60, 5, 33, 90, 1]), PagedCase.random([70, 18])
    plan = wide.plan(SMALL_TUNING)
    for case in (wide, narrow, wide):
        plan.update(case.context_lens)
        assert_rows_close(case.decode(plan), case.decode_torch(), tolerance(torch.float32))


# Every dtype, group, head_dim and block size, but not their product: each line compiles a kernel.
GPU_CASES = pytest.mark.parametrize(
    ("dtype", "group", "head_dim", "block_size"),
    [
        (torch.bfloat16, 1, 128, 256),
        (torch.bfloat16, 2, 128, 256),
        (torch.bfloat16, 4, 128, 16),
        (torch.bfloat16, 5, 128, 256),
        (torch.bfloat16, 7, 64, 32),
        (torch.bfloat16, 8, 256, 64),
        (torch.bfloat16, 16, 96, 128),
        (torch.float16, 2, 64, 16),
        (torch.float32, 2, 128, 256),
        (torch.float32, 5, 64, 16),
    ],
)


@pytest.mark.gpu
@GPU_CASES
def test_decode_on_gpu_matches_reference(
    dtype: torch.dtype, group: int, head_dim: int, block_size: int
) -> None:
    for lens in (
        [1],
        [0, 255, 256, 257, 4000],
        [1, 15, 16, 17, 127, 128, 129, 1000, 0, 2049, 31, 33],
    ):
        case = PagedCase.random(
            lens, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda"
        )
        plan = case.plan()
        plan.update(case.context_lens)
        assert_rows_close(case.decode(plan), case.decode_torch(), tolerance(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[32768], [131072], list(range(1, 2049, 4)), [32768, *[7] * 300]])
def test_decode_on_gpu_takes_long_contexts_and_wide_batches(lens: list[int]) -> None:
    case = PagedCase.random(
        lens, num_kv_heads=8, head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda"
    )
    plan = case.plan()
    plan.update(case.context_lens)
    assert_rows_close(case.decode(plan), case.decode_torch(), tolerance(torch.bfloat16))


@pytest.mark.gpu
def test_decode_on_gpu_graph_serves_every_length_bit_for_bit() -> None:
    """One capture, replayed over growing and shrinking lengths, equals eager calls and itself."""
    wide = PagedCase.random(
        [5000, 300, 2, 0], head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda"
    )
    plan, eager_plan = wide.plan(), wide.plan()
    context_lens = wide.context_lens.clone()
    plan.update(context_lens)
    wide.decode(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(context_lens)
        out = decode.decode_attention(
            wide.q, wide.k_cache, wide.v_cache, wide.block_tables, context_lens, wide.scale, plan
        )
    for lens in (
        [5000, 300, 2, 0],
        [1, 1, 1, 0],
        [4999, 0, 1, 0],
        [256, 257, 2, 0],
        [5000, 300, 2, 0],
    ):
        context_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        narrow = replace(wide, context_lens=context_lens.clone())
        eager_plan.update(narrow.context_lens)
        assert torch.equal(out, narrow.decode(eager_plan))
        assert_rows_close(out, narrow.decode_torch(), tolerance(torch.bfloat16))


@pytest.mark.gpu
def test_decode_on_gpu_repeats_bit_for_bit() -> None:
    """Chunks finish in any order; what they add up to doesn't show it."""
    lens = [3000 + 7 * seq for seq in range(64)]
    case = PagedCase.random(
        lens, num_kv_heads=8, head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda"
    )
    plan = case.plan()
    plan.update(case.context_lens)
    first = case.decode(plan)
    assert plan.num_done.count_nonzero().item() == 0
    assert all(torch.equal(first, case.decode(plan)) for _ in range(50))


# Prefill


@interpreted
@pytest.mark.parametrize("split_loop", [False, True])
@pytest.mark.parametrize("group", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("context_lens", "num_new"),
    [([1], [1]), ([15, 16, 17], [15, 16, 17]), ([40, 33, 5, 64], [7, 1, 5, 32]), ([50, 9], [0, 9])],
)
def test_prefill_matches_reference(
    group: int, context_lens: list[int], num_new: list[int], split_loop: bool
) -> None:
    case = PagedCase.random(context_lens, num_new, group=group)
    tuning = prefill.PrefillTuning(
        block_m=16, block_n=16, num_warps=4, num_stages=2, split_loop=split_loop
    )
    assert_rows_close(case.prefill(tuning), case.prefill_torch(), tolerance(torch.float32))


@interpreted
@pytest.mark.parametrize(("block_size", "block_n"), [(16, 32), (32, 16)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_prefill_takes_any_block_size_and_cache_layout(
    block_size: int, block_n: int, heads_first: bool
) -> None:
    case = PagedCase.random(
        [70, 3, 33],
        [70, 2, 20],
        block_size=block_size,
        head_dim=24,
        dtype=torch.float16,
        heads_first=heads_first,
    )
    tuning = prefill.PrefillTuning(block_m=32, block_n=block_n, num_warps=4, num_stages=2)
    assert_rows_close(case.prefill(tuning), case.prefill_torch(), tolerance(torch.float16))


@interpreted
def test_prefill_finds_its_sequence_among_many() -> None:
    lens = [1 + seq % 3 for seq in range(150)]
    case = PagedCase.random(lens, lens, group=1, num_kv_heads=1, head_dim=16)
    tuning = prefill.PrefillTuning(block_m=16, block_n=16, num_warps=4, num_stages=2)
    assert_rows_close(case.prefill(tuning), case.prefill_torch(), tolerance(torch.float32))


@pytest.mark.gpu
@GPU_CASES
def test_prefill_on_gpu_matches_reference(
    dtype: torch.dtype, group: int, head_dim: int, block_size: int
) -> None:
    for lens, num_new in (
        ([1], [1]),
        ([255, 256, 257, 1000], [255, 256, 257, 1000]),
        ([700, 129, 513, 64, 2000], [3, 129, 1, 63, 1700]),
    ):
        case = PagedCase.random(
            lens,
            num_new,
            group=group,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            device="cuda",
        )
        assert_rows_close(case.prefill(), case.prefill_torch(), tolerance(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[8192], [1 + 3 * seq for seq in range(300)]])
def test_prefill_on_gpu_takes_long_prompts_and_many_sequences(lens: list[int]) -> None:
    case = PagedCase.random(
        lens, lens, head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda"
    )
    assert_rows_close(case.prefill(), case.prefill_torch(), tolerance(torch.bfloat16))


@pytest.mark.gpu
def test_runtime_integers_compile_nothing_new() -> None:
    """Batches of 1, 16 and 17 sequences, on slices of odd alignment, run the kernels compiled for
    the first.
    """
    kernels = [
        decode.plan_decode_kernel, decode.decode_attention_kernel, prefill.prefill_attention_kernel,
        store.store_kvcache_kernel,
    ]  # fmt: skip
    counts = []
    for num_seqs in (7, 1, 16, 17):
        lens = [20 + seq for seq in range(num_seqs + 1)]
        case = PagedCase.random(lens, head_dim=128, dtype=torch.bfloat16, device="cuda")
        part = PagedCase(
            case.q[1:], case.k_cache, case.v_cache, case.block_tables[1:], case.cu_seqlens_q[:-1],
            case.context_lens[1:], 1, case.scale,
        )  # fmt: skip
        plan = part.plan()
        plan.update(part.context_lens)
        part.decode(plan)
        part.prefill()
        key = torch.zeros(num_seqs + 1, 2, 128, dtype=torch.bfloat16, device="cuda")
        slots = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
        store.store_kvcache(key[1:], key[1:], case.k_cache, case.v_cache, slots[1:])
        counts.append(
            [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
        )
    assert counts[1:] == counts[:-1]


# Compilation without a GPU


@dataclass(frozen=True)
class CompileCase:
    """A kernel with the compile-time arguments that an engine passes."""

    kernel: Callable[..., None]
    constants: dict[str, int | bool]
    num_warps: int = 4
    num_stages: int = 3

    def compile(self, capability: int, element: str) -> None:
        """Compile as a launch with aligned pointers and strides would."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        element_names = ("out_ptr", "q_ptr", "key_ptr", "value_ptr", "k_cache_ptr", "v_cache_ptr")
        partial_names = ("partial_out_ptr", "partial_max_ptr", "partial_sum_ptr")
        types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in names}
        types |= {name: f"*{element}" for name in element_names}
        types |= dict.fromkeys(partial_names, "*fp32") | {"scale_log2": "fp32"}
        types |= dict.fromkeys(self.constants, "constexpr")
        aligned = [
            name
            for name in names
            if name.startswith("cache_stride") or name in element_names + partial_names
        ]
        source = ASTSource(
            fn=self.kernel,
            signature={name: types[name] for name in names},
            constexprs={(names.index(name),): value for name, value in self.constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


HEADS = {"NUM_KV_HEADS": 8, "GROUP": 2, "HEAD_DIM": 128, "BLOCK_D": 128}


def compile_cases(block_size: int) -> list[CompileCase]:
    decode_constants = {
        **HEADS,
        "ITEM_WORDS": 8,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": 16,
        "BLOCK_N": 64,
        "BLOCK_GROUP": 2,
    }
    prefill_constants = {
        **HEADS, "BLOCK_SIZE": block_size, "BLOCK_SEQS": 128, "BLOCK_M": 128, "BLOCK_N": 64,
        "SPLIT_LOOP": False,
    }  # fmt: skip
    store_constants = {
        "NUM_HEADS": 8,
        "HEAD_DIM": 128,
        "BLOCK_SIZE": block_size,
        "BLOCK_HEADS": 8,
        "BLOCK_DIM": 128,
    }
    plan_constants = {
        "ITEM_WORDS": 8,
        "BLOCK_LANES": 16,
        "BLOCK_SEQS": 256,
        "BLOCK_CHUNKS": 16,
    }
    return [
        CompileCase(decode.plan_decode_kernel, plan_constants),
        CompileCase(decode.decode_attention_kernel, decode_constants),
        CompileCase(prefill.prefill_attention_kernel, prefill_constants, num_warps=8, num_stages=2),
        CompileCase(store.store_kvcache_kernel, store_constants),
    ]


@compiled
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("element", "block_size"), [("bf16", 256), ("fp16", 16)])
def test_kernels_compile_for_gpus_that_are_not_here(
    capability: int, element: str, block_size: int
) -> None:
    for case in compile_cases(block_size):
        case.compile(capability, element)


# Contracts


@compiled
def test_launchers_reject_what_kernels_cannot_take() -> None:
    """Before any launch, so also without a GPU; and `python -O` changes nothing."""
    case = PagedCase.random([20, 5])
    plan = case.plan()
    with pytest.raises(ValueError, match="block_size is 48, must be a power of two"):
        PagedCase.random([20], block_size=48).plan()
    with pytest.raises(ValueError, match="multiple of 1 to 16"):
        PagedCase.random([20], group=17).plan()
    with pytest.raises(ValueError, match="room for 1 to 2 sequences"):
        plan.update(torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="must be int32"):
        plan.update(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="plan is for"):
        PagedCase.random([20, 5], group=4).decode(plan)
    with pytest.raises(ValueError, match="block_tables is torch.int64"):
        replace(case, block_tables=case.block_tables.long()).decode(plan)
    with pytest.raises(ValueError, match="strides"):
        replace(case, v_cache=case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)).decode(
            plan
        )
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        replace(case, cu_seqlens_q=case.cu_seqlens_q[:2]).prefill()
    with pytest.raises(ValueError, match="q is torch.float16"):
        replace(case, q=case.q.half()).prefill()
    with pytest.raises(ValueError, match="slot_mapping"):
        store.store_kvcache(
            case.q[:, :2], case.q[:, :2], case.k_cache, case.v_cache, torch.zeros(2)
        )
