"""What the caller tells its ranks and what they reply: a closed set, each with a form in bytes.

A command is a number and a payload, as `channel.py` carries them. None can name a method, a type
or a file: a payload is int32 words, the numbers of a tensor, or JSON.
"""

import json
from enum import IntEnum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

NO_COMMAND = -1  # number in a reply that nobody asked for


class Command(IntEnum):
    """All that a rank can be told."""

    STEP = 0  # payload: a ScheduledBatch as int32 words; no reply
    COLLECT = auto()  # payload: the number of a STEP; rank 0 replies, see `pack_result`
    ALLOCATE_KV_CACHE = auto()  # every rank replies with the number of blocks
    CAPTURE_CUDAGRAPH = auto()  # every rank replies with its `RunnerDescription`
    SYNCHRONIZE = auto()  # every rank replies when all that was launched is done
    LOAD_WEIGHT = auto()  # payload: see `pack_weight`; every rank replies when it is written
    SLEEP = auto()  # every rank frees the cache, then replies as to CAPTURE_CUDAGRAPH
    WAKE_UP = auto()  # payload: the number of blocks; replies as to CAPTURE_CUDAGRAPH
    EXIT = auto()  # the rank ends; no reply


class Answer(IntEnum):
    """What a reply is."""

    DONE = 0  # payload: what `Command` says; to no command: the rank has been built
    ERROR = auto()  # payload: a `Failure` as JSON; the rank does nothing more


class Failure(NamedTuple):
    """An exception in a rank."""

    type_name: str
    message: str
    traceback: str


class Pending(Protocol):
    """What a launched step will yield."""

    def wait(self) -> list[int]: ...
    def wait_logprobs(self) -> np.ndarray | None: ...


def pack_result(result: Pending) -> np.ndarray:
    """A step's result as int32 words: the number of tokens, the tokens, then any logprobs."""
    tokens, logprobs = result.wait(), result.wait_logprobs()
    words = np.array([len(tokens), *tokens], dtype=np.int32)
    return words if logprobs is None else np.concatenate([words, logprobs])


def pack_weight(name: str, tensor: "torch.Tensor") -> np.ndarray:
    """A named tensor as bytes: the length of a JSON header, the header, the numbers."""
    import torch

    header = json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    length = len(header.encode()).to_bytes(8, "little")
    numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return np.concatenate([np.frombuffer(length + header.encode(), dtype=np.uint8), numbers])


def unpack_weight(payload: bytes | bytearray) -> tuple[str, "torch.Tensor"]:
    """What `pack_weight` packed."""
    import torch

    start = 8 + int.from_bytes(payload[:8], "little")
    name, dtype_name, shape = json.loads(bytes(payload[8:start]))
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype_name!r} is no kind of number")
    numbers = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8, offset=start).copy())
    return name, numbers.view(dtype).view(shape)
