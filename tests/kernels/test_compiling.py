"""Kernels compile in a pool before they are launched: by a driver for a GPU that isn't there."""

import ast
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compiling import needs_compiler
from fake_gpu import FakeGpu, fake_gpu

from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.compiling import compile_launches
from nanovllm.kernels.norm import rms_norm
from nanovllm.kernels.optional_triton import tl, triton

pytestmark = needs_compiler
pytest.importorskip("triton")

WAIT_S = 60


@triton.jit
def add_kernel(x_ptr, step, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + step)


@triton.jit
def scale_kernel(x_ptr, factor, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * factor)


@triton.jit
def broken_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "this kernel is broken")
    tl.store(x_ptr, 0.0)


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeGpu]:
    with fake_gpu(tmp_path) as gpu:
        yield gpu


def add_and_scale(x: torch.Tensor) -> None:
    add_kernel[(1,)](x, 2.0, BLOCK=16)
    scale_kernel[(1,)](x, 3.0, BLOCK=16)


def compiler_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "compile" in thread.name]


def test_kernels_compile_side_by_side(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel waits for the other: one after the other they would never end."""
    monkeypatch.setattr("nanovllm.kernels.compiling.num_cores", lambda: 2)
    meeting = threading.Barrier(2)
    gpu.while_loading = lambda name: meeting.wait(WAIT_S)
    compile_launches(lambda: add_and_scale(torch.zeros(16)))
    assert sorted(gpu.loaded) == ["add_kernel", "scale_kernel"]
    assert len(gpu.loaded_by) == 2
    assert not compiler_threads()


def test_nothing_is_launched_until_afterwards_and_nothing_compiles_then(gpu: FakeGpu) -> None:
    x = torch.ones(16)
    compile_launches(lambda: add_and_scale(x))
    assert x.eq(1).all()
    assert gpu.launched == []
    add_and_scale(x)
    assert gpu.launched == ["add_kernel", "scale_kernel"]
    assert len(gpu.loaded) == 2


def test_a_kernel_of_many_launches_compiles_once(gpu: FakeGpu) -> None:
    def run_steps() -> None:
        for step in range(2, 6):
            add_kernel[(step,)](torch.zeros(16), float(step), BLOCK=16)

    compile_launches(run_steps)
    assert gpu.loaded == ["add_kernel"]
    compile_launches(run_steps)  # as a second engine of the process would
    assert gpu.loaded == ["add_kernel"]


def test_variants_compile_each(gpu: FakeGpu) -> None:
    """What Triton specialises on is told by the launch: types, alignment, compile-time values."""

    def run_steps() -> None:
        x = torch.zeros(32)
        add_kernel[(1,)](x, 2.0, BLOCK=16)
        add_kernel[(1,)](x[1:], 2.0, BLOCK=16)
        add_kernel[(1,)](x.double(), 2.0, BLOCK=16)
        add_kernel[(1,)](x, 2.0, BLOCK=32)

    compile_launches(run_steps)
    assert gpu.loaded == ["add_kernel"] * 4
    run_steps()
    assert len(gpu.loaded) == 4


def test_launchers_say_what_they_need(gpu: FakeGpu) -> None:
    x, weight = torch.zeros(3, 64), torch.ones(64)
    compile_launches(lambda: (silu_and_mul(rms_norm(x, weight, 1e-6)), None)[1])
    assert sorted(gpu.loaded) == ["rms_norm_kernel", "silu_and_mul_kernel"]
    silu_and_mul(rms_norm(x, weight, 1e-6))
    assert gpu.launched == ["rms_norm_kernel", "silu_and_mul_kernel"]
    assert len(gpu.loaded) == 2


def test_what_fails_to_compile_raises_its_own_error(gpu: FakeGpu) -> None:
    from triton.compiler import CompilationError

    def run_steps() -> None:
        x = torch.zeros(16)
        broken_kernel[(1,)](x, BLOCK=16)
        add_and_scale(x)

    with pytest.raises(CompilationError, match="this kernel is broken"):
        compile_launches(run_steps)
    assert not compiler_threads()
    add_and_scale(torch.zeros(16))
    assert gpu.launched == ["add_kernel", "scale_kernel"]
    compile_launches(lambda: add_and_scale(torch.zeros(16)))


def test_an_error_of_the_steps_compiles_nothing(gpu: FakeGpu) -> None:
    def run_steps() -> None:
        add_and_scale(torch.zeros(16))
        raise ValueError("a step failed")

    with pytest.raises(ValueError, match="a step failed"):
        compile_launches(run_steps)
    assert gpu.loaded == []
    add_and_scale(torch.zeros(16))
    assert gpu.launched == ["add_kernel", "scale_kernel"]


def test_ctrl_c_leaves_no_thread_and_no_half_made_kernel(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread the second kernel hasn't begun when the first is interrupted."""
    monkeypatch.setattr("nanovllm.kernels.compiling.num_cores", lambda: 1)

    def interrupt(name: str) -> None:
        gpu.while_loading = lambda name: None
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)  # the main thread hears it

    gpu.while_loading = interrupt
    with pytest.raises(KeyboardInterrupt):
        compile_launches(lambda: add_and_scale(torch.zeros(16)))
    assert not compiler_threads()
    add_and_scale(torch.zeros(16))
    assert gpu.launched == ["add_kernel", "scale_kernel"]


def test_syntax_trees_are_built_by_one_thread_at_a_time(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 raised "AST constructor recursion depth mismatch" now and then."""
    monkeypatch.setattr("nanovllm.kernels.compiling.num_cores", lambda: 8)
    parse, parsing, num_parsed = ast.parse, threading.Lock(), 0

    def parse_slowly(*args: str) -> ast.AST:
        nonlocal num_parsed
        assert parsing.acquire(blocking=False), "two threads build syntax trees"
        time.sleep(0.01)
        parsing.release()
        num_parsed += 1
        return parse(*args)

    monkeypatch.setattr(ast, "parse", parse_slowly)
    x = torch.zeros(3, 64)
    compile_launches(lambda: (add_and_scale(x), rms_norm(x, x[0], 1e-6), None)[-1])
    assert num_parsed > 3


def test_other_threads_launch_meanwhile(gpu: FakeGpu) -> None:
    def run_steps() -> None:
        other = threading.Thread(target=add_and_scale, args=(torch.zeros(16),))
        other.start()
        other.join(WAIT_S)

    compile_launches(run_steps)
    assert gpu.launched == ["add_kernel", "scale_kernel"]
