"""The life of a rank's process: build a ModelRunner, obey commands, report what fails, end.

`worker.py` is the caller's side. A rank does what it is told, in order, and decides nothing. If
something fails it says so and waits to be killed: if it went on or ended, its peers could fail too,
with a less telling error. It ends as soon as its parent has ended.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.channel import RankEnd
from nanovllm.engine.commands import (
    NO_COMMAND,
    Answer,
    Command,
    Failure,
    Pending,
    pack_result,
    unpack_weight,
)
from nanovllm.outputs import RunnerDescription
from nanovllm.utils.shared_file import SharedFile

if TYPE_CHECKING:
    import torch

    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.settings import RunnerSettings

_WATCH_S = 1.0  # between looks at who the parent is
_MAX_IN_FLIGHT = 3  # results that a rank keeps for collection; the engine has at most two


class Runner(Protocol):
    """The part of ModelRunner that a rank is driven by."""

    def launch(self, batch: ScheduledBatch) -> Pending: ...
    def allocate_kv_cache(self) -> int: ...
    def capture_cudagraph(self) -> None: ...
    def load_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]]) -> None: ...
    def sleep(self) -> None: ...
    def wake_up(self, num_blocks: int) -> None: ...
    def synchronize(self) -> None: ...
    def exit(self) -> None: ...
    def describe(self) -> RunnerDescription: ...


BuildRunner = Callable[["RunnerSettings", int, SharedFile], Runner]


def run_rank(
    end: RankEnd,
    settings: "RunnerSettings",
    rank: int,
    meeting_point: SharedFile,
    build: BuildRunner,
) -> None:
    """The life of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to end
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        runner = build(settings, rank, meeting_point)
        end.reply(NO_COMMAND, Answer.DONE)
        serve(runner, end, rank)
        _leave(0)  # the runner has let go of everything; taking torch apart would take seconds
    except (EOFError, BrokenPipeError):
        _leave(1)  # the caller is gone
    except BaseException as error:
        _report(error, end)
        # Keep our connections: else peers would report a broken one instead of this.
        while True:
            signal.pause()


def build_model_runner(
    settings: "RunnerSettings", rank: int, meeting_point: SharedFile
) -> "RankRunner":
    """A rank of the real network, in a process group that this process owns."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.layers.peer_norm import with_peer_norm
    from nanovllm.utils.distributed import join_group, limit_threads, with_peer_memory

    config, hidden_size = settings.config, settings.model_config.hidden_size
    size = config.tensor_parallel_size
    if settings.device_type == "cpu":
        limit_threads(size)
    tp = join_group(rank, size, settings.device_type, meeting_point.path)
    if settings.device_type == "cuda":
        tp = with_peer_memory(tp, hidden_size, settings.dtype, settings.max_num_seqs)
        tp = with_peer_norm(tp, hidden_size, settings.dtype, settings.max_num_seqs)
    return RankRunner(ModelRunner(settings, tp))


class RankRunner:
    """A ModelRunner together with the process group that it talks through."""

    def __init__(self, runner: "ModelRunner") -> None:
        self._runner = runner
        self.launch = runner.launch
        self.allocate_kv_cache = runner.allocate_kv_cache
        self.capture_cudagraph = runner.capture_cudagraph
        self.load_weights = runner.load_weights
        self.sleep = runner.sleep
        self.wake_up = runner.wake_up
        self.synchronize = runner.synchronize
        self.describe = runner.describe

    def exit(self) -> None:
        from nanovllm.utils.distributed import leave_group

        self._runner.exit()  # graphs first: they hold collectives of the group
        leave_group()


def serve(runner: Runner, end: RankEnd, rank: int) -> None:
    """Do what the caller commands, in order, until it says EXIT."""
    pending: dict[int, Pending] = {}  # launched steps that may be collected, by number
    while True:
        message = end.receive()
        command = Command(message.kind)
        if command is Command.STEP:
            words = np.frombuffer(message.payload, dtype=np.int32)
            pending[message.number] = runner.launch(ScheduledBatch.from_wire(words))
            if len(pending) > _MAX_IN_FLIGHT:
                del pending[min(pending)]
        elif command is Command.COLLECT:
            result = pending.pop(int.from_bytes(message.payload, "little"))
            if rank == 0:
                end.reply(message.number, Answer.DONE, pack_result(result))
        elif command is Command.EXIT:
            runner.exit()
            return
        else:
            end.reply(message.number, Answer.DONE, _obey(command, message.payload, runner))


def _obey(command: Command, payload: bytes | bytearray, runner: Runner) -> bytes:
    """Carry out a command that every rank answers; return the answer."""
    if command is Command.LOAD_WEIGHT:
        runner.load_weights([unpack_weight(payload)])
        return b""
    if command is Command.ALLOCATE_KV_CACHE:
        return runner.allocate_kv_cache().to_bytes(8, "little")
    if command is Command.SYNCHRONIZE:
        runner.synchronize()
        return b""
    if command is Command.SLEEP:
        runner.sleep()
    elif command is Command.WAKE_UP:
        runner.wake_up(int.from_bytes(payload, "little"))
    else:
        assert command is Command.CAPTURE_CUDAGRAPH, f"nobody obeys {command!r}"
        runner.capture_cudagraph()
    return json.dumps(runner.describe()).encode()


def _report(error: BaseException, end: RankEnd) -> None:
    text = "".join(traceback.format_exception(error))
    failure = Failure(type(error).__name__, str(error), text)
    try:
        end.reply(NO_COMMAND, Answer.ERROR, json.dumps(failure).encode())
    except OSError:
        _leave(1)  # the caller is gone


def _end_with_parent(parent_pid: int) -> None:
    """End this process as soon as its parent has ended, whatever it is doing.

    Not prctl(PR_SET_PDEATHSIG): that fires when the *thread* that started us ends. The parent's
    sentinel tells at once; its pid tells even if a forked copy of it keeps the sentinel open.
    """
    parent = multiprocessing.parent_process()
    while os.getppid() == parent_pid and parent is not None and parent.is_alive():
        parent.join(_WATCH_S)
    _leave(1)


def _leave(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
