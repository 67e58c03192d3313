"""The kernels without attention in Triton's interpreter, which is chosen before import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = (
    "test_fused_kernels.py",
    "test_sampling_kernel.py",
    "test_gemm_kernels.py",
    "test_row_state_kernels.py",
    "test_all_reduce_norm_kernel.py",
)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is that process")
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    files = [str(folder / name) for name in FILES]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
