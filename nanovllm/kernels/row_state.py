"""What a rank remembers of running sequences between steps, by row, and how a step reads it.

A decode step would be bound by the host if it uploaded every token and block table anew. So they
stay on the device: the newest token of a row is written there when it is drawn and read there by
the next step, and only the scheduler's changes are sent, in the wire form of
`engine.batch.ScheduledBatch`. Four kernels frame a step, all of them inside its graph:
`fetch_wire` takes the wire from the host's pinned memory, `apply_updates` enters the changes,
`step_inputs` turns lanes into the flat inputs of the network, and `commit_tokens` leaves the tokens
with their rows and sends them to the host. So a captured step costs the host one launch.

A captured step has room for so many prompt lanes, prompt tokens and decode lanes (`StepShape`);
room that a batch doesn't use is padding. In attention a lane is numbered by its *place*: prompt
lanes and tokens begin at 0, decode lanes and tokens behind the room for prompts. In sampling, lanes
are numbered as in the batch, without gaps, the padding last.

The last row is a spare for padded lanes: what they sample lands there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanovllm.kernels.optional_triton import tl, triton

HEADER_WORDS = 6  # of the wire: prefills, decodes, new rows, new blocks, prompt tokens, parameters
BLOCK_UPDATES = 128
BLOCK_COLUMNS = 64
BLOCK_TOKENS = 128
BLOCK_LANES = 16
BLOCK_WORDS = 1024
FETCHING_PROGRAMS = 4


class StepShape(NamedTuple):
    """What a step has room for; a smaller batch is padded to it."""

    num_prefills: int  # lanes
    num_prefill_tokens: int
    num_decodes: int  # lanes, and tokens

    @property
    def num_lanes(self) -> int:
        return self.num_prefills + self.num_decodes

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decodes


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
class StepBuffers:
    """Inputs of a step at fixed addresses. int32 where nothing else is said."""

    input_ids: torch.Tensor  # (tokens,)
    positions: torch.Tensor  # (tokens,)
    slot_mapping: torch.Tensor  # (tokens,) -1 for padding
    context_lens: torch.Tensor  # (places,) tokens that the lane's last query sees; 0 for padding
    block_tables: torch.Tensor  # (places, max_blocks) only columns of used blocks are written
    cu_seqlens_q: torch.Tensor  # (prefills + 1,) where the tokens of each prompt lane begin
    cu_seqlens_k: torch.Tensor  # (prefills + 1,) the same for the keys they see
    rows: torch.Tensor  # (lanes,) int64; the spare one for padding
    ends: torch.Tensor  # (lanes,) position of the token to draw; 0 for padding
    temperatures: torch.Tensor  # (lanes,) float32
    seeds: torch.Tensor  # (lanes,) int64
    logits_indices: torch.Tensor  # (lanes,) the lane's last token

    @classmethod
    def allocate(
        cls, max_tokens: int, max_lanes: int, max_blocks: int, device: torch.device
    ) -> StepBuffers:
        """Buffers for steps of any shape of so many tokens and lanes."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(max_tokens),
            positions=zeros(max_tokens),
            slot_mapping=zeros(max_tokens),
            context_lens=zeros(max_lanes),
            block_tables=zeros(max_lanes, max_blocks),
            cu_seqlens_q=zeros(max_lanes + 1),
            cu_seqlens_k=zeros(max_lanes + 1),
            rows=zeros(max_lanes, dtype=torch.int64),
            ends=zeros(max_lanes),
            temperatures=zeros(max_lanes, dtype=torch.float32),
            seeds=zeros(max_lanes, dtype=torch.int64),
            logits_indices=zeros(max_lanes),
        )

    def of(self, shape: StepShape) -> StepBuffers:
        """Views for a step of `shape`."""
        tokens, lanes = slice(shape.num_tokens), slice(shape.num_lanes)
        prefill_ends = slice(shape.num_prefills + 1)
        return StepBuffers(
            input_ids=self.input_ids[tokens],
            positions=self.positions[tokens],
            slot_mapping=self.slot_mapping[tokens],
            context_lens=self.context_lens[lanes],
            block_tables=self.block_tables[lanes],
            cu_seqlens_q=self.cu_seqlens_q[prefill_ends],
            cu_seqlens_k=self.cu_seqlens_k[prefill_ends],
            rows=self.rows[lanes],
            ends=self.ends[lanes],
            temperatures=self.temperatures[lanes],
            seeds=self.seeds[lanes],
            logits_indices=self.logits_indices[lanes],
        )


