"""What requests may do to their logits before a token is drawn: filters, penalties, bias, bans.

The plain sampler needs none of this; only rows that ask for it come here. They get back logits,
-inf where a token is out, to be drawn from with the same temperature, seed and position. Filters
don't change the logits that they keep, so a row whose filters keep everything draws exactly the
token that the plain sampler draws.

Order, as vLLM documents it: logprobs are read from the raw logits; then bad_words, min_tokens,
logit_bias, penalties (repetition, frequency, presence), temperature, min_p, top_k, top_p.

Everything a filter keeps is "the logits from some value upwards", its *cutoff*: top_k, top_p and
min_p only have to find it. So equal logits stay or go together. For top_k that is what vLLM and
transformers do; for top_p, where those drop some of several equal tokens by their place in a sort,
it makes the result independent of any order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.sampling_params import SamplingParams

Numbers = Sequence[float] | Sequence[Sequence[float]]

# Above this many candidates a whole sort costs no more than picking them.
MAX_PICKED = 1024
# Rows at once, so that 512 rows of 152k logits need no gigabytes beside the KV cache: a sort takes
# some 50 bytes a logit, penalties some 24, picking candidates 5.
ROWS_PER_SORT = 16
ROWS_PER_PENALTY = 64
ROWS_PER_PICK = 128
# Float32 logits carry a probability to about this relative error, and top_p forgives it: whether
# 0.1 + 0.2 may go when p is 0.7 must not depend on how they were rounded.
PROBABILITY_ERROR = 2.0**-21
FLOAT32_EPS = 2.0**-23


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """What one row asks for, the same at each of its steps."""

    params: SamplingParams
    num_prompt_tokens: int = 0  # tokens from there on are its output
    stop_token_ids: Iterable[int] = ()  # all that end it, eos included: out before min_tokens
    bad_words: Sequence[Sequence[int]] = ()  # token sequences; see Tokenizer.encode_bad_words

    @property
    def needs_history(self) -> bool:
        """Whether it matters which tokens were seen, not only how many."""
        return self.params.has_penalties or any(len(word) > 1 for word in self.bad_words)


class History(NamedTuple):
    """What the rows of a step have seen so far, on their device."""

    num_tokens: torch.Tensor  # (rows,) int: prompt and output, a token in flight included
    token_ids: torch.Tensor  # (rows, width) int, the tokens first; width 0: no row needs_history


@dataclass(frozen=True, slots=True, eq=False)
class FilterGroup:
    """Rows whose top_k and top_p are found among equally many candidates, together."""

    rows: torch.Tensor | slice  # (group rows,) int64, or all rows of the batch as a slice
    num_candidates: int  # likeliest tokens to look at: the largest top_k, or the whole vocabulary
    has_top_p: bool


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Penalties of the rows that have any."""

    rows: torch.Tensor  # (penalized,) int64: row in the batch
    repetition: torch.Tensor  # (penalized, 1) float32; 1 = off
    frequency: torch.Tensor  # (penalized, 1) float32
    presence: torch.Tensor  # (penalized, 1) float32
    num_prompt_tokens: torch.Tensor  # (penalized, 1) int64


@dataclass(frozen=True, slots=True, eq=False)
class EarlyStops:
    """Token ids that would end a row before its min_tokens."""

    rows: torch.Tensor  # (n,) int64: row in the batch
    places: torch.Tensor  # (n,) int64: row * vocab_size + token id
    min_total_tokens: torch.Tensor  # (n,) int64: prompt + min_tokens; no stop below it


@dataclass(frozen=True, slots=True, eq=False)
class BadWords:
    """Last tokens of bad words, each banned if the row's output ends in the rest of the word."""

    rows: torch.Tensor  # (n,) int64: row in the batch
    places: torch.Tensor  # (n,) int64: row * vocab_size + last token id
    beginnings: torch.Tensor  # (n, longest) int64: all but the last token, -1 in front as padding
    num_prompt_tokens: torch.Tensor  # (n, 1) int64: words count in output only


