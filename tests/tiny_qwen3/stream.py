"""The endless training stream: the problems of `problems.py` as token ids, drawn on the device.

Every row is computed position by position from random numbers, with no loop and no work of the
host, so a CUDA graph can hold the drawing together with the training step. A row is exactly what
the chat template makes of the same conversation (a test compares them); held-out rows are blanked.
A lookup row goes on asking about its list until it is full: many graded answers for one list.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from tiny_qwen3.problems import (
    HIGHEST_TERM,
    KEYS,
    LONGEST_WORD,
    LOWEST_TERM,
    PAIRS,
    SHORTEST_WORD,
    VALUES,
    held_out_rows,
)
from torch.nn.functional import pad

# The vocabulary: the bytes themselves, all pairs of capitals, the role words, special tokens.
ROLES = ("user", "assistant", "system")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_PAIR = 256
USER, ASSISTANT, SYSTEM = range(FIRST_PAIR + len(PAIRS), FIRST_PAIR + len(PAIRS) + len(ROLES))
END_OF_TEXT, IM_START, IM_END = range(SYSTEM + 1, SYSTEM + 1 + len(SPECIAL_TOKENS))
NUM_TOKENS = IM_END + 1

NOT_GRADED = -100  # the label that cross_entropy ignores
SHORT_LENGTH = 40  # tokens that hold one sum or reversal
# <|im_start|>user\n ... <|im_end|>\n<|im_start|>assistant\n ... <|im_end|>\n
OPENING = (IM_START, USER, ord("\n"))
REPLY = (IM_END, ord("\n"), IM_START, ASSISTANT, ord("\n"))
ENTRY_LENGTH = 4  # key, "=", value, separator
_KEY, _VALUE = -1, -2  # places in a turn that differ from turn to turn
_TURN = (_KEY, ord("?"), *REPLY, _VALUE, IM_END, ord("\n"), *OPENING)
_TURN_END = _TURN.index(_VALUE) + 2  # tokens up to and with the answer's <|im_end|>


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows and, for each position, the token to predict there."""

    ids: torch.Tensor  # (rows, tokens) int64
    labels: torch.Tensor  # (rows, tokens) int64; NOT_GRADED outside answers and their <|im_end|>


@dataclass(frozen=True, slots=True)
class ListShape:
    """Lookup rows of one batch; each row has its own random number of entries."""

    num_rows: int
    row_length: int  # tokens: the list and as many questions as fit after it
    fewest_entries: int
    most_entries: int


def sum_rows(num_rows: int, device: torch.device) -> Rows:
    """Sums of two terms, one a row."""
    a, b = torch.randint(LOWEST_TERM, HIGHEST_TERM + 1, (2, num_rows), device=device)
    # Tens that add up to nine pass the carry on: rare at random, and the last thing to be learned.
    nines = b // 100 * 100 + (9 - a // 10 % 10) * 10 + b % 10
    b = torch.where(torch.rand(num_rows, device=device) < 0.3, nines, b)
    prompts = torch.cat(
        [_digits(a, 3), _repeat("+", a), _digits(b, 3), _repeat("=?", a)], 1
    )  # (rows, 9)
    three, four = _digits(a + b, 3), _digits(a + b, 4)
    long = (a + b >= 1000)[:, None]
    answers = torch.where(long, four, pad(three, (0, 1)))
    lengths = torch.full_like(a, prompts.shape[1])
    return _short_rows(prompts, lengths, answers, 3 + long[:, 0].long())


def reverse_rows(num_rows: int, device: torch.device) -> Rows:
    """Reversals of random words, one a row."""
    words = torch.randint(ord("a"), ord("z") + 1, (num_rows, LONGEST_WORD), device=device)
    lengths = torch.randint(SHORTEST_WORD, LONGEST_WORD + 1, (num_rows,), device=device)
    mirrored = lengths[:, None] - 1 - torch.arange(LONGEST_WORD, device=device)
    answers = words.gather(1, mirrored.clamp(min=0))
    command = _repeat("reverse ", lengths)
    return _short_rows(torch.cat([command, words], 1), command.shape[1] + lengths, answers, lengths)


