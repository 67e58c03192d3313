"""Ranks without a network, which fail on demand: what `worker.py` does about it needs no model."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.outputs import RunnerDescription
from nanovllm.utils.shared_file import SharedFile

PREFILL = ScheduledBatch(
    rows=np.array([4, 2], dtype=np.int32),
    starts=np.array([0, 3], dtype=np.int32),
    num_tokens=np.array([2, 1], dtype=np.int32),
    prompt_tokens=np.array([11, 12, 13], dtype=np.int32),
)
DECODE = ScheduledBatch(
    rows=np.array([4, 2, 0], dtype=np.int32),
    starts=np.array([2, 4, 100], dtype=np.int32),
    num_tokens=np.array([], dtype=np.int32),
)


@dataclass(frozen=True)
class StubSettings:
    """Stands for RunnerSettings: who fails, where and how."""

    fault: str = ""  # a method of `Fault`; "" is none
    where: str = ""  # "start", "cache", "capture", "prefill", "decode" or "synchronize"
    rank: int = 1
    device_type: str = "cpu"


class Fault:
    """Ways for a rank to fail."""

    @staticmethod
    def raise_error() -> NoReturn:
        raise RuntimeError("a fault for a test")

    @staticmethod
    def raise_value_error() -> NoReturn:
        raise ValueError("a fault for a test")

    @staticmethod
    def run_out_of_memory() -> NoReturn:
        raise MemoryError("a fault for a test")

    @staticmethod
    def be_killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def end() -> NoReturn:
        os._exit(3)

    @staticmethod
    def hang_up() -> NoReturn:
        sys.exit("a fault for a test")


class StubPending:
    def __init__(self, tokens: list[int], logprobs: np.ndarray | None) -> None:
        self._tokens = tokens
        self._logprobs = logprobs

    def wait(self) -> list[int]:
        return self._tokens

    def wait_logprobs(self) -> np.ndarray | None:
        return self._logprobs


class StubRunner:
    """Answers with each lane's row + start. Where one rank fails the other waits for ever."""

    def __init__(self, settings: StubSettings, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._pass("start")

    def launch(self, batch: ScheduledBatch) -> StubPending:
        self._pass("prefill" if batch.num_prefills else "decode")
        logprobs = batch.prompt_tokens if batch.num_prefills else None
        return StubPending((batch.rows + batch.starts).tolist(), logprobs)

    def allocate_kv_cache(self) -> int:
        self._pass("cache")
        return 1234

    def capture_cudagraph(self) -> None:
        self._pass("capture")

    def synchronize(self) -> None:
        self._pass("synchronize")

    def exit(self) -> None:
        if self._settings.where == "exit":
            threading.Event().wait()

    def describe(self) -> RunnerDescription:
        return RunnerDescription(
            f"stub:{self._rank}", 100, "stub prefill", "stub decode", [1, 2], "stub"
        )

    def _pass(self, where: str) -> None:
        if where != self._settings.where:
            return
        if self._rank == self._settings.rank:
            getattr(Fault, self._settings.fault)()
        threading.Event().wait()  # as in a collective with the one that failed


def build_stub(settings: StubSettings, rank: int, meeting_point: SharedFile) -> StubRunner:
    return StubRunner(settings, rank)
