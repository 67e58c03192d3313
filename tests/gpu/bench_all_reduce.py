"""Microseconds of sum, residual and norm inside a CUDA graph, by size and by who does it.

python tests/gpu/bench_all_reduce.py [RANKS]; a row is 4096 bfloat16, as in an 8B model. "fused" is
one kernel; of the others, which add_rms_norm follows, the second figure is the sum alone.
"""

import multiprocessing
import sys
from collections.abc import Callable

import torch

from nanovllm.kernels.norm import add_rms_norm
from nanovllm.layers.peer_norm import PeerNorm, with_peer_norm
from nanovllm.utils.distributed import join_group, leave_group, with_peer_memory
from nanovllm.utils.peer_all_reduce import PeerAllReduce, time_us
from nanovllm.utils.shared_file import SharedFile

HIDDEN_SIZE = 4096
SIZES = (1, 8, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512)


def measure_size(num_rows: int, peers: PeerAllReduce, fused: PeerNorm) -> dict[str, float]:
    """Every way's time for so many rows."""
    x, residual, weight = fused.draw_rows(num_rows)
    times = {"fused": time_us(lambda: fused.run_both_turns(x, residual, weight)) / 2}
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "one_shot": peers._one_shot,
        "two_shot": peers._two_shot,
        "nccl": peers._nccl,
    }
    for name, run in ways.items():
        x, residual, weight = fused.draw_rows(num_rows)

        def both(run=run, x=x, residual=residual, weight=weight) -> None:  # type: ignore[no-untyped-def]
            add_rms_norm(run(x), residual, weight, 1e-6)

        times[name] = time_us(both)
        times[f"{name} alone"] = time_us(lambda run=run, x=x: run(x))  # type: ignore[misc]
    return times


def measure(rank: int, num_ranks: int, meeting_point: SharedFile) -> None:
    tp = join_group(rank, num_ranks, "cuda", meeting_point.path)
    tp = with_peer_memory(tp, HIDDEN_SIZE, torch.bfloat16, SIZES[-1])
    tp = with_peer_norm(tp, HIDDEN_SIZE, torch.bfloat16, SIZES[-1])
    assert tp.peers is not None, "no peer memory"
    assert isinstance(tp.peer_norm, PeerNorm), "no peer memory"
    if rank == 0:
        print("chosen:", tp.all_reduce_name, flush=True)
    for num_rows in SIZES:
        times = measure_size(num_rows, tp.peers, tp.peer_norm)
        if rank == 0:
            parts = [f"fused {times['fused']:5.1f} us"] + [
                f"{name} {times[name]:5.1f} ({times[f'{name} alone']:5.1f})"
                for name in ("one_shot", "two_shot", "nccl")
            ]
            size = f"{num_rows:4} rows, {num_rows * HIDDEN_SIZE // 512:5} KiB"
            print(f"{size}:", " | ".join(parts), flush=True)
    leave_group()


if __name__ == "__main__":
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    context = multiprocessing.get_context("spawn")
    meeting_point = SharedFile(0)
    processes = [
        context.Process(target=measure, args=(rank, num_ranks, meeting_point), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    sys.exit(any(process.exitcode != 0 for process in processes))
