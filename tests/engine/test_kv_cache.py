"""The size of the KV cache: what counts against it, and what is said when nothing is left."""

from dataclasses import replace

import pytest

from nanovllm.engine import kv_cache
from nanovllm.engine.kv_cache import GpuMemory, num_blocks_on_cpu, num_blocks_on_gpu

GIB = 1 << 30
MEMORY = GpuMemory(
    total_bytes=100 * GIB, free_bytes=90 * GIB, own_bytes=10 * GIB, graph_bytes=2 * GIB
)


def test_pool_takes_what_is_left_of_the_engines_share() -> None:
    assert num_blocks_on_gpu(MEMORY, utilization=0.5, block_bytes=GIB) == 50 - 10 - 2


def test_memory_of_others_is_not_charged_but_cannot_be_used() -> None:
    """C46: 60 GiB belong to another process; the engine's own share is untouched until it meets
    what is free."""
    crowded = replace(MEMORY, free_bytes=30 * GIB)
    assert num_blocks_on_gpu(crowded, utilization=0.3, block_bytes=GIB) == 30 - 10 - 2
    assert num_blocks_on_gpu(crowded, utilization=0.9, block_bytes=GIB) == 30 - 2 - 1  # the margin


def test_memory_freed_by_others_meanwhile_counts_as_nothing_taken() -> None:
    memory = replace(MEMORY, own_bytes=-5 * GIB)
    assert num_blocks_on_gpu(memory, utilization=0.5, block_bytes=GIB) == 50 - 2


@pytest.mark.parametrize("changes", [{"own_bytes": 49 * GIB}, {"free_bytes": 2 * GIB}])
def test_empty_pool_names_the_numbers_and_the_knobs(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no room for a KV cache") as caught:
        num_blocks_on_gpu(replace(MEMORY, **changes), utilization=0.5, block_bytes=GIB)
    for text in ("100.00 GiB", "2.00 GiB", "50.00 GiB", "gpu_memory_utilization=0.5", "lower"):
        assert text in str(caught.value)


def test_cpu_pool_stays_within_a_quarter_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_free_host_bytes", lambda: 4 * GIB)
    assert num_blocks_on_cpu(10, block_bytes=GIB // 16) == 10
    assert num_blocks_on_cpu(100, block_bytes=GIB // 16) == 16
    assert num_blocks_on_cpu(100, block_bytes=3 * GIB) == 1
