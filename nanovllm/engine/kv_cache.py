"""How many blocks the KV cache may have, given measured memory, and the pool that holds them.

The cache takes what weights, buffers, the largest steps and captured graphs leave of this engine's
share of the memory. Memory of other processes is not charged to the engine, but it can't be used
either.
"""

import math
import os
from dataclasses import dataclass

import numpy as np
import torch

_MARGIN_BYTES = 256 << 20  # left free on the GPU for the driver, libraries and fragmentation
_CPU_CACHE_BYTES = 2 << 30  # most that a CPU pool takes unless asked for more


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """One GPU as an engine finds it once its largest steps have run. All in bytes."""

    total_bytes: int
    free_bytes: int
    own_bytes: int  # weights, buffers and activations of this engine; negative readings are 0
    graph_bytes: int  # that captures are going to take


def num_blocks_on_gpu(memory: GpuMemory, *, utilization: float, block_bytes: int) -> int:
    """Blocks that fit into `utilization` of the GPU beside what the engine has taken.

    Raises:
        ValueError: Not one does; the text names the numbers and the knobs.
    """
    share_bytes = int(utilization * memory.total_bytes)
    own_bytes = max(memory.own_bytes, 0)
    budget = min(memory.free_bytes - _MARGIN_BYTES, share_bytes - own_bytes)
    num_blocks = (budget - memory.graph_bytes) // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"no room for a KV cache: the GPU has {_gib(memory.total_bytes)}, "
            f"{_gib(memory.free_bytes)} free; model and activations take {_gib(own_bytes)}, CUDA "
            f"graphs {_gib(memory.graph_bytes)}, and gpu_memory_utilization={utilization} allows "
            f"{_gib(share_bytes)} in all: raise gpu_memory_utilization, or lower "
            "max_num_batched_tokens, max_num_seqs or max_model_len"
        )
    return num_blocks


def num_blocks_on_cpu(num_wanted: int, block_bytes: int) -> int:
    """`num_wanted` blocks, within 2 GiB and a quarter of free memory, but at least one."""
    limit_bytes = min(_CPU_CACHE_BYTES, _free_host_bytes() // 4)
    return max(1, min(num_wanted, limit_bytes // block_bytes))


def allocate_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A pool of zeros: a masked probability of 0 times a NaN left in fresh memory would be NaN.

    On a CPU the system hands its pages out when they are first written.

    Raises:
        ValueError: On a CPU, the system refuses so much.
    """
    if device.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        zeros = np.zeros(num_bytes, dtype=np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: beyond numpy's sizes
        raise ValueError(
            f"no room for a KV cache of {_gib(num_bytes)}: lower num_kvcache_blocks or "
            "kvcache_block_size"
        ) from error
    return torch.from_numpy(zeros).view(dtype).view(shape)


def _free_host_bytes() -> int:
    # Not every system has sysconf or this name of it: then the other limit counts alone.
    if "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return 4 * _CPU_CACHE_BYTES
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
