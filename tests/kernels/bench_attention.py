"""Measure the attention kernels against a device copy and, where importable, flash-attn 2 and 3.

    python -m tests.kernels.bench_attention            # the table of the README, about a minute
    python -m tests.kernels.bench_attention --tune     # and which kernel constants are fastest

Decode is measured as an engine runs it: one CUDA graph, captured for block tables of max_model_len
4096, that plans a step once and then attends in 28 layers, here with 8 distinct caches in turn, so
that nothing stays in the L2 cache. Blocks are shuffled and data random. The figure is the K and V
bytes of the contexts over the time of a layer, the plan included. Prefill counts 4 · head_dim ·
query heads operations for each visible (query, key) pair.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from nanovllm.kernels.decode_attention import (
    DecodePlan,
    DecodeTuning,
    decode_attention,
    decode_attention_torch,
    decode_tuning,
)
from nanovllm.kernels.prefill_attention import (
    PrefillTuning,
    prefill_attention,
    prefill_attention_torch,
)

NUM_CACHES = 8
NUM_LAYERS = 28
MAX_MODEL_LEN = 4096
HEAD_DIM = 128
NUM_KV_HEADS = 8


@dataclass(frozen=True)
class DecodeShape:
    """A decode batch; context lengths are uniform in low..high."""

    num_seqs: int
    low: int
    high: int
    num_q_heads: int = 16
    block_size: int = 256
    target: float | None = None  # fraction of the copy's bytes/s

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}/{NUM_KV_HEADS}"
        return f"{self.num_seqs} x {self.low}..{self.high}, {heads}, block {self.block_size}"


DECODE_SHAPES = [
    DecodeShape(256, 100, 2000, 16, target=0.97),
    DecodeShape(256, 100, 2000, 32, target=0.95),
    DecodeShape(512, 100, 600, 16, target=0.92),
    DecodeShape(32, 100, 2000, 16, target=0.82),
    DecodeShape(100, 700, 2000, 16),
    DecodeShape(8, 1000, 2000, 16),
    DecodeShape(1, 2000, 2000, 16),
    DecodeShape(1, 500, 500, 16),
    DecodeShape(256, 100, 2000, 16, block_size=16),
]
PREFILL_HEADS = (16, 32)


class PagedBatch:
    """Random queries over NUM_CACHES shuffled caches; both layouts are views of the same memory."""

    def __init__(
        self, pool: torch.Tensor, lens: list[int], num_q_heads: int, block_size: int, num_new: int
    ) -> None:
        device = pool.device
        counts = [-(-length // block_size) for length in lens]
        num_blocks = sum(counts) + 1
        caches = pool[: NUM_CACHES * 2 * num_blocks * block_size * NUM_KV_HEADS * HEAD_DIM]
        self.tokens_first = caches.view(
            NUM_CACHES, 2, num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM
        )
        heads_first = caches.view(NUM_CACHES, 2, num_blocks, NUM_KV_HEADS, block_size, HEAD_DIM)
        self.heads_first = heads_first.transpose(3, 4)
        ids = iter((torch.randperm(num_blocks - 1) + 1).tolist())
        tables = torch.zeros(len(lens), MAX_MODEL_LEN // block_size, dtype=torch.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = torch.tensor(list(itertools.islice(ids, count)))
        self.block_tables = tables.to(device)
        self.context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.q = torch.randn(num_new, num_q_heads, HEAD_DIM, device=device).bfloat16()
        self.scale = HEAD_DIM**-0.5
        self.block_size = block_size

    def layers(
        self, caches: torch.Tensor, num_layers: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer in range(num_layers):
            yield caches[layer % NUM_CACHES, 0], caches[layer % NUM_CACHES, 1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--tune", action="store_true", help="also sweep the constants of the kernels"
    )
    arguments = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    pool = torch.empty(6 * 2**30, dtype=torch.bfloat16, device="cuda").normal_()
    copy_rate = measure_copy(pool)
    if arguments.tune:
        print("\n".join(tune_decode(pool, copy_rate) + tune_prefill(pool)), flush=True)
    print(f"device copy {copy_rate / 1e9:,.0f} GB/s", flush=True)
    for shape in DECODE_SHAPES:
        print(decode_row(pool, shape, copy_rate), flush=True)
    for num_q_heads in PREFILL_HEADS:
        for row in prefill_rows(pool, num_q_heads):
            print(row, flush=True)


# Timing


def graph_seconds(step: Callable[[], None], repeats: int = 10) -> float:
    """Median time of a replay of `step`, captured after a run outside of the graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def try_seconds(measure: Callable[[], float], name: str) -> float | None:
    """Time of an optional competitor or variant; None if it refuses."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001 - whatever a foreign library raises, the table goes on
        print(f"{name}: {type(error).__name__}: {str(error)[:150]}")
        torch.cuda.synchronize()
        return None


def measure_copy(pool: torch.Tensor) -> float:
    """Bytes/s of a large device-to-device copy, read and written bytes."""
    source, target = pool[: 2**30], pool[2**30 : 2**31]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(20):  # not in a graph: there a copy engine does it, at two thirds of the speed
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    target.normal_()
    return 2 * source.nbytes / statistics.median(seconds)


# Decode


def decode_batch(pool: torch.Tensor, shape: DecodeShape) -> PagedBatch:
    lens = [random.randint(shape.low, shape.high) for _ in range(shape.num_seqs)]
    return PagedBatch(pool, lens, shape.num_q_heads, shape.block_size, shape.num_seqs)


def decode_seconds(
    batch: PagedBatch, caches: torch.Tensor, tuning: DecodeTuning | None = None, repeats: int = 10
) -> float:
    """Time of one layer of a decode step by our kernel."""
    plan = decode_plan(batch, tuning)

    def step() -> None:
        plan.update(batch.context_lens)
        for k_cache, v_cache in batch.layers(caches, NUM_LAYERS):
            decode_attention(
                batch.q, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.scale, plan
            )

    return graph_seconds(step, repeats) / NUM_LAYERS


def decode_plan(batch: PagedBatch, tuning: DecodeTuning | None = None) -> DecodePlan:
    num_seqs, num_q_heads, _ = batch.q.shape
    return DecodePlan.allocate(
        num_seqs,
        num_q_heads,
        NUM_KV_HEADS,
        HEAD_DIM,
        batch.block_size,
        batch.q.device,
        tuning=tuning,
    )


def decode_error(batch: PagedBatch, caches: torch.Tensor, lanes: int = 8) -> float:
    """Largest relative error of a (lane, head) row against float32."""
    plan = decode_plan(batch)
    plan.update(batch.context_lens)
    out = decode_attention(
        batch.q,
        caches[0, 0],
        caches[0, 1],
        batch.block_tables,
        batch.context_lens,
        batch.scale,
        plan,
    )[:lanes].float()
    expected = decode_attention_torch(
        batch.q[:lanes].float(), caches[0, 0].float(), caches[0, 1].float(),
        batch.block_tables[:lanes], batch.context_lens[:lanes], batch.scale,
    )  # fmt: skip
    return ((out - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def flash2_decode_seconds(batch: PagedBatch) -> float | None:
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None

    def step() -> None:
        for k_cache, v_cache in batch.layers(batch.tokens_first, NUM_LAYERS):
            flash_attn_with_kvcache(
                batch.q.unsqueeze(1), k_cache, v_cache, cache_seqlens=batch.context_lens,
                block_table=batch.block_tables, softmax_scale=batch.scale, causal=True,
            )  # fmt: skip

    seconds = try_seconds(lambda: graph_seconds(step), "flash-attn 2")
    return seconds and seconds / NUM_LAYERS


def flash3_decode_seconds(batch: PagedBatch) -> float | None:
    """The better of splits chosen for each call and scheduler metadata once a step."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata
    except (ImportError, OSError):
        return None

    def step(with_metadata: bool) -> None:
        metadata = None
        if with_metadata:
            metadata = get_scheduler_metadata(
                len(batch.context_lens), 1, MAX_MODEL_LEN, batch.q.shape[1], NUM_KV_HEADS, HEAD_DIM,
                batch.context_lens, page_size=batch.block_size, causal=True,
            )  # fmt: skip
        for k_cache, v_cache in batch.layers(batch.tokens_first, NUM_LAYERS):
            flash_attn_with_kvcache(
                batch.q.unsqueeze(1), k_cache, v_cache, cache_seqlens=batch.context_lens,
                page_table=batch.block_tables, softmax_scale=batch.scale, causal=True,
                scheduler_metadata=metadata,
            )  # fmt: skip

    times = [
        try_seconds(lambda: graph_seconds(lambda: step(False)), "flash-attn 3"),
        try_seconds(lambda: graph_seconds(lambda: step(True)), "metadata"),
    ]
    measured = [seconds / NUM_LAYERS for seconds in times if seconds]
    return min(measured, default=None)


