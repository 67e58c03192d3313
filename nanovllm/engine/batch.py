"""One step's decision as a value: what the scheduler tells every rank.

`ScheduledBatch` holds no tensor and no Sequence. It is a list of *lanes*, prefill lanes first, then
decode lanes; each lane names a *row*, the place where the ranks keep what they know of a running
sequence between steps: its newest token, temperature, seed and block table. So a decode lane is
two integers, its token being on the device already, and a prefill lane carries only the tokens that
this step runs. The whole batch travels as one int32 array (`to_wire`, `from_wire`): on one GPU it
is written to pinned memory, which the device reads, between processes the same bytes go through
shared memory, and nothing is pickled.

The rest of the module is arithmetic: how many prompt tokens ride in a *mixed* step, of prompt
chunks and decode lanes, and how lanes turn into flat tokens (`flatten`, `slots_of`). A
*slot* is the place of one token in the KV cache, block * block_size + offset; a slot_mapping is the
list of slots that a step's new keys and values are stored to.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

HEADER_WORDS = 6  # of the wire; the kernels of `row_state` read the same layout
NEW_ROW_WORDS = 4
NEW_BLOCK_WORDS = 3

# A mixed step may be captured, and a captured step has room for a fixed number of prompts.
MAX_MIXED_PREFILLS = 16
_MIN_PROMPT_SHARE = 4  # a quarter of a mixed step is for prompts, however many sequences decode
_NUM_MIXED_SHAPES = 16  # decode lanes are counted in sixteenths of a mixed step


def _empty(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """What one step runs. All arrays are int32; a lane is one sequence in this step.

    Tokens are returned in lane order. Every lane yields one, drawn from the logits of its last
    scheduled position; the scheduler drops that of a prompt that isn't through yet.
    """

    rows: np.ndarray  # (lanes,) row of each lane; prefill lanes first
    starts: np.ndarray  # (lanes,) position of the first token that the lane runs
    num_tokens: np.ndarray  # (prefill lanes,) tokens that the lane runs; a decode lane runs one
    prompt_tokens: np.ndarray = field(default_factory=lambda: _empty(0))  # of prefill lanes, flat
    # (n, 4) rows given to another sequence: row, float32 temperature as bits, lower and upper 32
    # bits of the seed
    new_rows: np.ndarray = field(default_factory=lambda: _empty(0, NEW_ROW_WORDS))
    # (n, 3) what block tables gained: row, index in the row's table, block
    new_blocks: np.ndarray = field(default_factory=lambda: _empty(0, NEW_BLOCK_WORDS))
    # (words,) parameters of new rows that need more than temperature and seed; see `row_params`
    row_params: np.ndarray = field(default_factory=lambda: _empty(0))

    @property
    def num_prefills(self) -> int:
        return len(self.num_tokens)

    @property
    def num_decodes(self) -> int:
        return len(self.rows) - len(self.num_tokens)

    @property
    def num_lanes(self) -> int:
        return len(self.rows)

    @property
    def total_num_tokens(self) -> int:
        """Tokens that the network runs this step."""
        return len(self.prompt_tokens) + self.num_decodes

    def to_wire(self) -> np.ndarray:
        """The batch as one flat int32 array."""
        header = np.array(
            [
                self.num_prefills,
                self.num_decodes,
                len(self.new_rows),
                len(self.new_blocks),
                len(self.prompt_tokens),
                len(self.row_params),
            ],
            dtype=np.int32,
        )
        return np.concatenate(
            [
                header,
                self.rows,
                self.starts,
                self.num_tokens,
                self.new_rows.ravel(),
                self.new_blocks.ravel(),
                self.prompt_tokens,
                self.row_params,
            ]
        )

    @classmethod
    def from_wire(cls, wire: np.ndarray) -> "ScheduledBatch":
        """Read a batch back; the fields are views of `wire`."""
        num_prefills, num_decodes, num_new_rows, num_new_blocks, num_prompt_tokens, num_params = (
            wire[:HEADER_WORDS].tolist()
        )
        num_lanes = num_prefills + num_decodes
        lengths = (
            num_lanes,
            num_lanes,
            num_prefills,
            num_new_rows * NEW_ROW_WORDS,
            num_new_blocks * NEW_BLOCK_WORDS,
            num_prompt_tokens,
            num_params,
        )
        end = HEADER_WORDS + sum(lengths)
        assert end == len(wire), f"a wire of {len(wire)} words, its header says {end}"
        ends = np.cumsum(lengths) + HEADER_WORDS
        rows, starts, num_tokens, new_rows, new_blocks, prompt_tokens, row_params = (
            wire[end - length : end] for end, length in zip(ends, lengths, strict=True)
        )
        return cls(
            rows=rows,
            starts=starts,
            num_tokens=num_tokens,
            new_rows=new_rows.reshape(-1, NEW_ROW_WORDS),
            new_blocks=new_blocks.reshape(-1, NEW_BLOCK_WORDS),
            prompt_tokens=prompt_tokens,
            row_params=row_params,
        )


class FlatBatch(NamedTuple):
    """A batch laid out token by token, lanes back to back. All arrays are int32."""

    positions: np.ndarray  # (tokens,) of each token in its sequence
    slot_mapping: np.ndarray  # (tokens,) cache slot of each token
    cu_seqlens_q: np.ndarray  # (lanes + 1,) where each lane's tokens begin
    cu_seqlens_k: np.ndarray  # (prefill lanes + 1,) the same for the keys that prompts see
    context_lens: np.ndarray  # (lanes,) tokens that the lane's last query may see, itself included


def new_row(row: int, temperature: float, seed: int) -> tuple[int, int, int, int]:
    """A record of `ScheduledBatch.new_rows`."""
    temperature_bits = int(np.float32(temperature).view(np.int32))
    low, high = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32).view(np.int32).tolist()
    return row, temperature_bits, low, high


def flatten(batch: ScheduledBatch, block_tables: np.ndarray, block_size: int) -> FlatBatch:
    """Lay a batch out token by token.

    Args:
        batch: The step.
        block_tables: (rows, max_blocks) int32, the step's new blocks already entered.
        block_size: Tokens in a block.
    """
    num_tokens = np.ones(batch.num_lanes, dtype=np.int32)
    num_tokens[: batch.num_prefills] = batch.num_tokens
    cu_seqlens_q = np.zeros(batch.num_lanes + 1, dtype=np.int32)
    np.cumsum(num_tokens, out=cu_seqlens_q[1:])
    lanes = np.repeat(np.arange(batch.num_lanes), num_tokens)
    positions = np.arange(len(lanes), dtype=np.int32) + (batch.starts - cu_seqlens_q[:-1])[lanes]
    slot_mapping = slots_of(block_tables, batch.rows[lanes], positions, block_size)
    context_lens = batch.starts + num_tokens
    cu_seqlens_k = np.zeros(batch.num_prefills + 1, dtype=np.int32)
    np.cumsum(context_lens[: batch.num_prefills], out=cu_seqlens_k[1:])
    return FlatBatch(positions, slot_mapping, cu_seqlens_q, cu_seqlens_k, context_lens)


def slots_of(
    block_tables: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Cache slots of tokens, each given by its row and its position in the sequence."""
    blocks = block_tables[rows, positions // block_size]
    return blocks * block_size + positions % block_size


def mixed_granularity(max_num_mixed_tokens: int) -> int:
    """Spacing of mixed steps' shapes, in decode lanes."""
    return max(1, max_num_mixed_tokens // _NUM_MIXED_SHAPES)


def num_mixed_prompt_tokens(num_decodes: int, max_num_mixed_tokens: int) -> int:
    """Prompt tokens that ride with so many decode lanes.

    What the lanes, rounded up so that few shapes need capturing, leave of a mixed step; but at
    least a quarter of it, so that prompts never starve.
    """
    granularity = mixed_granularity(max_num_mixed_tokens)
    num_rounded = -(-num_decodes // granularity) * granularity
    return max(max_num_mixed_tokens - num_rounded, max_num_mixed_tokens // _MIN_PROMPT_SHARE, 1)


def apply_new_blocks(batch: ScheduledBatch, block_tables: np.ndarray) -> None:
    """Enter what the block tables gained into (rows, max_blocks) `block_tables`."""
    rows, indices, blocks = batch.new_blocks.T
    block_tables[rows, indices] = blocks
