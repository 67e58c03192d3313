"""A GPU that isn't there: kernels compile for it, in an empty cache, and their launches are noted.

`fake_gpu` is what Triton sees of it. With `cuda_on_cpu`, torch sees one too: what should be on it
is on the CPU, and what torch computes there is real.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

DEVICE = 99  # an index of its own: Triton remembers kernels and limits by device


class FakeGpu:
    """An sm_90 as Triton's driver describes and uses it."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.loaded: list[str] = []  # names of kernels, once for each variant
        self.loaded_by: set[str] = set()  # names of threads
        self.launched: list[str] = []
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
        self.loaded_by.add(threading.current_thread().name)
        return 1, 1, 32, 0, 1024


@contextmanager
def fake_gpu(cache_dir: Path) -> Iterator[FakeGpu]:
    """The only GPU, with an empty cache; all kernels forget it afterwards."""
    from triton import JITFunction
    from triton.runtime.driver import driver

    gpu, run = FakeGpu(), JITFunction.run
    kernels: dict[int, JITFunction] = {}

    def remember(kernel: JITFunction, *args: object, **options: object) -> object:
        kernels[id(kernel)] = kernel
        return run(kernel, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache_dir))
        patch.setattr(driver, "_active", gpu)
        patch.setattr(JITFunction, "run", remember)
        yield gpu
        for kernel in kernels.values():
            kernel.device_caches.pop(DEVICE, None)
        gc.collect()  # compiled kernels unload themselves, and need the driver for that


class CpuAsGpu(TorchFunctionMode):
    """Makes on the CPU whatever is asked for on a GPU."""

    fresh_byte = 0x7F  # fills new memory: integers that are no index, so that who reads it is found

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        named = {name: _moved(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_moved, args), **named)
        if getattr(func, "__name__", "") in ("empty", "empty_like", "new_empty"):
            assert isinstance(result, torch.Tensor)
            result.untyped_storage().fill_(self.fresh_byte)
        return result


def _moved(value: object) -> object:
    is_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_gpu else value


class _FakeRing:
    """A PinnedRing whose copies have been made when they are enqueued."""

    def __init__(self, num_words: int) -> None:
        pass

    def upload(self, array: np.ndarray, target: torch.Tensor) -> None:
        target[: len(array)] = torch.from_numpy(array)

    def download(self, source: torch.Tensor) -> tuple[np.ndarray, SimpleNamespace]:
        return source.numpy().copy(), SimpleNamespace(synchronize=lambda: None)


class _FakeSlots:
    """StepSlots of a device that shares the host's memory."""

    def __init__(self, num_words: int, num_tokens: int, device: torch.device) -> None:
        self.wires = torch.zeros(1, num_words, dtype=torch.int32)
        self.tokens = torch.zeros(1, num_tokens, dtype=torch.int32)
        self.turn = torch.zeros(1, dtype=torch.int32)
        self.num_words = num_words

    def fill(self, wire: np.ndarray) -> None:
        self.wires[0, : len(wire)] = torch.from_numpy(wire)

    def launched(self) -> SimpleNamespace:
        return SimpleNamespace(tokens=self.tokens[0].numpy(), synchronize=lambda: None)

    def resync(self) -> None:
        pass


@contextmanager
def cuda_on_cpu() -> Iterator[CpuAsGpu]:
    """Let a ModelRunner believe in a GPU."""
    with pytest.MonkeyPatch.context() as patch, CpuAsGpu() as mode:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 36, 1 << 37))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        for module in ("model_runner", "second_pass"):
            patch.setattr(f"nanovllm.engine.{module}.PinnedRing", _FakeRing)
        patch.setattr("nanovllm.engine.model_runner.StepSlots", _FakeSlots)
        yield mode
