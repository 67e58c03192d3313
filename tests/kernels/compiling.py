"""Compiling kernels for GPUs that aren't there: what fails to compile fails on every machine."""

from __future__ import annotations

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu"

needs_launch = pytest.mark.skipif(
    DEVICE == "cpu" and not IS_INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1"
)
needs_compiler = pytest.mark.skipif(
    IS_INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler"
)
CAPABILITIES = (80, 90)


def compile_for(
    capability: int,
    kernel: object,
    signature: dict[str, str],
    constexprs: dict[str, object],
    **options: int,
) -> object:
    """Compile a kernel for a compute capability (80, 90) without a GPU; returns Triton's compiled
    kernel.

    Args:
        signature: type of each runtime argument in order, such as "*bf16", "i32", "fp32".
        constexprs: the compile-time arguments.
        options: num_warps, num_stages.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    source = ASTSource(fn=kernel, signature=types, constexprs=constexprs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
