"""What a request returns, and what an engine says about itself: frozen values, nothing else.

A `RequestOutput` reads two ways. Its attributes are vLLM's (`out.outputs[0].text`); as a mapping it
is the dict nano-vllm's scripts expect (`out["text"]`, `out["token_ids"]`: sample 0). The mapping
is computed from the attributes and stored nowhere, so the two cannot disagree.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log probability at one position, from the logits before temperature."""

    logprob: float
    rank: int | None = None  # >= 1; 1 = the likeliest token
    decoded_token: str | None = None  # None = the engine runs without a tokenizer


SampleLogprobs = list[dict[int, Logprob]]  # one dict a generated token
PromptLogprobs = list[dict[int, Logprob] | None]  # one a prompt token; the first has none


def logprob_entry(
    token_id: int,
    token: Logprob,
    top_token_ids: Sequence[int],
    top_logprobs: Sequence[float],
    decode_token: Callable[[int], str] | None = None,
) -> dict[int, Logprob]:
    """Return one position's report: its own token first, then the likeliest ones by rank.

    Holds one entry more than `top_token_ids` unless the token is among them, as in vLLM.
    """

    def decoded(candidate: int) -> str | None:
        return decode_token(candidate) if decode_token else None

    entry = {token_id: Logprob(token.logprob, token.rank, decoded(token_id))}
    for rank, (candidate, logprob) in enumerate(
        zip(top_token_ids, top_logprobs, strict=True), start=1
    ):
        if candidate != token_id:
            entry[candidate] = Logprob(logprob, rank, decoded(candidate))
    return entry


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request, whole or (while streaming deltas) the part new since the last."""

    index: int  # 0..n-1: which sample
    text: str  # "" with detokenize=False; never holds the eos or stop id that ended it
    token_ids: list[int]  # as generated: the eos or stop id is kept
    cumulative_logprob: float | None = None  # sum over all tokens so far; None without logprobs
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishReason | None = None  # None = still running
    stop_reason: int | str | None = None  # stop id or stop string; None = eos, length or abort

    def finished(self) -> bool:
        """Whether this sample will get no more tokens."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When a request passed its stations, in seconds of `time.monotonic()`; None = not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that ran any of its tokens."""
        return _elapsed(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first generated token."""
        return _elapsed(self.arrival_time, self.first_token_time)

    @property
    def total_time(self) -> float | None:
        """Seconds from arrival to the end."""
        return _elapsed(self.arrival_time, self.finished_time)


def _elapsed(start: float, end: float | None) -> float | None:
    return None if end is None else end - start


@dataclass(frozen=True, slots=True, eq=False)
class RequestOutput(Mapping[str, object]):
    """The answer to one prompt: vLLM's attributes; `text` and `token_ids` of sample 0 as keys."""

    request_id: str
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # by index; n of them
    finished: bool  # whether every sample is
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    metrics: RequestMetrics | None = None
    prompt_index: int | None = None  # place of the prompt in its call

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, the cached ones included."""
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens in `outputs`, all samples together."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def text(self) -> str:
        """Text of sample 0."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of sample 0."""
        return self.outputs[0].token_ids

    def __getitem__(self, key: str) -> object:
        """Return nano-vllm's view of sample 0.

        Raises:
            KeyError: `key` is neither "text" nor "token_ids".
        """
        if key == "text":
            return self.text
        if key == "token_ids":
            return self.token_ids
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("text", "token_ids"))

    def __len__(self) -> int:
        return 2


class RunnerDescription(NamedTuple):
    """What runs the steps, as one rank or all of them say; empty once it is closed."""

    device: str = ""
    block_bytes: int = 0  # of one KV block, on all ranks described
    prefill_name: str = ""
    decode_name: str = ""
    graph_sizes: Sequence[int] = ()
    all_reduce: str = ""  # "" on one rank
    compile_s: float = 0.0  # of start-up, of the slowest rank


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine has done since it started, and what it runs on."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of accepted requests, cached ones included
    num_cached_tokens: int = 0  # of those, read from the prefix cache
    num_generated_tokens: int = 0
    num_waiting: int = 0  # sequences, now
    num_running: int = 0  # sequences, now
    num_kvcache_blocks: int = 0
    num_free_kvcache_blocks: int = 0  # now; blocks kept for the prefix cache count as free
    kvcache_block_size: int = 0  # tokens
    kvcache_bytes: int = 0
    device: str = ""
    dtype: str = ""
    prefill_backend: str = ""
    decode_backend: str = ""
    graph_batch_sizes: tuple[int, ...] = ()  # captured decode graphs; () = eager
    max_num_mixed_tokens: int = 0  # of steps of prompt chunks and decode lanes; 0: no such steps
    startup_s: tuple[tuple[str, float], ...] = ()  # (what start-up was spent on, seconds)
    all_reduce: str = ""  # who sums over the ranks, up to which size; "" on one rank
