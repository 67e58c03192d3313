"""Throughput of one engine on nano-vllm's benchmark workload, and where its time goes.

256 prompts of 100 to 1024 random tokens, 100 to 1024 output tokens each, temperature 0.6, no stop.
All numbers come from one random stream: the first repeat draws exactly what nano-vllm's bench.py
draws, later repeats continue the stream. A full pass of the same shape, drawn from a generator of
its own, warms up; the prefix cache is emptied before each repeat; text is built inside the timed
call where there is a tokenizer. The last line of the output is JSON.

    python bench.py --shape 0.6B                       # random weights made on the device, no files
    python bench.py --shape 8B --tokenizer FOLDER      # and text from that tokenizer
    python bench.py --model FOLDER --profile           # a checkpoint, and where the time goes
    python bench.py --shape 0.6B --num-seqs 1 --input-len 100 --output-len 945      # one sequence
    python bench.py --shape 0.6B --num-seqs 1000 --prefix-len 2048 --input-len 50 --output-len 64

    python bench.py --model FOLDER --requests in.jsonl  # a batch file's requests, from memory

`--profile` runs two more passes of the first repeat's workload after the timed ones: one times the
host's parts of each step with no profiler, the other records the GPU's kernels. The floor it
compares with is arithmetic: bytes over bandwidth, operations over FLOP/s, no other cost.
"""

import argparse
import functools
import json
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, ParamSpec, Protocol, TypeVar
from unittest.mock import patch

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.batch_file import RequestReader, parse_line, read_lines
from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.prompt import Prompt
from nanovllm.model_config import ModelConfig

