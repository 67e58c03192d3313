"""Row state: the kernels do to the device's memory of sequences what their torch references do."""

import numpy as np
import pytest
import torch
from compiling import CAPABILITIES, DEVICE, compile_for, needs_compiler, needs_launch

from nanovllm.engine.batch import HEADER_WORDS, ScheduledBatch, new_row
from nanovllm.kernels import row_state
from nanovllm.kernels.row_state import (
    DecodeInputs,
    RowState,
    apply_updates,
    apply_updates_kernel,
    apply_updates_torch,
    decode_inputs,
    decode_inputs_kernel,
    decode_inputs_torch,
)

BLOCK_SIZE = 4
MAX_BLOCKS = 70  # more than the kernel copies at once
MAX_NUM_SEQS = 300


def random_state(device: str) -> RowState:
    rng = np.random.default_rng(0)
    state = RowState.allocate(MAX_NUM_SEQS, MAX_BLOCKS, torch.device(device))
    state.last_tokens.copy_(torch.from_numpy(rng.integers(0, 999, MAX_NUM_SEQS + 1)))
    state.temperatures.copy_(torch.from_numpy(rng.random(MAX_NUM_SEQS + 1)))
    state.seeds.copy_(torch.from_numpy(rng.integers(0, 2**63 - 1, MAX_NUM_SEQS + 1)))
    blocks = rng.integers(0, 5000, (MAX_NUM_SEQS + 1, MAX_BLOCKS))
    state.block_tables.copy_(torch.from_numpy(blocks))
    return state


def wire_of(num_decodes: int, num_new_rows: int, num_new_blocks: int) -> np.ndarray:
    """A batch of decode lanes, a prefill lane where rows are new, and updates."""
    rng = np.random.default_rng(num_decodes)
    num_prefills = min(num_new_rows, 1)
    rows = rng.permutation(MAX_NUM_SEQS)[: num_prefills + num_decodes]
    starts = rng.integers(0, MAX_BLOCKS * BLOCK_SIZE, len(rows))
    updated = rng.permutation(MAX_NUM_SEQS * MAX_BLOCKS)[:num_new_blocks]
    new_blocks = [(i // MAX_BLOCKS, i % MAX_BLOCKS, int(rng.integers(5000))) for i in updated]
    seeds = rng.integers(0, 2**63 - 1, num_new_rows).tolist()
    new_rows = [new_row(i, 0.1 + i / 7, seed) for i, seed in enumerate(seeds)]
    batch = ScheduledBatch(
        rows=rows.astype(np.int32),
        starts=starts.astype(np.int32),
        num_tokens=np.full(num_prefills, 2, dtype=np.int32),
        prompt_tokens=np.full(2 * num_prefills, 7, dtype=np.int32),
        new_rows=np.array(new_rows, dtype=np.int32).reshape(-1, 4),
        new_blocks=np.array(new_blocks, dtype=np.int32).reshape(-1, 3),
    )
    return batch.to_wire()


def on_device(wire: np.ndarray) -> torch.Tensor:
    """The wire, and behind it what an earlier, longer step left."""
    return torch.from_numpy(np.concatenate((wire, np.full(50, 987_654, np.int32)))).to(DEVICE)


def test_header_is_the_batchs() -> None:
    assert row_state.HEADER_WORDS == HEADER_WORDS


@needs_launch
@pytest.mark.parametrize("counts", [(3, 0, 0), (3, 1, 1), (0, 0, 0), (9, 129, 600), (300, 0, 300)])
def test_updates_are_entered_as_by_the_reference(counts: tuple[int, int, int]) -> None:
    wire = wire_of(*counts)
    expected, state = random_state("cpu"), random_state(DEVICE)
    apply_updates_torch(torch.from_numpy(wire), expected)
    apply_updates(on_device(wire), state)
    for name in RowState.__slots__:
        assert torch.equal(getattr(state, name).cpu(), getattr(expected, name)), name


@needs_launch
@pytest.mark.parametrize(("num_decodes", "num_lanes"), [(1, 1), (3, 8), (5, 5), (0, 2), (65, 96)])
def test_inputs_of_decode_lanes_equal_the_references(num_decodes: int, num_lanes: int) -> None:
    """Padded lanes too; block tables as far as a lane's context reaches."""
    wire = wire_of(num_decodes, 0, 0)
    expected, inputs = (
        DecodeInputs.allocate(num_lanes, MAX_BLOCKS, torch.device(device))
        for device in ("cpu", DEVICE)
    )
    decode_inputs_torch(torch.from_numpy(wire), random_state("cpu"), expected, BLOCK_SIZE)
    decode_inputs(on_device(wire), random_state(DEVICE), inputs, BLOCK_SIZE)
    for name in DecodeInputs.__slots__:
        if name != "block_tables":
            assert torch.equal(getattr(inputs, name).cpu(), getattr(expected, name)), name
    for lane, context_len in enumerate(expected.context_lens.tolist()):
        num_blocks = -(-context_len // BLOCK_SIZE)
        table, right = inputs.block_tables[lane].cpu(), expected.block_tables[lane]
        assert torch.equal(table[:num_blocks], right[:num_blocks])


def test_padded_lanes_use_the_spare_row_and_store_nothing() -> None:
    inputs = DecodeInputs.allocate(4, MAX_BLOCKS, torch.device("cpu"))
    wire = torch.from_numpy(wire_of(2, 0, 0))
    decode_inputs_torch(wire, random_state("cpu"), inputs, BLOCK_SIZE)
    assert inputs.rows[2:].tolist() == [MAX_NUM_SEQS, MAX_NUM_SEQS]
    assert inputs.slot_mapping[2:].tolist() == [-1, -1]
    assert inputs.context_lens[2:].tolist() == [0, 0]


@needs_compiler
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_row_state_kernels_compile_for_gpus_that_are_not_there(capability: int) -> None:
    tables = {"block_tables_ptr": "*i32"}
    state = {"temperatures_ptr": "*fp32", "seeds_ptr": "*i64", **tables}
    compile_for(
        capability,
        apply_updates_kernel,
        {"wire_ptr": "*i32", **state, "table_stride": "i32"},
        {"HEADER_WORDS": HEADER_WORDS, "BLOCK_UPDATES": 128},
        num_warps=4,
    )
    outputs = ("input_ids_ptr", "positions_ptr", "slot_mapping_ptr", "context_lens_ptr")
    compile_for(
        capability,
        decode_inputs_kernel,
        {
            "wire_ptr": "*i32",
            "last_tokens_ptr": "*i32",
            **state,
            "rows_out_ptr": "*i64",
            **dict.fromkeys(outputs, "*i32"),
            "temperatures_out_ptr": "*fp32",
            "seeds_out_ptr": "*i64",
            "block_tables_out_ptr": "*i32",
            "table_stride": "i32",
            "table_out_stride": "i32",
            "spare_row": "i32",
        },
        {"HEADER_WORDS": HEADER_WORDS, "BLOCK_SIZE": 256, "BLOCK_COLUMNS": 64},
        num_warps=1,
    )
