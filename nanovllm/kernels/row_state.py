"""What a rank remembers of running sequences between steps, by row, and how a step reads it.

A decode step would be bound by the host if it uploaded every token and block table anew. So they
stay on the device: the newest token of a row is written there by the sampler and read there by the
next step, and only what the scheduler changed is uploaded. `apply_updates` enters the changes,
`decode_inputs` turns rows into the flat inputs of a decode step, both straight from the wire form
of `engine.batch.ScheduledBatch`, so that one captured graph serves every batch of its size.

The last row is a spare for the padded lanes of a graph: what they sample lands there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels.optional_triton import tl, triton

HEADER_WORDS = 6  # of the wire: prefills, decodes, new rows, new blocks, prompt tokens, parameters
BLOCK_UPDATES = 128
BLOCK_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class RowState:
    """The device's memory of running sequences; row max_num_seqs is the spare."""

    last_tokens: torch.Tensor  # (rows + 1,) int32 newest token, not stored in the KV cache yet
    temperatures: torch.Tensor  # (rows + 1,) float32
    seeds: torch.Tensor  # (rows + 1,) int64 key of the row's noise
    block_tables: torch.Tensor  # (rows + 1, max_blocks) int32

    @classmethod
    def allocate(cls, max_num_seqs: int, max_blocks: int, device: torch.device) -> RowState:
        """State for `max_num_seqs` rows of at most `max_blocks` blocks."""
        rows = max_num_seqs + 1
        return cls(
            last_tokens=torch.zeros(rows, dtype=torch.int32, device=device),
            temperatures=torch.zeros(rows, dtype=torch.float32, device=device),
            seeds=torch.zeros(rows, dtype=torch.int64, device=device),
            block_tables=torch.zeros(rows, max_blocks, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step, lane by lane, at fixed addresses; all but two are int32."""

    rows: torch.Tensor  # (lanes,) int64 row of each lane; the spare one for padded lanes
    input_ids: torch.Tensor  # (lanes,)
    positions: torch.Tensor  # (lanes,)
    slot_mapping: torch.Tensor  # (lanes,) -1 for padded lanes
    context_lens: torch.Tensor  # (lanes,) 0 for padded lanes
    temperatures: torch.Tensor  # (lanes,) float32
    seeds: torch.Tensor  # (lanes,) int64
    block_tables: torch.Tensor  # (lanes, max_blocks) only columns of used blocks are written

    @classmethod
    def allocate(cls, max_lanes: int, max_blocks: int, device: torch.device) -> DecodeInputs:
        """Buffers for up to `max_lanes` lanes."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            rows=zeros(max_lanes, dtype=torch.int64),
            input_ids=zeros(max_lanes),
            positions=zeros(max_lanes),
            slot_mapping=zeros(max_lanes),
            context_lens=zeros(max_lanes),
            temperatures=zeros(max_lanes, dtype=torch.float32),
            seeds=zeros(max_lanes, dtype=torch.int64),
            block_tables=zeros(max_lanes, max_blocks),
        )

    def lanes(self, num_lanes: int) -> DecodeInputs:
        """Views of the first `num_lanes` lanes."""
        return DecodeInputs(
            rows=self.rows[:num_lanes],
            input_ids=self.input_ids[:num_lanes],
            positions=self.positions[:num_lanes],
            slot_mapping=self.slot_mapping[:num_lanes],
            context_lens=self.context_lens[:num_lanes],
            temperatures=self.temperatures[:num_lanes],
            seeds=self.seeds[:num_lanes],
            block_tables=self.block_tables[:num_lanes],
        )


def apply_updates(wire: torch.Tensor, state: RowState) -> None:
    """Enter a step's new rows and new blocks into `state`, in place.

    Args:
        wire: A ScheduledBatch in wire form, int32, on the device; words beyond its end may follow.
    """
    apply_updates_kernel[(4,)](
        wire, state.temperatures, state.seeds, state.block_tables, state.block_tables.stride(0),
        HEADER_WORDS=HEADER_WORDS, BLOCK_UPDATES=BLOCK_UPDATES,
    )  # fmt: skip


def apply_updates_torch(wire: torch.Tensor, state: RowState) -> None:
    """`apply_updates` in plain torch; reads the header on the host."""
    num_prefills, num_decodes, num_new_rows, num_new_blocks = wire[:4].tolist()
    start = HEADER_WORDS + 3 * num_prefills + 2 * num_decodes
    new_rows = wire[start : start + 4 * num_new_rows].view(-1, 4)
    start += 4 * num_new_rows
    new_blocks = wire[start : start + 3 * num_new_blocks].view(-1, 3).long()
    rows = new_rows[:, 0].long()
    state.temperatures[rows] = new_rows[:, 1].contiguous().view(torch.float32)
    state.seeds[rows] = (new_rows[:, 2].long() & 0xFFFFFFFF) | (new_rows[:, 3].long() << 32)
    state.block_tables[new_blocks[:, 0], new_blocks[:, 1]] = new_blocks[:, 2].int()


@triton.jit
def apply_updates_kernel(
    wire_ptr,
    temperatures_ptr,
    seeds_ptr,
    block_tables_ptr,
    table_stride,
    HEADER_WORDS: tl.constexpr,
    BLOCK_UPDATES: tl.constexpr,
):
    """A few programs share the updates, whose number only the wire knows."""
    offsets = tl.program_id(0) * BLOCK_UPDATES + tl.arange(0, BLOCK_UPDATES)
    step = tl.num_programs(0) * BLOCK_UPDATES
    num_new_rows = tl.load(wire_ptr + 2)
    num_new_blocks = tl.load(wire_ptr + 3)
    new_rows_ptr = wire_ptr + HEADER_WORDS + 3 * tl.load(wire_ptr) + 2 * tl.load(wire_ptr + 1)
    new_blocks_ptr = new_rows_ptr + 4 * num_new_rows
    for start in range(0, num_new_rows, step):
        i = start + offsets
        mask = i < num_new_rows
        row = tl.load(new_rows_ptr + 4 * i, mask=mask, other=0)
        temperature = tl.load(new_rows_ptr + 4 * i + 1, mask=mask, other=0)
        low = tl.load(new_rows_ptr + 4 * i + 2, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(new_rows_ptr + 4 * i + 3, mask=mask, other=0).to(tl.int64) << 32
        tl.store(temperatures_ptr + row, temperature.to(tl.float32, bitcast=True), mask=mask)
        tl.store(seeds_ptr + row, low | high, mask=mask)
    for start in range(0, num_new_blocks, step):
        i = start + offsets
        mask = i < num_new_blocks
        row = tl.load(new_blocks_ptr + 3 * i, mask=mask, other=0).to(tl.int64)
        column = tl.load(new_blocks_ptr + 3 * i + 1, mask=mask, other=0)
        block = tl.load(new_blocks_ptr + 3 * i + 2, mask=mask, other=0)
        tl.store(block_tables_ptr + row * table_stride + column, block, mask=mask)


def decode_inputs(
    wire: torch.Tensor, state: RowState, inputs: DecodeInputs, block_size: int
) -> None:
    """Write the inputs of a decode step into `inputs`, one lane each; the rest is padding.

    Args:
        wire: A batch of decode lanes only, in wire form; its updates are in `state` already.
        inputs: As many lanes as the step is padded to.
    """
    num_lanes = inputs.rows.shape[0]
    spare_row = state.last_tokens.shape[0] - 1
    decode_inputs_kernel[(num_lanes,)](
        wire, state.last_tokens, state.temperatures, state.seeds, state.block_tables,
        inputs.rows, inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.context_lens,
        inputs.temperatures, inputs.seeds, inputs.block_tables,
        state.block_tables.stride(0), inputs.block_tables.stride(0), spare_row,
        HEADER_WORDS=HEADER_WORDS, BLOCK_SIZE=block_size, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=1,
    )  # fmt: skip


def decode_inputs_torch(
    wire: torch.Tensor, state: RowState, inputs: DecodeInputs, block_size: int
) -> None:
    """`decode_inputs` in plain torch; reads the header on the host."""
    num_lanes = int(wire[1])
    rows = wire[HEADER_WORDS : HEADER_WORDS + num_lanes].long()
    starts = wire[HEADER_WORDS + num_lanes : HEADER_WORDS + 2 * num_lanes]
    blocks = state.block_tables[rows, (starts // block_size).long()]
    padded = slice(num_lanes, None)
    inputs.rows[:num_lanes], inputs.rows[padded] = rows, state.last_tokens.shape[0] - 1
    inputs.input_ids[:num_lanes], inputs.input_ids[padded] = state.last_tokens[rows], 0
    inputs.positions[:num_lanes], inputs.positions[padded] = starts, 0
    inputs.slot_mapping[:num_lanes] = blocks * block_size + starts % block_size
    inputs.slot_mapping[padded] = -1
    inputs.context_lens[:num_lanes], inputs.context_lens[padded] = starts + 1, 0
    inputs.temperatures[:num_lanes], inputs.temperatures[padded] = state.temperatures[rows], 0.0
    inputs.seeds[:num_lanes], inputs.seeds[padded] = state.seeds[rows], 0
    inputs.block_tables[:num_lanes] = state.block_tables[rows]


@triton.jit
def decode_inputs_kernel(
    wire_ptr,
    last_tokens_ptr,
    temperatures_ptr,
    seeds_ptr,
    block_tables_ptr,
    rows_out_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    temperatures_out_ptr,
    seeds_out_ptr,
    block_tables_out_ptr,
    table_stride,
    table_out_stride,
    spare_row,
    HEADER_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program a lane; it copies as many columns of the block table as its context fills."""
    lane = tl.program_id(0)
    num_lanes = tl.load(wire_ptr + 1)
    is_real = lane < num_lanes
    row = tl.load(wire_ptr + HEADER_WORDS + lane, mask=is_real, other=0)
    row = tl.where(is_real, row, spare_row).to(tl.int64)
    position = tl.load(wire_ptr + HEADER_WORDS + num_lanes + lane, mask=is_real, other=0)
    table_ptr = block_tables_ptr + row * table_stride
    block = tl.load(table_ptr + position // BLOCK_SIZE)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    token = tl.load(last_tokens_ptr + row, mask=is_real, other=0)
    context_len = tl.where(is_real, position + 1, 0)
    tl.store(rows_out_ptr + lane, row)
    tl.store(input_ids_ptr + lane, token)
    tl.store(positions_ptr + lane, position)
    tl.store(slot_mapping_ptr + lane, tl.where(is_real, slot, -1))
    tl.store(context_lens_ptr + lane, context_len)
    temperature = tl.load(temperatures_ptr + row, mask=is_real, other=0.0)
    tl.store(temperatures_out_ptr + lane, temperature)
    tl.store(seeds_out_ptr + lane, tl.load(seeds_ptr + row, mask=is_real, other=0))
    num_blocks = (context_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    table_out_ptr = block_tables_out_ptr + lane.to(tl.int64) * table_out_stride
    for start in range(0, num_blocks, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < num_blocks
        tl.store(table_out_ptr + columns, tl.load(table_ptr + columns, mask=mask), mask=mask)
