"""A start compiles every kernel side by side: by a runner for a GPU that isn't there."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_gpu import CpuAsGpu, FakeGpu, cuda_on_cpu, fake_gpu

from nanovllm.config import Config
from nanovllm.engine.cuda_graph import decode_shapes, mixed_shapes
from nanovllm.engine.model_runner import ModelRunner, _dummy_prefill
from nanovllm.engine.settings import RunnerSettings
from nanovllm.model_config import ModelConfig
from nanovllm.utils.distributed import Communicator

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
)

FIELDS = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeGpu]:
    with fake_gpu(tmp_path / "cache") as gpu:
        yield gpu


@pytest.fixture
def memory(gpu: FakeGpu) -> Iterator[CpuAsGpu]:
    with cuda_on_cpu() as memory:
        yield memory


def make_runner(folder: Path, dtype: str, max_num_seqs: int) -> ModelRunner:
    (folder / "config.json").write_text(json.dumps(FIELDS))
    config = Config(
        model=str(folder),
        load_format="dummy",
        attention_backend="triton",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(64, max_num_seqs),
    )
    runner = ModelRunner(
        RunnerSettings(
            config=config,
            model_config=ModelConfig.from_dict(FIELDS),
            folder=folder,
            device_type="cuda",
            dtype_name=dtype,
            max_model_len=512,
            max_num_mixed_tokens=64,
        ),
        Communicator(),
    )
    runner._bind_pool(1)
    return runner


@pytest.mark.parametrize(("dtype", "max_num_seqs"), [("bfloat16", 40), ("float32", 1)])
def test_no_step_needs_a_kernel_that_the_start_did_not_compile(
    gpu: FakeGpu, memory: CpuAsGpu, tmp_path: Path, dtype: str, max_num_seqs: int
) -> None:
    runner = make_runner(tmp_path, dtype, max_num_seqs)
    runner.compile_kernels()
    assert gpu.launched == []
    num_compiled = len(gpu.loaded)
    assert num_compiled > 5

    memory.fresh_byte = 0  # the kernels of this GPU write nothing, and now what they wrote is read
    runner.warmup_model()
    with torch.inference_mode():
        for shape in decode_shapes(max_num_seqs) + mixed_shapes(max_num_seqs, 64):
            runner._run_shape(shape)
    for lengths in ([1], [2], [3], [16], [17], [64]):
        runner.run(_dummy_prefill(lengths))
    assert gpu.launched
    assert gpu.loaded[num_compiled:] == []


def test_compiling_leaves_nothing_behind(memory: CpuAsGpu, tmp_path: Path) -> None:
    """What a kernel should have written is rubbish: nothing reads it, and no token of it stays."""
    runner = make_runner(tmp_path, "bfloat16", 4)
    runner.compile_kernels()
    assert runner.tokens.eq(0).all()
    assert runner.row_state.last_tokens.eq(0).all()
    assert runner.buffers.input_ids.eq(0).all()
    assert runner.kv_cache is not None
    assert runner.kv_cache.eq(0).all()
