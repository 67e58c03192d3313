"""Who runs which step, by hand in the smallest cases, then against a plain model of the rules."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
from engine.worlds import MAX_STEPS, VOCAB_SIZE, Loop, Order, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanovllm.engine.batch import MAX_MIXED_PREFILLS, new_row
from nanovllm.engine.scheduler import MAX_PREFILLS_IN_A_ROW, MAX_STEPS_HELD, Scheduler, Step
from nanovllm.engine.sequence import Sequence, SequenceStatus

TOKEN = 7  # what every step samples, unless a test says otherwise
STOP = 99


def make_scheduler(
    num_blocks: int = 8,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_num_mixed_tokens: int = 0,
    enable_prefix_caching: bool = True,
) -> Scheduler:
    return Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_mixed_tokens=max_num_mixed_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )


def add(
    scheduler: Scheduler,
    prompt: list[int] | int,
    max_tokens: int = 10,
    seq_id: int = 0,
    min_tokens: int = 0,
) -> Sequence:
    """Queue a prompt of these tokens, or of this length and like no other."""
    if isinstance(prompt, int):
        prompt = [1000 * (seq_id + 1) + i for i in range(prompt)]
    seq = Sequence(
        seq_id,
        prompt,
        block_size=scheduler.block_manager.block_size,
        max_total_tokens=len(prompt) + max_tokens,
        temperature=0.5,
        seed=seq_id,
        stop_token_ids=frozenset({STOP}),
        min_tokens=min_tokens,
    )
    scheduler.add(seq)
    return seq


def schedule(scheduler: Scheduler, in_flight: bool = False) -> Step:
    step = scheduler.schedule(in_flight=in_flight)
    assert step is not None, "nothing was scheduled"
    return step


def confirm(scheduler: Scheduler, step: Step, *tokens: int) -> list[Sequence]:
    """Process a step whose lanes sampled `tokens` (default: TOKEN each)."""
    finished = scheduler.postprocess(step, list(tokens) or [TOKEN] * step.batch.num_lanes)
    scheduler.check_invariants()
    return finished


def run_step(scheduler: Scheduler, *tokens: int) -> list[Sequence]:
    return confirm(scheduler, schedule(scheduler), *tokens)


def run_to_end(scheduler: Scheduler) -> list[Sequence]:
    finished = []
    while not scheduler.is_finished():
        finished += run_step(scheduler)
    assert scheduler.schedule() is None
    return finished


# what is accepted (C05)


@pytest.mark.parametrize("num_tokens", [1, 32, 33])
def test_request_that_the_pool_can_hold_alone_is_accepted(num_tokens: int) -> None:
    """The last token is never stored, so 33 tokens fit 32 slots."""
    make_scheduler(num_blocks=8).check_fits(num_tokens)


def test_request_beyond_the_pool_is_refused_with_both_numbers_and_the_knob() -> None:
    scheduler = make_scheduler(num_blocks=8)
    with pytest.raises(ValueError, match=r"need 9 .*the pool has 8.*num_kvcache_blocks"):
        scheduler.check_fits(34)
    assert scheduler.is_finished()


def test_largest_accepted_request_runs_to_its_end() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.check_fits(33)
    seq = add(scheduler, 5, max_tokens=28)
    assert run_to_end(scheduler) == [seq]
    assert (seq.num_output_tokens, scheduler.num_preemptions) == (28, 0)


# admission


def test_empty_scheduler_schedules_nothing() -> None:
    scheduler = make_scheduler()
    assert scheduler.is_finished()
    assert scheduler.schedule() is None


def test_budget_that_ends_on_a_prompts_end_loses_none() -> None:
    """C10: three prompts of 4 tokens, 8 tokens a step."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    sequences = [add(scheduler, 4, max_tokens=2, seq_id=i) for i in range(3)]
    assert schedule_and_confirm_lanes(scheduler) == [(0, 0, 4), (1, 0, 4)]
    assert schedule_and_confirm_lanes(scheduler) == [(2, 0, 4)]
    assert run_to_end(scheduler) == sequences
    assert all(seq.output_token_ids == [TOKEN, TOKEN] for seq in sequences)


