"""Options are checked in one place, before anything starts."""

import dataclasses
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from conftest import MakeCheckpoint

from nanovllm import LLM
from nanovllm.config import Config

COUNTS = ["tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "kvcache_block_size"]
OPTIONAL_COUNTS = ["max_model_len", "num_kvcache_blocks"]
BOOLS = ["skip_tokenizer_init", "enforce_eager", "async_scheduling", "enable_prefix_caching"]
CHOICES = ["dtype", "device", "attention_backend", "load_format"]


def test_options_are_frozen_and_keep_the_wish() -> None:
    config = Config.from_kwargs("folder", max_num_seqs=3)
    assert (config.model, config.max_num_seqs, config.max_model_len) == ("folder", 3, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 4  # type: ignore[misc]


def test_defaults_are_those_of_the_contract() -> None:
    config = Config(model="folder")
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (512, 16384)
    assert (config.kvcache_block_size, config.gpu_memory_utilization) == (256, 0.9)
    assert (config.dtype, config.device, config.attention_backend) == ("auto",) * 3
    assert (config.seed, config.tensor_parallel_size, config.load_format) == (0, 1, "auto")
    assert config.enable_prefix_caching
    assert not config.enforce_eager


def test_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"max_batch.*known options are model, .*max_num_seqs"):
        LLM("folder", max_batch=3)
    with pytest.raises(TypeError, match="also_wrong, wrong"):
        LLM("folder", wrong=1, also_wrong=2)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("block_size", "kvcache_block_size"),
        ("max_seq_len", "max_model_len"),
        ("num_gpu_blocks", "num_kvcache_blocks"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
    ],
)
def test_unknown_option_is_refused_with_a_near_one(name: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"{name}; did you mean '{near}'\\?; known options are"):
        LLM("folder", **{name: 1})
    with pytest.raises(TypeError, match="unknown option tp_size; known options are"):
        LLM("folder", tp_size=2)


def test_keywords_of_vllm_that_change_nothing_warn_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = Config.from_kwargs(
            "folder",
            trust_remote_code=False,
            disable_log_stats=True,
            swap_space=4,
            max_logprobs=50,
            hf_overrides={},
            dtype="half",
            seed=5,
        )
    assert (config.seed, config.dtype) == (5, "float16")
    (warning,) = caught
    for name in ("trust_remote_code", "disable_log_stats", "swap_space"):
        assert name in str(warning.message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True),
        ("enable_chunked_prefill", False),
        ("swap_space", 16),
        ("quantization", "awq"),
        ("kv_cache_dtype", "fp8"),
        ("max_logprobs", None),  # took 80 s
        ("max_logprobs", True),
    ],
)
def test_keyword_of_vllm_that_would_change_something_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} is not supported"):
        LLM("folder", **{name: value})


@pytest.mark.parametrize("name", COUNTS + OPTIONAL_COUNTS)
def test_count_below_its_minimum_is_refused(name: str) -> None:
    for value in (0, -1, -(2**70)):
        with pytest.raises(ValueError, match=f"{name} is {value}, it must be (at least|in) "):
            LLM("folder", **{name: value})


@pytest.mark.parametrize("name", ["max_num_seqs", "kvcache_block_size", "num_kvcache_blocks"])
def test_count_beyond_all_memory_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is {10**30}, it must be in 1.."):
        LLM("folder", **{name: 10**30})


def test_numpys_ints_are_kept_as_pythons() -> None:
    """Blocks of np.int64(4) tokens failed in the first step, and ranks couldn't be told of them."""
    config = Config(model="folder", kvcache_block_size=np.int64(4), seed=np.int32(7))
    assert (type(config.kvcache_block_size), type(config.seed)) == (int, int)


@pytest.mark.parametrize("name", [*COUNTS, *OPTIONAL_COUNTS, "seed"])
@pytest.mark.parametrize("value", [1.5, "16", True, [4], float("nan")])
def test_count_of_the_wrong_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an int, not"):
        LLM("folder", **{name: value})


@pytest.mark.parametrize("name", [*COUNTS, "seed"])
def test_count_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an int, not None"):
        LLM("folder", **{name: None})


