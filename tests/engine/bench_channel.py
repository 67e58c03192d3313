"""Microseconds and bytes of a decode step's command: publish, seen by all ranks, round trip.

python tests/engine/bench_channel.py [RANKS]; the ranks are stubs, so no GPU is needed.
"""

import multiprocessing
import struct
import sys
import time
from collections.abc import Iterator

import numpy as np

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.channel import Channel, RankEnd

NUM_COMMANDS = 2000
NUM_LANES = 256
PERCENTILES = (10, 50, 90, 99)
_TIME_NS = struct.Struct("=q")


def answer_with_the_time(end: RankEnd) -> None:
    """A stub rank: perf_counter_ns is one clock for all processes of a Linux host."""
    for _ in range(NUM_COMMANDS):
        message = end.receive()
        end.reply(message.number, 0, _TIME_NS.pack(time.perf_counter_ns()))


def measure(num_ranks: int, pause_s: float) -> None:
    """Print percentiles with the caller busy elsewhere for `pause_s` between commands."""
    channel = Channel(num_ranks)
    context = multiprocessing.get_context("spawn")
    for end in channel.rank_ends:
        context.Process(target=answer_with_the_time, args=(end,), daemon=True).start()
    channel.release_rank_ends()
    rows = np.arange(NUM_LANES, dtype=np.int32)
    batch = ScheduledBatch(rows=rows, starts=rows, num_tokens=rows[:0])
    times_ns = np.array([_one_command(channel, num_ranks, batch) for _ in _paced(pause_s)])
    print(f"{num_ranks} ranks, {batch.to_wire().nbytes} bytes, {pause_s * 1e3} ms between commands")
    for name, column in zip(("publish", "seen", "round trip"), times_ns[100:].T, strict=True):
        micros = np.percentile(column, PERCENTILES) / 1e3
        print(f"  {name:10} p10 p50 p90 p99: {' '.join(f'{value:.1f}' for value in micros)} us")
    channel.close()


def _paced(pause_s: float) -> Iterator[int]:
    for i in range(NUM_COMMANDS):
        if i > 10:
            time.sleep(pause_s)
        yield i


def _one_command(channel: Channel, num_ranks: int, batch: ScheduledBatch) -> tuple[int, int, int]:
    start = time.perf_counter_ns()
    channel.publish(0, batch.to_wire())
    published = time.perf_counter_ns()
    seen = []
    for _ in range(num_ranks):
        reply = channel.take()
        assert reply is not None
        seen.append(_TIME_NS.unpack(reply.payload)[0])
    return published - start, max(seen) - start, time.perf_counter_ns() - start


if __name__ == "__main__":
    for pause_s in (0.0, 1e-3, 5e-3):
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 2, pause_s)