# The host's words


class WireParts(NamedTuple):
    """A wire taken apart on the device, all int32; see `engine.batch.ScheduledBatch`."""

    rows: torch.Tensor  # (lanes,)
    starts: torch.Tensor  # (lanes,)
    num_tokens: torch.Tensor  # (prefills,)
    new_rows: torch.Tensor  # (n, 4)
    new_blocks: torch.Tensor  # (n, 3)
    prompt_tokens: torch.Tensor  # (tokens,)

    @classmethod
    def of(cls, wire: torch.Tensor) -> WireParts:
        """Views of a wire, behind which anything may follow; reads the header on the host."""
        num_prefills, num_decodes, num_new_rows, num_new_blocks, num_tokens = wire[:5].tolist()
        num_lanes = num_prefills + num_decodes
        lengths = [num_lanes, num_lanes, num_prefills, 4 * num_new_rows, 3 * num_new_blocks]
        words = wire[HEADER_WORDS : HEADER_WORDS + sum(lengths) + num_tokens]
        rows, starts, lane_tokens, new_rows, new_blocks, prompt_tokens = words.split(
            [*lengths, num_tokens]
        )
        return cls(
            rows, starts, lane_tokens, new_rows.view(-1, 4), new_blocks.view(-1, 3), prompt_tokens
        )


def fetch_wire(wires: torch.Tensor, turn: torch.Tensor, wire: torch.Tensor) -> None:
    """Copy the wire whose turn it is into device memory.

    Args:
        wires: (slots, words) int32, pinned host memory, which the device reads in place.
        turn: (1,) int32, the slot.
        wire: (words,) int32, **written** at least as far as the header says that the
            step's words go.
    """
    fetch_wire_kernel[(FETCHING_PROGRAMS,)](
        wires, turn, wire, wires.shape[1], HEADER_WORDS=HEADER_WORDS, BLOCK_WORDS=BLOCK_WORDS,
        num_warps=8,
    )  # fmt: skip


def fetch_wire_torch(wires: torch.Tensor, turn: torch.Tensor, wire: torch.Tensor) -> None:
    """`fetch_wire` in plain torch, whole."""
    wire.copy_(wires[int(turn)])