def decode_row(pool: torch.Tensor, shape: DecodeShape, copy_rate: float) -> str:
    batch = decode_batch(pool, shape)
    num_bytes = kv_bytes(batch)
    seconds = {
        "ours": decode_seconds(batch, batch.tokens_first),
        "heads first": decode_seconds(batch, batch.heads_first),
        "fa2": flash2_decode_seconds(batch) if shape.block_size % 256 == 0 else None,
        "fa3": flash3_decode_seconds(batch),
    }
    rates = "  ".join(
        f"{name} {num_bytes / time / 1e9:,.0f} ({time * 1e6:.1f} us)" if time else f"{name} -"
        for name, time in seconds.items()
    )
    fraction = num_bytes / seconds["ours"] / copy_rate
    target = f" (target {shape.target:.0%})" if shape.target else ""
    error = decode_error(batch, batch.tokens_first)
    return f"decode {shape}: {fraction:.1%} of copy{target}; GB/s: {rates}; error {error:.1e}"


def kv_bytes(batch: PagedBatch) -> int:
    return 2 * 2 * NUM_KV_HEADS * HEAD_DIM * int(batch.context_lens.sum())


def tune_decode(pool: torch.Tensor, copy_rate: float) -> list[str]:
    """Every kernel variant with every plan constant on every shape."""
    lines = []
    for num_q_heads in (16, 32):
        shapes = [
            replace(shape, num_q_heads=num_q_heads)
            for shape in DECODE_SHAPES
            if shape.block_size == 256
        ]
        shapes = list(dict.fromkeys(replace(shape, target=None) for shape in shapes))
        batches = [decode_batch(pool, shape) for shape in shapes]
        tunings = list(decode_tunings())
        compile_decode(batches[-1], tunings)
        results = {
            tuning: [
                kv_bytes(batch)
                / decode_seconds(batch, batch.tokens_first, tuning, repeats=4)
                / copy_rate
                for batch in batches
            ]
            for tuning in tunings
        }
        best = [max(rates[i] for rates in results.values()) for i in range(len(batches))]
        names = "; ".join(f"{shape.num_seqs}x{shape.low}..{shape.high}" for shape in shapes)
        lines.append(f"tune decode, {num_q_heads}/8; shapes: {names}")
        lines += [tuning_line("best of each shape", best)]
        by_worst = sorted(
            results, key=lambda t: -min(a / b for a, b in zip(results[t], best, strict=True))
        )
        by_large = sorted(results, key=lambda t: -sum(results[t][:3]))
        lines += [tuning_line(f"worst loss: {short(t)}", results[t]) for t in by_worst[:12]]
        lines += [tuning_line(f"large: {short(t)}", results[t]) for t in by_large[:8]]
        lines += [tuning_line(f"in use: {short(t)}", results[t]) for t in tunings[:1]]
    return lines


