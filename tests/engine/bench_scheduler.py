"""What scheduling is worth: a workload's schedule replayed with measured times, without a GPU.

    python tests/engine/bench_scheduler.py 8B --num-seqs 2048
    python tests/engine/bench_scheduler.py 0.6B --num-seqs 2048 --num-groups 100000  # no groups
    python tests/engine/bench_scheduler.py 8B --outputs unknown --num-riding-steps 100000

Lengths are those of bench.py: 100 to 1024 tokens in, as many out, known beforehand; or unknown, as
where all have one limit and some token ends them; or all alike. Times are one H200's, from the
README's tables: a step takes its matrix products, by rows; K and V of its decode lanes, by their
bytes; what every layer and the head take besides, in a mixed step a little more; and if it is
launched kernel by kernel, as steps of prompts alone are, at least what that takes the host. Such
predictions were within 5% of what bench.py measured (256 and 2,048 sequences of 0.6B, 256 of 8B
with mixed steps and without).
"""

import argparse
import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 256
KV_BYTES = 4096  # of a token in a layer: 8 heads of 128, keys and values, 16 bit
KV_BYTES_US = 4.45e6
FEW_LANES = 96  # with fewer, attention doesn't reach that
PROMPT_ATTENTION_US = 0.02  # of a token in a layer
RIDING_US = 6  # of prompts in a layer of a mixed step
STOP = 1  # the token that ends a sequence before its limit


@dataclass(frozen=True)
class Costs:
    """Microseconds of a model's steps."""

    num_blocks: int  # KV cache
    num_layers: int
    rows: tuple[int, ...]  # of a layer's matrix products...
    rows_us: tuple[float, ...]  # ...and what they take; beyond the last, `row_us` a row more
    row_us: float
    layer_us: float  # norms, rotation, stores
    head_us: float  # head, sampler, start and end of a step
    lane_us: float  # of those, by lane
    eager_us: float  # launching a step kernel by kernel

    def step_us(self, batch: ScheduledBatch) -> float:
        """One step's time."""
        num_rows, num_prefills = batch.total_num_tokens, batch.num_prefills
        products = float(np.interp(num_rows, self.rows, self.rows_us))
        products += max(num_rows - self.rows[-1], 0) * self.row_us
        attention = float(batch.starts[num_prefills:].sum()) * KV_BYTES / KV_BYTES_US
        if 0 < batch.num_decodes < FEW_LANES:
            attention += 6
        if num_prefills and batch.num_decodes:
            attention += RIDING_US
        if not batch.num_decodes:
            attention += len(batch.prompt_tokens) * PROMPT_ATTENTION_US
        step = self.num_layers * (products + attention + self.layer_us)
        step += self.head_us + self.lane_us * batch.num_lanes
        return step if batch.num_decodes else max(step, self.eager_us)


SHAPES = {
    "0.6B": Costs(4520, 28, (1, 128, 1024), (26, 26, 57), 0.06, 7.5, 150, 0.25, 8500),
    "8B": Costs(3069, 36, (1, 64, 128, 256), (118, 118, 125, 157), 0.547, 9, 370, 0.35, 9500),
}


class Wish(NamedTuple):
    """Tokens of one sequence."""

    prompt: int
    output: int
    limit: int  # of the output, which is all that the engine knows


def make_wishes(num_seqs: int, max_input_len: int, max_output_len: int, outputs: str) -> list[Wish]:
    """Lengths from a tenth of the longest."""
    rng = random.Random(0)
    prompts = [rng.randint(max_input_len // 10, max_input_len) for _ in range(num_seqs)]
    lengths = [rng.randint(max_output_len // 10, max_output_len) for _ in prompts]
    if outputs == "alike":
        lengths = [max_output_len] * num_seqs
    limits = lengths if outputs == "known" else [max_output_len] * num_seqs
    return [Wish(*wish) for wish in zip(prompts, lengths, limits, strict=True)]


def replay(scheduler: Scheduler, costs: Costs, wishes: list[Wish]) -> Counter[str]:
    """Run a workload and return its microseconds, steps and lanes by kind."""
    ends: dict[Sequence | None, int] = {}  # the length that each ends with
    for i, (prompt, output, limit) in enumerate(wishes):
        seq = Sequence(
            i,
            [0] * prompt,
            block_size=BLOCK_SIZE,
            max_total_tokens=prompt + limit,
            stop_token_ids=frozenset([STOP]),
        )
        ends[seq] = prompt + output
        scheduler.add(seq)
    counts: Counter[str] = Counter()
    while not scheduler.is_finished():
        step = scheduler.schedule()
        assert step is not None, "nothing is in flight"
        batch = step.batch
        kind = "decode" if not batch.num_prefills else "mixed" if batch.num_decodes else "prompt"
        counts[f"{kind} steps"] += 1
        counts["decode lanes"] += batch.num_decodes
        counts["us"] += round(costs.step_us(batch))
        lanes = step.sequences
        is_last = [seq is not None and seq.num_tokens + 1 == ends[seq] for seq in lanes]
        scheduler.postprocess(step, [STOP if last else 0 for last in is_last])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--max-input-len", type=int, default=1024)
    parser.add_argument("--max-output-len", type=int, default=1024)
    parser.add_argument("--outputs", choices=("known", "unknown", "alike"), default="known")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-mixed-tokens", type=int, help="default: as the engine's")
    parser.add_argument("--num-kvcache-blocks", type=int, help="default: as on that GPU")
    parser.add_argument("--num-groups", type=int, default=Scheduler.num_groups)
    parser.add_argument("--num-riding-steps", type=int, default=Scheduler.num_riding_steps)
    args = parser.parse_args()

    costs, num_mixed = SHAPES[args.shape], args.max_num_mixed_tokens
    if num_mixed is None:
        num_mixed = 256 if args.shape == "8B" else 512
    scheduler = Scheduler(
        num_blocks=args.num_kvcache_blocks or costs.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=16384,
        max_num_mixed_tokens=num_mixed,
        enable_prefix_caching=False,
    )
    scheduler.num_groups = args.num_groups
    scheduler.num_riding_steps = args.num_riding_steps
    wishes = make_wishes(args.num_seqs, args.max_input_len, args.max_output_len, args.outputs)
    if num_mixed:
        wishes.sort(key=lambda wish: -wish.limit)  # as the engine queues them
    counts = replay(scheduler, costs, wishes)
    seconds = counts.pop("us") / 1e6
    num_tokens = sum(wish.output for wish in wishes)
    steps = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{num_tokens / seconds:.0f} tok/s in {seconds:.2f} s; {steps}; "
          f"{scheduler.num_preemptions} preemptions")  # fmt: skip


if __name__ == "__main__":
    main()
