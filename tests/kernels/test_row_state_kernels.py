"""Row state: the kernels do to the device's memory of sequences what their torch references do."""

import numpy as np
import pytest
import torch
from compiling import CAPABILITIES, DEVICE, compile_for, needs_compiler, needs_launch

from nanovllm.engine.batch import HEADER_WORDS, ScheduledBatch, flatten, new_row
from nanovllm.kernels.row_state import (
    RowState,
    StepBuffers,
    StepShape,
    apply_updates,
    apply_updates_kernel,
    apply_updates_torch,
    commit_tokens,
    commit_tokens_kernel,
    commit_tokens_torch,
    fetch_wire,
    fetch_wire_kernel,
    step_inputs,
    step_inputs_kernel,
    step_inputs_torch,
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


@needs_launch
@pytest.mark.parametrize("counts", [(3, 0, 0), (3, 1, 1), (0, 0, 0), (9, 129, 600), (300, 0, 300)])
def test_updates_are_entered_as_by_the_reference(counts: tuple[int, int, int]) -> None:
    wire = wire_of(*counts)
    expected, state = random_state("cpu"), random_state(DEVICE)
    apply_updates_torch(torch.from_numpy(wire), expected)
    apply_updates(on_device(wire), state)
    for name in RowState.__slots__:
        assert torch.equal(getattr(state, name).cpu(), getattr(expected, name)), name


def mixed_wire_of(prompt_lens: list[int], num_decodes: int) -> np.ndarray:
    """A batch of prompt chunks, decode lanes and a few updates."""
    rng = np.random.default_rng(len(prompt_lens))
    num_lanes = len(prompt_lens) + num_decodes
    batch = ScheduledBatch(
        rows=rng.permutation(MAX_NUM_SEQS)[:num_lanes].astype(np.int32),
        starts=rng.integers(0, 30, num_lanes).astype(np.int32),
        num_tokens=np.array(prompt_lens, dtype=np.int32),
        prompt_tokens=rng.integers(0, 999, sum(prompt_lens)).astype(np.int32),
        new_rows=np.array([new_row(299, 0.5, 7)] * 3, dtype=np.int32),
        new_blocks=np.array([(299, 0, 1)] * 5, dtype=np.int32),
    )
    return batch.to_wire()


SHAPES = {
    "one lane": ([], 1, StepShape(0, 0, 1)),
    "padded": ([], 3, StepShape(0, 0, 8)),
    "nothing": ([], 0, StepShape(0, 0, 2)),
    "many lanes": ([], 65, StepShape(0, 0, 96)),
    "prompts, padded": ([5, 131, 1], 4, StepShape(16, 144, 8)),
    "prompts, exact": ([100, 28], 5, StepShape(2, 128, 5)),
    "prompts alone": ([7], 0, StepShape(4, 300, 3)),
    "no prompt in a mixed step": ([], 3, StepShape(4, 12, 5)),
    "more prompts than are read at once": ([2] * 40, 2, StepShape(50, 99, 3)),
}


@needs_launch
@pytest.mark.parametrize("name", SHAPES)
def test_inputs_of_a_step_equal_the_references(name: str) -> None:
    """Padding too; block tables as far as a lane's context reaches."""
    prompt_lens, num_decodes, shape = SHAPES[name]
    wire = mixed_wire_of(prompt_lens, num_decodes) if prompt_lens else wire_of(num_decodes, 0, 0)
    expected, inputs = (
        StepBuffers.allocate(
            shape.num_tokens + 9, shape.num_lanes + 9, MAX_BLOCKS, torch.device(device)
        )
        for device in ("cpu", DEVICE)
    )
    for buffers in (expected, inputs):
        for field in StepBuffers.__slots__:
            getattr(buffers, field).fill_(77)  # of a step before
    state = random_state("cpu")
    step_inputs_torch(torch.from_numpy(wire), state, expected.of(shape), shape, BLOCK_SIZE)
    step_inputs(on_device(wire), random_state(DEVICE), inputs.of(shape), shape, BLOCK_SIZE)
    for field in StepBuffers.__slots__:
        if field != "block_tables":
            assert torch.equal(getattr(inputs, field).cpu(), getattr(expected, field)), field
    for place, context_len in enumerate(expected.context_lens[: shape.num_lanes].tolist()):
        num_blocks = -(-context_len // BLOCK_SIZE)
        table, right = inputs.block_tables[place].cpu(), expected.block_tables[place]
        assert torch.equal(table[:num_blocks], right[:num_blocks])


def test_inputs_of_a_mixed_step_are_those_of_its_batch_laid_out() -> None:
    """`flatten` says what each token is; here the gaps that a shape leaves come between."""
    wire = mixed_wire_of([5, 3], 2)
    batch, state, shape = ScheduledBatch.from_wire(wire), random_state("cpu"), StepShape(4, 10, 3)
    inputs = StepBuffers.allocate(13, 7, MAX_BLOCKS, torch.device("cpu")).of(shape)
    step_inputs_torch(torch.from_numpy(wire), state, inputs, shape, BLOCK_SIZE)
    flat = flatten(batch, state.block_tables.numpy(), BLOCK_SIZE)
    places = [*range(8), 10, 11]
    assert inputs.positions[places].tolist() == flat.positions.tolist()
    assert inputs.slot_mapping[places].tolist() == flat.slot_mapping.tolist()
    assert inputs.slot_mapping[[8, 9, 12]].tolist() == [-1, -1, -1]
    assert inputs.input_ids[:8].tolist() == batch.prompt_tokens.tolist()
    assert inputs.input_ids[[10, 11]].tolist() == state.last_tokens[batch.rows[2:]].tolist()
    assert inputs.cu_seqlens_q.tolist() == [0, 5, 8, 8, 8]
    assert inputs.context_lens[[0, 1, 4, 5]].tolist() == flat.context_lens.tolist()
    assert inputs.context_lens[[2, 3, 6]].tolist() == [0, 0, 0]
    assert inputs.rows.tolist() == [*batch.rows, *[MAX_NUM_SEQS] * 3]
    assert inputs.ends.tolist() == [*flat.context_lens, 0, 0, 0]
    assert inputs.logits_indices.tolist() == [4, 7, 10, 11, 0, 0, 0]


def pinned(*shape: int) -> torch.Tensor:
    """The host's side of a slot; interpreted kernels share all memory with it."""
    return torch.zeros(shape, dtype=torch.int32, pin_memory=DEVICE == "cuda")


@needs_launch
@pytest.mark.parametrize("num_new_blocks", [0, 300, 2000])
def test_wire_is_fetched_from_the_slot_whose_turn_it_is(num_new_blocks: int) -> None:
    """As far as it reaches: longer ones take a second round."""
    wire = wire_of(200, 0, num_new_blocks)
    wires, fetched = pinned(3, 7000), torch.zeros(7000, dtype=torch.int32, device=DEVICE)
    wires[1, : len(wire)] = torch.from_numpy(wire)
    fetch_wire(wires, torch.tensor([1], dtype=torch.int32, device=DEVICE), fetched)
    assert fetched[: len(wire)].tolist() == wire.tolist()


@needs_launch
def test_committed_tokens_are_their_rows_newest_and_the_hosts() -> None:
    rng = np.random.default_rng(0)
    drawn = torch.from_numpy(rng.integers(0, 999, 20).astype(np.int32))
    rows = torch.from_numpy(rng.permutation(MAX_NUM_SEQS)[:20])
    found = []
    for device, commit in (("cpu", commit_tokens_torch), (DEVICE, commit_tokens)):
        state, tokens = random_state(device), torch.zeros(30, dtype=torch.int32, device=device)
        slots = pinned(3, 30)
        turn = torch.full((1,), 2, dtype=torch.int32, device=device)
        for _ in range(2):
            commit(drawn.to(device), rows.to(device), state, tokens, slots, turn)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append((state.last_tokens.cpu(), tokens.cpu(), slots.clone(), turn.cpu()))
    for ours, right in zip(*found, strict=True):
        assert torch.equal(ours, right)
    _, _, slots, turn = found[1]
    assert turn.tolist() == [1]
    assert slots[:, :20].tolist() == [drawn.tolist(), [0] * 20, drawn.tolist()]


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
    outputs = ("input_ids", "positions", "slot_mapping", "context_lens", "block_tables_out")
    bounds = ("cu_seqlens_q", "cu_seqlens_k", "ends", "logits_indices")
    numbers = ("table_stride", "table_out_stride", "spare_row")
    compile_for(
        capability,
        step_inputs_kernel,
        {
            "wire_ptr": "*i32",
            "last_tokens_ptr": "*i32",
            **state,
            **{f"{name}_ptr": "*i32" for name in (*outputs, *bounds)},
            "rows_out_ptr": "*i64",
            "temperatures_out_ptr": "*fp32",
            "seeds_out_ptr": "*i64",
            **dict.fromkeys((*numbers, "num_prefill_places", "num_prefill_tokens"), "i32"),
        },
        {
            "HEADER_WORDS": HEADER_WORDS,
            "BLOCK_SIZE": 256,
            "BLOCK_COLUMNS": 64,
            "BLOCK_TOKENS": 128,
            "BLOCK_LANES": 16,
        },
        num_warps=1,
    )
    compile_for(
        capability,
        fetch_wire_kernel,
        {"wires_ptr": "*i32", "turn_ptr": "*i32", "wire_ptr": "*i32", "slot_words": "i32"},
        {"HEADER_WORDS": HEADER_WORDS, "BLOCK_WORDS": 1024},
        num_warps=8,
    )
    pointers = ("drawn_ptr", "last_tokens_ptr", "tokens_ptr", "slots_ptr", "turn_ptr")
    compile_for(
        capability,
        commit_tokens_kernel,
        {
            **dict.fromkeys(pointers, "*i32"),
            "rows_ptr": "*i64",
            **dict.fromkeys(("num_lanes", "slot_words", "num_slots"), "i32"),
        },
        {"BLOCK_WORDS": 1024},
        num_warps=8,
    )