def schedule_and_confirm_lanes(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Run a prefill step; (sequence, start, tokens) of each lane, by the row that it holds."""
    step = schedule(scheduler)
    holders = {seq.row: seq.seq_id for seq in (*scheduler.running, *scheduler.waiting)}
    batch = step.batch
    lanes = zip(batch.rows.tolist(), batch.starts.tolist(), batch.num_tokens.tolist(), strict=True)
    named = [(holders[row], start, num_tokens) for row, start, num_tokens in lanes]
    confirm(scheduler, step)
    return named


def test_admission_is_first_come_first_served_and_stops_at_what_doesnt_fit() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, 8, seq_id=0)
    add(scheduler, 12, seq_id=1)  # three blocks, and two are left
    add(scheduler, 2, seq_id=2)  # would fit, but waits its turn
    assert schedule_and_confirm_lanes(scheduler) == [(0, 0, 8)]
    assert [seq.seq_id for seq in scheduler.waiting] == [1, 2]


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for i in range(3):
        add(scheduler, 1, max_tokens=3, seq_id=i)
    assert schedule_and_confirm_lanes(scheduler) == [(0, 0, 1), (1, 0, 1)]
    assert schedule(scheduler).batch.num_decodes == 2


def test_decode_steps_keep_within_the_token_budget() -> None:
    """They ran one token for each of max_num_seqs, even beyond max_num_batched_tokens."""
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=2)
    sequences = [add(scheduler, 1, max_tokens=4, seq_id=i) for i in range(4)]
    while not scheduler.is_finished():
        step = schedule(scheduler)
        assert step.batch.total_num_tokens <= 2
        confirm(scheduler, step)
    assert all(seq.num_output_tokens == 4 for seq in sequences)


def test_only_the_first_prompt_of_a_step_is_chunked() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    long, short, other = (add(scheduler, n, seq_id=i) for i, n in enumerate((8, 3, 2)))
    assert schedule_and_confirm_lanes(scheduler) == [(0, 0, 6)]
    assert schedule_and_confirm_lanes(scheduler) == [(0, 6, 2), (1, 0, 3)]
    assert list(scheduler.waiting) == [other]  # two tokens, one is left of the budget
    assert scheduler.running == [long, short]


def test_token_of_a_prompt_that_isnt_through_is_dropped() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    seq = add(scheduler, 6)
    step = schedule(scheduler)
    assert step.sequences == [None]
    confirm(scheduler, step, STOP)
    assert (seq.num_output_tokens, seq.num_pending) == (0, 0)
    run_step(scheduler, TOKEN)
    assert seq.output_token_ids == [TOKEN]


def test_prompts_go_before_decodes() -> None:
    scheduler = make_scheduler()
    add(scheduler, 3, seq_id=0)
    run_step(scheduler)
    add(scheduler, 3, seq_id=1)
    assert schedule_and_confirm_lanes(scheduler) == [(1, 0, 3)]
    assert schedule(scheduler).batch.num_decodes == 2


def test_running_sequence_waits_a_bounded_number_of_steps() -> None:
    """However long the queue of prompts is."""
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=4)
    seq = add(scheduler, 4, max_tokens=5)
    run_step(scheduler)
    for i in range(100):
        add(scheduler, 4, max_tokens=1, seq_id=i + 1)
    waits = count_steps_between_tokens(scheduler, seq)
    assert len(waits) == 4
    assert max(waits) == MAX_PREFILLS_IN_A_ROW


def test_wait_is_bounded_also_when_blocks_are_short_and_a_step_is_in_flight() -> None:
    """A prompt half through holds the block it needs: that prompt went on, chunk by chunk."""
    scheduler = make_scheduler(num_blocks=11, max_num_batched_tokens=2)
    seq = add(scheduler, 4, max_tokens=3)
    run_step(scheduler)
    run_step(scheduler)
    add(scheduler, 40, max_tokens=1, seq_id=1)
    in_flight, num_prefills = None, 0
    while seq.num_computed_tokens == 4:
        step = scheduler.schedule(in_flight=in_flight is not None)
        num_prefills += step is not None and step.batch.num_prefills
        if in_flight:
            confirm(scheduler, in_flight)
        in_flight = step
    assert 0 < num_prefills <= MAX_PREFILLS_IN_A_ROW


def count_steps_between_tokens(scheduler: Scheduler, seq: Sequence) -> list[int]:
    """Steps that `seq` sat out before each of its further tokens."""
    waits = [0]
    while not seq.is_finished:
        num_tokens = seq.num_tokens
        run_step(scheduler)
        if seq.num_tokens > num_tokens:
            waits.append(0)
        else:
            waits[-1] += 1
    return waits[:-1]


# prompts in groups


def full_house(max_tokens: Iterable[int], num_waiting: int) -> Scheduler:
    """As many running as may run, one for each of `max_tokens`, and prompts that found no room."""
    lengths = list(max_tokens)
    scheduler = make_scheduler(
        num_blocks=2048, max_num_seqs=len(lengths), max_num_batched_tokens=128
    )
    for i, length in enumerate((*lengths, *[2] * num_waiting)):
        add(scheduler, 1, max_tokens=length, seq_id=i)
    run_step(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (len(lengths), num_waiting)
    return scheduler


def prefills_of_steps(scheduler: Scheduler, num_steps: int) -> list[int]:
    counts = []
    for _ in range(num_steps):
        step = schedule(scheduler)
        counts.append(step.batch.num_prefills)
        confirm(scheduler, step)
    return counts


def test_prompts_that_found_no_room_come_in_groups() -> None:
    """The host launches a step of one prompt as slowly as one of many; so it went, one by one."""
    scheduler = full_house([3, 3, 4, 5, 6, *[30] * 59], num_waiting=6)
    # Four of 64 are a group. Four end by the fourth step, and of the new ones the next group.
    assert prefills_of_steps(scheduler, 8) == [0, 0, 0, 0, 4, 0, 2, 0]


def test_prompts_that_found_no_room_wait_a_bounded_number_of_steps() -> None:
    scheduler = full_house([2, *[60] * 63], num_waiting=1)
    assert prefills_of_steps(scheduler, 40).index(1) == MAX_STEPS_HELD


def test_prompts_wait_for_a_group_of_blocks_too() -> None:
    """Rows were free all the time."""
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=64)
    for i, max_tokens in enumerate([2, 3, *[4] * 30, 2, 2]):
        add(scheduler, 1, max_tokens=max_tokens, seq_id=i)
    # Two of 32 are a group.
    assert prefills_of_steps(scheduler, 4) == [32, 0, 0, 2]


def test_prompts_do_not_wait_for_a_group_where_few_run() -> None:
    """A place left empty weighs more there than a step that is slow to launch."""
    scheduler = full_house([2, *[9] * 14], num_waiting=1)
    assert prefills_of_steps(scheduler, 2) == [0, 1]


def test_prompts_with_room_do_not_wait() -> None:
    scheduler = full_house([*[9] * 64], num_waiting=0)
    scheduler.finish(scheduler.running[:1], "abort")
    add(scheduler, 1, seq_id=99)
    assert prefills_of_steps(scheduler, 1) == [1]


def test_prompts_do_not_wait_where_no_one_runs() -> None:
    scheduler = full_house([*[9] * 64], num_waiting=1)
    scheduler.finish([*scheduler.running], "abort")
    assert prefills_of_steps(scheduler, 1) == [1]


# mixed steps


def test_mixed_step_decodes_and_takes_chunks_of_what_is_left() -> None:
    scheduler = make_scheduler(max_num_mixed_tokens=4)
    seq = add(scheduler, 2, seq_id=0)
    run_step(scheduler)
    prompt = add(scheduler, 9, seq_id=1)
    step = schedule(scheduler)
    assert (step.batch.num_tokens.tolist(), step.batch.num_decodes) == ([3], 1)
    assert step.batch.rows.tolist() == [prompt.row, seq.row]
    assert step.batch.starts.tolist() == [0, 2]
    assert step.sequences == [None, seq]


def test_prompts_with_nothing_to_ride_with_get_a_step_of_their_own() -> None:
    scheduler = make_scheduler(max_num_mixed_tokens=4, max_num_batched_tokens=12)
    add(scheduler, 2, seq_id=0)
    add(scheduler, 9, seq_id=1)
    assert schedule_and_confirm_lanes(scheduler) == [(0, 0, 2), (1, 0, 9)]


def test_no_mixed_step_has_more_prompts_than_a_captured_one_has_room_for() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=40, max_num_mixed_tokens=64)
    add(scheduler, 1, max_tokens=9, seq_id=0)
    run_step(scheduler)
    for i in range(MAX_MIXED_PREFILLS + 3):
        add(scheduler, 2, seq_id=1 + i)
    counts = []
    for _ in range(2):
        step = schedule(scheduler)
        counts.append(step.batch.num_prefills)
        confirm(scheduler, step)
    assert counts == [MAX_MIXED_PREFILLS, 3]


def test_prompts_get_their_share_of_a_mixed_step() -> None:
    """Else a full house of running sequences would let none in until one ends."""
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=8, max_num_mixed_tokens=4)
    for i in range(4):
        add(scheduler, 1, seq_id=i)
    run_step(scheduler)
    add(scheduler, 2, seq_id=4)
    step = schedule(scheduler)
    assert (step.batch.num_tokens.tolist(), step.batch.num_decodes) == ([1], 4)


def kinds_of_steps(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Prompt tokens and decode lanes of the steps until nobody waits."""
    kinds = []
    while scheduler.waiting:
        step = schedule(scheduler)
        kinds.append((len(step.batch.prompt_tokens), step.batch.num_decodes))
        confirm(scheduler, step)
    return kinds


def test_prompts_ride_once_the_longest_output_outlasts_them() -> None:
    """All of them rode, and for most of the time most lanes were empty."""
    scheduler = make_scheduler(
        num_blocks=256, max_num_seqs=32, max_num_batched_tokens=32, max_num_mixed_tokens=6
    )
    add(scheduler, 1, max_tokens=30, seq_id=0)
    run_step(scheduler)
    for i in range(30):
        add(scheduler, 4, max_tokens=10, seq_id=1 + i)
    # Beside 31 lanes one token rides, two while they fill; 29 steps are left, 10 of them for the
    # last prompt: 38 tokens may ride, not 120, 88 or 56.
    kinds = kinds_of_steps(scheduler)
    assert [num_tokens for num_tokens, _ in kinds[:4]] == [32, 32, 32, 1]
    assert [num_decodes > 0 for _, num_decodes in kinds] == [False] * 3 + [True] * (len(kinds) - 3)


def test_prompts_of_outputs_all_alike_get_whole_steps() -> None:
    """They rode, and of 256 alike, of an 8B, the last one ended a fifth later for it."""
    scheduler = make_scheduler(
        num_blocks=256, max_num_seqs=32, max_num_batched_tokens=32, max_num_mixed_tokens=6
    )
    for i in range(31):
        add(scheduler, 4, max_tokens=30, seq_id=i)
    assert kinds_of_steps(scheduler) == [(32, 0), (32, 0), (32, 0), (28, 0)]


def test_limits_that_are_the_models_own_say_nothing_of_outputs() -> None:
    """With max_tokens=None a short prompt may run longer than a long one, and most likely won't."""
    scheduler = make_scheduler(
        num_blocks=512, max_num_seqs=32, max_num_batched_tokens=40, max_num_mixed_tokens=6
    )
    add(scheduler, 1, max_tokens=199, seq_id=0)
    run_step(scheduler)
    for i in (1, 2):
        add(scheduler, 40, max_tokens=160, seq_id=i)
    # 80 tokens, in 14 steps: by the outputs' limits alone there would be 38 to spare.
    assert kinds_of_steps(scheduler)[0] == (40, 0)


def test_prompts_dont_ride_where_the_token_budget_leaves_them_a_token_a_step() -> None:
    """Steps were counted as if mixed ones could exceed it, and the last output ended late."""
    scheduler = make_scheduler(
        num_blocks=512, max_num_seqs=16, max_num_batched_tokens=17, max_num_mixed_tokens=16
    )
    for i in range(8):
        add(scheduler, 1, max_tokens=60, seq_id=i)
    run_step(scheduler)
    for i in range(8):
        add(scheduler, 12, max_tokens=20, seq_id=8 + i)
    # 96 tokens, two a step while lanes fill, and 39 steps to spare; as many as 8 were expected.
    assert kinds_of_steps(scheduler)[0] == (12, 0)


def test_few_prompts_that_come_later_ride() -> None:
    """However long they run: all lanes would sit out a step of theirs."""
    scheduler = make_scheduler(
        num_blocks=256, max_num_seqs=32, max_num_batched_tokens=32, max_num_mixed_tokens=6
    )
    add(scheduler, 1, max_tokens=5, seq_id=0)
    run_step(scheduler)
    add(scheduler, 4, max_tokens=30, seq_id=1)
    assert kinds_of_steps(scheduler) == [(4, 1)]


def test_prompt_half_through_is_preempted_before_anyone_who_runs() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_mixed_tokens=4)
    seq = add(scheduler, 3, max_tokens=10, seq_id=0)
    run_step(scheduler)
    prompt = add(scheduler, 12, max_tokens=1, seq_id=1)
    run_step(scheduler)
    assert prompt.row is not None
    step = schedule(scheduler)
    assert (prompt.row, scheduler.num_preemptions) == (None, 1)
    assert step.sequences == [seq]
    assert list(scheduler.waiting) == [prompt]


