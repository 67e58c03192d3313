"""Pinned host buffers that rotate, so that a copy in flight is never overwritten.

A copy from pinned memory is enqueued, not done, when the call returns: writing the buffer again
before the device has read it corrupts the step that it belonged to. Each buffer here carries an
event that was recorded behind its last copy, and is waited for before the buffer is used again;
with three buffers and one step in flight that wait never blocks.

Buffers are copied whole where the device's side is as large: a few kilobytes more cost nothing on
the bus, and taking slices of two tensors costs the host as much as the copy.
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
        self.tensor = torch.zeros(num_words, dtype=torch.int32, device="cpu", pin_memory=True)
        self.array = self.tensor.numpy()


class PinnedRing:
    """Rotating pinned int32 buffers for copies in one direction on the current stream."""

    def __init__(self, num_words: int) -> None:
        self._buffers = [_Buffer(num_words) for _ in range(NUM_BUFFERS)]
        self._next = 0

    def upload(self, array: np.ndarray, target: torch.Tensor) -> None:
        """Enqueue the copy of int32 `array` into the first words of device tensor `target`."""
        num_words = len(array)
        buffer = self._claim(num_words)
        buffer.array[:num_words] = array
        if target.shape == buffer.tensor.shape:
            target.copy_(buffer.tensor, non_blocking=True)
        else:
            target[:num_words].copy_(buffer.tensor[:num_words], non_blocking=True)
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
