"""What layers need to know about the step they run in.

A layer's arguments are activations; which sequence a token belongs to and where its keys and values
live is the same for all layers of a step, so it travels beside them. The runner sets the Context in
a `with` block around the forward, and `get_context()` reads it inside. It is a ContextVar: restored
on error, never left over, never shared by two engines in two threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nanovllm.kernels.decode_attention import DecodePlan


@dataclass(frozen=True, slots=True)
class Context:
    """One step. Lanes are sequences; prefill lanes and their tokens come first, then decode lanes.

    All tensors are int32 and on the model's device.
    """

    num_prefills: int  # prefill lanes
    num_prefill_tokens: int  # their tokens, the first of the flat batch
    num_decodes: int  # decode lanes, one token each
    slot_mapping: torch.Tensor  # (tokens,) cache slot of each new token; -1: padding, not stored
    block_tables: torch.Tensor  # (lanes, max_blocks) blocks of each lane; unused columns arbitrary
    context_lens: torch.Tensor  # (lanes,) tokens the lane's last query may see, itself included
    cu_seqlens_q: torch.Tensor  # (prefills + 1,) where the tokens of each prefill lane begin
    cu_seqlens_k: torch.Tensor  # (prefills + 1,) the same for the keys they see
    max_seqlen_q: int  # longest prefill lane, in new tokens
    max_seqlen_k: int  # longest lane, in tokens seen
    logits_indices: torch.Tensor | None  # (lanes,) last token of each lane; None: every token
    decode_plan: "DecodePlan | None" = None  # of the Triton decode kernel, shared by all layers
    side_stream: torch.cuda.Stream | None = None  # for what may run beside the decode lanes


_context: ContextVar[Context] = ContextVar("nanovllm_step_context")


def get_context() -> Context:
    """The Context of the step being run; a RuntimeError outside of one."""
    try:
        return _context.get()
    except LookupError:
        raise RuntimeError("get_context() works only inside a model's forward") from None


@contextmanager
def set_context(context: Context) -> Iterator[None]:
    """Make `context` the one that layers see inside the block."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)
