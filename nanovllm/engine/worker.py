"""Ranks as processes: start them, command them, report their failures, end them.

With tensor_parallel_size > 1 every rank is a child process with a ModelRunner of its own, and the
caller's process keeps only the Scheduler: it holds no CUDA context, and a rank that spins on a dead
peer can simply be killed. `WorkerGroup` is what the engine sees in place of a ModelRunner;
`rank.py` is the rank's side. `commands.py` lists their messages, `channel.py` carries them: a step
is the int32 array of its ScheduledBatch.

All ranks do the same with every command, so they stay in step by order alone. Only rank 0 returns
tokens, when it is told to collect them: that command follows the *next* step, so the device has
work while the host reads.

A rank that raises, or ends in any way, ends the group: the others may wait for it in a collective
for ever, so they are killed, and the caller gets one exception that says what happened where.
Whatever becomes of the caller, no rank outlives it: each watches its parent.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.channel import Channel, Reply
from nanovllm.engine.commands import NO_COMMAND, Answer, Command, Failure, pack_weight
from nanovllm.engine.rank import BuildRunner, build_model_runner, run_rank
from nanovllm.outputs import RunnerDescription
from nanovllm.utils.shared_file import SharedFile

if TYPE_CHECKING:
    import torch

    from nanovllm.engine.settings import RunnerSettings

_GRACE_S = 0.5  # after a first failure, for the one behind it to show itself
_EXIT_S = 5.0  # for ranks to end by themselves when told to
_KILL_S = 3.0  # for the kernel to end a killed rank
_NAME = "nanovllm rank"
_NO_MAIN_GUARD = 120  # exit code of a rank in which the user's script would start ranks

# Exceptions whose type tells the caller something; any other becomes a RuntimeError.
_TYPES_KEPT: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, ImportError, NotImplementedError)
}


def start_workers(
    settings: "RunnerSettings", size: int, build: BuildRunner | None = None
) -> "WorkerGroup":
    """Start `size` ranks and return once each has built its runner.

    Args:
        settings: Goes to every rank.
        size: Number of ranks.
        build: Makes a rank's runner in its process; a function that can be imported there.

    Raises:
        RuntimeError: A rank ended or raised (ValueError, TypeError, ImportError and
            NotImplementedError stay what they are), or the script that started this process has no
            `__main__` guard. All ranks are gone.
    """
    _disown_after_fork()
    _refuse_unguarded_script(size)
    _refuse_script_without_file(size)
    channel = Channel(size)
    meeting_point = SharedFile(0)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(
            target=run_rank,
            args=(end, settings, rank, meeting_point, build or build_model_runner),
            name=f"{_NAME} {rank}",
            daemon=True,
        )
        for rank, end in enumerate(channel.rank_ends)
    ]
    group = WorkerGroup(settings, channel, processes)
    try:
        # Blocked, not ignored: the ranks inherit it and never see a Ctrl-C, we get ours afterwards.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        channel.release_rank_ends()
        group.wait_until_ready()
    except BaseException:
        group.kill()
        raise
    finally:
        meeting_point.close()
    return group


@functools.cache
def _disown_after_fork() -> None:
    """Keep a forked copy of this process, when it exits, from ending ranks that aren't its own.

    multiprocessing terminates daemons at exit, and a copy inherits its set of them: the one of that
    moment, since a child that multiprocessing itself forks begins a new set.
    """
    os.register_at_fork(after_in_child=lambda: multiprocessing.process._children.clear())  # type: ignore[attr-defined]


class WorkerGroup:
    """All ranks of an engine, driven like one ModelRunner.

    Invariant: a rank's failure raises in the call that meets it, ends every rank, and makes any
    later call a RuntimeError.
    """

    runs_at_launch = False  # see `ModelRunner`

    def __init__(
        self, settings: "RunnerSettings", channel: Channel, processes: list[BaseProcess]
    ) -> None:
        self.settings = settings
        self._description = RunnerDescription()  # of all ranks, once graphs are captured
        self.is_lost = False  # a rank has failed, and all are gone
        self._channel = channel
        self._processes = processes
        # Also runs at the interpreter's end, and when an engine is dropped without exit().
        self._end = weakref.finalize(self, _end_ranks, channel, processes, os.getpid())

    # a ModelRunner's verbs

    def allocate_kv_cache(self) -> int:
        """As ModelRunner's; the ranks have agreed on the number."""
        replies = self._ask(Command.ALLOCATE_KV_CACHE)
        num_blocks = {int.from_bytes(reply, "little") for reply in replies}
        assert len(num_blocks) == 1, f"the ranks allocated {num_blocks} blocks"
        return num_blocks.pop()

    def capture_cudagraph(self) -> None:
        """As ModelRunner's."""
        self._description = _joined(self._ask(Command.CAPTURE_CUDAGRAPH))

    def describe(self) -> RunnerDescription:
        """As ModelRunner's, of all ranks."""
        return self._description

    def launch(self, batch: ScheduledBatch) -> "PendingReply":
        """As ModelRunner's: returns as soon as the ranks have been told."""
        return PendingReply(self, self._publish(Command.STEP, batch.to_wire()))

    def load_weights(
        self, weights: Mapping[str, "torch.Tensor"] | Iterable[tuple[str, "torch.Tensor"]]
    ) -> None:
        """As ModelRunner's: checked here, then sent to all ranks, of which each keeps its part."""
        from nanovllm.models import network_outline
        from nanovllm.utils.loader import checked_weights

        outline = network_outline(
            self.settings.model_config,
            max_model_len=self.settings.max_model_len,
            dtype=self.settings.dtype,
            num_ranks=self.settings.config.tensor_parallel_size,
        )
        for name, tensor in checked_weights(outline, weights):
            self._ask(Command.LOAD_WEIGHT, pack_weight(name, tensor))

    def sleep(self) -> None:
        """As ModelRunner's."""
        self._description = _joined(self._ask(Command.SLEEP))

    def wake_up(self, num_blocks: int) -> None:
        """As ModelRunner's; a rank without room for its cache ends them all."""
        self._description = _joined(self._ask(Command.WAKE_UP, num_blocks.to_bytes(8, "little")))

    def synchronize(self) -> None:
        """Wait for everything launched."""
        self._ask(Command.SYNCHRONIZE)

    def exit(self) -> None:
        """End all ranks, within seconds whatever state they are in. Again does nothing."""
        self._end()

    # around them

    def wait_until_ready(self) -> None:
        """Wait for every rank to be built."""
        self._receive(NO_COMMAND, len(self._processes))

    def collect(self, number: int) -> np.ndarray:
        """What `pack_result` made of the result of the STEP with this number."""
        asked = self._publish(Command.COLLECT, number.to_bytes(8, "little"))
        (words,) = self._receive(asked, 1)
        return np.frombuffer(words, dtype=np.int32)

    def kill(self) -> None:
        """End all ranks at once."""
        self.is_lost = True
        self._end.detach()
        _kill(self._processes)
        self._channel.close()

    def _ask(self, command: Command, payload: bytes | np.ndarray = b"") -> list[bytes]:
        """Send a command that every rank answers; return the answers by rank."""
        return self._receive(self._publish(command, payload), len(self._processes))

    def _publish(self, command: Command, payload: bytes | np.ndarray = b"") -> int:
        if self.is_lost or not self._end.alive:
            raise RuntimeError("the ranks of this engine are gone: make a new LLM")
        try:
            return self._channel.publish(command, payload)
        except BrokenPipeError:
            self._fail([])
        except BaseException:
            self._kill_if_torn()
            raise

    def _receive(self, number: int, num_ranks: int) -> list[bytes]:
        """Replies of ranks 0 to `num_ranks` - 1 to command `number`.

        Replies to earlier commands are dropped: those calls were interrupted.
        """
        answers: dict[int, bytes] = {}
        while len(answers) < num_ranks:
            reply = self._take()
            if reply.is_hangup or reply.kind == Answer.ERROR:
                self._fail([reply])
            if reply.number == number:
                answers[reply.rank] = reply.payload
        return [answers[rank] for rank in range(num_ranks)]

    def _take(self) -> Reply:
        try:
            reply = self._channel.take()
        except BaseException:
            self._kill_if_torn()
            raise
        assert reply is not None, "no reply, yet no limit to the wait"
        return reply

    def _kill_if_torn(self) -> None:
        """After a Ctrl-C: ranks that have seen half a command would be out of step."""
        if self._channel.is_torn:
            self.kill()

    def _fail(self, replies: list[Reply]) -> NoReturn:
        """Kill all ranks and raise one error for what they reported."""
        try:
            # A rank that lost its peer raises too: give that peer time to report.
            deadline = time.monotonic() + _GRACE_S
            while len(replies) < len(self._processes) and time.monotonic() < deadline:
                reply = self._channel.take(max(deadline - time.monotonic(), 0))
                if reply is not None and (reply.is_hangup or reply.kind == Answer.ERROR):
                    replies.append(reply)
            for reply in replies:
                if reply.is_hangup:
                    self._processes[reply.rank].join(_KILL_S)
            error = _error_of(replies, self._processes)
        finally:
            self.kill()
        raise error