@dataclass(frozen=True, slots=True, eq=False)
class LogitsParams:
    """What steps do to the logits of their rows, on their device.

    `of` builds it. It is valid while the batch has the same rows: from step to step only their
    History changes.
    """

    temperatures: torch.Tensor  # (rows,) float32; 1 for greedy rows, which no filter concerns
    top_k: torch.Tensor  # (rows,) int64; vocab_size = off
    top_p: torch.Tensor  # (rows,) float64, since 1 - p counts; inf = off
    min_p: torch.Tensor | None  # (rows,) float32; 0 = off; None = off in all rows
    filter_groups: tuple[FilterGroup, ...]
    banned: torch.Tensor | None  # (n,) int64: row * vocab_size + token id, drawn by no means
    early_stops: EarlyStops | None
    bad_words: BadWords | None
    biased: torch.Tensor | None  # (n,) int64: row * vocab_size + token id
    biases: torch.Tensor | None  # (n,) float32: added there
    penalties: tuple[Penalties, ...]

    @property
    def changes_values(self) -> bool:
        """Whether logits change, other than to -inf."""
        return self.biased is not None or bool(self.penalties)

    @classmethod
    def of(
        cls, rows: Sequence[LogitsRow], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "LogitsParams":
        """Gather the rows' wishes into tensors.

        Token ids at or above `vocab_size` have no logit, and are passed over.
        """
        params = [row.params for row in rows]
        filters = _filters(params, device)
        top_k = _top_k(params, vocab_size)
        has_min_p = any(p.has_filters and p.min_p > 0 for p in params)
        biases = [
            (i, token_id, bias)
            for i, p in enumerate(params)
            for token_id, bias in p.logit_bias
            if token_id < vocab_size
        ]
        penalized = [i for i, p in enumerate(params) if p.has_penalties]
        return cls(
            temperatures=filters[:, 0].float(),
            top_k=_int64(top_k, device),
            top_p=filters[:, 1],
            min_p=filters[:, 2].float() if has_min_p else None,
            filter_groups=_filter_groups(params, top_k, vocab_size, device),
            banned=_always_banned(rows, vocab_size, device),
            early_stops=_early_stops(rows, vocab_size, device),
            bad_words=_bad_words(rows, vocab_size, device),
            biased=_places([entry[:2] for entry in biases], vocab_size, device),
            biases=_float32([entry[2] for entry in biases], device) if biases else None,
            penalties=tuple(
                _penalties(rows, indices, device)
                for indices in _pieces(penalized, ROWS_PER_PENALTY)
            ),
        )


def process_logits(logits: torch.Tensor, params: LogitsParams, history: History) -> torch.Tensor:
    """Return the logits that each row may draw from: -inf where a token is out.

    Temperature decides what the filters keep, but isn't applied: the sampler does that. The input
    stays as it is. Penalties and biases give float32; filters and bans alone keep the dtype:
    they only compare, so this is exact, and moves half the bytes in bfloat16.

    Args:
        logits: (rows, vocab), any float dtype; the whole vocabulary, not one rank's part.
        params: of the same rows.
        history: of the same rows.
    """
    dtype = torch.float32 if params.changes_values else logits.dtype
    logits = logits.to(dtype, copy=True)
    flat = logits.view(-1)
    if params.banned is not None:
        flat.index_fill_(0, params.banned, -torch.inf)
    if params.bad_words is not None:
        _ban_where(flat, params.bad_words.places, would_complete(params.bad_words, history))
    if params.early_stops is not None:
        _ban_where(flat, params.early_stops.places, is_early(params.early_stops, history))
    if params.biased is not None and params.biases is not None:
        flat.index_add_(0, params.biased, params.biases)
    for penalties in params.penalties:
        penalized = apply_penalties(logits[penalties.rows], penalties, history)
        logits.index_copy_(0, penalties.rows, penalized)
    if params.min_p is not None or params.filter_groups:
        logits.masked_fill_(logits < filter_cutoffs(logits, params)[:, None], -torch.inf)
    return logits


def _ban_where(flat: torch.Tensor, places: torch.Tensor, is_banned: torch.Tensor) -> None:
    # Added, not assigned: several words may end in one token, of which any may forbid it.
    zero = torch.zeros((), dtype=flat.dtype, device=flat.device)
    flat.index_add_(0, places, torch.where(is_banned, -torch.inf, zero))


def is_early(stops: EarlyStops, history: History) -> torch.Tensor:
    """Return (n,) bool: whether to stop now would be before min_tokens.

    The token to be drawn counts too: a stop token may be number min_tokens.
    """
    return history.num_tokens[stops.rows] + 1 < stops.min_total_tokens


def would_complete(words: BadWords, history: History) -> torch.Tensor:
    """Return (n,) bool: whether the row's output ends in all of a word but its last token."""
    longest = words.beginnings.shape[1]
    offsets = torch.arange(longest, 0, -1, device=words.rows.device)
    positions = history.num_tokens[words.rows].long()[:, None] - offsets  # (n, longest)
    is_output = positions >= words.num_prompt_tokens
    seen = history.token_ids[words.rows[:, None], positions.clamp(min=0)]
    matches = ((seen == words.beginnings) & is_output) | (words.beginnings < 0)
    return matches.all(dim=-1)


def apply_penalties(logits: torch.Tensor, penalties: Penalties, history: History) -> torch.Tensor:
    """Return (penalized, vocab) logits with repetition, then frequency and presence penalties.

    Repetition divides positive logits and multiplies negative ones, for tokens of prompt and
    output; the other two subtract, for tokens of the output alone.

    Source: CTRL (Keskar et al. 2019) for repetition, OpenAI's API for the others, as in vLLM.
    """
    token_ids = history.token_ids[penalties.rows].long()  # (penalized, width)
    places = torch.arange(token_ids.shape[1], device=logits.device)
    is_there = places < history.num_tokens[penalties.rows, None]
    counts = _count(token_ids, is_there & (places >= penalties.num_prompt_tokens), logits)
    is_seen = _count(token_ids, is_there, logits) > 0
    factor = torch.where(is_seen, penalties.repetition, 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - penalties.frequency * counts - penalties.presence * (counts > 0)


def _count(token_ids: torch.Tensor, is_counted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    # Integers, so that the order of additions changes nothing.
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    return counts.scatter_add_(1, token_ids, is_counted.int())


def filter_cutoffs(logits: torch.Tensor, params: LogitsParams) -> torch.Tensor:
    """Return (rows,) float32: the smallest logit of each row that its filters keep."""
    cutoffs = torch.full_like(params.temperatures, -torch.inf)
    if params.min_p is not None:
        cutoffs = min_p_cutoffs(logits, params.temperatures, params.min_p)
    for group in params.filter_groups:
        rows = group.rows
        found = top_k_top_p_cutoffs(
            logits[rows],
            params.temperatures[rows],
            params.top_k[rows],
            params.top_p[rows] if group.has_top_p else None,
            group.num_candidates,
            cutoffs[rows],
        )
        cutoffs[rows] = torch.maximum(found, cutoffs[rows])
    return cutoffs


def min_p_cutoffs(
    logits: torch.Tensor, temperatures: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return (rows,) float32: the logit of a token min_p times as likely as the likeliest.

    Lowered by a few float32 steps, so that rounding can't drop a token exactly there.
    """
    largest = logits.amax(dim=-1).float()
    cutoffs = largest + temperatures * min_p.log()
    return cutoffs - 4 * FLOAT32_EPS * torch.maximum(largest.abs(), cutoffs.abs())


def top_k_top_p_cutoffs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor | None,
    num_candidates: int,
    lower_bounds: torch.Tensor,
) -> torch.Tensor:
    """Return (rows,) float32: the smallest logit among the top k that top_p still keeps.

    top_k keeps the k likeliest tokens and those equal to the k-th. Of these, top_p keeps a token
    while the likelier ones have less than p of the total: so the token that crosses p stays, and at
    least one does.

    Args:
        logits: (rows, vocab), any float dtype.
        temperatures: (rows,) float32.
        top_k: (rows,) int64, 1..num_candidates.
        top_p: (rows,) float64; inf = off; None = off in all rows.
        num_candidates: at least the largest top_k.
        lower_bounds: (rows,) float32: logits below these are out already (min_p).
    """
    candidates = largest_logits(logits, num_candidates).float()  # (rows, candidates), descending
    last = top_k[:, None] - 1
    kth = candidates.gather(1, last)
    if top_p is None:
        return kth[:, 0]
    # float64: sums of up to a whole vocabulary, which must not depend on the batch's width.
    weights = ((candidates - candidates[:, :1]).double() / temperatures[:, None]).exp()
    places = torch.arange(num_candidates, device=logits.device)
    is_in = (places <= last) & (candidates >= lower_bounds[:, None])
    weights = weights.where(is_in, 0.0)
    # Tokens equal to the k-th, beyond the k candidates, have a part in the probability too.
    num_equal = (logits >= kth).sum(dim=-1, keepdim=True) - top_k[:, None]
    total = weights.sum(dim=-1, keepdim=True) + num_equal * weights.gather(1, last)
    rest = total - (weights.cumsum(dim=-1) - weights)  # of each token and the less likely ones
    dispensable = total * (1.0 - top_p[:, None]) * (1.0 + PROBABILITY_ERROR)
    num_kept = (is_in & (rest > dispensable)).sum(dim=-1, keepdim=True).clamp(min=1)
    return candidates.gather(1, num_kept - 1)[:, 0]


def largest_logits(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` largest logits of each row, descending."""
    if count < logits.shape[-1]:
        return logits.topk(count, dim=-1).values
    return logits.sort(dim=-1, descending=True).values


class Logprobs(NamedTuple):
    """Log probabilities of one token a row, and of the likeliest ones."""

    logprobs: torch.Tensor  # (rows,) float32
    ranks: torch.Tensor  # (rows,) int64; 1 = no token is likelier
    top_token_ids: torch.Tensor  # (rows, k) int64, likeliest first
    top_logprobs: torch.Tensor  # (rows, k) float32


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Return log_softmax of raw logits for the tokens that are asked for, no others.

    Args:
        logits: (rows, vocab), any float dtype: before temperature, penalties and filters.
        token_ids: (rows,) of the tokens that were drawn, or that the prompt has there.
        num_top: k, 0..vocab.
    """
    logits = logits.float()
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None].long())
    top = logits.topk(num_top, dim=-1)
    return Logprobs(
        logprobs=(chosen - normalizers)[:, 0],
        ranks=(logits > chosen).sum(dim=-1) + 1,
        top_token_ids=top.indices,
        top_logprobs=top.values - normalizers,
    )


def _filters(params: Sequence[SamplingParams], device: torch.device | str) -> torch.Tensor:
    """Return (rows, 3) float64: temperature, top_p and min_p, or their neutral values."""
    values = [
        [p.temperature, p.top_p if p.top_p < 1.0 else torch.inf, p.min_p]
        if p.has_filters
        else [1.0, torch.inf, 0.0]
        for p in params
    ]
    return upload(values, torch.float64, device)


def _top_k(params: Sequence[SamplingParams], vocab_size: int) -> list[int]:
    return [
        min(p.top_k, vocab_size) if p.has_filters and p.top_k > 0 else vocab_size for p in params
    ]


def _filter_groups(
    params: Sequence[SamplingParams],
    top_k: Sequence[int],
    vocab_size: int,
    device: torch.device | str,
) -> tuple[FilterGroup, ...]:
    """Split the rows with top_k or top_p: a few candidates suffice, or a sort is needed."""
    has_top_p = [p.has_filters and p.top_p < 1.0 for p in params]
    picked = [i for i, k in enumerate(top_k) if k <= MAX_PICKED and k < vocab_size]
    by_sort = [
        i
        for i, k in enumerate(top_k)
        if (k == vocab_size and has_top_p[i]) or MAX_PICKED < k < vocab_size
    ]
    if len(picked) == len(params):  # the common case needs no copy of its rows
        return (FilterGroup(slice(None), max(top_k), any(has_top_p)),)
    most = max((top_k[i] for i in picked), default=0)
    pieces = [(rows, most) for rows in _pieces(picked, ROWS_PER_PICK)]
    pieces += [(rows, vocab_size) for rows in _pieces(by_sort, ROWS_PER_SORT)]
    return tuple(
        FilterGroup(_int64(rows, device), num_candidates, any(has_top_p[i] for i in rows))
        for rows, num_candidates in pieces
    )


def _pieces(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _penalties(
    rows: Sequence[LogitsRow], indices: list[int], device: torch.device | str
) -> Penalties:
    params = [rows[i].params for i in indices]
    factors = _float32(
        [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params], device
    )
    return Penalties(
        rows=_int64(indices, device),
        repetition=factors[:, 0:1],
        frequency=factors[:, 1:2],
        presence=factors[:, 2:3],
        num_prompt_tokens=_int64([rows[i].num_prompt_tokens for i in indices], device)[:, None],
    )


def _always_banned(
    rows: Sequence[LogitsRow], vocab_size: int, device: torch.device | str
) -> torch.Tensor | None:
    words = [(i, word) for i, row in enumerate(rows) for word in row.bad_words]
    return _places([(i, word[0]) for i, word in words if len(word) == 1], vocab_size, device)


def _early_stops(
    rows: Sequence[LogitsRow], vocab_size: int, device: torch.device | str
) -> EarlyStops | None:
    # Ending at min_tokens is allowed, so one that is 0 or 1 forbids nothing.
    stops = [
        (i, token_id)
        for i, row in enumerate(rows)
        if row.params.min_tokens > 1
        for token_id in row.stop_token_ids
        if token_id < vocab_size
    ]
    if not stops:
        return None
    totals = [rows[i].num_prompt_tokens + rows[i].params.min_tokens for i, _ in stops]
    return EarlyStops(
        rows=_int64([i for i, _ in stops], device),
        places=_int64([i * vocab_size + token_id for i, token_id in stops], device),
        min_total_tokens=_int64(totals, device),
    )


def _bad_words(
    rows: Sequence[LogitsRow], vocab_size: int, device: torch.device | str
) -> BadWords | None:
    words = [
        (i, list(word))
        for i, row in enumerate(rows)
        for word in row.bad_words
        if len(word) > 1 and word[-1] < vocab_size
    ]
    if not words:
        return None
    longest = max(len(word) for _, word in words) - 1
    beginnings = [[-1] * (longest + 1 - len(word)) + word[:-1] for _, word in words]
    return BadWords(
        rows=_int64([i for i, _ in words], device),
        places=_int64([i * vocab_size + word[-1] for i, word in words], device),
        beginnings=_int64(beginnings, device),
        num_prompt_tokens=_int64([rows[i].num_prompt_tokens for i, _ in words], device)[:, None],
    )


def _places(
    entries: Sequence[tuple[int, int]], vocab_size: int, device: torch.device | str
) -> torch.Tensor | None:
    places = [row * vocab_size + token_id for row, token_id in entries if token_id < vocab_size]
    return _int64(places, device) if places else None


def _int64(values: Numbers, device: torch.device | str) -> torch.Tensor:
    return upload(values, torch.int64, device)


def _float32(values: Numbers, device: torch.device | str) -> torch.Tensor:
    return upload(values, torch.float32, device)


def upload(
    values: Numbers | np.ndarray, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Numbers of the host on `device`, without a wait for the step in flight."""
    # "cpu" is said, because the caller's default device may be another.
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)
