"""What requests may do to their logits before a token is drawn: filters, penalties, bias, bans.

The plain sampler needs none of this; only rows that ask for it come here, and what they get back
are logits again, with -inf where a token is out, to be drawn from with the same temperature, seed
and position as before. Kept logits leave as they came, so a row whose filters keep everything
draws exactly the token that the plain sampler draws.

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
    """One row's request and what it has seen so far; what isn't needed may stay empty."""

    params: SamplingParams
    num_output_tokens: int = 0  # drawn so far, one in flight included
    stop_token_ids: Iterable[int] = ()  # all that end it, eos included: out before min_tokens
    bad_words: Sequence[Sequence[int]] = ()  # token sequences; see Tokenizer.encode_bad_words
    prompt_token_ids: Sequence[int] | np.ndarray = ()  # for the repetition penalty
    output_token_ids: Sequence[int] | np.ndarray = ()  # for penalties and bad words

    def banned(self) -> set[int]:
        """Return the token ids that may not be drawn now."""
        banned = {
            word[-1]
            for word in self.bad_words
            if ends_with(self.output_token_ids, word[: len(word) - 1])
        }
        # The token to be drawn is number num_output_tokens + 1, and may be the last at min_tokens.
        if self.num_output_tokens + 1 < self.params.min_tokens:
            banned.update(self.stop_token_ids)
        return banned


def ends_with(token_ids: Sequence[int] | np.ndarray, ending: Sequence[int]) -> bool:
    """Return whether the last tokens are `ending`; every sequence ends with the empty one."""
    start = len(token_ids) - len(ending)
    return start >= 0 and all(
        int(token_ids[start + i]) == token_id for i, token_id in enumerate(ending)
    )


@dataclass(frozen=True, slots=True, eq=False)
class FilterGroup:
    """Rows whose top_k and top_p are found among equally many candidates, together."""

    rows: torch.Tensor | slice  # (group rows,) int64, or all rows of the batch as a slice
    num_candidates: int  # likeliest tokens to look at: the largest top_k, or the whole vocabulary
    has_top_p: bool


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Penalties of the rows that have any, and the tokens that they are about."""

    rows: torch.Tensor  # (penalized,) int64: row in the batch
    repetition: torch.Tensor  # (penalized, 1) float32; 1 = off
    frequency: torch.Tensor  # (penalized, 1) float32
    presence: torch.Tensor  # (penalized, 1) float32
    prompt_tokens: torch.Tensor  # (n,) int64: place in `rows` * vocab_size + token id
    output_tokens: torch.Tensor  # (m,) int64: the same


@dataclass(frozen=True, slots=True, eq=False)
class LogitsParams:
    """What one step does to the logits of its rows, on their device.

    `of` builds it. As long as the rows of a batch stay and `depends_on_tokens` is False, it
    may be used again in the next step.
    """

    temperatures: torch.Tensor  # (rows,) float32; 1 for greedy rows, which no filter concerns
    top_k: torch.Tensor  # (rows,) int64; vocab_size = off
    top_p: torch.Tensor  # (rows,) float64, since 1 - p counts; inf = off
    min_p: torch.Tensor | None  # (rows,) float32; 0 = off; None = off in all rows
    filter_groups: tuple[FilterGroup, ...]
    banned: torch.Tensor | None  # (n,) int64: row * vocab_size + token id, drawn by no means
    biased: torch.Tensor | None  # (n,) int64: row * vocab_size + token id
    biases: torch.Tensor | None  # (n,) float32: added there
    penalties: tuple[Penalties, ...]
    depends_on_tokens: bool  # whether the next token changes any of this

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
        banned = [(i, token_id) for i, row in enumerate(rows) for token_id in row.banned()]
        penalized = [i for i, p in enumerate(params) if p.has_penalties]
        return cls(
            temperatures=filters[:, 0].float(),
            top_k=_int64(top_k, device),
            top_p=filters[:, 1],
            min_p=filters[:, 2].float() if has_min_p else None,
            filter_groups=_filter_groups(params, top_k, vocab_size, device),
            banned=_places(banned, vocab_size, device),
            biased=_places([entry[:2] for entry in biases], vocab_size, device),
            biases=_float32([entry[2] for entry in biases], device) if biases else None,
            penalties=tuple(
                _penalties(rows, indices, vocab_size, device)
                for indices in _pieces(penalized, ROWS_PER_PENALTY)
            ),
            depends_on_tokens=any(_depends_on_tokens(row) for row in rows),
        )


