"""A limit that no test of processes outlives."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

_LIMIT_S = 120


@pytest.fixture
def hard_timeout() -> Iterator[None]:
    """Raise out of whatever the test waits for, so that a hang is a failure."""

    def is_late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took longer than {_LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, is_late)
    signal.alarm(_LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
