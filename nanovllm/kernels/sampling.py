"""Exact sampling by the Gumbel-max trick, with noise that depends on the request alone.

Adding independent Gumbel noise to logit / T and taking the largest score draws from softmax(logit /
T) exactly. The noise of a vocabulary id is a pure function of (the row's seed, the token's
position, the id): Philox4x32-10 turns the key (seed) and the counter (id // 4, position, 0, 0) into
four words, and id % 4 picks one. So a request draws the same noise in any batch, order, graph or
rank count, each vocabulary shard finds its own winner, and CPU and GPU agree on every integer. A
temperature below 1e-5 means greedy: the score is the logit.

From word to noise, so that both devices hold the same floats: v = ((word >> 9) + 1/2) / 2**23 is
exact in float32 and never 0 or 1; E = -log(1 - v) ~ Exp(1) lies in [6e-8, 17]; score = logit / T -
log E. Scores are kept in bits and without a constant, log2(e) · logit / T - log2(-log2(1 - v)),
because that is what the hardware computes; only their order means something. The grid of v bends
the odds of a token only where its probability is below about 1e-7.

Sources: Gumbel 1954; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011 (Philox).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.compiling import row_stride
from nanovllm.kernels.optional_triton import tl, triton

GREEDY_BELOW = 1e-5  # temperatures under this take the largest logit
LOG2_E = 1.4426950408889634

# Programs a launch should have (an H200 runs some 2,000 of them at once), and the most splits of
# a row.
TARGET_PROGRAMS = 2048
MAX_SPLITS = 256
BLOCK_COUNTERS = 256
NUM_WARPS = 4

_MASK = 0xFFFFFFFF
_ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_COUNTERS_PER_PASS = 1 << 16  # of the torch reference: its temporaries stay in a CPU's cache


class Sampled(NamedTuple):
    """The winner of each row, over the vocabulary shard that was given."""

    values: torch.Tensor  # (rows,) float32: winning score, comparable between shards of one row
    token_ids: torch.Tensor  # (rows,) int32: winning id, vocab_start included


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int = 0,
    *,
    num_splits: int | None = None,
) -> Sampled:
    """Draw one token a row, greedy and sampled rows in one launch.

    The highest score wins, the lowest id on ties; -inf is never drawn unless a whole row is. One
    pass over the logits, one Philox call for four ids, rows split over programs whose winners a
    second, tiny launch combines. Deterministic: the splits change nothing.

    Args:
        logits: (rows, vocab), float32, float16 or bfloat16; rows may be strided, elements of a row
            are adjacent.
        temperatures: (rows,) float32, >= 0.
        seeds: (rows,) int64, the Philox key.
        positions: (rows,) int32 or int64, position of the token to be drawn.
        vocab_start: id of the first column, where the logits are one shard of the vocabulary.
        num_splits: programs a row; None picks by the number of rows.

    Raises:
        ValueError: shapes or strides don't fit together.
    """
    _check(logits, temperatures, seeds, positions)
    num_rows, vocab = logits.shape
    first_counter = vocab_start // 4
    num_counters = triton.cdiv(vocab_start + vocab, 4) - first_counter
    wanted = num_splits or max(1, TARGET_PROGRAMS // max(num_rows, 1))
    num_tiles = triton.cdiv(num_counters, BLOCK_COUNTERS)
    tiles_per_split = triton.cdiv(num_tiles, min(wanted, num_tiles, MAX_SPLITS))
    splits = triton.cdiv(num_tiles, tiles_per_split)

    values = torch.empty((num_rows, splits), dtype=torch.float32, device=logits.device)
    token_ids = torch.empty((num_rows, splits), dtype=torch.int32, device=logits.device)
    if num_rows:
        sample_kernel[(splits, num_rows)](
            logits, temperatures, seeds, positions, values, token_ids,
            row_stride(logits), vocab, vocab_start, tiles_per_split,
            BLOCK_COUNTERS=BLOCK_COUNTERS, GREEDY_BELOW=GREEDY_BELOW,
            FAST_LOG2=logits.is_cuda, num_warps=NUM_WARPS,
        )  # fmt: skip
    if splits == 1:
        return Sampled(values.view(-1), token_ids.view(-1))
    return _combine(values, token_ids)


def sample_torch(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int = 0,
) -> Sampled:
    """`sample` in plain torch, with the same integers; greedy rows cost no noise."""
    _check(logits, temperatures, seeds, positions)
    num_rows, vocab = logits.shape
    values = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    is_sampled = temperatures >= GREEDY_BELOW
    for rows in _row_groups(~is_sampled, num_rows):
        values[rows], token_ids[rows] = _best(logits[rows].float(), vocab_start)
    for rows in _row_groups(is_sampled, max(1, _COUNTERS_PER_PASS * 4 // max(vocab, 1))):
        words = philox_uint32(seeds[rows], positions[rows], vocab, vocab_start)
        scale = LOG2_E / temperatures[rows].float().unsqueeze(1)
        scores = scores_of(logits[rows].float() * scale, words)
        values[rows], token_ids[rows] = _best(scores, vocab_start)
    return Sampled(values, token_ids)


def combine_shards(values: torch.Tensor, token_ids: torch.Tensor) -> Sampled:
    """Return the winner of each row over vocabulary shards: highest value, then lowest id.

    Args:
        values, token_ids: (shards, rows), what `sample` returned on each shard, in any order.
    """
    best = values.amax(dim=0)
    never = torch.iinfo(token_ids.dtype).max
    winners = torch.where(values == best, token_ids, never).amin(dim=0)
    return Sampled(best, winners)


def scores_of(scaled_logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Add the noise that 32-bit `words` stand for to log2(e) · logit / T; both (rows, vocab),
    float32 out.
    """
    v = ((words >> 9).float() + 0.5) * 2.0**-23
    return scaled_logits - torch.log2(torch.log1p(-v) * -LOG2_E)