LIBRARIES = ("torch", "triton", "transformers", "flash-attn", "numpy")
MAX_TOKEN_ID = 10000  # of nano-vllm's random prompts
WARM_UP_SEED = 12345  # the timed repeats use seed 0

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Shape:
    """What distinguishes the dense Qwen3 models; head_dim is 128 and the vocabulary the same."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    is_tied: bool


SHAPES = {
    "0.6B": Shape(28, 1024, 16, 8, 3072, True),
    "1.7B": Shape(28, 2048, 16, 8, 6144, True),
    "4B": Shape(36, 2560, 32, 8, 9728, True),
    "8B": Shape(36, 4096, 32, 8, 12288, False),
    "14B": Shape(40, 5120, 40, 8, 17408, False),
    "32B": Shape(64, 5120, 64, 8, 25600, False),
}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or write_shape(SHAPES[args.shape], Path(scratch))
        start = time.perf_counter()
        llm = make_llm(args, str(folder))
        load_s = time.perf_counter() - start
        ready_s = process_age_s()
        with llm:
            settings = describe(args, llm)
            print(json.dumps(settings, indent=1))
            print(f"load: {load_s:.1f} s, {settings['kv_blocks']} KV blocks")
            print(startup_line(llm, load_s, ready_s))
            passes = run_repeats(args, llm)
            result = summary(passes) | {
                "kv_blocks": settings["kv_blocks"],
                "load_s": round(load_s, 2),
                "ready_s": ready_s,
                "versions": settings["versions"],
                "settings": settings,
                "stats": asdict(llm.stats()),
            }
            if args.profile:
                result["profile"] = profile(args, llm, passes)
    print(json.dumps(result), flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="checkpoint folder")
    source.add_argument("--shape", choices=list(SHAPES), help="random weights of this size")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer; without, no text")
    add_workload_flags(parser.add_argument_group("workload"))
    add_engine_flags(parser.add_argument_group("engine"))
    view = parser.add_argument_group("profile")
    view.add_argument("--profile", action="store_true", help="show where the time goes")
    view.add_argument("--bandwidth", type=float, default=4.3, help="of one GPU, TB/s: the floor's")
    view.add_argument("--flops", type=float, default=790, help="of one GPU, TFLOP/s: the floor's")
    args = parser.parse_args(argv)
    for name in ("repeats", "num_seqs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, at least 1 is due")
    if args.requests is not None and args.profile:
        parser.error("--profile is of random prompts: leave --requests out")
    return args


def add_workload_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--repeats", type=int, default=3)
    group.add_argument("--requests", type=Path, help="run this batch file's requests instead")
    group.add_argument("--num-seqs", type=int, default=256)
    group.add_argument("--min-len", type=int, default=100, help="tokens, of prompts and outputs")
    group.add_argument("--max-input-len", type=int, default=1024)
    group.add_argument("--max-output-len", type=int, default=1024)
    group.add_argument("--input-len", type=int, help="exactly so many tokens in each prompt")
    group.add_argument("--output-len", type=int, help="exactly so many tokens in each output")
    group.add_argument("--prefix-len", type=int, default=0, help="tokens that all prompts share")
    group.add_argument("--temperature", type=float, default=0.6)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-model-len", type=int, help="default: 4096 or the model's")
    group.add_argument("--max-num-seqs", type=int, default=512)
    group.add_argument("--max-num-batched-tokens", type=int, default=16384)
    group.add_argument(
        "--max-num-mixed-tokens", type=int, help="0: no mixed steps; default: by the model's size"
    )
    group.add_argument("--tp", type=int, default=1, help="tensor_parallel_size")
    group.add_argument("--backend", default="auto", help="attention_backend")
    group.add_argument("--device", default="auto")
    group.add_argument("--dtype", default="auto")
    group.add_argument("--kvcache-block-size", type=int, default=256)
    group.add_argument("--num-kvcache-blocks", type=int, help="default: what fits")
    group.add_argument("--enforce-eager", action="store_true")
    group.add_argument("--no-overlap", action="store_true", help="async_scheduling=False")


# The engine


def write_shape(shape: Shape, folder: Path) -> Path:
    """Write the config.json of a random-weight model."""
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": shape.is_tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    }
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def process_age_s() -> float | None:
    """Seconds since this process started, interpreter and imports included; None off Linux."""
    try:
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return round(uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"), 2)


def startup_line(llm: LLM, load_s: float, ready_s: float | None) -> str:
    """What the time from process start to ready was spent on."""
    parts = [f"{part} {seconds:.1f}" for part, seconds in llm.stats().startup_s]
    if ready_s is not None:
        parts.insert(0, f"interpreter and imports {ready_s - load_s:.1f}")
    return f"ready after {ready_s} s: " + ", ".join(parts)


def make_llm(args: argparse.Namespace, folder: str) -> LLM:
    has_tokenizer = args.tokenizer is not None or args.model is not None
    return LLM(
        folder,
        tokenizer=str(args.tokenizer) if args.tokenizer else None,
        skip_tokenizer_init=not has_tokenizer,
        load_format="auto" if args.model else "dummy",
        tensor_parallel_size=args.tp,
        attention_backend=args.backend,
        device=args.device,
        dtype=args.dtype,
        enforce_eager=args.enforce_eager,
        async_scheduling=not args.no_overlap,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_mixed_tokens=args.max_num_mixed_tokens,
        kvcache_block_size=args.kvcache_block_size,
        num_kvcache_blocks=args.num_kvcache_blocks,
    )


def describe(args: argparse.Namespace, llm: LLM) -> dict[str, object]:
    """Hardware, versions and settings of the run."""
    stats = llm.stats()
    flags = {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "hardware": hardware(),
        "versions": versions(),
        "detokenize": llm.llm_engine.tokenizer is not None,
        "kv_blocks": stats.num_kvcache_blocks,
        "prefill_backend": stats.prefill_backend,
        "decode_backend": stats.decode_backend,
        "graph_batch_sizes": list(stats.graph_batch_sizes),
        **flags,
        "max_num_mixed_tokens": stats.max_num_mixed_tokens,
    }


def hardware() -> str:
    if not torch.cuda.is_available():
        return platform.processor() or platform.machine()
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return f"{torch.cuda.get_device_name()}, driver {(driver or 'unknown').splitlines()[0]}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def output_of(*command: str) -> str | None:
    """What a program prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# The workload and its repeats


class Workload(NamedTuple):
    """Prompts and how many tokens each is to be answered with."""

    prompts: list[list[int]]
    output_lens: list[int]


class Pass(NamedTuple):
    """What one generate call did."""

    num_tokens: int  # generated
    num_cached_tokens: int  # of prompts, read from the prefix cache
    seconds: float


