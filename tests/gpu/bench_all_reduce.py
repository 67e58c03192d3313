"""Microseconds of an all-reduce inside a CUDA graph, by size and by who does it.

python tests/gpu/bench_all_reduce.py [RANKS]; a row is 4096 bfloat16, as in an 8B model.
"""

import multiprocessing
import sys

import torch

from nanovllm.utils.distributed import join_group, leave_group, with_peer_memory
from nanovllm.utils.shared_file import SharedFile

HIDDEN_SIZE = 4096
SIZES = (1, 8, 32, 64, 128, 192, 256, 512)


def measure(rank: int, num_ranks: int, meeting_point: SharedFile) -> None:
    tp = join_group(rank, num_ranks, "cuda", meeting_point.path)
    tp = with_peer_memory(tp, HIDDEN_SIZE, torch.bfloat16, SIZES[-1])
    assert tp.peers is not None, "no peer memory"
    for num_rows in SIZES:
        times_us = tp.peers._measure(num_rows * HIDDEN_SIZE).tolist()
        if rank == 0:
            names = ("nccl", "one_shot", "two_shot")
            parts = [f"{name} {time:6.1f} us" for name, time in zip(names, times_us, strict=True)]
            print(f"{num_rows:4} rows, {num_rows * HIDDEN_SIZE // 512:5} KiB:", *parts, flush=True)
    if rank == 0:
        print("chosen:", tp.all_reduce_name, flush=True)
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
