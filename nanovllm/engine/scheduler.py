"""Who runs this step: admit, chunk, preempt, finish.

Continuous batching decides anew before every step, so a sequence that ends makes room at once. The
rules are few. Waiting prompts go first, in order, and admission stops at the first that doesn't
fit; a prompt longer than a step's token budget runs in chunks. Else every running sequence decodes
one token. When a running sequence needs a block and none is free, the latest one in `running` is
preempted: its blocks go back, and it returns to the front of `waiting` to be computed again, which
its own blocks, if nobody took them, make cheap.

Under overlap a step is scheduled while the one before it still runs. That works because scheduling
uses counts only, never the value of a token in flight. Two decisions need such values to be
settled, preempting and noticing that all is done: there `schedule` returns None, and the caller
processes the step in flight first.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nanovllm.engine.batch import ScheduledBatch, new_row
from nanovllm.engine.block_manager import Admission, BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus


class Step(NamedTuple):
    """A scheduled step: what the ranks run, and whose the tokens are that come back."""

    batch: ScheduledBatch
    sequences: list[Sequence | None]  # by lane; None: the prompt isn't through, drop its token


class _Lane(NamedTuple):
    seq: Sequence
    start: int  # position of the first token that runs
    num_tokens: int


class Scheduler:
    """Owner of the queues, the device rows and, through its BlockManager, the blocks.

    Invariants (`check_invariants`): no step exceeds max_num_batched_tokens; at most max_num_seqs
    sequences hold a row, each its own; a sequence is in one queue; a step is never empty while work
    remains, since a request is accepted only if the whole pool could hold it alone (`check_fits`).
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_manager = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Records for the next batch: what rows and block tables gained since the last one.
        self._new_rows: list[tuple[int, int, int, int]] = []
        self._new_blocks: list[tuple[int, int, int]] = []

    def check_fits(self, num_tokens: int) -> None:
        """Refuse a sequence that the pool could not hold even alone.

        Args:
            num_tokens: Prompt and output; the last one is never stored.

        Raises:
            ValueError: With the blocks needed and the blocks there are.
        """
        block_size, num_blocks = self.block_manager.block_size, len(self.block_manager.blocks)
        num_needed = -(-(num_tokens - 1) // block_size)
        if num_needed > num_blocks:
            raise ValueError(
                f"{num_tokens} tokens (prompt and output) need {num_needed} KV-cache blocks of "
                f"{block_size} tokens, the pool has {num_blocks}: lower max_tokens or raise "
                "num_kvcache_blocks or gpu_memory_utilization"
            )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind all others."""
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self, *, in_flight: bool = False) -> Step | None:
        """Decide the next step and claim what it needs.

        Args:
            in_flight: Whether a launched step has not been given to `postprocess` yet.

        Returns:
            The step, or None: process the step in flight first, or, without one, all is done.
        """
        lanes = self._schedule_prefill()
        if lanes:
            return self._build_step(lanes, num_prefills=len(lanes))
        decodes = self._schedule_decode(in_flight)
        if decodes:
            return self._build_step(decodes, num_prefills=0)
        assert in_flight or self.is_finished(), "nothing to run while work remains"
        return None

    def postprocess(self, step: Step, token_ids: list[int]) -> list[Sequence]:
        """Confirm the tokens of a step and return the sequences that they finish.

        A sequence that ended since the step was launched takes no further token.
        """
        finished: list[Sequence] = []
        block_size = self.block_manager.block_size
        for seq, token_id in zip(step.sequences, token_ids, strict=True):
            if seq is None or seq.status is SequenceStatus.FINISHED:
                continue
            seq.num_pending -= 1
            seq.token_ids.append(token_id)
            num_tokens = len(seq.token_ids)
            if num_tokens % block_size <= 1:
                self.block_manager.hash_blocks(seq)
            if token_id in seq.stop_token_ids and num_tokens > seq.min_total_tokens:
                seq.finish_reason = "stop"
            elif num_tokens >= seq.max_total_tokens:
                seq.finish_reason = "length"
            else:
                continue
            finished.append(seq)
        self.finish(finished)
        return finished

    def finish(self, sequences: Iterable[Sequence], reason: str | None = None) -> None:
        """End sequences, wherever they stand, and take their blocks and rows back.

        A step in flight may still write to those blocks: whoever gets them writes later.

        Args:
            sequences: Unfinished sequences of this scheduler.
            reason: Their finish_reason, unless they have one.
        """
        ended = set(sequences)
        if not ended:
            return
        for seq in ended:
            assert not seq.is_finished, f"{seq} ends twice"
            seq.finish_reason = seq.finish_reason or reason
            self._release(seq)
            seq.status = SequenceStatus.FINISHED
            seq.num_pending = 0
        num_running = len(self.running)
        self.running = [seq for seq in self.running if seq not in ended]
        if num_running - len(self.running) < len(ended):
            self.waiting = deque(seq for seq in self.waiting if seq not in ended)

    def preempt(self, seq: Sequence) -> None:
        """Take everything back from a running or half-prefilled sequence; it will run again."""
        assert seq.num_pending == 0, f"{seq} is preempted with a token in flight"
        self.num_preemptions += 1
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        if self.waiting and self.waiting[0] is seq:
            return
        assert self.running[-1] is seq, f"{seq} isn't the latest in running"
        self.running.pop()
        self.waiting.appendleft(seq)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants of the queues, rows and blocks hold."""
        holders = [seq for seq in (*self.running, *self.waiting) if seq.row is not None]
        rows = [seq.row for seq in holders]
        assert sorted(rows + self._free_rows) == list(range(self.max_num_seqs)), "rows were lost"
        queued = [*self.running, *self.waiting]
        assert len(set(queued)) == len(queued), "a sequence is queued twice"
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.running), "not running"
        for i, seq in enumerate(self.waiting):
            assert i == 0 or seq.row is None, f"{seq} waits, yet holds a row"
        for seq in holders:
            capacity = len(seq.block_table) * self.block_manager.block_size
            assert seq.num_computed_tokens <= capacity, f"{seq}: tokens beyond its blocks"
            num_known = seq.num_tokens + max(seq.num_pending - 1, 0)
            assert seq.num_computed_tokens <= num_known, f"{seq}: more computed than sampled"
        self.block_manager.check_invariants(holders)

    def _schedule_prefill(self) -> list[_Lane]:
        """Admit waiting prompts in order, as far as tokens, rows and blocks go."""
        lanes: list[_Lane] = []
        budget = self.max_num_batched_tokens
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if seq.row is None:
                admission = self._admission(seq)
                if admission is None:
                    break
                num_cached = len(admission.cached_block_ids) * seq.block_size
                if lanes and seq.num_tokens - num_cached > budget:
                    break  # only the first prompt of a step is chunked
                self._admit(seq, admission)
            elif lanes and seq.num_tokens - seq.num_computed_tokens > budget:
                break
            lane = self._advance_prefill(seq, budget)
            lanes.append(lane)
            budget -= lane.num_tokens
            if seq.num_computed_tokens < seq.num_tokens:
                break
            self.waiting.popleft()
            self.running.append(seq)
        return lanes

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

    def _advance_prefill(self, seq: Sequence, budget: int) -> _Lane:
        start = seq.num_computed_tokens
        num_tokens = min(seq.num_tokens - start, budget)
        seq.num_scheduled_tokens = num_tokens
        seq.num_computed_tokens = start + num_tokens
        # Published now, before the step has run: a prompt admitted next, in this same step, may
        # share these blocks, since every layer stores all lanes' keys before any lane attends.
        self.block_manager.hash_blocks(seq)
        if seq.num_computed_tokens == seq.num_tokens:
            seq.num_pending += 1
        return _Lane(seq, start, num_tokens)

    def _schedule_decode(self, in_flight: bool) -> list[_Lane]:
        """One token for every running sequence that may have another.

        Decided before anything changes: if blocks are short, either the step in flight is
        processed first, which may free some, or sequences are preempted until the rest fit.
        """
        blocks = self.block_manager
        while True:
            runnable = [seq for seq in self.running if not seq.is_exhausted]
            needy = [seq for seq in runnable if blocks.needs_block(seq)]
            if len(needy) <= blocks.num_free_blocks:
                break
            if in_flight:
                return []
            self.preempt(self._victim())
        for seq in needy:
            block_id = blocks.may_append(seq)
            assert block_id is not None and seq.row is not None, f"{seq} got no block"
            self._new_blocks.append((seq.row, len(seq.block_table) - 1, block_id))
        return [self._advance_decode(seq) for seq in runnable]

    def _victim(self) -> Sequence:
        """The latest admitted: a half-prefilled prompt before any that runs."""
        if self.waiting and self.waiting[0].row is not None:
            return self.waiting[0]
        return self.running[-1]

    def _advance_decode(self, seq: Sequence) -> _Lane:
        start = seq.num_computed_tokens
        seq.num_scheduled_tokens = 1
        seq.num_computed_tokens = start + 1
        seq.num_pending += 1
        return _Lane(seq, start, 1)

    def _build_step(self, lanes: list[_Lane], num_prefills: int) -> Step:
        batch = ScheduledBatch(
            rows=np.array([lane.seq.row for lane in lanes], dtype=np.int32),
            starts=np.array([lane.start for lane in lanes], dtype=np.int32),
            num_tokens=np.array([lane.num_tokens for lane in lanes[:num_prefills]], dtype=np.int32),
            prompt_tokens=_prompt_tokens(lanes[:num_prefills]),
            new_rows=np.array(self._new_rows, dtype=np.int32).reshape(-1, 4),
            new_blocks=np.array(self._new_blocks, dtype=np.int32).reshape(-1, 3),
        )
        self._new_rows.clear()
        self._new_blocks.clear()
        return Step(batch, [lane.seq if lane.seq.num_pending else None for lane in lanes])

    def _release(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq)
        if seq.row is None:
            return
        self._free_rows.append(seq.row)
        seq.row = None


def _prompt_tokens(lanes: list[_Lane]) -> np.ndarray:
    """The tokens that prefill lanes run, back to back."""
    chunks = [lane.seq.token_ids[lane.start : lane.start + lane.num_tokens] for lane in lanes]
    return np.array([token for chunk in chunks for token in chunk], dtype=np.int32)