def draw(args: argparse.Namespace, rng: random.Random, max_token_id: int) -> Workload:
    """Prompts, then output lengths, in nano-vllm's order of draws."""

    def token_ids(count: int) -> list[int]:
        return [rng.randint(0, max_token_id) for _ in range(count)]

    def length(exact: int | None, longest: int) -> int:
        return rng.randint(args.min_len, longest) if exact is None else exact

    prefix = token_ids(args.prefix_len)
    prompts = [
        prefix + token_ids(length(args.input_len, args.max_input_len)) for _ in range(args.num_seqs)
    ]
    output_lens = [length(args.output_len, args.max_output_len) for _ in range(args.num_seqs)]
    return Workload(prompts, output_lens)


def draw_for(args: argparse.Namespace, llm: LLM, rng: random.Random) -> Workload:
    """`draw`, with ids that the model has even if its vocabulary is smaller than nano-vllm's."""
    return draw(args, rng, min(MAX_TOKEN_ID, llm.llm_engine.model_config.vocab_size - 1))


def make_params(args: argparse.Namespace, output_lens: list[int]) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=args.temperature,
            ignore_eos=True,
            max_tokens=output_len,
            top_p=args.top_p,
            top_k=args.top_k,
        )
        for output_len in output_lens
    ]


def timed_pass(args: argparse.Namespace, llm: LLM, rng: random.Random) -> Pass:
    """Draw a workload, or read the one asked for, and time it."""
    if args.requests is not None:
        return requests_pass(args.requests, llm)
    prompts, output_lens = draw_for(args, llm, rng)
    params = make_params(args, output_lens)
    done, num_due = timed_generate(llm, prompts, params), sum(output_lens)
    assert done.num_tokens == num_due, f"{done.num_tokens} tokens came, {num_due} were due"
    if not args.prefix_len:
        assert done.num_cached_tokens == 0, f"{done.num_cached_tokens} prompt tokens were cached"
    return done


def timed_generate(llm: LLM, prompts: Sequence[Prompt], params: list[SamplingParams]) -> Pass:
    """Time one generate call on an empty prefix cache."""
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(output.num_generated_tokens for output in outputs)
    return Pass(num_tokens, sum(output.num_cached_tokens for output in outputs), seconds)


def run_repeats(args: argparse.Namespace, llm: LLM) -> list[Pass]:
    """Warm up, then time the repeats; print and return them."""
    timed_pass(args, llm, random.Random(WARM_UP_SEED))
    rng = random.Random(0)
    passes = []
    for repeat in range(args.repeats):
        done = timed_pass(args, llm, rng)
        passes.append(done)
        cached = f", {done.num_cached_tokens} prompt tokens cached" if args.prefix_len else ""
        print(
            f"repeat {repeat}: {done.num_tokens} tokens, {done.seconds:.3f} s, "
            f"{done.num_tokens / done.seconds:.0f} tok/s{cached}",
            flush=True,
        )
    return passes


def summary(passes: list[Pass]) -> dict[str, object]:
    tok_s = [round(done.num_tokens / done.seconds, 1) for done in passes]
    return {
        "tok_s": tok_s,
        "tok_s_median": statistics.median(tok_s),
        "seconds": [round(done.seconds, 3) for done in passes],
        "tokens": [done.num_tokens for done in passes],
        "cached_tokens": [done.num_cached_tokens for done in passes],
    }


def requests_pass(path: Path, llm: LLM) -> Pass:
    """Time one generate call on all requests of a batch file, read beforehand."""
    engine = llm.llm_engine
    reader = RequestReader(engine.tokenizer, SamplingParams(), engine.config.seed)
    with path.open("rb") as file:
        requests = [reader.read(parse_line(line)) for line in read_lines(file)]
    return timed_generate(llm, [r.prompt for r in requests], [r.params for r in requests])


# The profile: host parts, GPU kernels, floor


def profile(args: argparse.Namespace, llm: LLM, passes: list[Pass]) -> dict[str, object]:
    """Print and return where the time of the first repeat's workload goes."""
    workload = draw_for(args, llm, random.Random(0))
    params = make_params(args, workload.output_lens)
    steps = host_pass(llm, workload.prompts, params)
    result: dict[str, object] = {"host": host_report(steps)}
    if args.tp > 1:
        print("gpu: not shown, since each rank is a process of its own")
    elif llm.stats().device != "cpu":
        kernels = gpu_pass(llm, workload.prompts, params)
        result["gpu"] = gpu_report(kernels, [s for s in steps if s.is_decode or s.is_mixed])
    result["floor"] = floor_report(args, llm, passes)
    return result