def lookup_rows(shape: ListShape, device: torch.device) -> Rows:
    """Conversations that open with a list and a question, then ask on until the row is full."""
    rows, most = shape.num_rows, shape.most_entries
    keys = torch.rand(rows, len(KEYS), device=device).argsort(1)[:, :most]
    values = torch.randint(len(VALUES), (rows, most), device=device) + len(KEYS)
    num_entries = torch.randint(shape.fewest_entries, most + 1, (rows,), device=device)
    blank = held_out_rows(_list_bytes(keys, values), num_entries * 6 - 1)  # "AB=YZ", separators
    at = torch.arange(shape.row_length, device=device).expand(rows, -1) - len(OPENING)
    in_turns = at - ENTRY_LENGTH * num_entries[:, None]  # negative before the first question
    turn, place = in_turns.clamp(min=0) // len(_TURN), in_turns.clamp(min=0) % len(_TURN)
    asked = torch.randint(2**30, at.shape, device=device) % num_entries[:, None]
    entry = torch.where(in_turns < 0, at.clamp(min=0) // ENTRY_LENGTH, asked.gather(1, turn))
    key = FIRST_PAIR + keys.gather(1, entry)
    value = FIRST_PAIR + values.gather(1, entry)

    listed = _constant((_KEY, ord("="), _VALUE, ord(" ")), device)[at % ENTRY_LENGTH]
    listed = listed.masked_fill(in_turns == -1, ord("\n"))
    ids = torch.where(in_turns < 0, listed, _constant(_TURN, device)[place])
    ids = torch.where(at < 0, _constant(OPENING, device)[at.clamp(max=-1)], ids)
    ids = torch.where(ids == _KEY, key, torch.where(ids == _VALUE, value, ids))
    turns = (shape.row_length - len(OPENING) - ENTRY_LENGTH * num_entries) // len(_TURN)
    used = ENTRY_LENGTH * num_entries + len(_TURN) * turns  # the last turn opens no other
    graded = (in_turns >= 0) & (place >= _TURN_END - 2) & (place < _TURN_END)
    return _finished(ids, graded, used.masked_fill(blank, 0))


def stacked(parts: list[Rows]) -> Rows:
    return Rows(torch.cat([part.ids for part in parts]), torch.cat([part.labels for part in parts]))


def _list_bytes(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The bytes of "AB=YZ AC=XY ...", a separator after each entry: (rows, 6 * entries)."""
    letters = len(PAIRS) // 26
    columns = [keys // letters, keys % letters, values // letters, values % letters]
    first, second, third, fourth = (column + ord("A") for column in columns)
    equals, space = torch.full_like(keys, ord("=")), torch.full_like(keys, ord(" "))
    return torch.stack([first, second, equals, third, fourth, space], 2).flatten(1)


def _short_rows(
    prompts: torch.Tensor,
    prompt_lengths: torch.Tensor,
    answers: torch.Tensor,
    lengths: torch.Tensor,
) -> Rows:
    """One question and its answer in each row, both padded on the right: (rows, SHORT_LENGTH)."""
    device = prompts.device
    at = torch.arange(SHORT_LENGTH, device=device).expand(len(prompts), -1) - len(OPENING)
    in_reply = at - prompt_lengths[:, None]
    in_answer = in_reply - len(REPLY)
    ids = prompts.gather(1, at.clamp(0, prompts.shape[1] - 1))
    ids = torch.where(at < 0, _constant(OPENING, device)[at.clamp(max=-1)], ids)
    ids = torch.where(in_reply < 0, ids, _constant(REPLY, device)[in_reply.clamp(0, 4)])
    ids = torch.where(
        in_answer < 0, ids, answers.gather(1, in_answer.clamp(0, answers.shape[1] - 1))
    )
    ids = ids.masked_fill(in_answer == lengths[:, None], IM_END)
    blank = held_out_rows(prompts, prompt_lengths)
    used = len(OPENING) + prompt_lengths + len(REPLY) + lengths + 1
    return _finished(ids, in_answer >= 0, used.masked_fill(blank, 0))


def _finished(ids: torch.Tensor, graded: torch.Tensor, used: torch.Tensor) -> Rows:
    """Fill up with <|endoftext|>, and shift the graded tokens to where they are predicted."""
    unused = torch.arange(ids.shape[1], device=ids.device) >= used[:, None]
    labels = ids.masked_fill(unused | ~graded, NOT_GRADED).roll(-1, 1)
    labels[:, -1] = NOT_GRADED
    return Rows(ids.masked_fill(unused, END_OF_TEXT), labels)


def _digits(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Decimal digits as bytes: (rows, count)."""
    places = _constant((1000, 100, 10, 1)[-count:], numbers.device)
    return numbers[:, None] // places % 10 + ord("0")


def _repeat(text: str, rows: torch.Tensor) -> torch.Tensor:
    """The bytes of `text` in each of `len(rows)` rows."""
    return _constant(tuple(text.encode()), rows.device).expand(len(rows), -1)


@cache
def _constant(ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Kept: a copy from the host could not be part of a CUDA graph, the warm-up before it can.
    return torch.tensor(ids, device=device)