# what a batch says


def test_new_row_and_its_blocks_are_told_once() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 6, seq_id=3)
    batch = schedule(scheduler).batch
    assert batch.new_rows.tolist() == [list(new_row(0, 0.5, 3))]
    assert batch.new_blocks.tolist() == [[0, 0, seq.block_table[0]], [0, 1, seq.block_table[1]]]
    assert batch.prompt_tokens.tolist() == seq.token_ids
    batch = schedule(scheduler, in_flight=True).batch
    assert len(batch.new_rows) == len(batch.new_blocks) == 0


def test_decode_lane_sends_no_token() -> None:
    """C16: the newest token is on the device; what travels is a row and a position."""
    scheduler = make_scheduler()
    add(scheduler, 3)
    run_step(scheduler)
    batch = schedule(scheduler).batch
    assert (batch.rows.tolist(), batch.starts.tolist()) == ([0], [3])
    assert len(batch.prompt_tokens) == len(batch.num_tokens) == 0


def test_block_taken_by_a_decode_is_told() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 4)
    run_step(scheduler)
    assert schedule(scheduler).batch.new_blocks.tolist() == [[0, 1, seq.block_table[1]]]


def test_row_of_a_finished_sequence_is_given_to_the_next() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, 3, max_tokens=1, seq_id=0)
    later = add(scheduler, 3, max_tokens=1, seq_id=1)
    run_step(scheduler)
    batch = schedule(scheduler).batch
    assert later.row == 0
    assert batch.new_rows.tolist() == [list(new_row(0, 0.5, 1))]