HOST_PARTS = ("schedule", "launch", "wait", "postprocess")  # the last: the rest, text included


@dataclass
class HostStep:
    """Seconds that the host spent in one `LLMEngine.step`, by part."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HOST_PARTS, 0.0))
    num_lanes: int = 0  # of the step launched
    has_prompts: bool = False  # whether the step launched, or the one processed, ran a prompt
    is_mixed: bool = False  # whether the step launched has prompt chunks and decode lanes
    seconds: float = 0.0  # all of it, from the end of the step before

    @property
    def is_decode(self) -> bool:
        return self.num_lanes > 0 and not self.has_prompts


class Pending(Protocol):
    """What a runner's launch returns."""

    def wait(self) -> object: ...


class HostClock:
    """Times the parts of steps by standing in for the engine's callables."""

    def __init__(self) -> None:
        self.step = HostStep()

    def timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, its time added to `part` of the current step."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.step.parts[part] += time.perf_counter() - start

        return call

    @contextmanager
    def watch(self, llm: LLM) -> Iterator[None]:
        """Time `llm`'s steps inside the block."""
        scheduler, runner = llm.llm_engine.scheduler, llm.llm_engine._runner
        assert runner is not None, "the engine is open"
        launch: Callable[[ScheduledBatch], Pending] = self.timed("launch", runner.launch)

        def launch_and_note(batch: ScheduledBatch) -> TimedPending:
            self.step.num_lanes = batch.num_lanes
            self.step.has_prompts |= batch.num_prefills > 0
            self.step.is_mixed = batch.num_prefills > 0 and batch.num_decodes > 0
            return TimedPending(launch(batch), self)

        with ExitStack() as patches:
            schedule = self.timed("schedule", scheduler.schedule)
            patches.enter_context(patch.object(scheduler, "schedule", schedule))
            patches.enter_context(patch.object(runner, "launch", launch_and_note))
            yield


class TimedPending:
    """What a launch returned, with its wait timed."""

    def __init__(self, pending: Pending, clock: HostClock) -> None:
        self._pending = pending
        self.wait = clock.timed("wait", pending.wait)

    def __getattr__(self, name: str) -> object:
        return getattr(self._pending, name)


