"""The three tasks of the bundled model: what is asked and what the right answer is.

The single source of problems for training, tests and `example.py`. Whether a problem is *held out*
is decided by its text alone, so the training stream can skip held-out problems and everyone else
can draw only those: no problem of a test is ever trained on, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

TASKS = ("sum", "reverse", "lookup")
LOWEST_TERM, HIGHEST_TERM = 100, 999
SHORTEST_WORD, LONGEST_WORD = 4, 10
# An entry with its separator is 7 byte tokens: lists of 601 to 874 tokens, prompts of 623 to 896.
FEWEST_ENTRIES, MOST_ENTRIES = 86, 125
KEYS = tuple(first + second for first in ascii_lowercase for second in ascii_lowercase)
LOWEST_VALUE, HIGHEST_VALUE = 100, 999

_HELD_OUT_ONE_IN = 16


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
    """Whether a prompt with this first line (the whole of it, or its list) is kept from training.

    A cryptographic hash, not a CRC: a linear one would keep whole digit patterns from training.
    """
    return hashlib.sha256(first_line).digest()[0] % _HELD_OUT_ONE_IN == 0


def sum_problem(a: int, b: int) -> Problem:
    return Problem("sum", f"{a}+{b}=?", str(a + b))


def reverse_problem(word: str) -> Problem:
    return Problem("reverse", f"reverse {word}", word[::-1])


def lookup_problem(entries: Sequence[tuple[str, int]], key: str) -> Problem:
    """Ask for the entry of `key` in a list of (key, value) pairs with different keys."""
    listing = " ".join(f"{name}={value}" for name, value in entries)
    return Problem("lookup", f"{listing}\n{key}?", f"{key}={dict(entries)[key]}")


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
    entries = [(key, rng.randint(LOWEST_VALUE, HIGHEST_VALUE)) for key in keys]
    return lookup_problem(entries, rng.choice(keys))
