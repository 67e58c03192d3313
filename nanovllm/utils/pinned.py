"""Pinned host memory that rotates, so that what is in flight is never overwritten.

A copy from pinned memory is enqueued, not done, when the call returns: writing the buffer again
before the device has read it corrupts the step that it belonged to. Each buffer here carries an
event that was recorded behind its last copy, and is waited for before the buffer is used again;
with three buffers and one step in flight that wait never blocks.

What the device sends is copied whole where the buffer is as large: taking slices of two tensors
costs the host as much as the copy.

Where kernels are ours, there is no copy to enqueue at all: the device reads and writes pinned
memory in place (`StepSlots`), and a captured step is then a single call of the host.
"""

import numpy as np
import torch

NUM_BUFFERS = 3


class _Buffer:
    """Pinned words, the same as an array, and the event behind their last copy."""

    __slots__ = ("array", "event", "tensor")

    def __init__(self, num_words: int) -> None:
        self.event = torch.cuda.Event()
        self.resize(num_words)

    def resize(self, num_words: int) -> None:
        self.tensor = _pinned(num_words)
        self.array = self.tensor.numpy()


class PinnedRing:
    """Rotating pinned int32 buffers for copies in one direction on the current stream."""

    def __init__(self, num_words: int) -> None:
        self._buffers = [_Buffer(num_words) for _ in range(NUM_BUFFERS)]
        self._next = 0

    def upload(self, array: np.ndarray, target: torch.Tensor) -> None:
        """Enqueue the copy of int32 `array` into device tensor `target` of the same length."""
        num_words = len(array)
        buffer = self._claim(num_words)
        buffer.array[:num_words] = array
        target.copy_(buffer.tensor[:num_words], non_blocking=True)
        buffer.event.record()

    def download(self, source: torch.Tensor) -> tuple[np.ndarray, torch.cuda.Event]:
        """Enqueue the copy of int32 device tensor `source` to the host.

        Returns:
            An array that holds the words once the event has passed, until the ring comes round.
        """
        num_words = source.numel()
        buffer = self._claim(num_words)
        if source.shape == buffer.tensor.shape:
            buffer.tensor.copy_(source, non_blocking=True)
        else:
            buffer.tensor[:num_words].copy_(source, non_blocking=True)
        buffer.event.record()
        return buffer.array, buffer.event

    def _claim(self, num_words: int) -> _Buffer:
        """The next buffer, free and large enough."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        buffer.event.synchronize()
        if len(buffer.array) < num_words:
            buffer.resize(2 * num_words)
        return buffer


class Slot:
    """One step's words in pinned memory, and the event behind the step."""

    __slots__ = ("_event", "_is_in_flight", "tokens", "wire")

    def __init__(self, wire: np.ndarray, tokens: np.ndarray) -> None:
        self.wire, self.tokens = wire, tokens
        self._event = torch.cuda.Event()
        self._is_in_flight = False

    def record(self) -> None:
        """Note that the step has been launched."""
        self._event.record()
        self._is_in_flight = True

    def synchronize(self) -> None:
        """Wait until the step is done."""
        if self._is_in_flight:
            self._event.synchronize()
            self._is_in_flight = False


class StepSlots:
    """What a step's own kernels read from the host, and write to it.

    Slots take turns, on either side by itself: the host fills the next, and the step that it then
    launches, captured or not, finds on the device whose turn it is, and advances that when its
    tokens are written. What breaks off between `fill` and `launched` may put them out of step, so
    the next `fill` finds that and calls `resync`.
    """

    def __init__(self, num_words: int, num_tokens: int, device: torch.device) -> None:
        """Slots for wires of at most `num_words` words and steps of at most `num_tokens` lanes."""
        self.wires = _pinned(NUM_BUFFERS, num_words)  # (slots, num_words), read by the device
        self.tokens = _pinned(NUM_BUFFERS, num_tokens)  # (slots, num_tokens), written by it
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_words = num_words
        pairs = zip(self.wires.numpy(), self.tokens.numpy(), strict=True)
        self._slots = [Slot(wire, tokens) for wire, tokens in pairs]
        self._next = 0
        self._is_open = False  # filled, and not yet noted as launched

    def fill(self, wire: np.ndarray) -> None:
        """Write the wire of the step to be launched next."""
        if self._is_open:
            self.resync()
        self._is_open = True
        slot = self._slots[self._next]
        slot.synchronize()
        slot.wire[: len(wire)] = wire

    def launched(self) -> Slot:
        """Note that the step has been launched; its tokens are in the slot when that is done.

        They stay there until the slots come round.
        """
        slot = self._slots[self._next]
        slot.record()
        self._next = (self._next + 1) % NUM_BUFFERS
        self._is_open = False
        return slot

    def resync(self) -> None:
        """Wait for the current stream and go on with the slot whose turn it is then."""
        self._next = int(self.turn.item())
        self._is_open = False

    def clear(self) -> None:
        """Make every wire that of a step without lanes."""
        self.wires.zero_()


def _pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=True)