@triton.jit
def fetch_wire_kernel(
    wires_ptr,
    turn_ptr,
    wire_ptr,
    slot_words,
    HEADER_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Programs read a first block before the header: a read across the bus takes microseconds, and
    most wires are no longer.
    """
    slot_ptr = wires_ptr + tl.load(turn_ptr).to(tl.int64) * slot_words
    first = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    is_word = first < slot_words
    words = tl.load(slot_ptr + first, mask=is_word, other=0, cache_modifier=".cv")
    num_prefills = tl.load(slot_ptr, cache_modifier=".cv")
    num_decodes = tl.load(slot_ptr + 1, cache_modifier=".cv")
    num_new_rows = tl.load(slot_ptr + 2, cache_modifier=".cv")
    num_new_blocks = tl.load(slot_ptr + 3, cache_modifier=".cv")
    num_prompt_tokens = tl.load(slot_ptr + 4, cache_modifier=".cv")
    tl.store(wire_ptr + first, words, mask=is_word)
    num_words = HEADER_WORDS + 3 * num_prefills + 2 * num_decodes
    num_words += 4 * num_new_rows + 3 * num_new_blocks + num_prompt_tokens
    step = tl.num_programs(0) * BLOCK_WORDS
    for start in range(step, num_words, step):
        more = start + first
        is_word = more < num_words
        words = tl.load(slot_ptr + more, mask=is_word, other=0, cache_modifier=".cv")
        tl.store(wire_ptr + more, words, mask=is_word)


def commit_tokens(
    drawn: torch.Tensor,
    rows: torch.Tensor,
    state: RowState,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """Keep each lane's token as its row's newest, send it to the host, and end the slot's turn.

    Args:
        drawn: (lanes,) int32.
        rows: (lanes,) int64.
        state: Its last_tokens are **written**.
        tokens: (max_lanes,) int32, **written**: the same tokens, at a fixed address.
        slots: (slots, max_lanes) int32, pinned host memory, **written** at the slot of the turn.
        turn: (1,) int32, the slot; **advanced** to the next.
    """
    commit_tokens_kernel[(1,)](
        drawn, rows, state.last_tokens, tokens, slots, turn, drawn.shape[0], slots.shape[1],
        slots.shape[0], BLOCK_WORDS=BLOCK_WORDS, num_warps=8,
    )  # fmt: skip


def commit_tokens_torch(
    drawn: torch.Tensor,
    rows: torch.Tensor,
    state: RowState,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """`commit_tokens` in plain torch."""
    state.last_tokens.index_copy_(0, rows, drawn)
    tokens[: len(drawn)] = drawn
    slots[int(turn), : len(drawn)] = drawn
    turn.copy_((turn + 1) % len(slots))


@triton.jit(do_not_specialize=["num_lanes"])
def commit_tokens_kernel(
    drawn_ptr,
    rows_ptr,
    last_tokens_ptr,
    tokens_ptr,
    slots_ptr,
    turn_ptr,
    num_lanes,
    slot_words,
    num_slots,
    BLOCK_WORDS: tl.constexpr,
):
    """One program, so that the turn ends when all is written."""
    turn = tl.load(turn_ptr)
    slot_ptr = slots_ptr + turn.to(tl.int64) * slot_words
    for start in range(0, num_lanes, BLOCK_WORDS):
        lanes = start + tl.arange(0, BLOCK_WORDS)
        mask = lanes < num_lanes
        token = tl.load(drawn_ptr + lanes, mask=mask, other=0)
        row = tl.load(rows_ptr + lanes, mask=mask, other=0)
        tl.store(last_tokens_ptr + row, token, mask=mask)
        tl.store(tokens_ptr + lanes, token, mask=mask)
        tl.store(slot_ptr + lanes, token, mask=mask)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turn_ptr, (turn + 1) % num_slots)


# Changes


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
    parts = WireParts.of(wire)
    new_rows, new_blocks = parts.new_rows, parts.new_blocks.long()
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


# Inputs


def step_inputs(
    wire: torch.Tensor, state: RowState, inputs: StepBuffers, shape: StepShape, block_size: int
) -> None:
    """Write the inputs of a step of `shape` into `inputs`, in one launch.

    Args:
        wire: A batch in wire form that fits `shape`; its updates are in `state` already.
        inputs: Views of `shape`.
    """
    spare_row = state.last_tokens.shape[0] - 1
    step_inputs_kernel[(shape.num_lanes,)](
        wire, state.last_tokens, state.temperatures, state.seeds, state.block_tables,
        inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.context_lens,
        inputs.block_tables, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.rows, inputs.ends,
        inputs.temperatures, inputs.seeds, inputs.logits_indices,
        state.block_tables.stride(0), inputs.block_tables.stride(0), spare_row,
        shape.num_prefills, shape.num_prefill_tokens,
        HEADER_WORDS=HEADER_WORDS, BLOCK_SIZE=block_size, BLOCK_COLUMNS=BLOCK_COLUMNS,
        BLOCK_TOKENS=BLOCK_TOKENS, BLOCK_LANES=BLOCK_LANES, num_warps=1,
    )  # fmt: skip


def step_inputs_torch(
    wire: torch.Tensor, state: RowState, inputs: StepBuffers, shape: StepShape, block_size: int
) -> None:
    """`step_inputs` in plain torch; reads the wire on the host."""
    parts = WireParts.of(wire)
    rows, starts = parts.rows.long(), parts.starts
    num_lanes, num_prefills = len(rows), len(parts.num_tokens)
    num_prompt_tokens = len(parts.prompt_tokens)
    num_tokens = torch.ones_like(starts)
    num_tokens[:num_prefills] = parts.num_tokens
    ends = starts + num_tokens
    bounds = torch.cumsum(num_tokens, dim=0)  # end of each lane's tokens, without padding

    inputs.rows.fill_(state.last_tokens.shape[0] - 1)
    for padded in (inputs.ends, inputs.temperatures, inputs.seeds, inputs.logits_indices):
        padded.zero_()
    inputs.rows[:num_lanes], inputs.ends[:num_lanes] = rows, ends
    inputs.temperatures[:num_lanes] = state.temperatures[rows]
    inputs.seeds[:num_lanes] = state.seeds[rows]
    prefill_gap = shape.num_prefill_tokens - num_prompt_tokens
    is_decode = torch.arange(num_lanes, device=wire.device) >= num_prefills
    inputs.logits_indices[:num_lanes] = bounds - 1 + is_decode * prefill_gap

    prefills, decodes = slice(num_prefills), slice(num_prefills, None)
    inputs.context_lens.zero_()
    for lanes, place in ((prefills, 0), (decodes, shape.num_prefills)):
        places = slice(place, place + len(rows[lanes]))
        inputs.context_lens[places] = ends[lanes]
        inputs.block_tables[places] = state.block_tables[rows[lanes]]
    for cumulated, lengths in (
        (inputs.cu_seqlens_q, num_tokens[prefills]),
        (inputs.cu_seqlens_k, ends[prefills]),
    ):
        if not shape.num_prefills:
            continue  # nobody looks
        cumulated[0] = 0
        cumulated[1:] = lengths.sum()
        cumulated[1 : num_prefills + 1] = torch.cumsum(lengths, dim=0)

    lane_of = torch.arange(num_lanes, device=wire.device).repeat_interleave(num_tokens)
    before_start = bounds - num_tokens - starts  # a token's place among all, less its position
    positions = torch.arange(len(lane_of), device=wire.device) - before_start[lane_of]
    blocks = state.block_tables[rows[lane_of], positions // block_size]
    input_ids = torch.cat((parts.prompt_tokens, state.last_tokens[rows[decodes]]))
    inputs.input_ids.zero_()
    inputs.positions.zero_()
    inputs.slot_mapping.fill_(-1)
    for tokens, place in (
        (slice(num_prompt_tokens), 0),
        (slice(num_prompt_tokens, None), shape.num_prefill_tokens),
    ):
        places = slice(place, place + len(input_ids[tokens]))
        inputs.input_ids[places] = input_ids[tokens]
        inputs.positions[places] = positions[tokens].int()
        inputs.slot_mapping[places] = (blocks * block_size + positions % block_size)[tokens].int()


@triton.jit(do_not_specialize=["num_prefill_places", "num_prefill_tokens"])
def step_inputs_kernel(
    wire_ptr,
    last_tokens_ptr,
    temperatures_ptr,
    seeds_ptr,
    block_tables_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    block_tables_out_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    rows_out_ptr,
    ends_ptr,
    temperatures_out_ptr,
    seeds_out_ptr,
    logits_indices_ptr,
    table_stride,
    table_out_stride,
    spare_row,
    num_prefill_places,
    num_prefill_tokens,
    HEADER_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
):
    """One program a place; it copies as many columns of the block table as its context fills."""
    place = tl.program_id(0)
    num_prefills = tl.load(wire_ptr)
    num_lanes = num_prefills + tl.load(wire_ptr + 1)
    is_prefill = place < num_prefill_places
    # Padded places take the lanes behind the batch's, prompt places first.
    lane = tl.where(place < num_prefills, place, num_lanes + place - num_prefills)
    if not is_prefill:
        lane = num_prefills + place - num_prefill_places
        lane = tl.where(lane < num_lanes, lane, lane + num_prefill_places - num_prefills)
    is_real = lane < num_lanes
    row = tl.load(wire_ptr + HEADER_WORDS + lane, mask=is_real, other=0)
    row = tl.where(is_real, row, spare_row).to(tl.int64)
    start = tl.load(wire_ptr + HEADER_WORDS + num_lanes + lane, mask=is_real, other=0)
    table_ptr = block_tables_ptr + row * table_stride

    if is_prefill:
        last, end = _write_prompt(
            wire_ptr, table_ptr, input_ids_ptr, positions_ptr, slot_mapping_ptr, cu_seqlens_q_ptr,
            cu_seqlens_k_ptr, place, start, num_prefills, num_lanes, num_prefill_places,
            num_prefill_tokens, HEADER_WORDS, BLOCK_SIZE, BLOCK_TOKENS, BLOCK_LANES,
        )  # fmt: skip
    else:
        last = num_prefill_tokens + place - num_prefill_places
        end = tl.where(is_real, start + 1, 0)
        block = tl.load(table_ptr + start // BLOCK_SIZE)
        slot = block * BLOCK_SIZE + start % BLOCK_SIZE
        token = tl.load(last_tokens_ptr + row, mask=is_real, other=0)
        tl.store(input_ids_ptr + last, token)
        tl.store(positions_ptr + last, start)
        tl.store(slot_mapping_ptr + last, tl.where(is_real, slot, -1))

    tl.store(rows_out_ptr + lane, row)
    tl.store(ends_ptr + lane, end)
    tl.store(logits_indices_ptr + lane, tl.where(is_real, last, 0))
    temperature = tl.load(temperatures_ptr + row, mask=is_real, other=0.0)
    tl.store(temperatures_out_ptr + lane, temperature)
    tl.store(seeds_out_ptr + lane, tl.load(seeds_ptr + row, mask=is_real, other=0))
    tl.store(context_lens_ptr + place, end)
    num_blocks = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
    table_out_ptr = block_tables_out_ptr + place.to(tl.int64) * table_out_stride
    for first in range(0, num_blocks, BLOCK_COLUMNS):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        mask = columns < num_blocks
        tl.store(table_out_ptr + columns, tl.load(table_ptr + columns, mask=mask), mask=mask)


@triton.jit
def _write_prompt(
    wire_ptr,
    table_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    place,
    start,
    num_prefills,
    num_lanes,
    num_prefill_places,
    num_prefill_tokens,
    HEADER_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
):
    """Write one prompt lane's tokens and bounds; the last place's program adds the padding.

    Returns the index of its last token and how many tokens that one sees, 0 in a padded lane.
    """
    starts_ptr = wire_ptr + HEADER_WORDS + num_lanes
    num_tokens_ptr = starts_ptr + num_lanes
    first = 0  # tokens of the lanes before this one
    num_keys = 0  # that these see
    for other in range(0, tl.minimum(place, num_prefills), BLOCK_LANES):
        lanes = other + tl.arange(0, BLOCK_LANES)
        is_before = (lanes < place) & (lanes < num_prefills)
        lengths = tl.load(num_tokens_ptr + lanes, mask=is_before, other=0)
        first += tl.sum(lengths, axis=0)
        starts = tl.load(starts_ptr + lanes, mask=is_before, other=0)
        num_keys += tl.sum(starts + lengths, axis=0)
    is_real = place < num_prefills
    num_tokens = tl.load(num_tokens_ptr + place, mask=is_real, other=0)
    end = tl.where(is_real, start + num_tokens, 0)
    tl.store(cu_seqlens_q_ptr + place, first)
    tl.store(cu_seqlens_k_ptr + place, num_keys)
    prompt_ptr = num_tokens_ptr + num_prefills + 4 * tl.load(wire_ptr + 2)
    prompt_ptr += 3 * tl.load(wire_ptr + 3)
    for offset in range(0, num_tokens, BLOCK_TOKENS):
        index = offset + tl.arange(0, BLOCK_TOKENS)
        mask = index < num_tokens
        position = start + index
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=mask, other=0)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        token = tl.load(prompt_ptr + first + index, mask=mask, other=0)
        tl.store(input_ids_ptr + first + index, token, mask=mask)
        tl.store(positions_ptr + first + index, position, mask=mask)
        tl.store(slot_mapping_ptr + first + index, slot, mask=mask)
    if place == num_prefill_places - 1:
        total = first + num_tokens
        tl.store(cu_seqlens_q_ptr + num_prefill_places, total)
        tl.store(cu_seqlens_k_ptr + num_prefill_places, num_keys + end)
        for offset in range(total, num_prefill_tokens, BLOCK_TOKENS):
            index = offset + tl.arange(0, BLOCK_TOKENS)
            mask = index < num_prefill_tokens
            tl.store(input_ids_ptr + index, 0, mask=mask)
            tl.store(positions_ptr + index, 0, mask=mask)
            tl.store(slot_mapping_ptr + index, -1, mask=mask)
    return first + num_tokens - 1, end