def _joined(replies: list[bytes]) -> RunnerDescription:
    """What the ranks say of themselves, as one."""
    ranks = [RunnerDescription(*json.loads(reply)) for reply in replies]
    return ranks[0]._replace(
        device=", ".join(rank.device for rank in ranks),
        block_bytes=sum(rank.block_bytes for rank in ranks),
        compile_s=max(rank.compile_s for rank in ranks),
    )


class PendingReply:
    """The tokens of a step that the ranks run, one a lane, and its logprobs."""

    __slots__ = ("_group", "_number", "_words")

    def __init__(self, group: WorkerGroup, number: int) -> None:
        self._group = group
        self._number = number
        self._words: np.ndarray | None = None  # once they have been asked for

    def wait(self) -> list[int]:
        """Block until the step is done and return its tokens."""
        words = self._wait_words()
        return words[1 : 1 + words[0]].tolist()

    def wait_logprobs(self) -> np.ndarray | None:
        """The logprobs that its rows asked for, if any did."""
        words = self._wait_words()
        logprobs = words[1 + words[0] :]
        return logprobs if len(logprobs) else None

    def _wait_words(self) -> np.ndarray:
        if self._words is None:
            self._words = self._group.collect(self._number)
        return self._words


def _refuse_unguarded_script(size: int) -> None:
    """Raise if this process is itself a child that is still importing the user's script."""
    process = multiprocessing.current_process()
    # multiprocessing's own check looks at the same attribute, and words it for its own users.
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(_NAME):
        os._exit(_NO_MAIN_GUARD)  # in silence: the process that started us says it, once
    raise RuntimeError(_no_main_guard(size))


