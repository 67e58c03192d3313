"""Captured steps: one graph launch in place of some three hundred kernel launches.

A graph fixes shapes and addresses, so decode is captured at a ladder of batch sizes that ends at
exactly max_num_seqs, and a batch replays the smallest that holds it. What varies between replays
is read from memory that keeps its address: the step's wire array and the row state. Padded lanes
use the spare row; their slot is -1, so they store nothing.

Mixed steps are captured too, with room for a few prompts beside the decode lanes. A coarse ladder
does for them: the scheduler fills what the decode lanes leave of a step with prompt chunks
(`batch.num_mixed_prompt_tokens`), so hardly anything is padding.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

import torch

from nanovllm.engine.batch import (
    MAX_MIXED_PREFILLS,
    ScheduledBatch,
    mixed_granularity,
    num_mixed_prompt_tokens,
)
from nanovllm.kernels.row_state import StepShape

# Spaced so that padding costs little: below 128 lanes a step's time hardly depends on their number;
# above, matrix products take longer, but unevenly: 192 and 224 rows take no less time than 208 and
# 240. Padded lanes have no context to read.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160, 176, 208, 240, 256, 320, 384, 448, 512)
_STEP_BEYOND = 128


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending, the last one exactly `max_num_seqs`."""
    beyond = range(_SIZES[-1] + _STEP_BEYOND, max_num_seqs, _STEP_BEYOND)
    return [size for size in (*_SIZES, *beyond) if size < max_num_seqs] + [max_num_seqs]


def decode_shapes(max_num_seqs: int) -> list[StepShape]:
    """Shapes of steps that only decode."""
    return [StepShape(0, 0, size) for size in graph_sizes(max_num_seqs)]


def mixed_shapes(max_num_seqs: int, max_num_mixed_tokens: int) -> list[StepShape]:
    """Shapes of steps of prompt chunks and decode lanes; [] if there are no such steps."""
    if not max_num_mixed_tokens:
        return []
    # Evenly spaced up to the tokens of a mixed step, and beyond that as for decode.
    granularity = mixed_granularity(max_num_mixed_tokens)
    sizes = [*range(granularity, max_num_mixed_tokens, granularity)]
    sizes += [size for size in graph_sizes(max_num_seqs) if size >= max_num_mixed_tokens]
    sizes = [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
    return [
        StepShape(MAX_MIXED_PREFILLS, num_mixed_prompt_tokens(size, max_num_mixed_tokens), size)
        for size in sizes
    ]


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures of a device: cuBLAS keeps a workspace for every stream it saw."""
    return torch.cuda.Stream(device)


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """For a short branch beside the main one; its higher priority lets it start first."""
    return torch.cuda.Stream(device, priority=-1)


class StepGraphs:
    """One captured graph for each shape of step; addresses never change after capture."""

    def __init__(self, shapes: Sequence[StepShape], run: Callable[[StepShape], None]) -> None:
        """Capture `run(shape)` for each of `shapes`.

        Args:
            shapes: What batches are padded to.
            run: Launches the work of a step of a shape on the current stream, allocating nothing
                that outlives it.

        Raises:
            RuntimeError: A capture failed. The process is left as it was.
        """
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        by_decodes = sorted(shapes, key=lambda shape: shape.num_decodes)
        self._decodes = [shape for shape in by_decodes if not shape.num_prefills]
        self._mixed = [shape for shape in by_decodes if shape.num_prefills]
        self.sizes = [shape.num_decodes for shape in self._decodes]  # batches that only decode
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        rng_state = generator.clone_state()
        try:
            self._capture(run)
        except BaseException:
            self.release()
            # A new state, not a new seed: a capture that broke off leaves the old one capturing.
            generator.graphsafe_set_state(rng_state)
            raise

    def shape_for(self, batch: ScheduledBatch) -> StepShape | None:
        """The smallest captured shape that holds `batch`; None if none does."""
        if not batch.num_prefills:
            place = bisect_left(self.sizes, batch.num_lanes)
            return self._decodes[place] if place < len(self._decodes) else None
        for shape in self._mixed:
            if (
                shape.num_decodes >= batch.num_decodes
                and shape.num_prefill_tokens >= len(batch.prompt_tokens)
                and shape.num_prefills >= batch.num_prefills
            ):
                return shape
        return None

    def replay(self, shape: StepShape) -> None:
        """Enqueue the step captured for `shape`."""
        self._graphs[shape].replay()

    def release(self) -> None:
        """Give the graphs and their memory back. No replay after this."""
        self._decodes, self._mixed, self.sizes = [], [], []
        self._graphs.clear()

    def _capture(self, run: Callable[[StepShape], None]) -> None:
        # A collection during capture could free tensors of another stream's graph.
        gc.collect()
        stream = _capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        pool = None
        with torch.cuda.stream(stream):
            # Largest first: later captures reuse its memory pool.
            for shape in sorted(
                (*self._decodes, *self._mixed), key=lambda shape: shape.num_tokens, reverse=True
            ):
                run(shape)  # eagerly once, so that nothing compiles or sets up inside the capture
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    run(shape)
                pool = pool or graph.pool()
                self._graphs[shape] = graph
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