# blocks while decoding (C15)


@pytest.mark.parametrize("block_size", [4, 256])
@pytest.mark.parametrize("surplus", [-1, 0, 1])
@pytest.mark.parametrize("num_free", [0, 1])
def test_nobody_is_preempted_when_a_block_merely_fills(
    block_size: int, surplus: int, num_free: int
) -> None:
    """Lengths 255, 256, 257, the newest token not stored yet: only the last needs a block."""
    scheduler = make_scheduler(
        num_blocks=2 + num_free, block_size=block_size, max_num_batched_tokens=1024
    )
    first = add(scheduler, block_size + surplus - 1, seq_id=0)
    add(scheduler, block_size - 2, seq_id=1)
    run_step(scheduler)
    assert first.num_tokens == block_size + surplus
    step = schedule(scheduler)
    is_needed = surplus == 1
    assert scheduler.num_preemptions == (is_needed and num_free == 0)
    assert len(first.block_table) == 1 + is_needed
    confirm(scheduler, step)


# preemption


def three_running(num_blocks: int = 3, enable_prefix_caching: bool = True) -> Scheduler:
    """Three sequences of a full block each, the pool full, and each about to need another."""
    scheduler = make_scheduler(num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching)
    for i in range(3):
        add(scheduler, 4, seq_id=i)
    run_step(scheduler)
    return scheduler


