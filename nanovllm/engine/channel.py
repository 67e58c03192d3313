"""How the caller's process talks to its ranks: commands down through shared memory, replies up.

Commands go through one ring of fixed slots in memory that all processes map. The caller writes a
command into the next slot, or into several if it is longer, and *then* sends one byte down a pipe
to each rank, its doorbell; a rank reads the byte and *then* the slot, and sends a byte back when
the slot may be written again. There is a byte for every slot, so nothing is lost or seen twice,
however slow a rank is; when the ring is full, the caller waits for the slowest. Bytes also order
memory: a write and the read that returns its byte synchronise in the kernel, on any processor.
Plain flags in the shared memory would need barriers that Python doesn't have.

A pipe has two more virtues: a rank with nothing to do sleeps in the kernel, and a process that
dies, in whatever way, closes its ends, which the other side sees at once.

Nothing here is pickled and no torch is imported. `commands.py` lists the commands.
"""

import os
import select
import struct
import time
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from nanovllm.utils.cores import num_cores
from nanovllm.utils.shared_file import SharedFile

NUM_SLOTS = 8
SLOT_BYTES = 128 << 10  # a step of 16384 prompt tokens fits one; a decode step takes 1 to 2 kB
_SLOT_HEADER = struct.Struct("=qqq")  # number of the command, its kind, bytes of its whole payload
_REPLY_HEADER = struct.Struct("=qq")  # number of the command that is answered, kind of the reply
_BELL = b"\0"

# A sleeping process needs some 50 us to wake, a polling one 1 us. Polling this long covers a caller
# that answers promptly and costs an idle rank nothing to speak of. With few cores, polling may keep
# the awaited process from running.
_SPIN_S = 200e-6 if num_cores() >= 8 else 0.0

Payload = bytes | bytearray | np.ndarray


class Message(NamedTuple):
    """A command as a rank receives it."""

    number: int  # 0, 1, 2, ... in the order of `Channel.publish`
    kind: int
    payload: bytearray


class Reply(NamedTuple):
    """What a rank answered, or that it is gone."""

    rank: int
    number: int  # of the command
    kind: int
    payload: bytes
    is_hangup: bool = False  # the rank has closed its end: it ended, or is about to


class RankEnd:
    """A rank's end of the channel, handed to its process when that is spawned."""

    def __init__(
        self, file: SharedFile, num_slots: int, bell: Connection, free: Connection, up: Connection
    ) -> None:
        self._file = file
        self._num_slots = num_slots
        self._bell, self._free, self._up = bell, free, up
        self._slots: list[memoryview] = []  # mapped by the first `receive`, in the rank's process
        self._num_ready = 0  # slots that have been announced and not read
        self._num_read = 0  # slots, ever
        self._num_received = 0  # commands, ever

    def receive(self) -> Message:
        """Wait for the next command.

        Raises:
            EOFError: The caller is gone.
        """
        if not self._slots:
            self._slots = _split(self._file, self._num_slots)
            self._poll = _poller(self._bell.fileno())
        number, kind, num_bytes = self._next_header()
        assert number == self._num_received, f"command {number} after {self._num_received - 1}"
        payload = bytearray(num_bytes)
        received = self._take_slot(payload, 0)
        while received < num_bytes:
            header = self._next_header()
            assert header == (number, kind, num_bytes), f"a piece of {header} in {number}"
            received = self._take_slot(payload, received)
        self._num_received += 1
        return Message(number, kind, payload)

    def reply(self, number: int, kind: int, payload: Payload = b"") -> None:
        """Answer command `number`.

        Raises:
            BrokenPipeError: The caller is gone.
        """
        self._up.send_bytes(_REPLY_HEADER.pack(number, kind) + bytes(payload))

    def close(self) -> None:
        for connection in (self._bell, self._free, self._up):
            connection.close()
        self._file.close()

    def _next_header(self) -> tuple[int, int, int]:
        if not self._num_ready:
            _wait(self._poll)
            bells = os.read(self._bell.fileno(), self._num_slots)
            if not bells:
                raise EOFError("the caller has closed the channel")
            self._num_ready = len(bells)
        return _SLOT_HEADER.unpack_from(self._slots[self._num_read % self._num_slots])

    def _take_slot(self, payload: bytearray, start: int) -> int:
        """Copy the next slot's part of `payload` to `start`, free it, return where that ends."""
        slot = self._slots[self._num_read % self._num_slots][_SLOT_HEADER.size :]
        end = min(start + len(slot), len(payload))
        payload[start:end] = slot[: end - start]
        self._num_read += 1
        self._num_ready -= 1
        os.write(self._free.fileno(), _BELL)
        return end