@pytest.mark.parametrize("value", [-1, 2**63])
def test_seed_outside_63_bits_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"seed is {value}, it must be in 0..{2**63 - 1}"):
        LLM("folder", seed=value)


@pytest.mark.parametrize("name", BOOLS)
@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_switch_that_is_no_bool_is_refused(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False, not {value!r}"):
        LLM("folder", **{name: value})


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["int4", "", None, 3, ["auto"]])
def test_unknown_choice_is_refused_with_the_known_ones(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*must be one of auto, "):
        LLM("folder", **{name: value})


@pytest.mark.parametrize("value", [0, -0.1, 1.01, float("nan"), float("inf"), 10**400])
def test_share_of_memory_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is .*\(0, 1\]"):
        LLM("folder", gpu_memory_utilization=value)


@pytest.mark.parametrize("value", ["0.9", None, True])
def test_share_of_memory_of_the_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="gpu_memory_utilization must be a number"):
        LLM("folder", gpu_memory_utilization=value)


@pytest.mark.parametrize("value", [None, "", 5, b"folder", ["folder"]])
def test_model_that_is_no_name_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="model must be a folder or a hub id"):
        LLM(value)
    if value is not None:
        with pytest.raises((TypeError, ValueError)):
            LLM("folder", tokenizer=value)


@pytest.mark.parametrize("option", [{"max_model_len": 4097}, {"max_model_len": 10**9}])
def test_more_positions_than_the_model_has_is_refused(
    make_checkpoint: MakeCheckpoint, option: dict[str, int]
) -> None:
    limit = f"max_model_len is {option['max_model_len']}, the model has positions for 4096"
    with pytest.raises(ValueError, match=limit):
        LLM(str(make_checkpoint()), skip_tokenizer_init=True, **option)


def test_max_model_len_is_the_models_up_to_4096(make_checkpoint: MakeCheckpoint) -> None:
    for positions, expected in ((100, 100), (4096, 4096), (8192, 4096)):
        folder = make_checkpoint(max_position_embeddings=positions)
        with LLM(str(folder), skip_tokenizer_init=True, device="cpu", max_num_seqs=1) as llm:
            assert llm.llm_engine.max_model_len == expected


@pytest.mark.parametrize("backend", ["flash_attn", "triton"])
def test_gpu_backend_on_cpu_is_refused(make_checkpoint: MakeCheckpoint, backend: str) -> None:
    with pytest.raises(ValueError, match=f"attention_backend='{backend}' needs a GPU.*'torch'"):
        LLM(
            str(make_checkpoint()),
            skip_tokenizer_init=True,
            device="cpu",
            attention_backend=backend,
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_missing_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ValueError, match="device='cuda'.*no CUDA GPU.*device='cpu'"):
        LLM(str(make_checkpoint()), skip_tokenizer_init=True, device="cuda")


def test_folder_without_tokenizer_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        LLM(str(make_checkpoint()), device="cpu")


def test_paths_numpy_ints_and_torch_dtypes_are_taken(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    with LLM(
        make_checkpoint(vocab_size=VOCAB_SIZE),
        tokenizer=write_byte_tokenizer(tmp_path),
        device="cpu",
        dtype=torch.bfloat16,
        max_num_seqs=np.int64(2),
        max_model_len=np.int32(64),
    ) as llm:
        assert llm.stats().dtype == "bfloat16"
        assert llm.generate("hi", use_tqdm=False)[0].prompt == "hi"


def test_stats_tell_what_runs(make_checkpoint: MakeCheckpoint) -> None:
    with LLM(
        str(make_checkpoint()),
        skip_tokenizer_init=True,
        device="cpu",
        max_model_len=100,
        max_num_seqs=3,
        kvcache_block_size=32,
    ) as llm:
        stats = llm.stats()
    assert (stats.device, stats.dtype) == ("cpu", "float32")
    assert (stats.prefill_backend, stats.decode_backend) == ("torch", "torch")
    assert stats.graph_batch_sizes == ()
    # Enough for every sequence at full length: 3 times 4 blocks of 32.
    assert (stats.num_kvcache_blocks, stats.kvcache_block_size) == (12, 32)
    # K and V, 2 layers, 2 heads of 32 float32.
    assert stats.kvcache_bytes == 12 * 32 * 2 * 2 * 2 * 32 * 4
