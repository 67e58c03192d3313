"""Measure the norm, activation, sampling and small-batch linear kernels on this GPU.

    python -m tests.kernels.bench_fused            # the configs the kernels choose by themselves
    python -m tests.kernels.bench_fused --tune     # and which configs are fastest

Everything is timed inside CUDA graphs. Products cycle through more weights than the L2 cache holds,
and a layer is 28 (0.6B) or 8 (8B) layers' worth of distinct weights in one graph; its floor is the
weights' bytes over 4.3 TB/s. Results are checked against float32 references first.
"""

from __future__ import annotations

import argparse
import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels import sampling
from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_torch
from nanovllm.kernels.gemm import (
    MAX_GEMV_ROWS,
    GemmConfig,
    default_config,
    linear_add,
    norm_linear,
    norm_linear_silu,
    sliced_config,
    small_batch_linear,
)
from nanovllm.kernels.norm import add_rms_norm, add_rms_norm_torch, qk_norm_rope_store, rms_norm

EPS = 1e-6
VOCAB = 151_936
HEAD_DIM = 128
BYTES_PER_S = 4.3e12
COLD_BYTES = 300e6  # more than an L2 cache holds
ROUNDS = 5
SMALL_ROWS = (1, 2, 4, 8, 16)
SLICED_CUTS = (  # block_n, slices, block_k
    (8, 8, 64), (8, 4, 64), (8, 8, 128), (16, 8, 64), (16, 4, 64), (16, 4, 128), (32, 4, 64),
)  # fmt: skip

Product = Callable[[int, GemmConfig], object]  # (which copy of the weight, config) -> result


@dataclass(frozen=True)
class Shape:
    """One of Qwen3's dense models."""

    name: str
    hidden: int
    q_heads: int
    kv_heads: int
    intermediate: int
    num_layers: int  # distinct layers in the graph of a layer's products

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of the four projections."""
        q, kv = self.q_heads * HEAD_DIM, self.kv_heads * HEAD_DIM
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "o": (self.hidden, q),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    def floor_us(self) -> float:
        """Time to read one layer's weights."""
        return sum(2e6 * n * k / BYTES_PER_S for n, k in self.linears().values())


SHAPES = (Shape("0.6B", 1024, 16, 8, 3072, 28), Shape("8B", 4096, 32, 8, 12288, 8))


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