def decode_tunings() -> Iterator[DecodeTuning]:
    yield decode_tuning(HEAD_DIM)
    kernels = [(128, 4, 3), (64, 4, 2), (64, 4, 3), (64, 2, 3), (32, 2, 4), (32, 1, 4)]
    for (block_n, num_warps, num_stages), min_chunk, spare_items in itertools.product(
        kernels, (128, 256), (32, 48, 64, 96, 128)
    ):
        yield DecodeTuning(block_n, num_warps, num_stages, min_chunk, spare_items)


def compile_decode(batch: PagedBatch, tunings: list[DecodeTuning]) -> None:
    """Compile all variants in threads; the measurements then find them ready."""
    variants = {(t.block_n, t.num_warps, t.num_stages): t for t in tunings}

    def compile_one(tuning: DecodeTuning) -> None:
        plan = decode_plan(batch, tuning)
        plan.update(batch.context_lens)
        k_cache, v_cache = batch.tokens_first[0]
        decode_attention(
            batch.q, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.scale, plan
        )

    compile_one(tunings[0])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_one, variants.values()))
    torch.cuda.synchronize()


def short(tuning: DecodeTuning) -> str:
    return (
        f"BLOCK_N {tuning.block_n}, {tuning.num_warps} warps, {tuning.num_stages} stages, "
        f"min_chunk {tuning.min_chunk}, spare {tuning.spare_items}"
    )