def test_latest_is_preempted_and_returns_to_the_front_of_waiting() -> None:
    scheduler = three_running()
    first, second, third = scheduler.running
    queued = add(scheduler, 4, seq_id=3)
    step = schedule(scheduler)
    assert scheduler.running == [first]
    assert list(scheduler.waiting) == [second, third, queued]
    assert scheduler.num_preemptions == 2
    assert third.status is SequenceStatus.WAITING
    assert (third.row, third.block_table) == (None, [])
    assert step.sequences == [first]
    confirm(scheduler, step)


def test_preempted_sequence_runs_again_with_all_its_tokens() -> None:
    """C16: everything it generated is part of what is prefilled."""
    scheduler = three_running(enable_prefix_caching=False)
    second = scheduler.running[1]
    run_step(scheduler)
    scheduler.finish([scheduler.running[0]], "abort")
    batch = schedule(scheduler).batch
    assert batch.prompt_tokens.tolist() == second.token_ids
    assert second.output_token_ids == [TOKEN]


def test_prefix_hit_after_preemption_counts_as_cached() -> None:
    """C12: what its own old blocks still hold isn't computed twice."""
    scheduler = three_running()
    second = scheduler.running[1]
    assert second.num_cached_tokens == 0
    run_step(scheduler)
    scheduler.finish([scheduler.running[0]], "abort")
    step = schedule(scheduler)
    assert second.num_cached_tokens == 4
    assert second.num_cached_tokens + second.num_scheduled_tokens == second.num_tokens
    assert step.batch.prompt_tokens.tolist() == [TOKEN]
    assert second.num_prompt_cached_tokens == 0, "the request's own figure is of its first run"


def test_step_in_flight_is_waited_for_before_anyone_is_preempted() -> None:
    scheduler = three_running(num_blocks=5)
    in_flight = schedule(scheduler)  # preempts one: needs three blocks, has two
    assert scheduler.num_preemptions == 1
    for _ in range(3):
        following = schedule(scheduler, in_flight=True)
        confirm(scheduler, in_flight)
        in_flight = following
    tables = [list(seq.block_table) for seq in scheduler.running]
    assert scheduler.schedule(in_flight=True) is None
    assert [seq.block_table for seq in scheduler.running] == tables, "decided before it changed"
    assert scheduler.num_preemptions == 1
    confirm(scheduler, in_flight)
    schedule(scheduler)
    assert scheduler.num_preemptions == 2


# prefix cache


def test_prompts_of_one_step_share_their_prefix() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    prefix = list(range(8))
    one, two = (add(scheduler, [*prefix, 50 + i], seq_id=i) for i in range(2))
    batch = schedule(scheduler).batch
    assert (batch.starts.tolist(), batch.num_tokens.tolist()) == ([0, 8], [9, 1])
    assert two.block_table[:2] == one.block_table[:2]
    assert two.num_cached_tokens == 8


@pytest.mark.parametrize("num_tokens", [4, 5, 8])
def test_fully_cached_prompt_computes_at_least_one_token(num_tokens: int) -> None:
    """C13."""
    scheduler = make_scheduler()
    prompt = list(range(num_tokens))
    add(scheduler, prompt, max_tokens=1)
    run_to_end(scheduler)
    again = add(scheduler, prompt, max_tokens=1)
    batch = schedule(scheduler).batch
    assert batch.num_tokens.tolist() == [num_tokens - again.num_cached_tokens]
    assert batch.num_tokens[0] > 0
    assert again.num_cached_tokens == (num_tokens - 1) // 4 * 4


def test_answer_is_a_prefix_that_the_next_turn_finds() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=6)
    run_to_end(scheduler)
    turn = add(scheduler, [*seq.token_ids, 5])
    run_step(scheduler)
    assert turn.num_cached_tokens == 8, "9 tokens, the last of which was never stored"


# the end of a sequence


@pytest.mark.parametrize("overlap", [False, True])
def test_max_tokens_costs_no_wasted_row(overlap: bool) -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=4)
    in_flight, num_steps = None, 0
    while not seq.is_finished:
        step = scheduler.schedule(in_flight=in_flight is not None)
        num_steps += step is not None
        previous, in_flight = (in_flight, step) if overlap else (step, None)
        if previous is not None:
            confirm(scheduler, previous)
    assert num_steps == seq.num_output_tokens == 4
    assert in_flight is None