def graph_us(body: Callable[[], object], calls: int = 1) -> float:
    """Median microseconds of one of the `calls` that `body` makes, in a CUDA graph."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = body()
    replays = 1
    times = []
    for index in range(ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        elapsed_us = 1e3 * start.elapsed_time(end) / replays
        if index == 0:
            replays = max(2, min(50, int(2000 / elapsed_us)))
        else:
            times.append(elapsed_us / calls)
    del kept
    return statistics.median(times)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected).abs().max() / expected.abs().max()).item()


def check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = relative_error(actual, expected)
    if not error < 2e-2:
        raise AssertionError(f"{name}: relative error {error}")


# --- norm, activation, rotary embedding --------------------------------------------------------


def bench_fused(shape: Shape, rows: int) -> list[str]:
    """Print one line a kernel: microseconds, GB/s, and torch where it can be captured."""
    repeats = 20 if rows <= 256 else 2
    x, residual = randn(rows, shape.hidden), randn(rows, shape.hidden)
    gate_up, weight = randn(rows, 2 * shape.intermediate), randn(shape.hidden)
    qkv_width = (shape.q_heads + 2 * shape.kv_heads) * HEAD_DIM
    qkv, head_weight = randn(rows, qkv_width), randn(HEAD_DIM)
    angles = torch.rand(4096, HEAD_DIM // 2, device="cuda") * 6
    cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    pool = torch.zeros(
        2, rows // 256 + 1, 256, shape.kv_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16
    )
    slots = torch.randperm(rows, device="cuda").int()
    positions = torch.arange(rows, device="cuda") % 4096

    def store() -> torch.Tensor:
        return qk_norm_rope_store(
            qkv, head_weight, head_weight, EPS, cos_sin_cache, positions, pool[0], pool[1], slots,
            shape.q_heads, shape.kv_heads, HEAD_DIM,
        )  # fmt: skip

    wide = x.float() + residual.float()
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()
    check("add_rms_norm", add_rms_norm(x, residual.clone(), weight, EPS)[0], norm)
    check("silu_and_mul", silu_and_mul(gate_up), silu_and_mul_torch(gate_up.float()))
    element = 2 * rows
    cases: list[tuple[str, Callable[[], object], Callable[[], object] | None, int]] = [
        ("rms_norm", lambda: rms_norm(x, weight, EPS), None, 2 * shape.hidden * element),
        (
            "add_rms_norm",
            lambda: add_rms_norm(x, residual, weight, EPS),
            lambda: add_rms_norm_torch(x, residual, weight, EPS),
            4 * shape.hidden * element,
        ),
        ("qk_norm_rope_store", store, None, 2 * qkv_width * element),
        (
            "silu_and_mul",
            lambda: silu_and_mul(gate_up),
            lambda: silu_and_mul_torch(gate_up),
            3 * shape.intermediate * element,
        ),
    ]
    for name, kernel, reference, num_bytes in cases:
        us = graph_us(lambda kernel=kernel: [kernel() for _ in range(repeats)], repeats)
        torch_us = "       -"
        if reference is not None:
            torch_us = f"{graph_us(lambda f=reference: [f() for _ in range(2)], 2):8.1f}"
        print(
            f"{shape.name:5} {rows:6} rows  {name:20} {us:8.1f} us  torch {torch_us}"
            f"  {num_bytes / us / 1e3:7.0f} GB/s"
        )
    return []


# --- sampling ----------------------------------------------------------------------------------


def sampler_inputs(rows: int, temperature: float) -> tuple[torch.Tensor, ...]:
    return (
        randn(rows, VOCAB, scale=3.0),
        torch.full((rows,), temperature, device="cuda"),
        torch.arange(rows, device="cuda") * 7919,
        torch.arange(rows, device="cuda", dtype=torch.int32),
    )


def bench_sampler(rows: int, is_tuning: bool) -> list[str]:
    """Sampled and greedy rows, against torch's argmax and its exponential-noise sampler."""
    inputs = sampler_inputs(rows, 0.6)
    greedy = sampler_inputs(rows, 0.0)
    expected = sampling.sample_torch(*inputs)
    agree = (sampling.sample(*inputs).token_ids == expected.token_ids).float().mean().item()
    argmax = greedy[0].float().argmax(-1).int()
    agree_greedy = (sampling.sample(*greedy).token_ids == argmax).float().mean().item()
    logits = inputs[0]

    def torch_sampler() -> torch.Tensor:
        probabilities = torch.softmax(logits.float() / 0.6, dim=-1)
        noise = torch.empty_like(probabilities).exponential_(1).clamp_min_(1e-10)
        return probabilities.div_(noise).argmax(dim=-1)

    times = {
        "sampled": graph_us(lambda: sampling.sample(*inputs)),
        "greedy": graph_us(lambda: sampling.sample(*greedy)),
        "torch argmax": graph_us(lambda: logits.argmax(-1)),
        "torch sampler": graph_us(torch_sampler),
        "floor": 2e6 * rows * VOCAB / BYTES_PER_S,
    }
    line = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
    print(f"sampler {rows:4} rows: {line}; agrees {agree:.4f}, greedy {agree_greedy:.4f}")
    if is_tuning:
        tune_sampler(rows, inputs)
    return [f"sampler {rows:4} rows: {line}"]


def tune_sampler(rows: int, inputs: tuple[torch.Tensor, ...]) -> None:
    """Print the fastest settings of the module's constants for one number of rows."""
    kept = (sampling.TARGET_PROGRAMS, sampling.BLOCK_COUNTERS, sampling.NUM_WARPS)
    results = []
    for programs in (512, 1056, 2048, 4096, 8192):
        for block, warps in ((128, 2), (256, 2), (256, 4), (512, 4), (512, 8)):
            sampling.TARGET_PROGRAMS, sampling.BLOCK_COUNTERS, sampling.NUM_WARPS = (
                programs, block, warps,
            )  # fmt: skip
            us = graph_us(lambda: sampling.sample(*inputs))
            results.append((us, f"programs {programs}, block {block}, warps {warps}"))
    sampling.TARGET_PROGRAMS, sampling.BLOCK_COUNTERS, sampling.NUM_WARPS = kept
    best = ";  ".join(f"{us:.1f} us: {what}" for us, what in sorted(results)[:4])
    print(f"  tuned sampler {rows} rows: {best}")


# --- products ----------------------------------------------------------------------------------


