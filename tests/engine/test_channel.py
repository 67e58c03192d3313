"""The channel alone, with stub ranks: nothing lost, doubled or reordered, whatever the pace."""

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from nanovllm.engine.channel import Channel, RankEnd


def numbered_payload(i: int, max_bytes: int) -> np.ndarray:
    """Payload of command i: 1 byte to `max_bytes`, different in every command."""
    rng = np.random.default_rng(i)
    num_bytes = int(np.exp(rng.uniform(0, np.log(max_bytes)))) if i % 50 else max_bytes
    return rng.integers(0, 256, num_bytes, dtype=np.uint8)


def echo(end: RankEnd, num_commands: int, delay_s: Callable[[int], float]) -> None:
    """A stub rank: check every command against its number, answer with its size."""
    for i in range(num_commands):
        message = end.receive()
        time.sleep(delay_s(i))
        expected = numbered_payload(i, 8 << 20).tobytes()
        is_right = message == (i, i % 7, expected)
        end.reply(i, int(is_right), str(len(message.payload)).encode())
    with pytest.raises(EOFError):
        end.receive()


def slow_at_times(i: int) -> float:
    return 0.05 if i % 20 == 3 else 0.0


def never_slow(i: int) -> float:
    return 0.0


def in_threads(channel: Channel, *paces: Callable[[int], float]) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=echo, args=(end, 200, pace), daemon=True)
        for end, pace in zip(channel.rank_ends, paces, strict=True)
    ]
    for thread in threads:
        thread.start()
    return threads


def test_channel_delivers_every_command_once_and_in_order(hard_timeout: None) -> None:
    """200 commands of 1 byte to 8 MB to ranks of different paces; big ones go in pieces."""
    channel = Channel(2)
    threads = in_threads(channel, slow_at_times, never_slow)
    for i in range(200):
        assert channel.publish(i % 7, numbered_payload(i, 8 << 20)) == i
    answers: list[list[int]] = [[], []]
    for _ in range(400):
        reply = channel.take(30)
        assert reply is not None
        assert reply.kind == 1, f"rank {reply.rank} saw another command {reply.number}"
        answers[reply.rank].append(reply.number)
    assert answers == [list(range(200))] * 2
    for bell in channel._bells:
        bell.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def count_steps(end: RankEnd, num_commands: int) -> None:
    for _ in range(num_commands):
        message = end.receive()
        end.reply(message.number, message.kind, message.payload)


def test_channel_works_between_processes(hard_timeout: None) -> None:
    channel = Channel(2, num_slots=4, slot_bytes=256)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=count_steps, args=(end, 20), daemon=True)
        for end in channel.rank_ends
    ]
    for process in processes:
        process.start()
    channel.release_rank_ends()
    for i in range(20):
        payload = numbered_payload(i, 2000)
        channel.publish(i, payload)
        replies = [channel.take(30), channel.take(30)]
        assert sorted(reply.rank for reply in replies if reply) == [0, 1]
        for reply in replies:
            assert reply is not None
            assert (reply.number, reply.kind) == (i, i)
            assert reply.payload == payload.tobytes()
    hangups = [channel.take(30), channel.take(30)]
    assert all(reply is not None and reply.is_hangup for reply in hangups)
    for process in processes:
        process.join(10)
        assert process.exitcode == 0


def test_channel_full_ring_makes_the_caller_wait(hard_timeout: None) -> None:
    channel = Channel(1, num_slots=2, slot_bytes=64)
    channel.publish(0)
    channel.publish(1)
    with pytest.raises(TimeoutError, match="doesn't read"):
        channel.publish(2, timeout_s=0.01)
    assert not channel.is_torn
    (end,) = channel.rank_ends
    assert end.receive().kind == 0
    assert channel.publish(2, timeout_s=1) == 2
    assert [end.receive().kind, end.receive().kind] == [1, 2]


def test_channel_reads_replies_while_the_ring_is_full(hard_timeout: None) -> None:
    """A rank blocked on its replies frees no slot: caller and rank would wait for each other."""
    channel = Channel(1, num_slots=2, slot_bytes=64)

    def talk(end: RankEnd) -> None:
        for _ in range(4):
            message = end.receive()
            end.reply(message.number, 0, bytes(1 << 20))

    threading.Thread(target=talk, args=channel.rank_ends, daemon=True).start()
    for i in range(4):
        channel.publish(i)
    replies = [channel.take(30) for _ in range(4)]
    assert [reply.number for reply in replies if reply] == [0, 1, 2, 3]


def test_channel_reports_a_rank_that_is_gone_once(hard_timeout: None) -> None:
    channel = Channel(2)
    channel.rank_ends[1].reply(-1, 5, b"last words")
    channel.rank_ends[1].close()
    first, second = channel.take(1), channel.take(1)
    assert first is not None
    assert second is not None
    assert (first.rank, first.kind, first.payload) == (1, 5, b"last words")
    assert (second.rank, second.is_hangup) == (1, True)
    assert channel.take(0.01) is None
    with pytest.raises(BrokenPipeError):
        channel.publish(0)


def test_channel_without_room_is_an_error_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    num_fds = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(OSError, match="no room for 1048576 bytes of shared memory: No space"):
        Channel(2)
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_channel_leaves_no_descriptor_and_no_name(hard_timeout: None) -> None:
    names, num_fds = os.listdir("/dev/shm"), len(os.listdir("/proc/self/fd"))
    channel = Channel(4)
    assert os.listdir("/dev/shm") == names
    channel.close()
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds
