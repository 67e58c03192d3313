"""The endless training stream: the problems of `problems.py` as token ids, made in bulk by numpy.

Rows of one group share a layout: a group is a concatenation of constant and random columns. Every
row is exactly what the chat template makes of the same conversation (a test compares them), and
held-out problems are replaced by others. A lookup row asks many questions about one list, which
gives ten graded answers for the price of one long prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tiny_qwen3.problems import (
    HIGHEST_TERM,
    HIGHEST_VALUE,
    KEYS,
    LONGEST_WORD,
    LOWEST_TERM,
    LOWEST_VALUE,
    SHORTEST_WORD,
    is_held_out,
)

# Token ids 0..255 are the bytes themselves.
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
NOT_GRADED = -100  # the label that cross_entropy ignores
SHORT_LENGTH = 48  # tokens in a row of one sum or reversal
LONG_LENGTH = 1152  # tokens in a row of one list and its questions


@dataclass(frozen=True, slots=True)
class Group:
    """Lookup rows of one batch whose lists have the same random number of entries."""

    num_rows: int
    fewest_entries: int
    most_entries: int


@dataclass(frozen=True, slots=True)
class Mix:
    """What one training batch is made of."""

    num_sums: int
    num_reversals_per_length: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows and, for each position, the token to predict there."""

    ids: np.ndarray  # (rows, tokens) int16
    labels: np.ndarray  # (rows, tokens) int16; NOT_GRADED outside answers and their <|im_end|>


def batches(mix: Mix, seed: tuple[int, ...]) -> Iterator[tuple[Rows, Rows]]:
    """Yield (short rows, long rows) for ever; the same seed gives the same stream."""
    rng = np.random.default_rng(seed)
    while True:
        short = [*sum_rows(rng, mix.num_sums)]
        for length in range(SHORTEST_WORD, LONGEST_WORD + 1):
            short.append(reverse_rows(rng, mix.num_reversals_per_length, length))
        yield _stack(short), _stack([lookup_rows(rng, group) for group in mix.groups])


def sum_rows(rng: np.random.Generator, num_rows: int) -> Iterator[Rows]:
    """Sums whose answer has three digits, then those with four."""
    a, b = rng.integers(LOWEST_TERM, HIGHEST_TERM + 1, (2, num_rows))
    # Tens that add up to nine pass the carry on: rare at random, and the last thing to be learned.
    nines = b // 100 * 100 + (9 - a // 10 % 10) * 10 + b % 10
    b = np.where(rng.random(num_rows) < 0.3, nines, b)
    prompts = _join(_digits(a, 3), _text("+"), _digits(b, 3), _text("=?"))
    kept = _trainable(prompts)
    prompts, totals = prompts[kept], (a + b)[kept]
    for num_digits, rows in ((3, totals < 1000), (4, totals >= 1000)):
        yield _short_rows(prompts[rows], _digits(totals[rows], num_digits))


def reverse_rows(rng: np.random.Generator, num_rows: int, length: int) -> Rows:
    """Reversals of random words of `length` letters."""
    words = rng.integers(ord("a"), ord("z") + 1, (num_rows, length))
    prompts = _join(_text("reverse "), words)
    kept = _trainable(prompts)
    return _short_rows(prompts[kept], words[kept][:, ::-1])


def lookup_rows(rng: np.random.Generator, group: Group) -> Rows:
    """Conversations that open with a list and a question, then ask on until the row is full."""
    num_rows = group.num_rows
    num_entries = int(rng.integers(group.fewest_entries, group.most_entries + 1))
    keys = rng.random((num_rows, len(KEYS))).argsort(axis=1)[:, :num_entries]
    values = rng.integers(LOWEST_VALUE, HIGHEST_VALUE + 1, (num_rows, num_entries))
    entries = np.concatenate(  # (rows, entries, 6): "ab=123"
        [_KEY_BYTES[keys], np.full((*keys.shape, 1), ord("=")), _digits(values, 3)], axis=2
    )
    spaced = np.concatenate([entries, np.full((*keys.shape, 1), ord(" "))], axis=2)
    lists = spaced.reshape(num_rows, -1)[:, :-1]
    kept = _trainable(lists)
    if len(kept) == 0:
        return lookup_rows(rng, group)
    return _ask(rng, lists[kept], entries[kept])


def _ask(rng: np.random.Generator, lists: np.ndarray, entries: np.ndarray) -> Rows:
    """Fill the rows with questions about their lists, in an order that can't be guessed."""
    num_rows, num_entries, _ = entries.shape
    opening = _join(_USER, lists, _text("\n"))
    room = LONG_LENGTH - opening.shape[1] + len(_USER)
    tokens, graded = [opening], [np.zeros(opening.shape, bool)]
    for turn in range(room // _TURN_LENGTH):
        answer = entries[np.arange(num_rows), rng.integers(num_entries, size=num_rows)]
        question = _join(_USER if turn else [], answer[:, :2], _text("?"), _ASSISTANT)
        tokens += [question, _join(answer, [IM_END]), _join(np.zeros((num_rows, 0)), _text("\n"))]
        graded += [np.full(part.shape, at == 1) for at, part in enumerate(tokens[-3:])]
    return _pad(np.concatenate(tokens, 1), np.concatenate(graded, 1), LONG_LENGTH)


def _short_rows(prompts: np.ndarray, answers: np.ndarray) -> Rows:
    question, answer = _join(_USER, prompts, _ASSISTANT), _join(answers, [IM_END])
    graded = np.zeros((len(prompts), question.shape[1] + answer.shape[1]), bool)
    graded[:, question.shape[1] :] = True
    return _pad(np.concatenate([question, answer], 1), graded, SHORT_LENGTH)


def _pad(tokens: np.ndarray, graded: np.ndarray, length: int) -> Rows:
    """Fill up with <|endoftext|>, and shift the graded tokens to where they are predicted."""
    num_rows, used = tokens.shape
    ids = np.full((num_rows, length), END_OF_TEXT, np.int16)
    labels = np.full((num_rows, length), NOT_GRADED, np.int16)
    ids[:, :used] = tokens
    labels[:, : used - 1] = np.where(graded, tokens, NOT_GRADED)[:, 1:]
    return Rows(ids, labels)


def _trainable(first_lines: np.ndarray) -> np.ndarray:
    """Indices of as many rows, held-out ones replaced by others; none if all are held out."""
    lines = first_lines.astype(np.uint8)
    kept = np.array([row for row, line in enumerate(lines) if not is_held_out(line.tobytes())], int)
    return np.resize(kept, len(lines)) if len(kept) else kept


def _stack(parts: list[Rows]) -> Rows:
    return Rows(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


def _join(*columns: np.ndarray | list[int]) -> np.ndarray:
    """Concatenate (rows, n) blocks and lists of token ids that are the same in every row."""
    num_rows = next(len(block) for block in columns if isinstance(block, np.ndarray))
    blocks = [
        block if isinstance(block, np.ndarray) else np.tile(block, (num_rows, 1))
        for block in columns
    ]
    return np.concatenate(blocks, axis=1).astype(np.int16)


def _digits(numbers: np.ndarray, count: int) -> np.ndarray:
    """Decimal digits as bytes, one more axis of size `count`."""
    return numbers[..., None] // 10 ** np.arange(count)[::-1] % 10 + ord("0")


def _text(text: str) -> list[int]:
    return list(text.encode())


_KEY_BYTES = np.array([_text(key) for key in KEYS])
_USER = [IM_START, *_text("user\n")]
_ASSISTANT = [IM_END, *_text("\n"), IM_START, *_text("assistant\n")]
_TURN_LENGTH = len(_USER) + len("ab?") + len(_ASSISTANT) + len("ab=123") + 1 + len("\n")