def tuning_line(name: str, rates: list[float]) -> str:
    return f"  {name:<70}" + " ".join(f"{rate:7.1%}" for rate in rates)


# Prefill


def prefill_batches(
    pool: torch.Tensor, num_q_heads: int
) -> dict[str, tuple[PagedBatch, torch.Tensor, list[int]]]:
    """Named batches of (paged batch, cu_seqlens_q, new tokens of each sequence)."""
    lens = [random.randint(100, 1024) for _ in range(29)]
    cases = {
        "29 prompts": (lens, lens),
        "1 prompt of 4096": ([4096], [4096]),
        "16 x 512 new of 2048": ([2048] * 16, [512] * 16),
    }
    result = {}
    for name, (context_lens, num_new) in cases.items():
        batch = PagedBatch(pool, context_lens, num_q_heads, 256, sum(num_new))
        ends = torch.tensor([0, *itertools.accumulate(num_new)], dtype=torch.int32, device="cuda")
        result[name] = (batch, ends, num_new)
    return result


def prefill_operations(batch: PagedBatch, num_new: list[int]) -> int:
    pairs = sum(
        sum(range(length - count + 1, length + 1))
        for length, count in zip(batch.context_lens.tolist(), num_new, strict=True)
    )
    return 4 * HEAD_DIM * batch.q.shape[1] * pairs


def prefill_seconds(
    batch: PagedBatch,
    ends: torch.Tensor,
    num_new: list[int],
    tuning: PrefillTuning | None = None,
    repeats: int = 10,
) -> float:
    def step() -> None:
        for k_cache, v_cache in batch.layers(batch.tokens_first, NUM_CACHES):
            prefill_attention(
                batch.q, k_cache, v_cache, batch.block_tables, ends, batch.context_lens,
                max(num_new), batch.scale,
                tuning,
            )  # fmt: skip

    return graph_seconds(step, repeats) / NUM_CACHES


