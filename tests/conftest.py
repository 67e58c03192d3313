"""What all tests share: which machine a test needs, and small checkpoints to run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` or `gpu2` on machines with fewer CUDA GPUs than that."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for mark, num_needed in (("gpu", 1), ("gpu2", 2)):
            if item.get_closest_marker(mark) and num_gpus < num_needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {num_needed} CUDA GPU(s)"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny models lose more to handing work between threads than they win by it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


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