def host_pass(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[HostStep]:
    """Run a workload without a profiler and return its steps' host times."""
    llm.reset_prefix_cache()
    engine, clock, steps = llm.llm_engine, HostClock(), []
    engine.add(engine.make_requests([*prompts], params))  # as generate does
    last = time.perf_counter()
    with clock.watch(llm):
        while not engine.is_finished():
            clock.step = step = HostStep()
            engine.step()
            now = time.perf_counter()
            step.seconds, last = now - last, now
            step.has_prompts |= engine.last_step.num_prompt_tokens > 0
            named = sum(step.parts.values())
            step.parts["postprocess"] = step.seconds - named
            steps.append(step)
    return steps


def host_report(steps: list[HostStep]) -> dict[str, object]:
    """Mean host microseconds of decode steps, of those with full batches, and of mixed steps."""
    decodes = [step for step in steps if step.is_decode]
    most = max((step.num_lanes for step in decodes), default=0)
    full = [step for step in decodes if step.num_lanes == most]
    report: dict[str, object] = {}
    mixed = [step for step in steps if step.is_mixed]
    for name, group in (("all", decodes), ("full_batch", full), ("mixed", mixed)):
        if not group:
            continue
        lanes = round(statistics.mean(step.num_lanes for step in group), 1)
        micros = mean_micros(group)
        report[name] = {"steps": len(group), "sequences": lanes, "us_per_step": micros}
        kind = "mixed" if name == "mixed" else "decode"
        print(
            f"host us per step, {len(group)} {kind} steps of {lanes:g} sequences: {listed(micros)}"
        )
    return report


def mean_micros(steps: list[HostStep]) -> dict[str, float]:
    def mean(values: Iterable[float]) -> float:
        return round(1e6 * sum(values) / len(steps), 1)

    micros = {part: mean(step.parts[part] for step in steps) for part in HOST_PARTS}
    micros["work"] = mean(step.seconds - step.parts["wait"] for step in steps)
    micros["step"] = mean(step.seconds for step in steps)
    return micros


class Kernel(NamedTuple):
    """Something the GPU did, in microseconds of the profiler's clock."""

    name: str
    start: float
    duration: float


# First match wins. cuBLAS names its Hopper kernels nvjet and has a splitKreduce of its own.
KERNEL_KINDS = {
    "attention": "attention|attn|flash|fmha|plan_decode",
    "norm/rope/store": "norm|rope|rotary|store_kvcache|silu",
    "GEMM": "gemm|gemv|nvjet|cutlass|splitk|linear_kernel|^reduce_kernel",
    "sampler": "sample|combine|argmax",
}


@functools.cache
def kind_of(kernel_name: str) -> str:
    for kind, pattern in KERNEL_KINDS.items():
        if re.search(pattern, kernel_name, flags=re.IGNORECASE):
            return kind
    return "other"


def gpu_pass(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Kernel]:
    """Run a workload and return what the GPU did once every prompt was in, or something decodes.

    The latter where steps are mixed, since prompts then come in until shortly before the end.
    """
    llm.reset_prefix_cache()
    engine = llm.llm_engine
    engine.add(engine.make_requests([*prompts], params))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    is_mixed = llm.stats().max_num_mixed_tokens > 0
    while engine.scheduler.waiting and not (is_mixed and engine.last_step.num_decode_tokens):
        engine.step()
    torch.cuda.synchronize()  # the prompts' own kernels are no part of the view
    with profiler:
        while not engine.is_finished():
            engine.step()
        torch.cuda.synchronize()
    return read_kernels(profiler)


def read_kernels(profiler: torch.profiler.profile) -> list[Kernel]:
    """The profiler's GPU events, through its trace file: its Python objects take minutes here."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [
        Kernel(event["name"], float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("cat") in kinds
    ]


def gpu_report(kernels: list[Kernel], steps: list[HostStep]) -> dict[str, object]:
    """How busy the GPU is while decoding, prompt chunks beside it included, and with what.

    Recording a kernel costs time between kernels, so `busy` has two forms: within the recorded run,
    and against the wall time of the same steps in the run without a profiler.
    """
    if not kernels or not steps:
        print("gpu: no kernel of a decode step was recorded")
        return {}
    busy_us = union_length(kernels)
    end = max(kernel.start + kernel.duration for kernel in kernels)
    recorded_us = end - min(kernel.start for kernel in kernels)
    plain_us = 1e6 * sum(step.seconds for step in steps)
    by_kind = dict.fromkeys((*KERNEL_KINDS, "other"), 0.0)
    for kernel in kernels:
        by_kind[kind_of(kernel.name)] += kernel.duration
    micros = {kind: round(us / len(steps), 1) for kind, us in by_kind.items() if us}
    report = {
        "busy": round(busy_us / plain_us, 4),
        "busy_recorded": round(busy_us / recorded_us, 4),
        "kernels_per_step": round(len(kernels) / len(steps), 1),
        "us_per_step": micros,
    }
    print(
        f"gpu busy: {busy_us / plain_us:.1%} of decode wall time "
        f"({busy_us / recorded_us:.1%} in the recorded run)"
    )
    print(f"gpu us per step, {len(steps)} decode and mixed steps: {listed(micros)}")
    return report


def listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def union_length(kernels: list[Kernel]) -> float:
    """Microseconds in which at least one kernel runs."""
    total, covered_to = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        end = kernel.start + kernel.duration
        total += max(0.0, end - max(kernel.start, covered_to))
        covered_to = max(covered_to, end)
    return total


# The floor: the least time that the workload's bytes and operations take


class FloorStep(NamedTuple):
    """A step as the floor sees it."""

    context_lens: list[int]  # of decode lanes, the new token included
    prompt_spans: list[tuple[int, int]]  # of prefill lanes: first position that runs, end

    @property
    def num_tokens(self) -> int:
        return len(self.context_lens) + sum(end - start for start, end in self.prompt_spans)

    @property
    def num_lanes(self) -> int:
        return len(self.context_lens) + len(self.prompt_spans)


def plan_steps(
    input_lens: list[int],
    output_lens: list[int],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_cached: int = 0,
) -> Iterator[FloorStep]:
    """Prefill first, whole prompts, as many as fit a step; else every sequence decodes.

    Args:
        input_lens: Tokens of each prompt.
        output_lens: Tokens to generate for each.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Prompt tokens of a step.
        num_cached: Leading tokens of every prompt but the first that need not run.
    """
    waiting = deque(range(len(input_lens)))
    running: dict[int, int] = {}  # sequence -> tokens generated
    while waiting or running:
        spans: list[tuple[int, int]] = []
        room = max_num_batched_tokens
        while waiting and len(running) < max_num_seqs:
            seq = waiting[0]
            start = num_cached if seq else 0
            if spans and input_lens[seq] - start > room:
                break
            spans.append((start, input_lens[seq]))
            room -= input_lens[seq] - start
            running[waiting.popleft()] = 1
        if spans:
            yield FloorStep([], spans)
        else:
            yield FloorStep([input_lens[s] + n for s, n in running.items()], [])
            running = {s: n + 1 for s, n in running.items()}
        running = {s: n for s, n in running.items() if n < output_lens[s]}


@dataclass(frozen=True)
class Roof:
    """A machine that only moves bytes and multiplies, both at full speed.

    With more than one GPU the work is split evenly and communication is free.
    """

    bytes_per_s: float
    flops_per_s: float
    element_bytes: int

    def seconds(self, flops: float, elements: float) -> float:
        """Least time for these operations and for moving these elements."""
        return max(flops / self.flops_per_s, elements * self.element_bytes / self.bytes_per_s)

    def step_seconds(self, model: ModelConfig, step: FloorStep) -> float:
        """Least time of one step: each matrix once, each cached key once, each logit once."""
        layer = sum(
            self.seconds(2 * step.num_tokens * i * o, i * o + step.num_tokens * (i + o))
            for i, o in model.layer_matrices
        )
        kv_width = 2 * model.num_key_value_heads * model.head_dim  # elements of one token's k and v
        decode = self.seconds(0, sum(step.context_lens) * kv_width)
        pairs = sum((end - start) * (start + end + 1) / 2 for start, end in step.prompt_spans)
        prefill = self.seconds(
            4 * pairs * model.num_attention_heads * model.head_dim,
            sum(end for _, end in step.prompt_spans) * kv_width,
        )
        head_size = model.hidden_size * model.vocab_size
        num_logits = step.num_lanes * model.vocab_size
        head = self.seconds(2 * step.num_lanes * head_size, head_size + num_logits)
        sampling = self.seconds(0, num_logits)
        return model.num_hidden_layers * (layer + decode + prefill) + head + sampling


def floor_seconds(
    args: argparse.Namespace, model: ModelConfig, dtype: str, workload: Workload
) -> float:
    """Least time of a workload on `args.tp` GPUs."""
    element_bytes = 4 if dtype == "float32" else 2
    roof = Roof(args.tp * args.bandwidth * 1e12, args.tp * args.flops * 1e12, element_bytes)
    block_size = args.kvcache_block_size
    steps = plan_steps(
        [len(prompt) for prompt in workload.prompts],
        workload.output_lens,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_cached=args.prefix_len // block_size * block_size,
    )
    return sum(roof.step_seconds(model, step) for step in steps)


def floor_report(args: argparse.Namespace, llm: LLM, passes: list[Pass]) -> dict[str, object]:
    """Print and return each repeat's share of its floor."""
    rng, model, dtype = random.Random(0), llm.llm_engine.model_config, llm.stats().dtype
    floors = [floor_seconds(args, model, dtype, draw_for(args, llm, rng)) for _ in passes]
    tok_s = [done.num_tokens / floor for done, floor in zip(passes, floors, strict=True)]
    shares = [floor / done.seconds for done, floor in zip(passes, floors, strict=True)]
    print(
        f"floor at {args.bandwidth} TB/s and {args.flops} TFLOP/s, prefill first: "
        f"{floors[0]:.3g} s, {tok_s[0]:.0f} tok/s; the repeats reached "
        + ", ".join(f"{share:.1%}" for share in shares)
    )
    return {
        "seconds": [round(floor, 6) for floor in floors],
        "tok_s": [round(speed) for speed in tok_s],
        "share": [round(share, 4) for share in shares],
    }


if __name__ == "__main__":
    main()
