"""What all tests share: which machine a test needs, time limits, small checkpoints to run.

The only conftest.py: two would be one module name, and tests import from here.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from fuzz import Fuzzer

# Few and small: one forward on a CPU takes milliseconds. The large initializer_range spreads the
# logits, so that outputs vary and every weight matters to them.
TINY_QWEN3 = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 999,
    "pad_token_id": None,
}

MakeCheckpoint = Callable[..., Path]
_LIMIT_S = 120  # of a test of processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu`, `gpu2`, `gpu4` or `gpu8` on machines with fewer CUDA GPUs than that.

    They need compiled kernels, too: in Triton's interpreter there is no GPU.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    has_gpus = torch.cuda.is_available() and not is_interpreted
    num_gpus = torch.cuda.device_count() if has_gpus else 0
    for item in items:
        for mark, num_needed in (("gpu", 1), ("gpu2", 2), ("gpu4", 4), ("gpu8", 8)):
            if item.get_closest_marker(mark) and num_gpus < num_needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {num_needed} CUDA GPU(s)"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny models lose more to handing work between threads than they win by it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def hard_timeout() -> Iterator[None]:
    """Raise out of whatever the test waits for, so that a hang is a failure."""

    def is_late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took longer than {_LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, is_late)
    signal.alarm(_LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks be forked from a server that has imported torch, instead of spawned."""
    from processes import quick_context

    monkeypatch.setattr("nanovllm.engine.worker.multiprocessing.get_context", quick_context)


@pytest.fixture(
    params=[2, pytest.param(4, marks=pytest.mark.gpu4), pytest.param(8, marks=pytest.mark.gpu8)]
)
def size(request: pytest.FixtureRequest) -> int:
    """Ranks, a GPU each, as many as a machine may have."""
    return request.param


@pytest.fixture(scope="module")
def fuzzer() -> "Iterator[Fuzzer]":
    """Runs random workloads of the bundled model."""
    from fuzz import Fuzzer

    opened = Fuzzer()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Factory of folders with a random Qwen3, as transformers writes it.

    `make_checkpoint(seed=0, dtype="float32", max_shard_size="5GB", **changes)`: `changes` are
    fields of Qwen3Config, on top of TINY_QWEN3. The same arguments give the same folder, so never
    write into it. There is no tokenizer in it: use skip_tokenizer_init=True.
    """
    folders: dict[str, Path] = {}

    def make(
        *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "5GB", **changes: object
    ) -> Path:
        key = repr((seed, dtype, max_shard_size, sorted(changes.items())))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("qwen3")
            _write_qwen3(folders[key], {**TINY_QWEN3, **changes}, seed, dtype, max_shard_size)
        return folders[key]

    return make


def _write_qwen3(
    folder: Path, fields: dict[str, object], seed: int, dtype: str, max_shard_size: str
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM  # slow to import; few tests need it

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**fields))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