def test_token_in_flight_when_a_stop_is_seen_is_dropped() -> None:
    scheduler = make_scheduler()
    seq, mate = add(scheduler, 3, seq_id=0), add(scheduler, 3, seq_id=1)
    first = schedule(scheduler)
    second = schedule(scheduler, in_flight=True)
    assert confirm(scheduler, first, STOP, TOKEN) == [seq]
    assert confirm(scheduler, second, 55, 66) == []
    assert (seq.output_token_ids, seq.finish_reason) == ([STOP], "stop")
    assert mate.output_token_ids == [TOKEN, 66]


def test_late_token_of_an_ended_sequence_never_reaches_its_rows_next_owner() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, 3, seq_id=0)
    later = add(scheduler, 3, seq_id=1)
    first = schedule(scheduler)
    second = schedule(scheduler, in_flight=True)
    confirm(scheduler, first, STOP)
    third = schedule(scheduler, in_flight=True)
    assert later.row == 0
    confirm(scheduler, second, 55)
    assert later.num_output_tokens == 0
    confirm(scheduler, third, 66)
    assert later.output_token_ids == [66]


def test_stop_id_at_the_last_token_is_a_stop() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=1)
    run_step(scheduler, STOP)
    assert seq.finish_reason == "stop"


def test_stop_id_before_min_tokens_doesnt_end_it() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 3, min_tokens=3)
    assert run_step(scheduler, STOP) == []
    assert run_step(scheduler, STOP) == []
    assert run_step(scheduler, STOP) == [seq], "the third may be the last"


def test_sequences_that_end_together_are_returned_in_lane_order() -> None:
    scheduler = make_scheduler()
    sequences = [add(scheduler, 2, max_tokens=m, seq_id=i) for i, m in enumerate((2, 1, 2, 1))]
    assert run_step(scheduler) == [sequences[1], sequences[3]]
    assert run_step(scheduler) == [sequences[0], sequences[2]]


def test_sequences_that_end_together_give_back_in_lane_order() -> None:
    """They did it in order of their addresses, so the same run might find other prefixes."""
    scheduler = make_scheduler(num_blocks=12, max_num_seqs=12)
    for i in range(12):
        add(scheduler, 2, max_tokens=1, seq_id=i)
    run_step(scheduler)
    later = [add(scheduler, 2, max_tokens=1, seq_id=12 + i) for i in range(12)]
    schedule(scheduler)
    assert [seq.row for seq in later] == list(range(11, -1, -1))
    assert [seq.block_table for seq in later] == [[i] for i in range(12)]


# abort (C11)


def abort_waiting(scheduler: Scheduler) -> Sequence:
    return scheduler.waiting[-1]


def abort_half_prefilled(scheduler: Scheduler) -> Sequence:
    seq = scheduler.waiting[0]
    assert seq.row is not None
    return seq


def abort_running(scheduler: Scheduler) -> Sequence:
    return scheduler.running[0]


@pytest.mark.parametrize("pick", [abort_waiting, abort_half_prefilled, abort_running])
@pytest.mark.parametrize("in_flight", [False, True])
def test_aborted_sequence_gives_all_back_and_others_finish(
    pick: Callable[[Scheduler], Sequence], in_flight: bool
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequences = [add(scheduler, n, max_tokens=3, seq_id=i) for i, n in enumerate((3, 9, 2))]
    run_step(scheduler)
    step = schedule(scheduler)  # the second prompt's first chunk
    if not in_flight:
        confirm(scheduler, step)
    aborted = pick(scheduler)
    scheduler.finish([aborted], "abort")
    scheduler.check_invariants()
    if in_flight:
        confirm(scheduler, step)
    assert (aborted.finish_reason, aborted.row, aborted.block_table) == ("abort", None, [])
    assert set(run_to_end(scheduler)) == {*sequences} - {aborted}
    assert all(s.output_token_ids == [TOKEN] * 3 for s in sequences if s is not aborted)
    assert scheduler.block_manager.num_free_blocks == 8


def test_aborting_with_a_token_in_flight_drops_it() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 3)
    step = schedule(scheduler)
    scheduler.finish([seq], "abort")
    assert confirm(scheduler, step) == []
    assert (seq.num_output_tokens, seq.num_pending) == (0, 0)
    assert scheduler.is_finished()


def test_ending_nobody_or_several_from_both_queues() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    sequences = [add(scheduler, 3, seq_id=i) for i in range(3)]
    run_step(scheduler)
    scheduler.finish([], "abort")
    scheduler.finish([sequences[0], sequences[2]], "abort")
    scheduler.check_invariants()
    assert (scheduler.running, list(scheduler.waiting)) == ([], [sequences[1]])


def test_ending_twice_is_our_bug() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 3)
    scheduler.finish([seq], "abort")
    with pytest.raises(AssertionError, match="ends twice"):
        scheduler.finish([seq], "abort")


# check_invariants


def lose_row(scheduler: Scheduler) -> None:
    scheduler._free_rows.pop()


def share_row(scheduler: Scheduler) -> None:
    scheduler.running[1].row = scheduler.running[0].row


def queue_twice(scheduler: Scheduler) -> None:
    scheduler.waiting.append(scheduler.running[0])


