"""The networks: architecture name in config.json -> class."""

from nanovllm.models.qwen3 import Qwen3ForCausalLM

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
