"""Log probabilities on their way from the ranks to the user.

A step reports them as one int32 array, like everything that crosses processes. It consists of
groups of rows that ask for equally many tokens; a group is a header, its rows' lanes, positions and
numbers (floats as their bits). `LogprobLog` collects one sample's or one prompt's rows and turns
them into vLLM's dicts when asked.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nanovllm.outputs import Logprob, logprob_entry

FIXED_COLUMNS = 3  # of a row: token id, bits of its logprob, its rank; then k ids and k logprobs


class LogprobRow(NamedTuple):
    """What is reported about one token."""

    lane: int  # of the step
    position: int  # of the token in its sequence: below num_prompt_tokens for one of the prompt
    values: np.ndarray  # (3 + 2k,) int32


class LogprobGroup(NamedTuple):
    """Rows of a step with the same k."""

    lanes: np.ndarray  # (rows,)
    positions: np.ndarray  # (rows,)
    num_top: int  # k

    @property
    def num_values(self) -> int:
        return len(self.lanes) * (FIXED_COLUMNS + 2 * self.num_top)


def join_groups(groups: list[LogprobGroup], values: np.ndarray) -> np.ndarray:
    """One int32 array of a step's groups and their numbers, which lie in `values` back to back."""
    parts: list[np.ndarray] = []
    start = 0
    for group in groups:
        header = np.array([len(group.lanes), group.num_top], dtype=np.int32)
        end = start + group.num_values
        parts += [header, group.lanes, group.positions, values[start:end]]
        start = end
    return np.concatenate(parts, dtype=np.int32, casting="same_kind")


def read_rows(words: np.ndarray) -> Iterator[LogprobRow]:
    """Read what `join_groups` wrote."""
    start = 0
    while start < len(words):
        num_rows, num_top = words[start : start + 2].tolist()
        lanes_start = start + 2
        positions_start = lanes_start + num_rows
        values_start = positions_start + num_rows
        num_columns = FIXED_COLUMNS + 2 * num_top
        start = values_start + num_rows * num_columns
        lanes = words[lanes_start:positions_start].tolist()
        positions = words[positions_start:values_start].tolist()
        values = words[values_start:start].reshape(num_rows, num_columns)
        yield from map(LogprobRow, lanes, positions, values)


class LogprobLog:
    """Rows of consecutive tokens, as they come.

    Invariant: row i is that of position `first_position` + i; others are passed over, so a token
    that is computed again after a preemption isn't reported twice.
    """

    __slots__ = ("_decode_token", "_entries", "_first_position", "_values", "total")

    def __init__(self, first_position: int, decode_token: Callable[[int], str] | None) -> None:
        self.total = 0.0  # sum of the tokens' own logprobs
        self._first_position = first_position
        self._decode_token = decode_token  # None: report no text
        self._values: list[np.ndarray] = []
        self._entries: list[dict[int, Logprob]] = []  # of the first rows, as far as asked

    def add(self, row: LogprobRow) -> None:
        """Take the row of the next token."""
        if row.position == self._first_position + len(self._values):
            self._values.append(row.values)
            self.total += float(row.values[1:2].view(np.float32)[0])

    def entries(self) -> list[dict[int, Logprob]]:
        """One dict a token, its own logprob first."""
        for values in self._values[len(self._entries) :]:
            self._entries.append(entry_of(values, self._decode_token))
        return self._entries


def entry_of(values: np.ndarray, decode_token: Callable[[int], str] | None) -> dict[int, Logprob]:
    """A row's dict, the token itself first."""
    num_top = (len(values) - FIXED_COLUMNS) // 2
    floats = values.view(np.float32)
    token_id, rank = int(values[0]), int(values[2])
    top_token_ids = values[FIXED_COLUMNS : FIXED_COLUMNS + num_top].tolist()
    top_logprobs = floats[FIXED_COLUMNS + num_top :].tolist()
    own = Logprob(float(floats[1]), rank)
    return logprob_entry(token_id, own, top_token_ids, top_logprobs, decode_token)
