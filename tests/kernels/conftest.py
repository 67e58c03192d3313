"""Tests marked `gpu` need a GPU, and Triton's compiler rather than its interpreter."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU and compiled kernels")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
