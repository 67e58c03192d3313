"""The networks: architecture name in config.json -> class -> one rank's part of the network."""

import torch

from nanovllm.layers.attention_backend import AttentionBackend, torch_backend
from nanovllm.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.distributed import Communicator

ARCHITECTURES: dict[str, type[Qwen3ForCausalLM]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def model_class(architecture: str) -> type[Qwen3ForCausalLM]:
    """The class that runs `architecture`.

    Raises:
        ValueError: None does; the text lists those that run.
    """
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        known = ", ".join(ARCHITECTURES)
        message = f"architecture {architecture} is not supported; supported: {known}"
        raise ValueError(message) from None


def build_network(
    config: ModelConfig,
    *,
    max_model_len: int,
    backend: AttentionBackend,
    dtype: torch.dtype,
    tp: Communicator,
    device: torch.device,
) -> Qwen3ForCausalLM:
    """One rank's part of the network, its parameters not written yet.

    Raises:
        RuntimeError, torch.OutOfMemoryError: There is no room for it.
    """
    try:
        with torch.device(device):
            return model_class(config.architecture)(
                config, max_model_len=max_model_len, backend=backend, dtype=dtype, tp=tp
            )
    except RuntimeError as error:  # of the allocator, which names bytes and nothing else
        text = f"no room for the network that config.json describes: {error}"
        raise type(error)(text) from error


def network_outline(
    config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, num_ranks: int
) -> Qwen3ForCausalLM:
    """Rank 0's part of the network without memory: what it tells are names and shapes."""
    return build_network(
        config,
        max_model_len=max_model_len,
        backend=torch_backend(),
        dtype=dtype,
        tp=Communicator(rank=0, size=num_ranks),
        device=torch.device("meta"),
    )