class Weights:
    """Enough copies of one projection's weight to keep the L2 cache cold."""

    def __init__(self, name: str, out_features: int, in_features: int, copies: int) -> None:
        self.name, self.out_features, self.in_features = name, out_features, in_features
        self.copies = [
            randn(out_features, in_features, scale=in_features**-0.5) for _ in range(copies)
        ]
        self.norm_weight = randn(in_features)

    def candidates(self, rows: int) -> list[GemmConfig]:
        """The configs worth measuring; weights of `gemv_kernel` must fit in registers."""
        configs = [
            sliced_config(self.in_features, block_n=block_n, slices=slices, block_k=block_k)
            for block_n, slices, block_k in SLICED_CUTS
        ]
        if rows <= MAX_GEMV_ROWS and self.in_features <= 4096:
            configs += [GemmConfig(rows, n, num_warps=warps) for n in (4, 8) for warps in (8, 4)]
        return configs

    def products(self, rows: int) -> dict[bool, Product]:
        """The plain product and the one with its norm and epilogue, by `is_fused`."""
        x, residual = randn(rows, self.in_features), randn(rows, self.out_features)
        copies, norm_weight = self.copies, self.norm_weight
        fused: dict[str, Product] = {
            "qkv": lambda i, config: norm_linear(x, norm_weight, EPS, copies[i], config),
            "o": lambda i, config: linear_add(x, copies[i], residual, config),
            "gate_up": lambda i, config: norm_linear_silu(x, norm_weight, EPS, copies[i], config),
            "down": lambda i, config: linear_add(x, copies[i], residual, config),
        }
        return {
            False: lambda i, config: small_batch_linear(x, copies[i], config),
            True: fused[self.name],
        }

    def cublas_us(self, rows: int) -> float:
        x = randn(rows, self.in_features)
        return graph_us(lambda: [F.linear(x, w) for w in self.copies], len(self.copies))

    def product_us(self, product: Product, config: GemmConfig) -> float:
        count = len(self.copies)
        return graph_us(lambda: [product(i, config) for i in range(count)], count)

    def check(self, rows: int, config: GemmConfig) -> None:
        x = randn(rows, self.in_features)
        expected = F.linear(x.float(), self.copies[0].float())
        check(f"{self.name} {config}", small_batch_linear(x, self.copies[0], config), expected)


def compile_all(jobs: Iterable[Callable[[], object]]) -> None:
    """Run each job once, in threads, so that its kernels are compiled; failures show when timed."""

    def attempt(job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:  # a config may ask for more shared memory than there is
            print(f"  dropped: {type(error).__name__} {str(error)[:120]}")

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(attempt, jobs))
    torch.cuda.synchronize()


def compile_jobs(weights: Weights, rows: Iterable[int]) -> Iterator[Callable[[], object]]:
    seen = set()
    for count in rows:
        for is_fused, product in weights.products(count).items():
            for config in weights.candidates(count):
                if (config, is_fused) not in seen:
                    seen.add((config, is_fused))
                    yield lambda p=product, c=config: p(0, c)


def fastest(weights: Weights, rows: int, is_fused: bool) -> tuple[float, GemmConfig]:
    """Time every candidate; return the best with its microseconds."""
    product = weights.products(rows)[is_fused]
    results = []
    for config in weights.candidates(rows):
        try:
            if not is_fused:
                weights.check(rows, config)
            results.append((weights.product_us(product, config), config))
        except Exception as error:
            print(f"  {weights.name} {config}: {type(error).__name__} {str(error)[:160]}")
    results.sort(key=lambda result: result[0])
    return results[0]


@dataclass
class Choice:
    """What one projection runs with at one number of rows."""

    cublas_us: float
    plain_us: float
    plain: GemmConfig
    fused_us: float
    fused: GemmConfig


def short(config: GemmConfig) -> str:
    if config.is_gemv:
        return f"gemv n{config.block_n} w{config.num_warps}"
    return (
        f"n{config.block_n} k{config.block_k} slices{config.slices} w{config.num_warps} "
        f"s{config.num_stages}"
    )


def choose(weights: Weights, rows: int, is_tuning: bool) -> Choice:
    """Measure the defaults, or every candidate, and print a line."""
    if is_tuning:
        plain_us, plain = fastest(weights, rows, False)
        fused_us, fused = fastest(weights, rows, True)
    else:
        products = weights.products(rows)
        plain = fused = default_config(rows, weights.in_features)
        weights.check(rows, plain)
        plain_us = weights.product_us(products[False], plain)
        fused_us = weights.product_us(products[True], fused)
    cublas_us = weights.cublas_us(rows)
    floor = 2e6 * weights.out_features * weights.in_features / BYTES_PER_S
    print(
        f"{weights.name:8} {weights.in_features:5} -> {weights.out_features:5} {rows:4} rows: "
        f"floor {floor:5.1f}  cublas {cublas_us:5.1f}  plain {plain_us:5.1f} ({short(plain)})  "
        f"fused {fused_us:5.1f} ({short(fused)})"
    )
    return Choice(cublas_us, plain_us, plain, fused_us, fused)


