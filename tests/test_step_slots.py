"""Step slots are read and written in time, however late the device is, wherever a step breaks."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from late_device import LateDevice, late_device

from nanovllm.kernels.row_state import RowState, commit_tokens_torch, fetch_wire_torch
from nanovllm.utils.pinned import NUM_BUFFERS, Slot, StepSlots

NUM_WORDS, NUM_LANES = 8, 3
NUM_STEPS = 300


class Steps:
    """Steps that return the first words of their wire, on a late device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.slots = StepSlots(NUM_WORDS, NUM_LANES, torch.device("cpu"))
        self._wire = torch.zeros(NUM_WORDS, dtype=torch.int32)
        self._state = RowState.allocate(NUM_LANES, 1, torch.device("cpu"))
        self._num_steps = 0

    def fill(self) -> list[int]:
        """Write a wire like no other and return what its step must return."""
        self._num_steps += 1
        wire = np.arange(NUM_WORDS, dtype=np.int32) + 100 * self._num_steps
        self.slots.fill(wire)
        return wire[:NUM_LANES].tolist()

    def replay(self) -> None:
        self._device.enqueue(self._run)

    def launch(self) -> tuple[Slot, list[int]]:
        expected = self.fill()
        self.replay()
        return self.slots.launched(), expected

    def recover(self) -> None:
        self._device.synchronize()
        self.slots.resync()

    def _run(self) -> None:
        slots = self.slots
        fetch_wire_torch(slots.wires, slots.turn, self._wire)
        rows = torch.arange(NUM_LANES)
        drawn, tokens = self._wire[:NUM_LANES].clone(), torch.zeros(NUM_LANES, dtype=torch.int32)
        commit_tokens_torch(drawn, rows, self._state, tokens, slots.tokens, slots.turn)


def check(pending: deque[tuple[Slot, list[int]]]) -> None:
    slot, expected = pending.popleft()
    slot.synchronize()
    assert slot.tokens.tolist() == expected


@pytest.mark.parametrize("depth", range(1, NUM_BUFFERS + 1))
def test_tokens_of_a_step_are_those_of_its_wire(depth: int) -> None:
    pending: deque[tuple[Slot, list[int]]] = deque()
    with late_device() as device:
        steps = Steps(device)
        for _ in range(10 * depth):
            if len(pending) == depth:
                check(pending)
            pending.append(steps.launch())
        while pending:
            check(pending)


def test_slot_is_filled_again_only_when_its_step_is_done() -> None:
    with late_device() as device:
        steps = Steps(device)
        launched = [steps.launch() for _ in range(NUM_BUFFERS)]
        steps.fill()  # the first slot again
        assert launched[0][0].tokens.tolist() == launched[0][1]
        assert not steps.slots.tokens[1:].any(), "nobody waits for the steps behind it"


def test_steps_go_on_wherever_one_breaks_off() -> None:
    """Before anything, filled, launched and not noted, noted and not read."""
    rng = random.Random(0)
    pending: deque[tuple[Slot, list[int]]] = deque()
    with late_device() as device:
        steps = Steps(device)
        for _ in range(NUM_STEPS):
            if len(pending) == 2 or (pending and rng.random() < 0.5):
                check(pending)
            pending.append(steps.launch())
            if rng.random() < 0.3:
                num_parts = rng.randint(0, 2)
                for part in (steps.fill, steps.replay)[:num_parts]:
                    part()
                pending.clear()
                if num_parts == 0 or rng.random() < 0.5:  # the recovery may break off, too
                    steps.recover()
