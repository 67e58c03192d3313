"""All-reduce of small tensors over memory that the GPUs of a host read from one another.

NCCL moves large tensors at the speed of the links, but a decode step sums a few hundred kilobytes,
twice a layer, where what counts is latency. With *symmetric memory* every rank maps every rank's
buffer. *One-shot*: each rank reads all buffers and sums them by itself, one exchange of signals.
*Two-shot*: each rank sums its part of the tensor, then reads the others: less traffic, one more
exchange. Which wins depends on size, ranks and links, so it is measured when an engine starts.

The kernels are torch's (`torch.ops.symm_mem`). Its multicast operations are not used: they need a
switch feature that many hosts and containers don't offer.

Source: the one-shot and two-shot kernels of TensorRT-LLM and vLLM's custom all-reduce.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

MAX_BYTES = 8 << 20  # of a tensor; beyond it NCCL is at the speed of the links
_NUM_ROWS = (1, 8, 32, 64, 128, 256, 512)  # sizes that are measured
_NUM_CALLS = 20  # in a measured graph
_NUM_REPLAYS = 10
ATOL_OF_MAX = 2e-2  # bf16 keeps 8 bits, and the order of the sum differs


class Choice(NamedTuple):
    """Who sums tensors up to a size."""

    max_bytes: int
    name: str  # "nccl", "one_shot" or "two_shot"


class PeerAllReduce:
    """Sums over the ranks of a group, by what was measured to be fastest at each size.

    Invariant: all ranks call it in the same order, with the same shapes, on one stream each: then a
    buffer is never overwritten before its peers have read it, because each kernel ends with an
    exchange of signals.

    Raises:
        RuntimeError: The GPUs can't map one another's memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, row_elements: int, dtype: torch.dtype, max_rows: int
    ) -> None:
        """Map the buffers and measure; all ranks of `group` together.

        Args:
            group: An NCCL group on one host.
            row_elements: Elements of a tensor for each token, the model's hidden size.
            dtype: bfloat16 or float32; float16 is left to NCCL.
            max_rows: Most tokens of a decode step.
        """
        import torch.distributed._symmetric_memory as symm_mem

        self._group = group
        self._name = group.group_name
        self._dtype = dtype
        row_bytes = row_elements * dtype.itemsize
        max_elements = min(max_rows * row_bytes, MAX_BYTES) // dtype.itemsize
        device = torch.device("cuda", torch.cuda.current_device())
        self._buffer = symm_mem.empty(max_elements, dtype=dtype, device=device)
        symm_mem.rendezvous(self._buffer, self._name)
        sizes = [num_rows * row_elements for num_rows in measured_rows(max_rows)]
        self.choices = self._choose(sizes, max_elements)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The sum of the ranks' tensors, a new tensor; None where NCCL should do it."""
        if tensor.dtype is not self._dtype or not tensor.is_contiguous():
            return None
        num_bytes = tensor.numel() * tensor.element_size()
        name = next((name for max_bytes, name in self.choices if num_bytes <= max_bytes), "nccl")
        if name == "nccl":
            return None
        return self._one_shot(tensor) if name == "one_shot" else self._two_shot(tensor)

    def describe(self) -> str:
        """The choices as a line: "one_shot to 64 KiB, two_shot to 1024 KiB, nccl"."""
        parts = []
        for i, (max_bytes, name) in enumerate(self.choices):
            is_last_of_run = i + 1 == len(self.choices) or self.choices[i + 1].name != name
            if name != "nccl" and is_last_of_run:
                parts.append(f"{name} to {max_bytes // 1024} KiB")
        return ", ".join([*parts, "nccl"])

    def _one_shot(self, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffer[: tensor.numel()].view(tensor.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, tensor, "sum", self._name)

    def _two_shot(self, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffer[: tensor.numel()].view(tensor.shape)
        buffer.copy_(tensor)
        out = torch.empty_like(tensor)
        return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._name, out)

    def _nccl(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def _choose(self, sizes: list[int], max_elements: int) -> list[Choice]:
        """The fastest for each size; every rank finds the same, from the slowest rank's times."""
        choices = []
        for num_elements in (size for size in sizes if size <= max_elements):
            times_us = self._measure(num_elements)
            dist.all_reduce(times_us, op=dist.ReduceOp.MAX, group=self._group)
            name = ("nccl", "one_shot", "two_shot")[int(times_us.argmin())]
            choices.append(Choice(num_elements * self._dtype.itemsize, name))
        return choices

    def _measure(self, num_elements: int) -> torch.Tensor:
        """Time of NCCL, one-shot and two-shot; infinite for one that gives a wrong sum."""
        generator = torch.Generator(device=self._buffer.device).manual_seed(self._group.rank())
        tensor = torch.randn(
            num_elements, generator=generator, dtype=self._dtype, device=self._buffer.device
        )
        times = [time_us(lambda: self._nccl(tensor))]
        for run in (self._one_shot, self._two_shot):
            tensor.normal_(generator=generator)
            expected = self._nccl(tensor.clone())
            error = (run(tensor) - expected).abs().max()
            is_right = bool(error <= ATOL_OF_MAX * expected.abs().max())
            time = time_us(lambda run=run: run(tensor))  # type: ignore[misc]
            times.append(time if is_right else float("inf"))
        return torch.tensor(times, device=self._buffer.device)


def measured_rows(max_rows: int) -> list[int]:
    """Batch sizes to measure, ascending, the last one `max_rows`."""
    return [num_rows for num_rows in _NUM_ROWS if num_rows < max_rows] + [max_rows]


def time_us(run: Callable[[], object]) -> float:
    """Microseconds of one call inside a CUDA graph, where decode steps make it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_NUM_CALLS):
            run()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(_NUM_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / (_NUM_CALLS * _NUM_REPLAYS)