def philox_uint32(
    seeds: torch.Tensor, positions: torch.Tensor, num_ids: int, first_id: int = 0
) -> torch.Tensor:
    """Return the 32-bit word of each vocabulary id in [first_id, first_id + num_ids).

    Args:
        seeds, positions: (rows,) integers.

    Returns:
        (rows, num_ids) int64, values in [0, 2**32).
    """
    first_counter = first_id // 4
    counters = torch.arange(first_counter, (first_id + num_ids + 3) // 4, device=seeds.device)
    seeds, positions = seeds.long().unsqueeze(1), positions.long().unsqueeze(1) & _MASK
    zero = torch.zeros_like(positions)
    words = philox4x32((counters, positions, zero, zero), (seeds & _MASK, (seeds >> 32) & _MASK))
    skipped = first_id - 4 * first_counter
    return torch.stack(words, dim=-1).flatten(1)[:, skipped : skipped + num_ids]


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10: four random 32-bit words for each (counter, key), all int64 in [0, 2**32),
    broadcast together.

    The 64-bit products wrap round into negative numbers, which leaves all 64 bits right; low words
    are masked late.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _ROUND_MULTIPLIERS[0], c2 * _ROUND_MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ (c1 ^ k0)) & _MASK, product1
        c2, c3 = ((product0 >> 32) ^ (c3 ^ k1)) & _MASK, product0
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def _row_groups(chosen: torch.Tensor, rows_per_group: int) -> list[torch.Tensor]:
    """Indices of the chosen rows, in groups; none if no row is chosen."""
    rows = chosen.nonzero().view(-1)
    return list(rows.split(rows_per_group)) if rows.numel() else []


