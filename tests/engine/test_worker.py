"""Ranks as processes: what they answer, how they fail, and that nothing stays behind."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import pids_of_session, rank_pids, shared_memory_names, wait_until_ended
from stub_ranks import DECODE, PREFILL, StubSettings, build_stub

from nanovllm.engine.settings import check_shardable
from nanovllm.engine.worker import WorkerGroup, start_workers
from nanovllm.model_config import ModelConfig

pytestmark = pytest.mark.usefixtures("hard_timeout")

REPEATS = [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 20))]
SCRIPT_LIMIT_S = 100


def start_stubs(settings: StubSettings, size: int = 2) -> WorkerGroup:
    return start_workers(settings, size, build_stub)  # type: ignore[arg-type]


# when all is well


@pytest.mark.usefixtures("quick_start")
def test_group_answers_like_a_runner() -> None:
    group = start_stubs(StubSettings(), size=3)
    assert group.allocate_kv_cache() == 1234
    group.capture_cudagraph()
    assert group.describe() == (
        "stub:0, stub:1, stub:2", 300, "stub prefill", "stub decode", [1, 2], "stub", 0.0
    )  # fmt: skip
    first = group.launch(PREFILL)
    second = group.launch(DECODE)  # launched before the first is read, as the engine does
    assert first.wait() == [4, 5]
    logprobs = first.wait_logprobs()
    assert logprobs is not None
    assert logprobs.tolist() == [11, 12, 13]
    assert second.wait() == [6, 6, 100]
    assert second.wait_logprobs() is None
    group.synchronize()
    group.exit()
    group.exit()
    with pytest.raises(RuntimeError, match="gone"):
        group.launch(DECODE)


@pytest.mark.usefixtures("quick_start")
def test_group_forgets_results_that_nobody_collects() -> None:
    group = start_stubs(StubSettings())
    for _ in range(100):
        group.launch(DECODE)
    assert group.launch(PREFILL).wait() == [4, 5]
    group.exit()


@pytest.mark.usefixtures("quick_start")
def test_interrupted_wait_leaves_the_group_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while waiting: the late answer isn't taken for the next one's."""
    group = start_stubs(StubSettings())
    pending = group.launch(DECODE)
    take = group._channel.take

    def interrupt() -> None:
        monkeypatch.setattr(group._channel, "take", take)
        raise KeyboardInterrupt

    monkeypatch.setattr(group._channel, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    group.synchronize()
    assert group.launch(PREFILL).wait() == [4, 5]
    group.exit()


# when a rank fails


def run_until_it_fails(settings: StubSettings) -> None:
    group = start_stubs(settings)
    try:
        group.allocate_kv_cache()
        group.capture_cudagraph()
        group.launch(PREFILL).wait()
        for _ in range(3):
            group.launch(DECODE).wait()
        group.synchronize()
    finally:
        assert group.is_lost
        with pytest.raises(RuntimeError, match="gone"):
            group.launch(DECODE)
        group.exit()


FAULTS = {
    "be_killed": (RuntimeError, r"rank 1 was killed by SIGKILL \(exit code -9\), perhaps because"),
    "end": (RuntimeError, "rank 1 ended with exit code 3"),
    "raise_error": (RuntimeError, r"(?s)rank 1 raised RuntimeError: a fault.*in raise_error"),
    "raise_value_error": (ValueError, r"(?s)rank 1 raised ValueError: a fault.*in raise_value"),
    "run_out_of_memory": (RuntimeError, "rank 1 raised MemoryError: a fault"),
    "hang_up": (RuntimeError, "rank 1 raised SystemExit: a fault"),
}


PLACES = ("start", "cache", "capture", "prefill", "decode", "synchronize")
FAILURES = [(fault, where) for fault in FAULTS for where in PLACES]


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize(("fault", "where"), FAILURES)
def test_failed_rank_raises_and_ends_all(fault: str, where: str, repeat: int) -> None:
    names = shared_memory_names()
    kind, text = FAULTS[fault]
    with pytest.raises(kind, match=text):
        run_until_it_fails(StubSettings(fault, where))
    assert rank_pids() == {}
    assert shared_memory_names() == names


@pytest.mark.usefixtures("quick_start")
def test_failure_of_rank_0_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="^rank 0 was killed by SIGKILL"):
        run_until_it_fails(StubSettings("be_killed", "decode", rank=0))


@pytest.mark.usefixtures("quick_start")
def test_rank_that_does_not_end_is_killed() -> None:
    group = start_stubs(StubSettings(where="exit"))
    group.exit()
    assert rank_pids() == {}


@pytest.mark.usefixtures("quick_start")
def test_failed_starts_leave_no_descriptor() -> None:
    start_stubs(StubSettings()).exit()  # the fork server stays
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(RuntimeError):
            start_stubs(StubSettings("be_killed", "start"))
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_full_memory_is_an_error_before_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(OSError, match="no room for"):
        start_stubs(StubSettings())
    assert rank_pids() == {}


# scripts, as a user runs them


