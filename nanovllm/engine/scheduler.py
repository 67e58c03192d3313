"""Who runs this step: admit, chunk, preempt, finish.

Continuous batching decides anew before every step, so a sequence that ends makes room at once:

- Waiting prompts go first, in order; admission stops at the first that doesn't fit, and a prompt
  longer than a step's token budget runs in chunks.
- With no prompt to run, every running sequence decodes one token. MAX_PREFILLS_IN_A_ROW bounds how
  many prompt steps they sit out.
- Prompts that found no room are held until a group (1/16 of those running) ends, at most
  MAX_STEPS_HELD decode steps: a step of one prompt takes as long as one of ten.
- With max_num_mixed_tokens, running sequences decode in every step and prompt chunks ride along,
  where that makes no output end later (`_mixes`).
- When a running sequence needs a block and none is free, the latest admitted one is preempted: it
  gives its blocks back and returns to the front of `waiting`, to be computed again, which is cheap
  where its old blocks are still in the prefix cache.

Under overlap a step is scheduled while the one before it still runs. That works because scheduling
uses counts only, never the value of a token in flight. Two decisions must wait for such values:
preempting, and noticing that all is done. There `schedule` returns None, and the caller processes
the step in flight first.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Lanes
from typing import NamedTuple

import numpy as np

from nanovllm.engine.batch import (
    MAX_MIXED_PREFILLS,
    NEW_BLOCK_WORDS,
    NEW_ROW_WORDS,
    ScheduledBatch,
    new_row,
    num_mixed_prompt_tokens,
)
from nanovllm.engine.block_manager import Admission, BlockManager
from nanovllm.engine.decodes import Decodes
from nanovllm.engine.sequence import Sequence, SequenceStatus

# Prefill steps that running sequences sit out before they decode one token: their wait is bounded
# however long the queue of prompts is.
MAX_PREFILLS_IN_A_ROW = 16

# Decode steps that prompts which found no room sit out, unless a group's worth of sequences ends.
MAX_STEPS_HELD = 32

_EMPTY = np.zeros(0, dtype=np.int32)
_NO_RECORDS = {
    num_words: np.zeros((0, num_words), dtype=np.int32)
    for num_words in (NEW_ROW_WORDS, NEW_BLOCK_WORDS)
}


class Step(NamedTuple):
    """A scheduled step: what the ranks run, and whose the tokens are that come back."""

    batch: ScheduledBatch
    sequences: Lanes[Sequence | None]  # by lane; None: the prompt isn't through, drop its token
    decodes: Decodes | None = None  # the same lanes, if all of them decode
    num_ended: int = 0  # sequences that had ended when the step was scheduled


class _Chunk(NamedTuple):
    """What a prefill lane runs."""

    seq: Sequence
    start: int  # position of its first token
    token_ids: list[int]


class Scheduler:
    """Owner of the queues, the device rows and, through its BlockManager, the blocks.

    Invariants: no step exceeds max_num_batched_tokens; a step is never empty while work remains,
    since a request is accepted only if the whole pool could hold it alone (`check_fits`); and
    (`check_invariants`) at most max_num_seqs sequences hold a row, each its own, and a sequence is
    in one queue.
    """

    # Found by replaying schedules (tests/engine/bench_scheduler.py); small worlds change them.
    num_groups = 16  # a group is a sixteenth of all that run; see `_holds_prompts`
    num_riding_steps = 8  # prompts that need no more ride in any case; see `_mixes`

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_mixed_tokens: int = 0,
        enable_prefix_caching: bool = True,
    ) -> None:
        # A decode step runs one token a sequence, and the token budget holds for it too.
        self.max_num_seqs = max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        # Tokens of a step that holds prompt chunks and decode lanes; 0: there are no such steps.
        self.max_num_mixed_tokens = min(max_num_mixed_tokens, max_num_batched_tokens)
        self.block_manager = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._num_waiting_tokens = 0  # of waiting sequences, not computed yet
        self._num_prefills_in_a_row = 0
        self._num_ended = 0
        # The _num_ended at which prompts that found no room are tried again, and the steps that
        # they have been held.
        self._held_until_ended = 0
        self._num_steps_held = 0
        self._decodes: Decodes | None = None  # of the last step; None: `running` has changed
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Records for the next batch: what rows and block tables gained since the last one.
        self._new_rows: list[tuple[int, int, int, int]] = []
        self._new_blocks: list[tuple[int, int, int]] = []
        self._row_params: list[np.ndarray] = []

    def check_fits(self, num_tokens: int) -> None:
        """Refuse a sequence that this pool could not hold even alone; see `check_fits`."""
        blocks = self.block_manager
        check_fits(num_tokens, num_blocks=len(blocks.blocks), block_size=blocks.block_size)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind all others."""
        self.waiting.append(seq)
        self._num_waiting_tokens += seq.num_tokens

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self, *, in_flight: bool = False) -> Step | None:
        """Decide the next step and claim what it needs.

        Args:
            in_flight: Whether a launched step has not been given to `postprocess` yet.

        Returns:
            The step, or None: process the step in flight first, or, without one, all is done.
        """
        is_anyone_running = bool(self.running)
        if self._mixes():
            step = self._schedule_mixed(in_flight)
        elif is_anyone_running and self._num_prefills_in_a_row >= MAX_PREFILLS_IN_A_ROW:
            step = self._schedule_decode(in_flight)
        elif self._holds_prompts():
            step = self._schedule_decode(in_flight)
            self._num_steps_held += step is not None
        else:
            step = self._schedule_prefill() or self._schedule_decode(in_flight)
        assert step or in_flight or self.is_finished(), "nothing to run while work remains"
        if step is not None:
            sits_out = is_anyone_running and not step.batch.num_decodes
            self._num_prefills_in_a_row = self._num_prefills_in_a_row + 1 if sits_out else 0
        return step

    def postprocess(self, step: Step, token_ids: list[int]) -> list[Sequence]:
        """Confirm the tokens of a step and return the sequences that they finish.

        A sequence that ended since the step was launched takes no further token.
        """
        assert len(token_ids) == len(step.sequences), "a token for each lane"
        decodes = step.decodes if step.num_ended == self._num_ended else None
        if decodes is not None and decodes.stop_token_ids.isdisjoint(token_ids):
            return self._confirm_all(decodes, step.batch.starts, token_ids)
        finished: list[Sequence] = []
        ended = SequenceStatus.FINISHED
        for seq, token_id in zip(step.sequences, token_ids, strict=True):
            if seq is None or seq.status is ended:
                continue
            seq.token_ids.append(token_id)
            num_tokens = len(seq.token_ids)
            if token_id in seq.stop_token_ids and num_tokens >= seq.min_total_tokens:
                seq.finish_reason = "stop"
            elif num_tokens >= seq.max_total_tokens:
                seq.finish_reason = "length"
            else:
                continue
            finished.append(seq)
        self.finish(finished)
        return finished

    def _confirm_all(
        self, decodes: Decodes, starts: np.ndarray, token_ids: list[int]
    ) -> list[Sequence]:
        """Confirm a token of every sequence; none ends except by its length.

        Nearly all steps are so. For 256 sequences this takes a sixth of the time that
        `postprocess` takes lane by lane.
        """
        deque(map(list.append, decodes.token_lists, token_ids), maxlen=0)
        if decodes.num_steps_of_shortest > 0:
            return []
        is_last = starts + 1 >= decodes.limits
        finished = [decodes.sequences[i] for i in np.flatnonzero(is_last).tolist()]
        for seq in finished:
            seq.finish_reason = "length"
        self.finish(finished)
        return finished

    def finish(self, sequences: Iterable[Sequence], reason: str | None = None) -> None:
        """End sequences, wherever they stand, and take their blocks and rows back.

        A step in flight may still write to those blocks: whoever gets them writes later.

        Args:
            sequences: Unfinished sequences of this scheduler.
            reason: Their finish_reason, unless they have one.
        """
        # Not a set: its order, and so which blocks are reused first, would differ between runs.
        ended = dict.fromkeys(sequences)
        if not ended:
            return
        self._drop_decodes()
        for seq in ended:
            assert not seq.is_finished, f"{seq} ends twice"
            seq.finish_reason = seq.finish_reason or reason
            self._release(seq)
            seq.status = SequenceStatus.FINISHED
        self._num_ended += len(ended)
        num_running = len(self.running)
        self.running = [seq for seq in self.running if seq not in ended]
        if num_running - len(self.running) < len(ended):
            self.waiting = deque(seq for seq in self.waiting if seq not in ended)
            self._num_waiting_tokens = self._count_waiting_tokens()

    def preempt(self, seq: Sequence) -> None:
        """Take everything back from the latest admitted sequence; it will be computed again."""
        self._drop_decodes()
        assert seq is self._victim(), f"{seq} isn't the latest admitted"
        assert seq.num_pending == 0, f"{seq} is preempted with a token in flight"
        self.num_preemptions += 1
        num_lost = seq.num_computed_tokens
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        if not self.waiting or seq is not self.waiting[0]:
            self.waiting.appendleft(self.running.pop())
            num_lost = seq.num_tokens
        self._num_waiting_tokens += num_lost

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants of the queues, rows and blocks hold."""
        if self._decodes is not None:
            self._decodes.settle()
        holders = [seq for seq in (*self.running, *self.waiting) if seq.row is not None]
        rows = [seq.row for seq in holders if seq.row is not None]
        assert sorted(rows + self._free_rows) == list(range(self.max_num_seqs)), "rows were lost"
        queued = [*self.running, *self.waiting]
        assert len(set(queued)) == len(queued), "a sequence is queued twice"
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.running), "not running"
        for i, seq in enumerate(self.waiting):
            assert i == 0 or seq.row is None, f"{seq} waits, yet holds a row"
        for seq in self.running:
            assert 0 <= seq.num_pending <= 2, f"{seq} runs ahead of its tokens"
            num_blocks = -(-seq.num_computed_tokens // seq.block_size)
            assert num_blocks == len(seq.block_table), f"{seq} holds blocks before it needs them"
        for seq in holders[len(self.running) :]:
            assert seq.num_computed_tokens < seq.num_tokens, f"{seq} is through, yet waits"
            assert seq.num_blocks == len(seq.block_table), f"{seq} lacks blocks of its prompt"
        assert self._num_waiting_tokens == self._count_waiting_tokens(), "waiting tokens were lost"
        self.block_manager.check_invariants(holders)

    def _mixes(self) -> bool:
        """Whether prompts ride with decode lanes, because the call ends no later for it.

        Riding is nearly free, but takes more steps than prompt steps would, and the last prompt in
        the queue starts its output after all of them. That delays nothing if some running output
        needs at least those steps plus the last prompt's output, as it does if the longest outputs
        were queued first. Else (all outputs of one length, say) prompts get steps of their own,
        unless all that wait fit into `num_riding_steps`.
        """
        if not self.max_num_mixed_tokens:
            return False
        if not self.waiting:
            return True
        num_lanes = min(len(self.running) + len(self.waiting), self.max_num_seqs)
        # Lanes fill meanwhile: on the way a step carries about twice what it does in the end.
        num_steps = self._num_waiting_tokens / (2 * max(self._num_riding_tokens(num_lanes), 1))
        last, decodes = self.waiting[-1], self._gather_decodes()
        num_steps_after = last.max_total_tokens - last.num_tokens
        num_steps_spare = min(
            decodes.num_steps_of_longest - num_steps_after,
            # <= 0 if `last` may reach max_model_len, which says nothing of its output.
            decodes.max_total_tokens - last.max_total_tokens,
        )
        return num_steps <= max(num_steps_spare, self.num_riding_steps)

    def _num_riding_tokens(self, num_decodes: int) -> int:
        """Prompt tokens that a mixed step takes beside so many decode lanes."""
        num_tokens = num_mixed_prompt_tokens(num_decodes, self.max_num_mixed_tokens)
        return min(num_tokens, self.max_num_batched_tokens - num_decodes)

    def _count_waiting_tokens(self) -> int:
        return sum(seq.num_tokens - seq.num_computed_tokens for seq in self.waiting)

    def _holds_prompts(self) -> bool:
        """Whether prompts that found no room go on waiting until more sequences end."""
        is_due = self._num_steps_held >= MAX_STEPS_HELD or not self.running
        return self._num_ended < self._held_until_ended and not is_due

    def _schedule_prefill(self) -> Step | None:
        """A step of waiting prompts alone."""
        chunks = self._take_prompts(self.max_num_batched_tokens)
        return self._build_prefill(chunks) if chunks else None

    def _schedule_mixed(self, in_flight: bool) -> Step | None:
        """Every running sequence's next token, and prompt chunks in what the budget leaves.

        Reading the weights is most of a decode step of a large model, and a few hundred tokens more
        read them no longer. Running sequences never wait for prompts here; where none runs, there
        is nothing to ride with, and prompts get a step of their own.
        """
        decodes = self._claim_decodes(in_flight)
        if decodes is None:
            return None
        num_decodes = len(decodes.sequences)
        if not num_decodes:
            return self._schedule_prefill()
        budget = self._num_riding_tokens(num_decodes)
        chunks = self._take_prompts(budget, MAX_MIXED_PREFILLS, cuts_last=True)
        if not chunks:
            return self._build_decode(decodes)
        step = self._build_prefill(chunks, decodes)
        decodes.advance()
        if self._decodes is not decodes:  # dropped, since a prompt is through and will decode, too
            decodes.settle()
        return step

    def _take_prompts(
        self, budget: int, max_prompts: int | None = None, *, cuts_last: bool = False
    ) -> list[_Chunk]:
        """Admit waiting prompts in order, as far as tokens, rows and blocks go.

        Args:
            budget: Tokens.
            max_prompts: None: any number.
            cuts_last: Whether any prompt that exceeds the budget is cut; else only the step's
                first prompt may be cut, and a later one that doesn't fit waits.
        """
        chunks: list[_Chunk] = []
        self._held_until_ended = self._num_steps_held = 0
        while self.waiting and budget > 0 and len(chunks) != max_prompts:
            seq = self.waiting[0]
            if seq.row is None:
                admission = self._admission(seq)
                if admission is None:
                    self._held_until_ended = self._num_ended + len(self.running) // self.num_groups
                    break
                num_cached = len(admission.cached_block_ids) * seq.block_size
                if chunks and not cuts_last and seq.num_tokens - num_cached > budget:
                    break
                self._admit(seq, admission)
                self._num_waiting_tokens -= num_cached
            chunk = self._advance_prefill(seq, budget)
            chunks.append(chunk)
            budget -= len(chunk.token_ids)
            self._num_waiting_tokens -= len(chunk.token_ids)
            if seq.num_computed_tokens < seq.num_tokens:
                break
            self.waiting.popleft()
            self.running.append(seq)
            self._drop_decodes()
        return chunks

    def _admission(self, seq: Sequence) -> Admission | None:
        return self.block_manager.can_allocate(seq) if self._free_rows else None

    def _admit(self, seq: Sequence, admission: Admission) -> None:
        self.block_manager.allocate(seq, admission)
        if seq.num_prompt_cached_tokens is None:
            seq.num_prompt_cached_tokens = seq.num_cached_tokens
            seq.first_scheduled_time = time.monotonic()
        seq.status = SequenceStatus.RUNNING
        seq.row = row = self._free_rows.pop()
        self._new_rows.append(new_row(row, seq.temperature, seq.seed))
        self._new_blocks += [(row, i, block) for i, block in enumerate(seq.block_table)]
        if seq.row_params is not None:
            self._row_params.append(seq.row_params.record(row, seq.token_ids))

    def _advance_prefill(self, seq: Sequence, budget: int) -> _Chunk:
        start = seq.num_computed_tokens
        token_ids = seq.token_ids[start : start + budget]
        seq.num_scheduled_tokens = len(token_ids)
        seq.num_computed_tokens = start + len(token_ids)
        # Published now, before the step has run: a prompt admitted next, in this same step, may
        # share these blocks, since every layer stores all lanes' keys before any lane attends.
        self.block_manager.hash_blocks(seq)
        return _Chunk(seq, start, token_ids)

    def _schedule_decode(self, in_flight: bool) -> Step | None:
        """One token for every running sequence that may have another."""
        decodes = self._claim_decodes(in_flight)
        if decodes is None or not decodes.sequences:
            return None
        return self._build_decode(decodes)

    def _build_decode(self, decodes: Decodes) -> Step:
        step = self._build_step(decodes.sequences, decodes.rows, decodes.starts, decodes=decodes)
        decodes.advance()
        return step

    def _drop_decodes(self) -> None:
        """Before anything changes that the arrays hold: gather them anew next time."""
        if self._decodes is not None:
            self._decodes.settle()
            self._decodes = None

    def _gather_decodes(self) -> Decodes:
        """The running sequences that may have another token."""
        self._decodes = (self._decodes or Decodes([*self.running])).without_exhausted()
        return self._decodes

    def _claim_decodes(self, in_flight: bool) -> Decodes | None:
        """The running sequences that may have another token, with a slot for it.

        Decided before anything changes: if blocks are short, either the step in flight is
        processed first (None), which may free some, or sequences are preempted until the rest fit.
        """
        while True:
            decodes = self._gather_decodes()
            # Those whose next token begins a block: `BlockManager.needs_block` for all at once.
            begins_block = decodes.starts % self.block_manager.block_size == 0
            needy = np.flatnonzero(begins_block).tolist()
            if len(needy) <= self.block_manager.num_free_blocks:
                break
            if in_flight:
                return None
            self.preempt(self._victim())
        for i in needy:
            seq = decodes.sequences[i]
            seq.num_computed_tokens = int(decodes.starts[i])
            self._append_block(seq)
        return decodes

    def _append_block(self, seq: Sequence) -> None:
        self.block_manager.hash_blocks(seq)
        block_id = self.block_manager.may_append(seq)
        assert block_id is not None, f"{seq} takes a block without need"
        assert seq.row is not None, f"{seq} runs without a row"
        self._new_blocks.append((seq.row, len(seq.block_table) - 1, block_id))

    def _victim(self) -> Sequence:
        """The latest admitted: the prompt half through, if any, else the last in `running`."""
        if self.waiting and self.waiting[0].row is not None:
            return self.waiting[0]
        return self.running[-1]

    def _build_prefill(self, chunks: list[_Chunk], decodes: Decodes | None = None) -> Step:
        """A step of prompt chunks, then decode lanes if there are any."""
        sequences = [chunk.seq for chunk in chunks]
        receivers = [seq if seq.num_pending else None for seq in sequences]
        rows = np.array([seq.row for seq in sequences], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        token_ids = [chunk.token_ids for chunk in chunks]
        if decodes is not None:
            receivers += decodes.sequences
            rows = np.concatenate((rows, decodes.rows))
            starts = np.concatenate((starts, decodes.starts))
        return self._build_step(
            receivers,
            rows,
            starts,
            np.array([len(tokens) for tokens in token_ids], dtype=np.int32),
            np.array(list(itertools.chain.from_iterable(token_ids)), dtype=np.int32),
        )

    def _build_step(
        self,
        receivers: Lanes[Sequence | None],
        rows: np.ndarray,
        starts: np.ndarray,
        num_tokens: np.ndarray = _EMPTY,
        prompt_tokens: np.ndarray = _EMPTY,
        decodes: Decodes | None = None,
    ) -> Step:
        """A step of these lanes, with what rows and block tables gained since the last one."""
        batch = ScheduledBatch(
            rows=rows,
            starts=starts,
            num_tokens=num_tokens,
            prompt_tokens=prompt_tokens,
            new_rows=_records(self._new_rows, NEW_ROW_WORDS),
            new_blocks=_records(self._new_blocks, NEW_BLOCK_WORDS),
            row_params=np.concatenate(self._row_params) if self._row_params else _EMPTY,
        )
        self._new_rows.clear()
        self._new_blocks.clear()
        self._row_params.clear()
        return Step(batch, receivers, decodes, self._num_ended)

    def _release(self, seq: Sequence) -> None:
        self.block_manager.hash_blocks(seq)
        self.block_manager.deallocate(seq)
        if seq.row is None:
            return
        self._free_rows.append(seq.row)
        seq.row = None


def _records(records: Lanes[tuple[int, ...]], num_words: int) -> np.ndarray:
    """(n, num_words) int32."""
    return np.array(records, dtype=np.int32) if records else _NO_RECORDS[num_words]


def check_fits(num_tokens: int, *, num_blocks: int, block_size: int) -> None:
    """Refuse a sequence that a pool could not hold even alone.

    Args:
        num_tokens: Prompt and output; the last one is never stored.
        num_blocks: Of the pool.
        block_size: Tokens.

    Raises:
        ValueError: With the blocks needed and the blocks there are.
    """
    num_needed = -(-(num_tokens - 1) // block_size)
    if num_needed > num_blocks:
        raise ValueError(
            f"{num_tokens} tokens (prompt and output) need {num_needed} KV-cache blocks of "
            f"{block_size} tokens, the pool has {num_blocks}: lower max_tokens or raise "
            "num_kvcache_blocks (on a GPU, or gpu_memory_utilization)"
        )
