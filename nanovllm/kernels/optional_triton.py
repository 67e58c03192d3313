"""Triton where it is installed; elsewhere a stand-in, so that kernel modules import on every
system.

A kernel module holds its Triton kernel, its launcher and its torch reference side by side. The
reference is what CPU installs run, and off Linux they have no Triton: there `@triton.jit` yields an
object that raises an ImportError naming the remedy when it is launched, and importing costs
nothing. Kernel modules begin with

    from __future__ import annotations  # so that `tl.constexpr` in a signature isn't evaluated

    from nanovllm.kernels.optional_triton import tl, triton
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__all__ = ["tl", "triton"]


class _UnlaunchableKernel:
    """Stands for a kernel that can't be compiled here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: object) -> NoReturn:
        raise ImportError(
            f"kernel {self.name} needs Triton (Linux only): pip install triton, "
            "or choose device='cpu' or attention_backend='torch'"
        )


class _MissingTriton:
    """Answers the decorator that kernel modules use at import time."""

    def jit(
        self, kernel: Callable[..., object] | None = None, **options: object
    ) -> _UnlaunchableKernel | Callable[[Callable[..., object]], _UnlaunchableKernel]:
        """Replace a kernel, decorated with or without options, by one that can't be launched."""
        if kernel is None:
            return lambda decorated: _UnlaunchableKernel(decorated.__name__)
        return _UnlaunchableKernel(kernel.__name__)

    def next_power_of_2(self, n: int) -> int:
        """Smallest power of two that is >= n."""
        return 1 << (n - 1).bit_length()

    def cdiv(self, a: int, b: int) -> int:
        """a / b, rounded up."""
        return -(-a // b)


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = _MissingTriton()
    tl = None