def start_script(folder: Path, body: str) -> "subprocess.Popen[str]":
    """Run a Python script in a session of its own, which a Ctrl-C reaches as a whole."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(body))
    tests = Path(__file__).parents[1]
    paths = [str(tests.parent), str(tests), str(tests / "engine")]
    script = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        preexec_fn=hear_interrupts,
    )
    SCRIPTS.append(script)
    return script


def hear_interrupts() -> None:
    """A shell's `&` makes all that it starts ignore Ctrl-C, tests and their scripts included."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SCRIPTS: list["subprocess.Popen[str]"] = []


@pytest.fixture(autouse=True)
def no_script_outlives_its_test() -> Iterator[None]:
    yield
    while SCRIPTS:
        script = SCRIPTS.pop()
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)


RUNNING_SCRIPT = """
    from processes import rank_pids
    from stub_ranks import DECODE, StubSettings, build_stub
    from nanovllm.engine.worker import start_workers

    if __name__ == "__main__":
        group = start_workers(StubSettings(), 2, build_stub)
        print(*rank_pids().values(), flush=True)
        while True:
            group.launch(DECODE).wait()
"""


def read_pids(script: "subprocess.Popen[str]") -> list[int]:
    assert script.stdout is not None
    pids = [int(word) for word in script.stdout.readline().split()]
    assert len(pids) == 2, script.communicate(timeout=SCRIPT_LIMIT_S)
    return pids


@pytest.mark.parametrize("repeat", REPEATS)
def test_killed_parent_takes_its_ranks_along(tmp_path: Path, repeat: int) -> None:
    names = shared_memory_names()
    script = start_script(tmp_path, RUNNING_SCRIPT)
    pids = read_pids(script)
    script.kill()
    script.wait(10)
    assert wait_until_ended(pids) == []
    assert shared_memory_names() == names


@pytest.mark.parametrize("repeat", REPEATS)
def test_interrupted_script_ends_without_a_trace(tmp_path: Path, repeat: int) -> None:
    names = shared_memory_names()
    script = start_script(tmp_path, RUNNING_SCRIPT)
    pids = read_pids(script)
    os.killpg(script.pid, signal.SIGINT)
    _, errors = script.communicate(timeout=SCRIPT_LIMIT_S)
    assert script.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1  # the caller's own; the ranks never hear of it
    assert "resource_tracker" not in errors
    assert wait_until_ended(pids) == []
    assert shared_memory_names() == names


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", np.linspace(0.1, 8, 20).round(2).tolist())
def test_script_interrupted_while_it_starts_ends(tmp_path: Path, delay_s: float) -> None:
    script = start_script(tmp_path, RUNNING_SCRIPT)
    time.sleep(delay_s)
    os.killpg(script.pid, signal.SIGINT)
    script.communicate(timeout=SCRIPT_LIMIT_S)
    assert wait_until_ended(pids_of_session(script.pid)) == []


def test_script_that_never_calls_exit_ends_in_silence(tmp_path: Path) -> None:
    script = start_script(tmp_path, RUNNING_SCRIPT.replace("while True:", "for _ in range(3):"))
    _, errors = script.communicate(timeout=SCRIPT_LIMIT_S)
    assert (script.returncode, errors) == (0, "")


def test_script_without_main_guard_gets_one_clear_line(tmp_path: Path) -> None:
    script = start_script(
        tmp_path,
        """
        from stub_ranks import StubSettings, build_stub
        from nanovllm.engine.worker import start_workers

        start_workers(StubSettings(), 2, build_stub)
        """,
    )
    _, errors = script.communicate(timeout=SCRIPT_LIMIT_S)
    assert script.returncode == 1
    assert errors.count("Traceback") == 1
    assert 'put what makes the LLM under `if __name__ == "__main__":`' in errors.splitlines()[-1]


def test_script_from_standard_input_is_told_to_come_from_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks import it by its path: they ended with a traceback about '<stdin>'."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(RuntimeError, match="comes from <stdin>: save it to a file"):
        start_workers(StubSettings(), 2, build_stub)


# what can be split

ModelFields = Callable[..., ModelConfig]
QWEN3 = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    attention_bias=False,
    dtype="float32",
    eos_token_ids=(),
)


@pytest.mark.parametrize(
    ("changes", "size"),
    [({}, 1), ({}, 2), ({}, 4), ({}, 8), ({"vocab_size": 1001}, 8), ({"vocab_size": 7}, 4)],
)
def test_sizes_that_divide_or_are_padded_pass(changes: dict[str, int], size: int) -> None:
    check_shardable(dataclasses.replace(QWEN3, **changes), size)


@pytest.mark.parametrize(
    ("changes", "size", "text"),
    [
        ({}, 3, "num_attention_heads is 8, no multiple of tensor_parallel_size 3"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "num_key_value_heads is 3"),
        ({"intermediate_size": 126}, 4, "intermediate_size is 126"),
        ({"vocab_size": 5}, 4, "vocab_size 5 leaves nothing for the last of 4 ranks"),
    ],
)
def test_sizes_that_cannot_be_split_are_refused(
    changes: dict[str, int], size: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        check_shardable(dataclasses.replace(QWEN3, **changes), size)
