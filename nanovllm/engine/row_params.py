"""What a rank is told of a row whose sampling needs more than temperature and seed.

Few rows need it, so it is no part of the fixed wire of `ScheduledBatch` but travels in its
`row_params`: one record for each such row, once, in the step that gives the row to a sequence. A
record is a few counts, the parameters as JSON, and the tokens known so far where penalties, bad
words or prompt logprobs depend on them. Nothing is pickled.
"""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nanovllm.sampling_params import SamplingParams

# Fields that decide what a rank draws or reports; the others concern text and the end of a request.
_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
_DEFAULTS = SamplingParams()
_COUNT_WORDS = 5  # of a record, before its JSON
_WORD_BYTES = 4
_NUM_REMEMBERED = 16


class RowRecord(NamedTuple):
    """A row's parameters as the ranks read them."""

    row: int
    num_tokens: int  # known when the row was given; prefill chunks that end earlier draw nothing
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]  # out before min_tokens; () without min_tokens
    bad_words: tuple[tuple[int, ...], ...]  # as token ids
    token_ids: np.ndarray  # (num_tokens,) int32, or empty where nothing depends on them


class RowParams:
    """One sequence's parameters, encoded once and sent whenever it is given a row."""

    __slots__ = ("_needs_tokens", "_num_prompt_tokens", "_words")

    def __init__(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        *,
        stop_token_ids: Sequence[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> None:
        stops = tuple(stop_token_ids) if params.min_tokens > 0 else ()
        self._words = _encode(params, stops, tuple(bad_words))
        self._num_prompt_tokens = num_prompt_tokens
        self._needs_tokens = (
            params.has_penalties
            or params.prompt_logprobs is not None
            or any(len(word) > 1 for word in bad_words)
        )

    def record(self, row: int, token_ids: Sequence[int]) -> np.ndarray:
        """Return this sequence's part of `ScheduledBatch.row_params`.

        Args:
            row: Given to the sequence.
            token_ids: Its confirmed tokens: after a preemption, output too.
        """
        sent = token_ids if self._needs_tokens else ()
        counts = (row, len(token_ids), self._num_prompt_tokens, len(self._words), len(sent))
        return np.concatenate(
            [np.array(counts, dtype=np.int32), self._words, np.array(sent, dtype=np.int32)]
        )


def read_records(words: np.ndarray) -> Iterator[RowRecord]:
    """Read `ScheduledBatch.row_params`."""
    start = 0
    while start < len(words):
        row, num_tokens, num_prompt_tokens, num_json_words, num_sent = words[
            start : start + _COUNT_WORDS
        ].tolist()
        json_start = start + _COUNT_WORDS
        sent_start = json_start + num_json_words
        start = sent_start + num_sent
        wishes = _decode(words[json_start:sent_start].tobytes())
        yield RowRecord(row, num_tokens, num_prompt_tokens, *wishes, words[sent_start:start])


class _Wishes(NamedTuple):
    """The part of a RowRecord that is JSON."""

    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]


# Remembered, since the requests of a call mostly ask for the same.
@lru_cache(maxsize=_NUM_REMEMBERED)
def _encode(
    params: SamplingParams,
    stop_token_ids: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
) -> np.ndarray:
    changed = {
        name: value
        for name in _FIELDS
        if (value := getattr(params, name)) != getattr(_DEFAULTS, name)
    }
    if stop_token_ids:
        changed["stop_token_ids"] = stop_token_ids
    if bad_words:
        changed["bad_words"] = bad_words
    text = json.dumps(changed, separators=(",", ":")).encode()
    return np.frombuffer(text + b" " * (-len(text) % _WORD_BYTES), dtype=np.int32)


@lru_cache(maxsize=_NUM_REMEMBERED)
def _decode(text: bytes) -> _Wishes:
    fields = json.loads(text)
    stop_token_ids = tuple(fields.pop("stop_token_ids", ()))
    bad_words = tuple(tuple(word) for word in fields.pop("bad_words", ()))
    if "logit_bias" in fields:
        fields["logit_bias"] = [tuple(pair) for pair in fields["logit_bias"]]
    return _Wishes(SamplingParams(max_tokens=None, **fields), stop_token_ids, bad_words)
