"""A batch survives its wire form, and its flat form is what a plain loop would write."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.engine.batch import (
    HEADER_WORDS,
    ScheduledBatch,
    apply_new_blocks,
    flatten,
    new_row,
    slots_of,
)
from nanovllm.kernels import row_state

FIELDS = (
    "rows",
    "starts",
    "num_tokens",
    "prompt_tokens",
    "new_rows",
    "new_blocks",
    "row_params",
)
words = st.integers(-(2**31), 2**31 - 1)


def int32(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@st.composite
def batches(draw: st.DrawFn) -> ScheduledBatch:
    """Any batch with consistent lengths; the values don't matter to the wire."""
    num_tokens = draw(st.lists(st.integers(1, 5), max_size=4))
    num_lanes = len(num_tokens) + draw(st.integers(0, 4))

    def array(length: int) -> np.ndarray:
        return int32(draw(st.lists(words, min_size=length, max_size=length)))

    return ScheduledBatch(
        rows=array(num_lanes),
        starts=array(num_lanes),
        num_tokens=int32(num_tokens),
        prompt_tokens=array(sum(num_tokens)),
        new_rows=array(4 * draw(st.integers(0, 3))).reshape(-1, 4),
        new_blocks=array(3 * draw(st.integers(0, 3))).reshape(-1, 3),
        row_params=array(draw(st.integers(0, 5))),
    )


@given(batches())
def test_wire_carries_every_field(batch: ScheduledBatch) -> None:
    wire = batch.to_wire()
    assert wire.dtype == np.int32
    assert wire.ndim == 1
    back = ScheduledBatch.from_wire(wire)
    for name in FIELDS:
        sent, received = getattr(batch, name), getattr(back, name)
        assert received.dtype == np.int32
        assert np.array_equal(sent, received), name
        assert sent.shape == received.shape


@given(batches(), st.integers(-3, 3).filter(bool))
def test_wire_of_wrong_length_is_refused(batch: ScheduledBatch, surplus: int) -> None:
    wire = batch.to_wire()
    wrong = wire[:surplus] if surplus < 0 else np.append(wire, wire[:surplus])
    with pytest.raises((AssertionError, ValueError)):
        ScheduledBatch.from_wire(wrong)


def test_decode_lane_travels_as_two_words() -> None:
    """No token and no block table: 256 decode lanes are about 2 kB, whatever their contexts."""
    lanes = np.arange(256, dtype=np.int32)
    batch = ScheduledBatch(rows=lanes, starts=lanes + 1000, num_tokens=int32([]))
    assert len(batch.to_wire()) == HEADER_WORDS + 2 * 256


def test_wire_header_is_the_one_that_kernels_read() -> None:
    assert HEADER_WORDS == row_state.HEADER_WORDS


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1e-6, 100.0])
def test_new_row_record_keeps_seed_and_temperature(seed: int, temperature: float) -> None:
    row, temperature_bits, low, high = int32(new_row(7, temperature, seed)).tolist()
    assert row == 7
    assert np.int32(temperature_bits).view(np.float32) == np.float32(temperature)
    assert (low & 0xFFFFFFFF) | (high << 32) == seed


def test_flatten_by_hand() -> None:
    """A chunk of three tokens from position 3 in row 1, then decode lanes in rows 0 and 2."""
    batch = ScheduledBatch(
        rows=int32([1, 0, 2]),
        starts=int32([3, 5, 0]),
        num_tokens=int32([3]),
        prompt_tokens=int32([7, 8, 9]),
        new_blocks=int32([[0, 0, 4], [0, 1, 2], [1, 0, 9], [1, 1, 5], [2, 0, 1]]),
    )
    block_tables = np.full((3, 2), -1, dtype=np.int32)
    apply_new_blocks(batch, block_tables)
    assert block_tables.tolist() == [[4, 2], [9, 5], [1, -1]]
    flat = flatten(batch, block_tables, block_size=4)
    assert flat.positions.tolist() == [3, 4, 5, 5, 0]
    assert flat.slot_mapping.tolist() == [9 * 4 + 3, 5 * 4, 5 * 4 + 1, 2 * 4 + 1, 4]
    assert flat.cu_seqlens_q.tolist() == [0, 3, 4, 5]
    assert flat.context_lens.tolist() == [6, 6, 1]
    assert batch.total_num_tokens == 5


@given(st.data())
def test_flatten_equals_a_plain_loop(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4, 16, 256]))
    num_tokens = data.draw(st.lists(st.integers(1, 20), max_size=4))
    num_decodes = data.draw(st.integers(0 if num_tokens else 1, 4))
    num_lanes = len(num_tokens) + num_decodes
    starts = data.draw(st.lists(st.integers(0, 40), min_size=num_lanes, max_size=num_lanes))
    rows = data.draw(st.permutations(range(num_lanes)))
    lengths = num_tokens + [1] * num_decodes
    tables = np.random.default_rng(0).permutation(num_lanes * 64).reshape(num_lanes, 64)
    tables = tables.astype(np.int32)
    batch = ScheduledBatch(
        rows=int32(rows),
        starts=int32(starts),
        num_tokens=int32(num_tokens),
        prompt_tokens=np.zeros(sum(num_tokens), dtype=np.int32),
    )
    positions, slots, ends = [], [], [0]
    for row, start, length in zip(rows, starts, lengths, strict=True):
        for position in range(start, start + length):
            block = int(tables[row][position // block_size])
            positions.append(position)
            slots.append(block * block_size + position % block_size)
        ends.append(len(positions))
    flat = flatten(batch, tables, block_size)
    assert flat.positions.tolist() == positions
    assert flat.slot_mapping.tolist() == slots
    assert flat.cu_seqlens_q.tolist() == ends
    assert flat.context_lens.tolist() == [s + n for s, n in zip(starts, lengths, strict=True)]
    for array in flat:
        assert array.dtype == np.int32


def test_slots_of_walks_through_blocks() -> None:
    tables = int32([[3, 0], [2, 1]])
    slots = slots_of(tables, int32([0, 0, 1]), int32([1, 2, 3]), block_size=2)
    assert slots.tolist() == [7, 0, 3]