def prefill_error(batch: PagedBatch, ends: torch.Tensor, num_new: list[int]) -> float:
    """Largest relative error of a (token, head) row of the first two sequences against float32."""
    k_cache, v_cache = batch.tokens_first[0]
    out = prefill_attention(
        batch.q,
        k_cache,
        v_cache,
        batch.block_tables,
        ends,
        batch.context_lens,
        max(num_new),
        batch.scale,
    )
    first = slice(0, sum(num_new[:2]))
    expected = prefill_attention_torch(
        batch.q[first].float(), k_cache.float(), v_cache.float(), batch.block_tables[:2], ends[:3],
        batch.context_lens[:2], max(num_new), batch.scale,
    )  # fmt: skip
    return ((out[first].float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def flash_prefill_seconds(
    batch: PagedBatch, ends: torch.Tensor, num_new: list[int], version: int
) -> float | None:
    """flash-attn over fresh, contiguous keys, its fastest path; None for cached prefixes."""
    if num_new != batch.context_lens.tolist():
        return None
    try:
        if version == 2:
            from flash_attn import flash_attn_varlen_func
        else:
            from flash_attn_interface import flash_attn_varlen_func
    except (ImportError, OSError):
        return None
    fresh = batch.tokens_first.flatten(2, 3)[
        :, :, : len(batch.q)
    ]  # (caches, 2, tokens, heads, head_dim)

    def step() -> None:
        for key, value in batch.layers(fresh, NUM_CACHES):
            flash_attn_varlen_func(
                batch.q,
                key,
                value,
                ends,
                ends,
                max(num_new),
                max(num_new),
                softmax_scale=batch.scale,
                causal=True,
            )

    seconds = try_seconds(lambda: graph_seconds(step), f"flash-attn {version}")
    return seconds and seconds / NUM_CACHES


def prefill_rows(pool: torch.Tensor, num_q_heads: int) -> Iterator[str]:
    for name, (batch, ends, num_new) in prefill_batches(pool, num_q_heads).items():
        operations = prefill_operations(batch, num_new)
        seconds = {
            "ours": prefill_seconds(batch, ends, num_new),
            "fa2": flash_prefill_seconds(batch, ends, num_new, 2),
            "fa3": flash_prefill_seconds(batch, ends, num_new, 3),
        }
        rates = "  ".join(
            f"{who} {operations / time / 1e12:.0f}" if time else f"{who} -"
            for who, time in seconds.items()
        )
        error = prefill_error(batch, ends, num_new)
        heads = f"{num_q_heads}/{NUM_KV_HEADS}"
        tokens = f"{len(batch.q):,} tokens"
        yield f"prefill {name}, {tokens}, {heads}: TFLOP/s: {rates}; error {error:.1e}"


def tune_prefill(pool: torch.Tensor) -> list[str]:
    lines = []
    tunings = [
        PrefillTuning(*constants)
        for constants in (
            (128, 64, 8, 3), (128, 64, 8, 3, True), (128, 64, 8, 2), (128, 64, 8, 2, True),
            (128, 64, 8, 4),
            (128, 64, 8, 2, False, 128), (128, 64, 8, 2, True, 128), (128, 128, 8, 2, True),
            (128, 128, 8, 3, True),
            (64, 64, 4, 2), (64, 64, 4, 2, True), (64, 64, 4, 3), (64, 64, 4, 3, True),
            (64, 128, 4, 2, True),
            (128, 32, 8, 4),
        )
    ]  # fmt: skip
    for num_q_heads in PREFILL_HEADS:
        cases = prefill_batches(pool, num_q_heads)
        compile_prefill(cases["29 prompts"], tunings)
        lines.append(f"tune prefill, {num_q_heads}/8, TFLOP/s of {'; '.join(cases)}")
        for tuning in tunings:
            rates = []
            for batch, ends, num_new in cases.values():
                seconds = try_seconds(
                    partial(prefill_seconds, batch, ends, num_new, tuning), str(tuning)
                )
                rates.append(
                    prefill_operations(batch, num_new) / seconds / 1e12 if seconds else 0.0
                )
            lines.append(f"  {tuple(tuning)!s:<32}" + " ".join(f"{rate:6.0f}" for rate in rates))
    return lines


def compile_prefill(
    case: tuple[PagedBatch, torch.Tensor, list[int]], tunings: list[PrefillTuning]
) -> None:
    batch, ends, num_new = case

    def compile_one(tuning: PrefillTuning) -> None:
        try:
            prefill_attention(
                batch.q, *batch.tokens_first[0], batch.block_tables, ends, batch.context_lens,
                max(num_new),
                batch.scale, tuning,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - a variant may need more shared memory than there is
            print(f"{tuple(tuning)}: {type(error).__name__}: {str(error)[:100]}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_one, tunings))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
