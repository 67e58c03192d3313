"""The three tasks of the bundled model: what is asked and what the right answer is.

The single source of problems for training, tests and `example.py`. Whether a problem is *held out*
is decided by its text alone, so the training stream can skip held-out problems and everyone else
can draw only those: no problem of a test is ever trained on, whatever the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase

import torch

TASKS = ("sum", "reverse", "lookup")
LOWEST_TERM, HIGHEST_TERM = 100, 999
SHORTEST_WORD, LONGEST_WORD = 4, 10
# An entry with its separator is 4 tokens: lists of 600 to 900 tokens.
FEWEST_ENTRIES, MOST_ENTRIES = 151, 225
PAIRS = tuple(first + second for first in ascii_uppercase for second in ascii_uppercase)
# Keys never occur as values: the key of a question is found once in its list.
KEYS, VALUES = PAIRS[: len(PAIRS) // 2], PAIRS[len(PAIRS) // 2 :]

_HELD_OUT_ONE_IN = 16
_LOW_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Problem:
    """A user message and the one right answer to it."""

    task: str  # one of TASKS
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """True if training never sees this problem, nor another question about the same list."""
        return is_held_out(self.prompt.split("\n")[0].encode())


def is_held_out(first_line: bytes) -> bool:
    """Whether a prompt with this first line (all of it, or its list) is kept from training."""
    codes = torch.tensor([list(first_line)])
    return bool(held_out_rows(codes, torch.tensor([len(first_line)])))


def held_out_rows(lines: torch.Tensor, num_bytes: torch.Tensor) -> torch.Tensor:
    """`is_held_out` for many first lines at once, on any device.

    Args:
        lines: (rows, bytes) int64, padded on the right with anything.
        num_bytes: (rows,) bytes of each line.

    Returns:
        (rows,) bool.

    A sum of mixed (position, byte) codes, mixed again: a sum of plain bytes or a CRC would keep
    whole digit patterns from training.
    """
    positions = torch.arange(lines.shape[1], device=lines.device)
    mixed = _mix(positions * 256 + lines).masked_fill(positions >= num_bytes[:, None], 0)
    return _mix(mixed.sum(1) & _LOW_32_BITS) % _HELD_OUT_ONE_IN == 0


def _mix(code: torch.Tensor) -> torch.Tensor:
    """Scramble 32-bit codes held in int64; the factors are small enough that nothing overflows."""
    code = ((code ^ (code >> 15)) * 0x2C1B3C6D) & _LOW_32_BITS
    code = ((code ^ (code >> 12)) * 0x297A2D39) & _LOW_32_BITS
    return code ^ (code >> 15)


def sum_problem(a: int, b: int) -> Problem:
    return Problem("sum", f"{a}+{b}=?", str(a + b))


def reverse_problem(word: str) -> Problem:
    return Problem("reverse", f"reverse {word}", word[::-1])


def lookup_problem(entries: Sequence[tuple[str, str]], key: str) -> Problem:
    """Ask for the value of `key` in a list of (key, value) pairs with different keys."""
    listing = " ".join(f"{name}={value}" for name, value in entries)
    return Problem("lookup", f"{listing}\n{key}?", dict(entries)[key])


def held_out_problems(task: str, count: int, seed: int) -> list[Problem]:
    """Return `count` different held-out problems of `task`, the same ones for the same seed.

    Raises:
        ValueError: `task` is not one of TASKS.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    found: dict[str, Problem] = {}
    for problem in _random_problems(task, random.Random(f"{task} {seed}")):
        if len(found) == count:
            break
        if problem.held_out:
            found[problem.prompt] = problem
    return list(found.values())


def _random_problems(task: str, rng: random.Random) -> Iterator[Problem]:
    draw = {"sum": _random_sum, "reverse": _random_reverse, "lookup": _random_lookup}[task]
    while True:
        yield draw(rng)


def _random_sum(rng: random.Random) -> Problem:
    return sum_problem(*(rng.randint(LOWEST_TERM, HIGHEST_TERM) for _ in range(2)))


def _random_reverse(rng: random.Random) -> Problem:
    length = rng.randint(SHORTEST_WORD, LONGEST_WORD)
    return reverse_problem("".join(rng.choices(ascii_lowercase, k=length)))


def _random_lookup(rng: random.Random) -> Problem:
    keys = rng.sample(KEYS, rng.randint(FEWEST_ENTRIES, MOST_ENTRIES))
    entries = list(zip(keys, rng.choices(VALUES, k=len(keys)), strict=True))
    return lookup_problem(entries, rng.choice(keys))
