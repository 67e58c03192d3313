"""Looking at processes from outside, and starting ranks quickly."""

import multiprocessing
import os
import time
from collections.abc import Iterable
from multiprocessing.context import BaseContext
from pathlib import Path

_ENDING_S = 15.0
_QUICK = multiprocessing.get_context("forkserver")


def quick_context(method: str) -> BaseContext:
    """In place of `multiprocessing.get_context`: ranks are forked from a server with torch in it.

    Starting one takes milliseconds instead of the seconds of importing torch. They share nothing
    else with the test's process, just like spawned ones.
    """
    assert method == "spawn"
    _QUICK.set_forkserver_preload(["nanovllm.engine.model_runner"])
    return _QUICK


def rank_pids() -> dict[str, int]:
    """Process ids of the ranks that this process has started and that run, by name."""
    return {
        process.name: process.pid
        for process in multiprocessing.active_children()
        if process.name.startswith("nanovllm rank") and process.pid
    }


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def pids_of_session(session: int) -> list[int]:
    """Ids of the processes that descend from a script started in a session of its own."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if is_running(pid) and _session_of(pid) == session]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def wait_until_ended(pids: Iterable[int]) -> list[int]:
    """Wait a while for processes to end; return those that still run."""
    deadline = time.monotonic() + _ENDING_S
    left = [pid for pid in pids if is_running(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if is_running(pid)]
    return left


def shared_memory_names() -> set[str]:
    return set(os.listdir("/dev/shm"))