def process_logits(logits: torch.Tensor, params: LogitsParams) -> torch.Tensor:
    """Return the logits that each row may draw from: float32, -inf where a token is out.

    Temperature decides what the filters keep, but isn't applied: the sampler does that. The input
    stays as it is.

    Args:
        logits: (rows, vocab), any float dtype; the whole vocabulary, not one rank's part.
        params: of the same rows.
    """
    logits = logits.to(torch.float32, copy=True)
    flat = logits.view(-1)
    if params.banned is not None:
        flat.index_fill_(0, params.banned, -torch.inf)
    if params.biased is not None and params.biases is not None:
        flat.index_add_(0, params.biased, params.biases)
    for penalties in params.penalties:
        penalized = apply_penalties(logits[penalties.rows], penalties)
        logits.index_copy_(0, penalties.rows, penalized)
    if params.min_p is not None or params.filter_groups:
        logits.masked_fill_(logits < filter_cutoffs(logits, params)[:, None], -torch.inf)
    return logits


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Return (penalized, vocab) logits with repetition, then frequency and presence penalties.

    Repetition divides positive logits and multiplies negative ones, for tokens of prompt and
    output; the other two subtract, for tokens of the output alone.

    Source: CTRL (Keskar et al. 2019) for repetition, OpenAI's API for the others, as in vLLM.
    """
    counts = _count(penalties.output_tokens, logits)
    is_in_output = counts > 0
    is_seen = is_in_output | (_count(penalties.prompt_tokens, logits) > 0)
    factor = torch.where(is_seen, penalties.repetition, 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - penalties.frequency * counts - penalties.presence * is_in_output


def _count(places: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    # Integers, so that the order of additions changes nothing.
    counts = torch.zeros(logits.numel(), dtype=torch.int32, device=logits.device)
    counts.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
    return counts.view(logits.shape)


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

    A few float32 steps lower, so that a token exactly there stays whatever rounding did to it.
    """
    largest = logits.amax(dim=-1)
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

    top_k keeps the k likeliest tokens and those equal to the k-th. top_p keeps, of these, a token
    while those likelier than it have less than p of their common probability: so the token that
    crosses p stays, and at least one does.

    Args:
        logits: (rows, vocab) float32.
        temperatures: (rows,) float32.
        top_k: (rows,) int64, 1..num_candidates.
        top_p: (rows,) float64; inf = off; None = off in all rows.
        num_candidates: at least the largest top_k.
        lower_bounds: (rows,) float32: logits below these are out already (min_p).
    """
    candidates = largest_logits(logits, num_candidates)  # (rows, num_candidates), descending
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
    """Return log_softmax of raw logits where it is asked for, never of the whole vocabulary.

    Args:
        logits: (rows, vocab), any float dtype: before temperature, penalties and filters.
        token_ids: (rows,) of the tokens that were drawn, or that the prompt has there.
        num_top: k, at most vocab counts; -1 = the whole vocabulary. The largest of the rows'
            wishes: a row that asks for fewer takes its first ones.
    """
    logits = logits.float()
    vocab_size = logits.shape[-1]
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None].long())
    top = logits.topk(vocab_size if num_top < 0 else min(num_top, vocab_size), dim=-1)
    return Logprobs(
        logprobs=(chosen - normalizers)[:, 0],
        ranks=(logits > chosen).sum(dim=-1) + 1,
        top_token_ids=top.indices,
        top_logprobs=top.values - normalizers,
    )


def _depends_on_tokens(row: LogitsRow) -> bool:
    waits_for_min_tokens = row.num_output_tokens + 1 < row.params.min_tokens
    return row.params.has_penalties or bool(row.bad_words) or waits_for_min_tokens


def _filters(params: Sequence[SamplingParams], device: torch.device | str) -> torch.Tensor:
    """Return (rows, 3) float64: temperature, top_p and min_p, or their neutral values."""
    values = [
        [p.temperature, p.top_p if p.top_p < 1.0 else torch.inf, p.min_p]
        if p.has_filters
        else [1.0, torch.inf, 0.0]
        for p in params
    ]
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)


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
    """Split the rows with top_k or top_p by whether a few candidates tell, or only a sort."""
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
    rows: Sequence[LogitsRow], indices: list[int], vocab_size: int, device: torch.device | str
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
        prompt_tokens=_histories([rows[i].prompt_token_ids for i in indices], vocab_size, device),
        output_tokens=_histories([rows[i].output_token_ids for i in indices], vocab_size, device),
    )


def _histories(
    histories: Sequence[Sequence[int] | np.ndarray], vocab_size: int, device: torch.device | str
) -> torch.Tensor:
    """Return every token of every history as (its row * vocab_size + its id), flat."""
    arrays = [np.asarray(history, dtype=np.int64) for history in histories]
    flat = np.concatenate([array + i * vocab_size for i, array in enumerate(arrays)])
    return torch.from_numpy(flat).to(device, non_blocking=True)


def _places(
    entries: Sequence[tuple[int, int]], vocab_size: int, device: torch.device | str
) -> torch.Tensor | None:
    places = [row * vocab_size + token_id for row, token_id in entries if token_id < vocab_size]
    return _int64(places, device) if places else None


def _int64(values: Sequence[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _float32(
    values: Sequence[float] | Sequence[Sequence[float]], device: torch.device | str
) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)
