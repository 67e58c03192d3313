"""Captured decode steps: one graph launch in place of some three hundred kernel launches.

A graph fixes shapes and addresses, so decode is captured at a ladder of batch sizes that ends at
exactly max_num_seqs, and a batch replays the smallest that holds it. What varies between replays
is read from memory that keeps its address: the step's wire array and the row state. Padded lanes
use the spare row; their slot is -1, so they store nothing.
"""

import gc
from collections.abc import Callable, Sequence
from functools import cache

import torch

# Spaced so that padding costs little where it matters: below 64 lanes a step's time hardly depends
# on the lanes, above it attention does, and padded lanes have no context to read.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_STEP_BEYOND = 128


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending, the last one exactly `max_num_seqs`."""
    beyond = range(_SIZES[-1] + _STEP_BEYOND, max_num_seqs, _STEP_BEYOND)
    return [size for size in (*_SIZES, *beyond) if size < max_num_seqs] + [max_num_seqs]


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures of a device: cuBLAS keeps a workspace for every stream it saw."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """One captured graph for each batch size; addresses never change after capture."""

    def __init__(self, sizes: Sequence[int], run: Callable[[int], None]) -> None:
        """Capture `run(size)` for each of `sizes`.

        Args:
            sizes: Batch sizes.
            run: Launches the work of a step of so many lanes on the current stream, allocating
                nothing that outlives it.

        Raises:
            RuntimeError: A capture failed. The process is left as it was.
        """
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.sizes = sorted(sizes)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        rng_state = generator.clone_state()
        try:
            self._capture(run)
        except BaseException:
            self.release()
            # A new state, not a new seed: a capture that broke off leaves the old one capturing.
            generator.graphsafe_set_state(rng_state)
            raise

    def size_for(self, num_lanes: int) -> int | None:
        """The smallest captured size that holds `num_lanes`; None if none does."""
        return next((size for size in self.sizes if size >= num_lanes), None)

    def replay(self, size: int) -> None:
        """Enqueue the step captured for `size` lanes."""
        self._graphs[size].replay()

    def release(self) -> None:
        """Give the graphs and their memory back. No replay after this."""
        self.sizes = []
        self._graphs.clear()

    def _capture(self, run: Callable[[int], None]) -> None:
        # A collection during capture could free tensors of another stream's graph.
        gc.collect()
        stream = _capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        pool = None
        with torch.cuda.stream(stream):
            # Largest size first: later captures reuse its memory pool.
            for size in reversed(self.sizes):
                run(size)  # eagerly once, so that nothing compiles or sets up inside the capture
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    run(size)
                pool = pool or graph.pool()
                self._graphs[size] = graph
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
