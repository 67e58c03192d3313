"""Compiling kernels side by side, before the first of them is launched.

Triton compiles a kernel when it is first launched, so a start with an empty cache waits for a few
dozen compilations in a row, on one core. Here the steps to come run once with their launches
*noted* instead of made: the launchers themselves say which kernels they need, so no second list of
kernels and arguments can get out of date. What was noted then compiles in a pool of threads, which
works because compilers spend their time in LLVM, ptxas and a C compiler, outside of the
interpreter's lock. Where Triton's cache is filled, the same pool loads what it finds there.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from nanovllm.utils.cores import num_cores

if TYPE_CHECKING:
    from triton import JITFunction

_P = ParamSpec("_P")
_T = TypeVar("_T")
MAX_THREADS = 32  # a start needs about thirty kernels
_turn = threading.Lock()  # held while methods of Triton's are replaced


def compile_launches(run_steps: Callable[[], None], num_processes: int = 1) -> None:
    """Compile and load every kernel that `run_steps` would launch, and launch none.

    Args:
        run_steps: Calls launchers, in this thread. torch's own operations in it run as ever, and
            find whatever memory holds where a kernel would have written. Other threads launch as
            usual.
        num_processes: How many do this at the same time; they share the host's cores.

    Raises:
        Exception: What `run_steps` or the compiler raised, the first of several. Kernels that did
            compile stay, and no thread is left.
    """
    num_threads = max(1, min(MAX_THREADS, num_cores() // num_processes))
    with _turn:
        launches = _note_launches(run_steps)
        # In a copy, because Triton 3.6 leaves its compile mode in the context after an error.
        contextvars.copy_context().run(_compile, launches, num_threads)


def _note_launches(run_steps: Callable[[], None]) -> list[Callable[[], object]]:
    """Run steps without their launches; return what compiles them, once for each kind."""
    from triton import JITFunction

    noted: dict[Hashable, Callable[[], object]] = {}
    launch, owner = JITFunction.run, threading.get_ident()

    def note(
        kernel: JITFunction, *args: object, grid: object, warmup: bool, **options: object
    ) -> object:
        if threading.get_ident() != owner:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        named = ((name, _kind(value)) for name, value in options.items())
        key = (id(kernel), *map(_kind, args), *named)
        if key not in noted:
            noted[key] = partial(launch, kernel, *args, grid=grid, warmup=True, **options)
        return None

    with _replaced(JITFunction, "run", note):
        run_steps()
    return list(noted.values())


def _kind(argument: object) -> Hashable:
    """A key with all that a compiler may care about in an argument, and sometimes more."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return type(argument), argument


def _compile(launches: list[Callable[[], object]], num_threads: int) -> None:
    """Compile noted launches; runs in a context of its own."""
    from triton import AsyncCompileMode, FutureKernel
    from triton.runtime.jit import JITCallable

    pool = _CompilerPool(num_threads, "compile", *_on_this_gpu())
    kernels: list[object] = []
    try:
        # Two threads that build syntax trees at once fail in Python 3.11: CPython's issue 106905.
        with (
            _replaced(JITCallable, "parse", _one_at_a_time(JITCallable.parse)),
            AsyncCompileMode(pool),
        ):
            for launch in launches:
                kernels.append(launch())
    except BaseException:
        # What hasn't begun never will; later launches must find no trace of it.
        pool.shutdown(cancel_futures=True)
        for kernel in kernels:
            if isinstance(kernel, FutureKernel):
                kernel.result(ignore_errors=True)
        raise
    finally:
        pool.shutdown()


@contextmanager
def _replaced(owner: type, name: str, replacement: Callable[..., object]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _one_at_a_time(function: Callable[_P, _T]) -> Callable[_P, _T]:
    lock = threading.Lock()

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with lock:
            return function(*args, **kwargs)

    return call


class _CompilerPool(ThreadPoolExecutor):
    """Threads that compile a kernel and prepare its launch, which may take as long."""

    def submit(
        self, compile_kernel: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        return super().submit(_compile_and_load, partial(compile_kernel, *args, **kwargs))


def _compile_and_load(compile_kernel: Callable[[], _T]) -> _T:
    kernel = compile_kernel()
    _ = kernel.run  # type: ignore[attr-defined]  # builds the launcher, moves code to the device
    return kernel


def _on_this_gpu() -> tuple[Callable[[torch.device], None], tuple[torch.device]] | tuple[()]:
    """A pool thread's initializer: the current GPU is a thread's own, and 0 in a new one."""
    if not torch.cuda.is_initialized():
        return ()
    return torch.cuda.set_device, (torch.device("cuda", torch.cuda.current_device()),)


def row_stride(x: torch.Tensor) -> int:
    """Elements from one row of x, (rows, columns), to the next, as launchers pass it.

    torch gives a single row any stride, and a new value might specialise a kernel anew.
    """
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