def leave_status(scheduler: Scheduler) -> None:
    scheduler.running[0].status = SequenceStatus.WAITING


def run_ahead(scheduler: Scheduler) -> None:
    scheduler.running[0].num_computed_tokens += 3


def forget_sequence(scheduler: Scheduler) -> None:
    scheduler._free_rows.append(scheduler.running.pop().row or 0)


@pytest.mark.parametrize(
    "corrupt", [lose_row, share_row, queue_twice, leave_status, run_ahead, forget_sequence]
)
def test_check_invariants_notices(corrupt: Callable[[Scheduler], None]) -> None:
    scheduler = three_running(num_blocks=8)
    scheduler.check_invariants()
    corrupt(scheduler)
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


# against a model


class ModelSequence:
    """What the model knows of a sequence: counts."""

    def __init__(self, order: Order) -> None:
        self.number = order.number
        self.num_tokens = len(order.prompt)
        self.num_computed = 0
        self.is_admitted = False


class ModelLane(NamedTuple):
    number: int
    start: int
    num_tokens: int


class ModelScheduler:
    """The scheduling rules without blocks, hashes, rows or steps in flight: counts and lists."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.waiting: list[ModelSequence] = []
        self.running: list[ModelSequence] = []
        self.num_prefills_in_a_row = 0
        self.num_to_end = 0  # before prompts that found no room are looked at again
        self.num_steps_held = 0

    def schedule(self) -> list[ModelLane]:
        is_anyone_running = bool(self.running)
        lanes = []
        if is_anyone_running and self.num_prefills_in_a_row == MAX_PREFILLS_IN_A_ROW:
            pass
        elif is_anyone_running and self._lacks_room_for_a_group():
            self.num_steps_held += 1
        else:
            self.num_to_end = self.num_steps_held = 0
            lanes = self._prefill()
        sits_out = is_anyone_running and lanes
        self.num_prefills_in_a_row = self.num_prefills_in_a_row + 1 if sits_out else 0
        return lanes or self._decode()

    def confirm(self, lanes: list[ModelLane], finished: set[int]) -> None:
        """Every sequence that ran and is through got a token; `finished` ended."""
        ran = {lane.number for lane in lanes}
        for seq in self.running:
            seq.num_tokens += seq.number in ran
        self.drop(finished)

    def drop(self, numbers: set[int]) -> None:
        self.num_to_end -= len(numbers)
        self.running = [seq for seq in self.running if seq.number not in numbers]
        self.waiting = [seq for seq in self.waiting if seq.number not in numbers]

    def _lacks_room_for_a_group(self) -> bool:
        return self.num_to_end > 0 and self.num_steps_held < MAX_STEPS_HELD

    def _num_free(self) -> int:
        return self.world.num_blocks - sum(
            self._num_blocks(seq.num_computed if seq in self.running else seq.num_tokens)
            for seq in (*self.running, *self.waiting)
            if seq.is_admitted
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.world.block_size)

    def _prefill(self) -> list[ModelLane]:
        lanes: list[ModelLane] = []
        budget = self.world.max_num_batched_tokens
        max_num_seqs = min(self.world.max_num_seqs, budget)
        while self.waiting and budget:
            seq = self.waiting[0]
            if not seq.is_admitted:
                is_full = len(self.running) == max_num_seqs
                if is_full or self._num_blocks(seq.num_tokens) > self._num_free():
                    self.num_to_end = len(self.running) // self.world.num_groups
                    break
                if lanes and seq.num_tokens > budget:
                    break
                seq.is_admitted = True
            num_tokens = min(budget, seq.num_tokens - seq.num_computed)
            lanes.append(ModelLane(seq.number, seq.num_computed, num_tokens))
            seq.num_computed += num_tokens
            budget -= num_tokens
            if seq.num_computed < seq.num_tokens:
                break
            self.running.append(self.waiting.pop(0))
        return lanes

    def _decode(self) -> list[ModelLane]:
        while sum(self._needs_block(seq) for seq in self.running) > self._num_free():
            if not (self.waiting and self.waiting[0].is_admitted):
                self.waiting.insert(0, self.running.pop())
            self.waiting[0].is_admitted, self.waiting[0].num_computed = False, 0
        lanes = [ModelLane(seq.number, seq.num_computed, 1) for seq in self.running]
        for seq in self.running:
            seq.num_computed += 1
        return lanes

    def _needs_block(self, seq: ModelSequence) -> bool:
        return seq.num_computed % self.world.block_size == 0


class SchedulerWalk(RuleBasedStateMachine):
    """Requests come and are aborted at any time; the oracle of `worlds` watches every step.

    With nothing shared and nothing in flight, the model also says who must run.
    """

    @initialize(
        block_size=st.sampled_from([1, 2, 2, 3, 4, 4, 16, 256]),
        num_blocks=st.integers(1, 10),
        max_num_seqs=st.sampled_from([8, 8, 3, 1]),
        max_num_batched_tokens=st.sampled_from([256, 64, 64, 8, 5, 1]),
        max_num_mixed_tokens=st.sampled_from([0, 0, 1, 4, 16]),
        num_groups=st.sampled_from([16, 3, 2]),
        is_plain=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_mixed_tokens: int,
        num_groups: int,
        is_plain: bool,
    ) -> None:
        scale = max(block_size // 4, 1)  # of large blocks a token a step would take all day
        self.world = World(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens * scale,
            max_num_mixed_tokens=0 if is_plain else max_num_mixed_tokens * scale,
            num_groups=num_groups,
        )
        self.loop = Loop(self.world, overlap=not is_plain, enable_prefix_caching=not is_plain)
        self.model = ModelScheduler(self.world) if is_plain else None
        self.orders: list[Order] = []

    @precondition(lambda self: len(self.orders) < 12)
    @rule(
        data=st.data(),
        num_shared=st.integers(0, 3),
        num_beside=st.integers(-1, 1),
        tail=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
        max_tokens=st.integers(1, 20),
        stop_token_ids=st.sampled_from([frozenset(), frozenset({0, 1})]),
    )
    def add(
        self,
        data: st.DataObject,
        num_shared: int,
        num_beside: int,
        tail: list[int],
        max_tokens: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        """A prompt of its own, or one that goes on where an earlier one has a block's end."""
        num_slots = self.world.block_size * self.world.num_blocks
        cut = max(num_shared * self.world.block_size + num_beside, 0)
        begin: list[int] = [1] * cut
        if self.orders and data.draw(st.booleans()):
            begin = data.draw(st.sampled_from(self.orders)).content().tolist()
        prompt = (begin[:cut] + tail)[:num_slots] or [1]
        order = Order(
            number=len(self.orders),
            seed=len(self.orders),
            prompt=tuple(prompt),
            max_tokens=min(max_tokens, num_slots + 1 - len(prompt)),
            stop_token_ids=stop_token_ids,
        )
        self.orders.append(order)
        self.loop.add(order)
        if self.model:
            self.model.waiting.append(ModelSequence(order))

    @precondition(lambda self: self.orders)
    @rule(num_steps=st.sampled_from([1, 1, 2, 5, 10]))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.model:
                self._step_as_the_model()
            else:
                self._note_finished(self.loop.step())

    @precondition(lambda self: self.orders and not self.loop.scheduler.is_finished())
    @rule(data=st.data(), is_meant=st.sampled_from([False, False, False, True]))
    def abort(self, data: st.DataObject, is_meant: bool) -> None:
        if not is_meant:
            return  # else most requests would be aborted before they met
        scheduler = self.loop.scheduler
        seq = data.draw(st.sampled_from([*scheduler.running, *scheduler.waiting]))
        self.loop.abort(seq)
        if self.model:
            self.model.drop({seq.seq_id})

    @precondition(lambda self: self.orders and self.loop.scheduler.is_finished())
    @rule()
    def reset_prefix_cache(self) -> None:
        self.loop.scheduler.block_manager.reset()

    @invariant()
    def queues_are_in_order(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.check()
        if self.model:
            scheduler = self.loop.scheduler
            assert [s.seq_id for s in scheduler.running] == [s.number for s in self.model.running]
            assert [s.seq_id for s in scheduler.waiting] == [s.number for s in self.model.waiting]

    def teardown(self) -> None:
        """Whatever happened, the rest ends as it would have alone."""
        if not hasattr(self, "loop"):
            return
        for _ in range(MAX_STEPS):
            if self.loop.scheduler.is_finished():
                break
            self.step(1)
        assert self.loop.scheduler.is_finished(), "some request never ends"
        for order in self.orders:  # once more: a late token may have come after the end
            if self.loop.sequences[order.number].finish_reason != "abort":
                self.loop.check_answer(order)
        blocks = self.loop.scheduler.block_manager
        assert blocks.num_free_blocks == self.world.num_blocks, "blocks leaked"

    def _step_as_the_model(self) -> None:
        assert self.model is not None
        rows = self.loop.runner.row_orders
        batches = []
        launch = self.loop.runner.launch
        self.loop.runner.launch = lambda batch: batches.append(batch) or launch(batch)
        finished = self.loop.step()
        self.loop.runner.launch = launch
        expected = self.model.schedule()
        lanes = []
        for batch in batches:
            num_tokens = batch.num_tokens.tolist() + [1] * batch.num_decodes
            parts = zip(batch.rows.tolist(), batch.starts.tolist(), num_tokens, strict=True)
            lanes += [ModelLane(rows[row].number, start, n) for row, start, n in parts]
        assert lanes == expected
        self.model.confirm(lanes, self._note_finished(finished))

    def _note_finished(self, finished: list[Sequence]) -> set[int]:
        for seq in finished:
            self.loop.check_answer(self.orders[seq.seq_id])
        return {seq.seq_id for seq in finished}


TestSchedulerWalk = SchedulerWalk.TestCase
TestSchedulerWalk.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.slow
def test_many_walks() -> None:
    run_state_machine_as_test(
        SchedulerWalk,
        settings=settings(max_examples=2000, stateful_step_count=50, deadline=None),
    )
