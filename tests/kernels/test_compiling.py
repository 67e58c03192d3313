"""Kernels compile in a pool before they are launched: by a driver for a GPU that isn't there."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiling import needs_compiler

from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_kernel
from nanovllm.kernels.compiling import compile_launches
from nanovllm.kernels.norm import rms_norm, rms_norm_kernel
from nanovllm.kernels.optional_triton import tl, triton

pytestmark = needs_compiler
pytest.importorskip("triton")

WAIT_S = 60
DEVICE = 99  # an index of its own: Triton remembers kernels and limits by device


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


class Gpu:
    """An sm_90 that loads code and notes which kernels are launched."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.loaded: list[str] = []
        self.launched: list[str] = []
        self.compiled_by: set[str] = set()  # names of threads
        self.while_loading: Callable[[str], object] = lambda name: None
        self.utils = SimpleNamespace(
            load_binary=self.load,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        )
        self.launcher_cls = self.make_launcher

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        return self.target

    def make_launcher(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *args: self.launched.append(metadata.name)  # type: ignore[attr-defined]

    def load(self, name: str, *args: object) -> tuple[int, ...]:
        self.while_loading(name)
        self.loaded.append(name)
        self.compiled_by.add(threading.current_thread().name)
        return 1, 1, 32, 0, 1024


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    """The only GPU, in an empty cache, forgotten by all kernels afterwards."""
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gpu = Gpu()
    monkeypatch.setattr(driver, "_active", gpu)
    yield gpu
    for kernel in (add_kernel, scale_kernel, broken_kernel, rms_norm_kernel, silu_and_mul_kernel):
        kernel.device_caches.pop(DEVICE, None)
    gc.collect()  # they unload themselves, and need the driver for that


def add_and_scale(x: torch.Tensor) -> None:
    add_kernel[(1,)](x, 2.0, BLOCK=16)
    scale_kernel[(1,)](x, 3.0, BLOCK=16)


def compiler_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "compile" in thread.name]


def test_kernels_compile_side_by_side(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel waits for the other: one after the other they would never end."""
    monkeypatch.setattr("nanovllm.kernels.compiling._num_cores", lambda: 2)
    meeting = threading.Barrier(2)
    gpu.while_loading = lambda name: meeting.wait(WAIT_S)
    compile_launches(lambda: add_and_scale(torch.zeros(16)))
    assert sorted(gpu.loaded) == ["add_kernel", "scale_kernel"]
    assert len(gpu.compiled_by) == 2
    assert not compiler_threads()


def test_nothing_is_launched_until_afterwards_and_nothing_compiles_then(gpu: Gpu) -> None:
    x = torch.ones(16)
    compile_launches(lambda: add_and_scale(x))
    assert x.eq(1).all()
    assert gpu.launched == []
    add_and_scale(x)
    assert gpu.launched == ["add_kernel", "scale_kernel"]
    assert len(gpu.loaded) == 2


def test_a_kernel_of_many_launches_compiles_once(gpu: Gpu) -> None:
    def run_steps() -> None:
        for step in range(2, 6):
            add_kernel[(step,)](torch.zeros(16), float(step), BLOCK=16)

    compile_launches(run_steps)
    assert gpu.loaded == ["add_kernel"]
    compile_launches(run_steps)  # as a second engine of the process would
    assert gpu.loaded == ["add_kernel"]


def test_variants_compile_each(gpu: Gpu) -> None:
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


def test_launchers_say_what_they_need(gpu: Gpu) -> None:
    x, weight = torch.zeros(3, 64), torch.ones(64)
    compile_launches(lambda: (silu_and_mul(rms_norm(x, weight, 1e-6)), None)[1])
    assert sorted(gpu.loaded) == ["rms_norm_kernel", "silu_and_mul_kernel"]
    silu_and_mul(rms_norm(x, weight, 1e-6))
    assert gpu.launched == ["rms_norm_kernel", "silu_and_mul_kernel"]
    assert len(gpu.loaded) == 2


def test_what_fails_to_compile_raises_its_own_error(gpu: Gpu) -> None:
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


def test_an_error_of_the_steps_compiles_nothing(gpu: Gpu) -> None:
    def run_steps() -> None:
        add_and_scale(torch.zeros(16))
        raise ValueError("a step failed")

    with pytest.raises(ValueError, match="a step failed"):
        compile_launches(run_steps)
    assert gpu.loaded == []
    add_and_scale(torch.zeros(16))
    assert gpu.launched == ["add_kernel", "scale_kernel"]


def test_ctrl_c_leaves_no_thread_and_no_half_made_kernel(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread the second kernel hasn't begun when the first is interrupted."""
    monkeypatch.setattr("nanovllm.kernels.compiling._num_cores", lambda: 1)

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


def test_other_threads_launch_meanwhile(gpu: Gpu) -> None:
    def run_steps() -> None:
        other = threading.Thread(target=add_and_scale, args=(torch.zeros(16),))
        other.start()
        other.join(WAIT_S)

    compile_launches(run_steps)
    assert gpu.launched == ["add_kernel", "scale_kernel"]