def _best(scores: torch.Tensor, vocab_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest score of each row and its lowest id (`max` returns the first of equals)."""
    values, columns = scores.max(dim=-1)
    return values, (columns + vocab_start).int()


# Rows of a packed buffer may start anywhere, and the number of splits follows the batch: neither
# may compile the kernel anew.
@triton.jit(do_not_specialize=["temperatures_ptr", "seeds_ptr", "positions_ptr", "tiles_per_split"])
def sample_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    values_ptr,
    token_ids_ptr,
    row_stride,
    vocab,
    vocab_start,
    tiles_per_split,
    BLOCK_COUNTERS: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """One program for one split of one row.

    Each lane keeps its best counter, that is four ids; which of the four it was is worked out once
    at the end, which saves a sixth of the arithmetic.
    """
    split = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    is_sampled = temperature >= GREEDY_BELOW
    scale = 1.0
    if is_sampled:
        scale = 1.4426950408889634 / temperature
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int32)

    logits_ptr += row.to(tl.int64) * row_stride
    first_counter = vocab_start // 4 + split * tiles_per_split * BLOCK_COUNTERS
    lanes = tl.arange(0, BLOCK_COUNTERS)
    best = tl.full((BLOCK_COUNTERS,), float("-inf"), tl.float32)
    # Where everything is -inf, the split's lowest counter wins.
    best_counter = tl.full((BLOCK_COUNTERS,), 0, tl.int32) + first_counter
    counters = first_counter + lanes
    # Not a range: Triton 3.6's interpreter can't count to a runtime number under numpy 2.4.
    tile = 0
    while tile < tiles_per_split:
        score0, score1, score2, score3 = _scores(
            logits_ptr, counters, vocab, vocab_start, is_sampled, scale, seed, position, FAST_LOG2
        )
        score = tl.maximum(tl.maximum(score0, score1), tl.maximum(score2, score3))
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_counter = tl.where(is_better, counters, best_counter)
        counters += BLOCK_COUNTERS
        tile += 1

    value = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == value, best_counter, 2147483647), axis=0)
    score0, score1, score2, score3 = _scores(
        logits_ptr, tl.full((1,), 0, tl.int32) + winner, vocab, vocab_start,
        is_sampled, scale, seed, position, FAST_LOG2,
    )  # fmt: skip
    word = tl.where(score1 > score0, 1, 0)
    score = tl.maximum(score0, score1)
    word = tl.where(score2 > score, 2, word)
    score = tl.maximum(score, score2)
    word = tl.where(score3 > score, 3, word)
    target = row * tl.num_programs(0) + split + tl.arange(0, 1)
    tl.store(values_ptr + target, tl.maximum(score, score3))
    tl.store(token_ids_ptr + target, tl.maximum(winner * 4 + word, vocab_start))


@triton.jit
def _scores(
    logits_ptr,
    counters,
    vocab,
    vocab_start,
    is_sampled,
    scale,
    seed,
    position,
    FAST_LOG2: tl.constexpr,
):
    """Scores of the four ids of each counter; -inf outside of the vocabulary."""
    columns = counters[:, None] * 4 + tl.arange(0, 4)[None, :] - vocab_start
    mask = (columns >= 0) & (columns < vocab)
    logits = tl.load(logits_ptr + columns, mask=mask, other=float("-inf"))
    even, odd = tl.split(tl.reshape(logits, (counters.shape[0], 2, 2)))
    logit0, logit2 = tl.split(even)
    logit1, logit3 = tl.split(odd)
    score0, score1 = logit0.to(tl.float32), logit1.to(tl.float32)
    score2, score3 = logit2.to(tl.float32), logit3.to(tl.float32)
    if is_sampled:
        word0, word1, word2, word3 = _philox4x32(seed, counters, position)
        score0 = score0 * scale + _gumbel_bits(word0, FAST_LOG2)
        score1 = score1 * scale + _gumbel_bits(word1, FAST_LOG2)
        score2 = score2 * scale + _gumbel_bits(word2, FAST_LOG2)
        score3 = score3 * scale + _gumbel_bits(word3, FAST_LOG2)
    return score0, score1, score2, score3


@triton.jit
def _philox4x32(seed, counters, position):
    """Philox4x32-10 of (counter, position, 0, 0), as `philox4x32`.

    tl.philox takes the high and the low half of each product by a multiplication of its own; a
    64-bit product is one instruction for both.
    """
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = counters.to(tl.uint32, bitcast=True)
    c2 = c0 * 0
    c1 = c2 + position.to(tl.uint32, bitcast=True)
    c3 = c2
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _gumbel_bits(word, FAST_LOG2: tl.constexpr):
    """-log2(-log2(1 - v)) for the v of a 32-bit word.

    The hardware's log2 has an absolute error of 2**-22, too coarse for 1 - v near 1, which is where
    winners are: there three terms of the series are exact to 1e-6.
    """
    one_to_two = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)  # 1 + (word >> 9) / 2**23
    v = one_to_two - (1.0 - 5.9604644775390625e-08)
    series = v * (-1.4426950408889634 - v * (0.7213475204444817 + v * 0.48089834696298783))
    bits = tl.where(v < 0.015625, series, _log2(1.0 - v, FAST_LOG2))
    return -_log2(tl.abs(bits), FAST_LOG2)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """log2 by one hardware instruction, where tl.log2 takes some 25; not in the interpreter."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


def _combine(values: torch.Tensor, token_ids: torch.Tensor) -> Sampled:
    """Return the winner over the (rows, splits) winners of `sample_kernel`."""
    num_rows, splits = values.shape
    best = torch.empty(num_rows, dtype=torch.float32, device=values.device)
    winners = torch.empty(num_rows, dtype=torch.int32, device=values.device)
    if num_rows:
        combine_kernel[(num_rows,)](
            values, token_ids, best, winners, splits, BLOCK_SPLITS=MAX_SPLITS, num_warps=1
        )
    return Sampled(best, winners)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    values_ptr, token_ids_ptr, best_ptr, winners_ptr, splits, BLOCK_SPLITS: tl.constexpr
):
    """One program a row: highest value, then lowest id."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_SPLITS)
    mask = lanes < splits
    values = tl.load(values_ptr + row * splits + lanes, mask=mask, other=float("-inf"))
    token_ids = tl.load(token_ids_ptr + row * splits + lanes, mask=mask, other=2147483647)
    best = tl.max(values, axis=0)
    winner = tl.min(tl.where(values == best, token_ids, 2147483647), axis=0)
    tl.store(best_ptr + row, best)
    tl.store(winners_ptr + row, winner)


def _check(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {tuple(logits.shape)} with strides {logits.stride()}, "
            "expected (rows, vocab) with adjacent elements"
        )
    columns = {"temperatures": temperatures, "seeds": seeds, "positions": positions}
    for name, column in columns.items():
        if column.shape != logits.shape[:1] or not column.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(column.shape)}, expected contiguous ({logits.shape[0]},)"
            )
    if temperatures.dtype != torch.float32 or seeds.dtype != torch.int64:
        raise ValueError(
            f"temperatures are {temperatures.dtype} and seeds {seeds.dtype}, "
            "expected float32 and int64"
        )
