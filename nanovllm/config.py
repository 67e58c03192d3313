"""The user's options, validated in one place.

`Config` keeps the wish exactly as it was given and is never written after construction: what is
learned later (how many KV blocks fit, which attention backend runs) is returned by whoever learns
it and passed on. What the checkpoint says about itself is in `model_config.py`.
"""

import dataclasses
import difflib
import os
import warnings
from collections.abc import Container
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cuda", "cpu"]
AttentionBackendName = Literal["auto", "flash_attn", "triton", "torch"]
LoadFormat = Literal["auto", "dummy"]


class _AnyCount:
    """Contains every int from -1. A range would be searched one by one for anything else."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= -1


# vLLM's keywords and those of their values that change nothing here: they are accepted with one
# warning. Any other value is refused, because dropping it would change what the user asked for.
_INERT_KEYWORDS: dict[str, Container[object]] = {
    "trust_remote_code": (False,),
    "enable_chunked_prefill": (True, None),
    "disable_log_stats": (True, False),
    "swap_space": (0, 4, 0.0, 4.0),
    "cpu_offload_gb": (0, 0.0),
    "tokenizer_mode": ("auto",),
    "enable_sleep_mode": (True, False),
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "hf_overrides": (None, {}),
    "generation_config": ("vllm",),
    "distributed_executor_backend": (None, "mp"),
    "max_logprobs": _AnyCount(),  # there is no limit here
}
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The options of one engine; see `LLM` for how they are used.

    The comments beside the fields are also the command line's help.

    Raises:
        ValueError: A value is out of range; the text names the field, the value and the limit.
        TypeError: A value has the wrong type.
    """

    model: str  # checkpoint folder, or the id of a model on the hub
    tokenizer: str | None = None  # folder or hub id; None: the model's
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    tensor_parallel_size: int = 1  # GPUs (or CPU processes) that share each layer
    dtype: Dtype = "auto"  # auto: the checkpoint's on CUDA, float32 on CPU
    seed: int = 0  # of requests that bring no seed of their own
    device: Device = "auto"  # auto: CUDA where there is one, else CPU
    attention_backend: AttentionBackendName = "auto"  # auto: what suits device and dtype
    enforce_eager: bool = False  # no CUDA graphs
    async_scheduling: bool = True  # launch step N+1 before reading the tokens of step N
    max_model_len: int | None = None  # prompt + output tokens; None: min(4096, the model's)
    max_num_seqs: int = 512  # sequences that run at once
    max_num_batched_tokens: int = 16384  # tokens of one step
    max_num_mixed_tokens: int | None = None  # tokens of a step of prompt chunks and decode lanes;
    # 0: no such steps; None: as many as were measured to be fastest for the model's size
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory that this engine may use
    kvcache_block_size: int = 256  # tokens of a block
    num_kvcache_blocks: int | None = None  # blocks of the KV cache; None: what fits
    enable_prefix_caching: bool = True  # prompts share the blocks of their common beginning
    load_format: LoadFormat = "auto"  # dummy: random weights from config.json alone

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise TypeError(f"model must be a folder or a hub id, not {self.model!r}")
        if self.tokenizer is not None and not isinstance(self.tokenizer, str):
            raise TypeError(f"tokenizer must be a folder or a hub id, not {self.tokenizer!r}")
        self._check_int("tensor_parallel_size", minimum=1)
        self._check_int("max_num_seqs", minimum=1, maximum=2**20)
        for name in ("max_num_batched_tokens", "kvcache_block_size"):
            self._check_int(name, minimum=1, maximum=2**31 - 1)
        self._check_int("seed", minimum=0, maximum=2**63 - 1)
        self._check_int("max_model_len", minimum=2, optional=True)
        self._check_int("max_num_mixed_tokens", minimum=0, optional=True)
        self._check_int("num_kvcache_blocks", minimum=1, maximum=2**31 - 1, optional=True)
        self._check_choice("dtype", get_args(Dtype))
        self._check_choice("device", get_args(Device))
        self._check_choice("attention_backend", get_args(AttentionBackendName))
        self._check_choice("load_format", get_args(LoadFormat))
        for name in ("skip_tokenizer_init", "enforce_eager", "enable_prefix_caching"):
            self._check_bool(name)
        self._check_bool("async_scheduling")
        self._check_utilization()

    @classmethod
    def from_kwargs(cls, model: str, **kwargs: object) -> "Config":
        """Build a Config, accepting with one warning vLLM's keywords that change nothing here.

        Raises:
            TypeError: An unknown keyword; the text names the known ones, near ones first.
        """
        inert = [name for name in kwargs if name in _INERT_KEYWORDS]
        for name in inert:
            value = kwargs.pop(name)
            if value not in _INERT_KEYWORDS[name]:
                raise ValueError(f"{name}={value!r} is not supported: leave it out")
        if inert:
            warnings.warn(f"ignored, changes nothing here: {', '.join(inert)}", stacklevel=3)
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(kwargs) - set(known))
        if unknown:
            near = [name for key in unknown for name in difflib.get_close_matches(key, known, 1)]
            hint = f"; did you mean {' and '.join(map(repr, near))}?" if near else ""
            raise TypeError(
                f"unknown option {', '.join(unknown)}{hint}; known options are {', '.join(known)}"
            )
        if isinstance(kwargs.get("tokenizer"), os.PathLike):
            kwargs["tokenizer"] = str(kwargs["tokenizer"])
        if "dtype" in kwargs:  # a torch.dtype prints as torch.bfloat16
            name = str(kwargs["dtype"]).removeprefix("torch.")
            kwargs["dtype"] = _DTYPE_ALIASES.get(name, name)
        return cls(model=model, **kwargs)  # type: ignore[arg-type]  # checked in __post_init__

    def _check_int(
        self, name: str, *, minimum: int, maximum: int | None = None, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be an int, not {value!r}")
        if int(value) < minimum or (maximum is not None and int(value) > maximum):
            limit = f"at least {minimum}" if maximum is None else f"in {minimum}..{maximum}"
            raise ValueError(f"{name} is {value}, it must be {limit}")
        object.__setattr__(self, name, int(value))  # numpy's, say

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name} is {value!r}, it must be one of {', '.join(choices)}")

    def _check_bool(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")

    def _check_utilization(self) -> None:
        value = self.gpu_memory_utilization
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"gpu_memory_utilization must be a number, not {value!r}")
        if not 0 < value <= 1:
            raise ValueError(f"gpu_memory_utilization is {value}, it must be in (0, 1]")
