"""Captured steps without a GPU: a device that does nothing until somebody waits for it.

`captured_on_cpu` gives every CPU engine what one on a GPU has: step slots, and a ladder of captured
shapes, padding included. A replay is only queued; it runs, in the reference kernels, when the host
waits for an event behind it, so whoever overwrites what a step in flight still reads, or reads what
it hasn't written, is found. Steps that aren't captured wait for all that was queued before them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nanovllm.engine.cuda_graph import StepGraphs
from nanovllm.engine.model_runner import ModelRunner, StepInputs
from nanovllm.engine.second_pass import SecondPass
from nanovllm.kernels.row_state import StepShape, commit_tokens_torch, fetch_wire_torch
from nanovllm.utils.pinned import PinnedRing, StepSlots

NUM_WIRE_WORDS = 400  # short enough that some batches have no room in a slot


class LateDevice:
    """Work in the order of its launch, done only when the host waits."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self.replays: list[StepShape] = []

    def enqueue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def run_one(self) -> None:
        work = self._queue.popleft()
        try:
            work()
        except BaseException:  # planted: what has been launched is done whole, whatever befalls us
            work()
            raise

    def synchronize(self) -> None:
        while self._queue:
            self.run_one()

    def make_event(self) -> "LateEvent":
        return LateEvent(self)


class LateEvent:
    """A torch.cuda.Event of a late device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._num_recorded = self._num_passed = 0

    def record(self) -> None:
        self._num_recorded += 1
        self._device.enqueue(partial(setattr, self, "_num_passed", self._num_recorded))

    def synchronize(self) -> None:
        while self._num_passed < self._num_recorded:
            self._device.run_one()


def host_memory(*shape: int) -> torch.Tensor:
    """In place of pinned memory, of which there is none without a GPU."""
    return torch.zeros(shape, dtype=torch.int32)


@contextmanager
def late_device() -> Iterator[LateDevice]:
    """What `utils.pinned` works with."""
    device = LateDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.utils.pinned._pinned", host_memory)
        patch.setattr(torch.cuda, "Event", device.make_event)
        patch.setattr(StepSlots, "resync", _after_all(device, StepSlots.resync))  # it reads a turn
        yield device


@contextmanager
def captured_on_cpu() -> Iterator[LateDevice]:
    """Let CPU engines that start in here capture their steps."""
    with late_device() as device, pytest.MonkeyPatch.context() as patch:
        module = "nanovllm.engine.model_runner"
        patch.setattr(f"{module}.fetch_wire", fetch_wire_torch)
        patch.setattr(f"{module}.commit_tokens", commit_tokens_torch)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "default_generators", [torch.Generator()])
        patch.setattr(StepGraphs, "_capture", lambda *args: _capture(device, *args))
        patch.setattr(ModelRunner, "capture_cudagraph", _capture_all)
        patch.setattr(ModelRunner, "_inputs_of", _with_fixed_logits(ModelRunner._inputs_of))
        patch.setattr(ModelRunner, "synchronize", lambda runner: device.synchronize())
        for owner, name in (
            (ModelRunner, "prepare_prefill"),
            (ModelRunner, "prepare_decode"),
            (SecondPass, "run"),
        ):
            patch.setattr(owner, name, _after_all(device, getattr(owner, name)))
        yield device


def _capture_all(runner: ModelRunner) -> None:
    """`capture_cudagraph`, and what `_allocate_buffers` allocates on a GPU."""
    max_lanes = max(shape.num_lanes for shape in runner._shapes())
    runner.slots = StepSlots(NUM_WIRE_WORDS, max_lanes, runner.device)
    runner.wire = torch.zeros(NUM_WIRE_WORDS, dtype=torch.int32)
    runner.tokens = torch.zeros(max_lanes, dtype=torch.int32)
    runner.logits = torch.zeros(max_lanes, runner.model.lm_head.num_rows)
    runner.downloads = PinnedRing(max_lanes)
    runner.graphs = StepGraphs(runner._shapes(), runner._run_shape)


def _capture(device: LateDevice, graphs: StepGraphs, run: Callable[[StepShape], None]) -> None:
    for shape in (*graphs._decodes, *graphs._mixed):
        graphs._graphs[shape] = SimpleNamespace(replay=partial(_replay, device, run, shape))


def _replay(device: LateDevice, run: Callable[[StepShape], None], shape: StepShape) -> None:
    device.replays.append(shape)
    device.enqueue(torch.inference_mode()(partial(run, shape)))


def _with_fixed_logits(inputs_of: Callable[..., StepInputs]) -> Callable[..., StepInputs]:
    def with_fixed_logits(runner: ModelRunner, shape: StepShape, *args: object) -> StepInputs:
        inputs = inputs_of(runner, shape, *args)
        if runner.graphs is None:
            return inputs
        return replace(inputs, logits=runner.logits[: shape.num_lanes])

    return with_fixed_logits


def _after_all(device: LateDevice, work: Callable[..., object]) -> Callable[..., object]:
    """What is launched otherwise runs at once, so all that was launched before it must have."""

    def after_all(*args: object) -> object:
        device.synchronize()
        return work(*args)

    return after_all