def bench_layer(
    shape: Shape, weights: dict[str, Weights], rows: int, choices: dict[str, Choice]
) -> dict[str, float]:
    """Microseconds of one layer without attention: norms, four products, activation."""
    x0, q_width = randn(rows, shape.hidden), shape.q_heads * HEAD_DIM
    norm_weight = randn(shape.hidden)
    count = len(weights["qkv"].copies)

    def plain_layer(i: int, linear: Callable[[str, torch.Tensor, int], torch.Tensor]) -> None:
        normed, _ = add_rms_norm(hidden, residual, norm_weight, EPS)
        attended = linear("qkv", normed, i)[:, :q_width]
        normed, _ = add_rms_norm(linear("o", attended, i), residual, norm_weight, EPS)
        hidden.copy_(linear("down", silu_and_mul(linear("gate_up", normed, i)), i))

    def fused_layer(i: int) -> None:
        config = {name: choice.fused for name, choice in choices.items()}
        w = {name: weight.copies[i] for name, weight in weights.items()}
        qkv = norm_linear(residual, norm_weight, EPS, w["qkv"], config["qkv"])
        linear_add(qkv[:, :q_width], w["o"], residual, config["o"])
        act = norm_linear_silu(residual, norm_weight, EPS, w["gate_up"], config["gate_up"])
        linear_add(act, w["down"], residual, config["down"])

    def cublas(name: str, x: torch.Tensor, i: int) -> torch.Tensor:
        return F.linear(x, weights[name].copies[i])

    def ours(name: str, x: torch.Tensor, i: int) -> torch.Tensor:
        return small_batch_linear(x, weights[name].copies[i], choices[name].plain)

    hidden, residual = x0.clone(), x0.clone()
    layers = range(count)
    return {
        "cublas": graph_us(lambda: [plain_layer(i, cublas) for i in layers], count),
        "plain": graph_us(lambda: [plain_layer(i, ours) for i in layers], count),
        "fused": graph_us(lambda: [fused_layer(i) for i in layers], count),
    }


def bench_products(shape: Shape, is_tuning: bool) -> list[str]:
    """Every projection at small batches, and whole layers."""
    weights = {
        name: Weights(name, n, k, shape.num_layers) for name, (n, k) in shape.linears().items()
    }
    rows_list = SMALL_ROWS if shape.hidden == 1024 else (1, 8, 16)
    if is_tuning:
        compile_all(job for w in weights.values() for job in compile_jobs(w, rows_list))
    summary = []
    for rows in rows_list:
        choices = {name: choose(w, rows, is_tuning) for name, w in weights.items()}
        sums = [
            sum(getattr(choice, field) for choice in choices.values())
            for field in ("cublas_us", "plain_us", "fused_us")
        ]
        layer = bench_layer(shape, weights, rows, choices)
        layer_times = "  ".join(f"{name} {us:6.1f}" for name, us in layer.items())
        summary.append(
            f"{shape.name:5} {rows:3} rows  products: floor {shape.floor_us():5.1f}  cublas "
            f"{sums[0]:6.1f}  plain {sums[1]:6.1f}  fused {sums[2]:6.1f}   layer: {layer_times}"
        )
        print(summary[-1])
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="time every candidate config")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    summary = []
    for rows in (1, 8, 32, 256, 512):
        summary += attempt(lambda rows=rows: bench_sampler(rows, arguments.tune))
    for shape in SHAPES:
        summary += attempt(lambda shape=shape: bench_products(shape, arguments.tune))
    for shape in SHAPES:
        for rows in (1, 32, 256, 16384):
            attempt(lambda shape=shape, rows=rows: bench_fused(shape, rows))
    print("\n--- summary, microseconds ---")
    print("\n".join(summary))


def attempt(section: Callable[[], list[str]]) -> list[str]:
    """Lines of a section; one that fails prints its traceback and doesn't end the others."""
    try:
        return section()
    except Exception:
        traceback.print_exc()
        return []


if __name__ == "__main__":
    main()