def _refuse_script_without_file(size: int) -> None:
    """Raise if the ranks couldn't import the user's script: it was read from standard input."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is not None and path.startswith("<"):
        raise RuntimeError(
            f"tensor_parallel_size={size} starts processes that import your script, and this one "
            f"comes from {path}: save it to a file"
        )


def _no_main_guard(size: int) -> str:
    return (
        f"tensor_parallel_size={size} starts processes that import your script again: put what "
        'makes the LLM under `if __name__ == "__main__":`'
    )


def _error_of(replies: list[Reply], processes: list[BaseProcess]) -> Exception:
    """One exception for all failed ranks; it names first those that ended, the likely cause."""
    ended = [reply.rank for reply in replies if reply.is_hangup]
    if any(processes[rank].exitcode == _NO_MAIN_GUARD for rank in ended):
        return RuntimeError(_no_main_guard(len(processes)))
    failures = [
        (reply.rank, Failure(*json.loads(reply.payload)))
        for reply in replies
        if not reply.is_hangup
    ]
    texts = [f"rank {rank} {_how_it_ended(processes[rank].exitcode)}" for rank in ended]
    texts += [f"rank {rank} raised {_text_of(failure)}" for rank, failure in failures]
    if ended or not failures:
        return RuntimeError("\n".join(texts) or "a rank has closed its channel")
    return _TYPES_KEPT.get(failures[0][1].type_name, RuntimeError)("\n".join(texts))


def _text_of(failure: Failure) -> str:
    return f"{failure.type_name}: {failure.message}\n\n{failure.traceback}"


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}: what it wrote to stderr says why"
    reason = ", perhaps because memory ran out" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name} (exit code {exit_code}){reason}"


def _end_ranks(channel: Channel, processes: list[BaseProcess], owner_pid: int) -> None:
    """Tell the ranks to end, wait, and kill those that don't."""
    if os.getpid() != owner_pid:
        return  # a forked copy of the caller: they aren't its children
    deadline = time.monotonic() + _EXIT_S
    try:
        channel.publish(Command.EXIT, timeout_s=_EXIT_S)
        alive = {process.sentinel for process in processes}
        while alive and (rest_s := deadline - time.monotonic()) > 0:
            alive -= set(wait_for_any(list(alive), rest_s))
    except OSError:
        pass  # one is gone or doesn't read
    finally:
        _kill(processes)
        channel.close()


def _kill(processes: list[BaseProcess]) -> None:
    """End processes at once and empty the list."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join(_KILL_S)
        with contextlib.suppress(ValueError):  # the kernel hasn't ended it yet
            process.close()
    processes.clear()
