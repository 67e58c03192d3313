"""From the user's wish to what runs: the options resolved against checkpoint and machine.

`Config` keeps the wish. What "auto" and None come to is decided here once, before a device is
touched or a process started, and handed to every rank as plain values.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm.config import Config
from nanovllm.model_config import ModelConfig, architecture_of, read_config
from nanovllm.models import model_class
from nanovllm.utils.model_folder import resolve_model_folder

_DEFAULT_MAX_MODEL_LEN = 4096
# Tokens of a mixed step: while weights are read, more tokens cost little, until they slow down
# the matrix products, which is sooner if those are large; see the README's notes.
_MIXED_TOKENS = 512
_MIXED_TOKENS_IF_LARGE = 256
_LARGE_BYTES = 5 << 30  # weights of a rank's layers


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The wish (`config`) and what has been resolved of it: plain values, the same on all ranks."""

    config: Config
    model_config: ModelConfig
    folder: Path
    device_type: str  # "cuda" or "cpu"
    dtype_name: str  # "bfloat16", "float16" or "float32"
    max_model_len: int
    max_num_mixed_tokens: int

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once: a decode step runs a token of each."""
        return min(self.config.max_num_seqs, self.config.max_num_batched_tokens)

    @property
    def dtype(self) -> torch.dtype:
        return {
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
            "float32": torch.float32,
        }[self.dtype_name]


def resolve_settings(config: Config) -> RunnerSettings:
    """Turn the wish into what runs, without touching a device.

    Raises:
        ValueError: The model can't be found or run, or an option doesn't fit it or this machine.
    """
    folder = resolve_model_folder(config.model)
    fields = read_config(folder)
    model_class(architecture_of(fields))  # first: another architecture's fields have other names
    model_config = ModelConfig.from_dict(fields)
    check_shardable(model_config, config.tensor_parallel_size)
    device_type = _resolve_device(config.device, config.tensor_parallel_size)
    dtype_name: str = config.dtype
    if dtype_name == "auto":
        dtype_name = model_config.dtype if device_type == "cuda" else "float32"
    return RunnerSettings(
        config=config,
        model_config=model_config,
        folder=folder,
        device_type=device_type,
        dtype_name=dtype_name,
        max_model_len=_resolve_max_model_len(config, model_config),
        max_num_mixed_tokens=_resolve_mixed_tokens(config, model_config, device_type, dtype_name),
    )


def _resolve_device(wish: str, num_ranks: int) -> str:
    has_cuda = torch.cuda.is_available()
    if wish == "cuda" and not has_cuda:
        raise ValueError("device='cuda', but torch finds no CUDA GPU: use device='cpu' or 'auto'")
    if not has_cuda or wish == "cpu":
        return "cpu"
    if num_ranks > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size is {num_ranks}, but torch finds {torch.cuda.device_count()} "
            "CUDA GPUs: lower it"
        )
    return "cuda"


def _resolve_max_model_len(config: Config, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return min(_DEFAULT_MAX_MODEL_LEN, limit)
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, the model has positions for {limit} tokens: "
            "lower it"
        )
    return config.max_model_len


def _resolve_mixed_tokens(
    config: Config, model_config: ModelConfig, device_type: str, dtype_name: str
) -> int:
    if config.max_num_mixed_tokens is not None:
        num_tokens = config.max_num_mixed_tokens
    elif device_type == "cpu" or config.enforce_eager:  # launches outlast what a GPU would save
        num_tokens = 0
    else:
        weight_bytes = 4 if dtype_name == "float32" else 2
        num_bytes = weight_bytes * model_config.num_layer_weights // config.tensor_parallel_size
        num_tokens = _MIXED_TOKENS_IF_LARGE if num_bytes >= _LARGE_BYTES else _MIXED_TOKENS
    return min(num_tokens, config.max_num_batched_tokens)


def check_shardable(model_config: ModelConfig, size: int) -> None:
    """Raise unless the network can be split over `size` ranks.

    The last rank may hold less vocabulary; KV heads fewer than ranks are held by several.

    Raises:
        ValueError: What doesn't divide, by name.
    """
    num_kv_heads = model_config.num_key_value_heads
    for name in ("num_attention_heads", "intermediate_size"):
        value = getattr(model_config, name)
        if value % size:
            raise ValueError(
                f"{name} is {value}, no multiple of tensor_parallel_size {size}: "
                "choose a size that divides it"
            )
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads is {num_kv_heads}, neither a multiple nor a divisor of "
            f"tensor_parallel_size {size}: choose a size for which it is"
        )
    vocab_size = model_config.vocab_size
    if vocab_size <= -(-vocab_size // size) * (size - 1):
        raise ValueError(
            f"vocab_size {vocab_size} leaves nothing for the last of {size} ranks: lower "
            "tensor_parallel_size"
        )