class Channel:
    """The caller's end: every command reaches every rank exactly once and in order.

    Not for use from two threads at once. An exception (Ctrl-C, say) while a call waits leaves the
    channel as it was; one in the middle of a command or a reply leaves it torn, and it can only be
    closed.

    Raises:
        OSError: There is no room for the ring.
    """

    def __init__(
        self, num_ranks: int, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        assert slot_bytes % 8 == 0, f"slot_bytes {slot_bytes} must keep headers aligned"
        assert slot_bytes > _SLOT_HEADER.size, f"slot_bytes {slot_bytes} hold no payload"
        file = SharedFile(num_slots * slot_bytes)
        self._num_slots = num_slots
        self._slots = _split(file, num_slots)
        bells = [Pipe(duplex=False) for _ in range(num_ranks)]
        frees = [Pipe(duplex=False) for _ in range(num_ranks)]
        ups = [Pipe(duplex=False) for _ in range(num_ranks)]
        self._bells = [write for _, write in bells]
        self._frees = [read for read, _ in frees]
        self._ups = [read for read, _ in ups]
        self.rank_ends = [
            RankEnd(file, num_slots, bell, free, up)
            for (bell, _), (_, free), (_, up) in zip(bells, frees, ups, strict=True)
        ]
        self.is_torn = False
        self._num_commands = 0
        self._num_written = 0  # slots, ever
        self._num_freed = [0] * num_ranks  # of those, read by the rank
        self._replies: deque[Reply] = deque()  # read and not taken yet
        self._rank_of_fd = {up.fileno(): rank for rank, up in enumerate(self._ups)}
        self._replies_poll = _poller(*self._rank_of_fd)
        self._poll = _poller(*self._rank_of_fd, *(free.fileno() for free in self._frees))

    def release_rank_ends(self) -> None:
        """Close this process's copies of the ranks' ends: after this a dead rank is noticed."""
        for end in self.rank_ends:
            end.close()

    def publish(self, kind: int, payload: Payload = b"", timeout_s: float | None = None) -> int:
        """Send a command to all ranks and return its number.

        Args:
            kind: Any int.
            payload: Any size; an array is sent as its bytes.
            timeout_s: How long to wait for room in the ring; None is for ever.

        Raises:
            TimeoutError: A rank hasn't read for so long.
            BrokenPipeError: A rank is gone; `take` tells which.
        """
        content = memoryview(payload.tobytes() if isinstance(payload, np.ndarray) else payload)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        number = self._num_commands
        header = (number, kind, len(content))
        room = len(self._slots[0]) - _SLOT_HEADER.size
        for start in range(0, max(len(content), 1), room):
            piece = content[start : start + room]
            self._wait_for_free_slot(deadline)
            self.is_torn = True
            slot = self._slots[self._num_written % self._num_slots]
            _SLOT_HEADER.pack_into(slot, 0, *header)
            slot[_SLOT_HEADER.size : _SLOT_HEADER.size + len(piece)] = piece
            self._num_written += 1
            for bell in self._bells:
                os.write(bell.fileno(), _BELL)
        self._num_commands += 1
        self.is_torn = False
        return number

    def take(self, timeout_s: float | None = None) -> Reply | None:
        """Return the next reply of any rank; None if there is none within `timeout_s`.

        A rank that is gone is reported once, behind everything that it had said.
        """
        if not self._replies:
            ready = _wait(self._replies_poll, timeout_s)
            self.is_torn = True
            self._read_replies(ready)
            self.is_torn = False
        return self._replies.popleft() if self._replies else None

    def close(self) -> None:
        """Close all pipes, which ends the ranks that still read. Again does nothing."""
        for connection in (*self._bells, *self._frees, *self._ups):
            connection.close()
        self._slots.clear()  # the mapping goes with the last view of it
        self.release_rank_ends()

    def _wait_for_free_slot(self, deadline: float | None) -> None:
        while self._num_written - min(self._num_freed) >= self._num_slots:
            timeout_s = None if deadline is None else max(deadline - time.monotonic(), 0)
            ready = _wait(self._poll, timeout_s)
            if not ready and timeout_s == 0:
                raise TimeoutError("a rank doesn't read its commands")
            was_torn, self.is_torn = self.is_torn, True
            for rank, free in enumerate(self._frees):
                if free.fileno() in ready:
                    self._num_freed[rank] += len(os.read(free.fileno(), self._num_slots))
            # A rank that waits for room in its pipe of replies would never free a slot.
            self._read_replies(ready)
            self.is_torn = was_torn
            if any(reply.is_hangup for reply in self._replies):
                raise BrokenPipeError("a rank has gone")

    def _read_replies(self, ready: set[int]) -> None:
        for fd in ready & self._rank_of_fd.keys():
            rank = self._rank_of_fd[fd]
            try:
                message = self._ups[rank].recv_bytes()
            except (EOFError, ConnectionError):
                self._forget(rank)
                self._replies.append(Reply(rank, -1, -1, b"", is_hangup=True))
                continue
            number, kind = _REPLY_HEADER.unpack_from(message)
            self._replies.append(Reply(rank, number, kind, message[_REPLY_HEADER.size :]))

    def _forget(self, rank: int) -> None:
        """Stop polling the pipes of a rank that is gone: they would always be ready."""
        up, free = self._ups[rank].fileno(), self._frees[rank].fileno()
        del self._rank_of_fd[up]
        self._replies_poll.unregister(up)
        self._poll.unregister(up)
        self._poll.unregister(free)


def _split(file: SharedFile, num_slots: int) -> list[memoryview]:
    view = memoryview(file.map())
    size = len(view) // num_slots
    return [view[i * size : (i + 1) * size] for i in range(num_slots)]


def _poller(*fds: int) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def _wait(poll: select.poll, timeout_s: float | None = None) -> set[int]:
    """Descriptors that can be read or were hung up; polls for a moment, then sleeps."""
    spin_s = _SPIN_S if timeout_s is None else min(_SPIN_S, timeout_s)
    spin_until = time.perf_counter() + spin_s
    while not (events := poll.poll(0)) and time.perf_counter() < spin_until:
        pass
    if not events:
        events = poll.poll(None if timeout_s is None else max(timeout_s - spin_s, 0) * 1000)
    return {fd for fd, _ in events}
