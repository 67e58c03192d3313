"""Pinned host buffers that rotate, so that a copy in flight is never overwritten.

A copy from pinned memory is enqueued, not done, when the call returns: writing the buffer again
before the device has read it corrupts the step that it belonged to. Each buffer here carries an
event that was recorded behind its last copy, and is waited for before the buffer is used again;
with three buffers and one step in flight that wait never blocks.
"""

import numpy as np
import torch

NUM_BUFFERS = 3


class PinnedRing:
    """Rotating pinned int32 buffers for copies in one direction on the current stream."""

    def __init__(self, num_words: int) -> None:
        self._buffers = [_pinned(num_words) for _ in range(NUM_BUFFERS)]
        self._events = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        self._next = 0

    def upload(self, array: np.ndarray, target: torch.Tensor) -> None:
        """Enqueue the copy of int32 `array` into the first words of device tensor `target`."""
        i = self._claim(len(array))
        buffer = self._buffers[i][: len(array)]
        buffer.numpy()[:] = array
        target[: len(array)].copy_(buffer, non_blocking=True)
        self._events[i].record()

    def download(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Enqueue the copy of int32 device tensor `source` to the host.

        Returns:
            A host tensor, valid once the event has passed and until the ring comes round.
        """
        i = self._claim(source.numel())
        buffer = self._buffers[i][: source.numel()]
        buffer.copy_(source, non_blocking=True)
        self._events[i].record()
        return buffer, self._events[i]

    def _claim(self, num_words: int) -> int:
        """Index of the next buffer, free and large enough."""
        i, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        self._events[i].synchronize()
        if self._buffers[i].numel() < num_words:
            self._buffers[i] = _pinned(2 * num_words)
        return i


def _pinned(num_words: int) -> torch.Tensor:
    return torch.empty(num_words, dtype=torch.int32, pin_memory=True)
