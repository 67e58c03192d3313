"""Whatever the scheduler does, every step reads its own tokens, and answers are a lone run's.

Worlds are random but fixed by their seed. The second half plants mistakes: an oracle that no
mistake can fail proves nothing.
"""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from engine.worlds import Lane, Loop, SlotRunner, World

from nanovllm.engine.batch import MAX_MIXED_PREFILLS, ScheduledBatch, num_mixed_prompt_tokens
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.decodes import Decodes
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence

NUM_WORLDS = 300
NUM_WORLDS_OF_OTHER_MODES = 80
NUM_WORLDS_SLOW = 2000
ALWAYS = 10**9  # prompts ride, however many steps they take
WEAK_HASHES = 4

MODES = [(overlap, caching) for overlap in (True, False) for caching in (True, False)]


def run_worlds(
    seeds: range, overlap: bool = True, caching: bool = True, **classes: type
) -> Counter[str]:
    """Run worlds, checking all of it, and add up what happened."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        loop = Loop(World.random(seed), overlap=overlap, enable_prefix_caching=caching, **classes)
        counts += loop.run()
    return counts


def test_random_worlds_answer_as_alone() -> None:
    counts = run_worlds(range(NUM_WORLDS))
    assert counts["preemptions"] >= 300
    assert counts["prefix hits"] >= 700
    assert counts["chunked prefills"] >= 700
    assert counts["stop"] >= 200


@pytest.mark.parametrize(("overlap", "caching"), MODES[1:])
def test_random_worlds_answer_as_alone_in_other_modes(overlap: bool, caching: bool) -> None:
    counts = run_worlds(range(NUM_WORLDS_OF_OTHER_MODES), overlap, caching)
    assert counts["preemptions"] >= 50
    assert (counts["prefix hits"] > 0) == caching


@pytest.mark.slow
def test_thousands_of_worlds_answer_as_alone() -> None:
    counts: Counter[str] = Counter()
    for overlap, caching in MODES:
        counts += run_worlds(range(NUM_WORLDS_SLOW), overlap, caching)
    print(dict(counts))
    assert counts["preemptions"] >= 2000
    assert counts["prefix hits"] >= 2000
    assert counts["chunked prefills"] >= 1000
    for stage in ("waiting", "half prefilled", "running", "in flight"):
        assert counts[f"aborts {stage}"] >= 20, f"too few aborts of sequences {stage}"


# sequences told late


class Unasked(Loop):
    """Looks at no sequence between steps, since whoever looks must have it told how far it is."""

    def check(self) -> None:
        pass


class TellsAtOnce(Scheduler):
    """Tells sequences how far they are at every step."""

    def schedule(self, *, in_flight: bool = False) -> Step | None:
        step = super().schedule(in_flight=in_flight)
        if self._decodes is not None:
            self._decodes.settle()
        return step


class RecordingRunner(SlotRunner):
    """Keeps every wire."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.wires: list[list[int]] = []

    def launch(self, batch: ScheduledBatch) -> list[int]:
        self.wires.append(batch.to_wire().tolist())
        return super().launch(batch)


def mixed_world(seed: int) -> World:
    """The world of this seed, with mixed steps in any case."""
    return replace(
        World.random(seed),
        max_num_mixed_tokens=(1, 3, 8, 16, 64)[seed % 5],
        num_riding_steps=(0, ALWAYS)[seed % 2],
    )


def run_told_late_and_at_once(seeds: range, overlap: bool, caching: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        world = mixed_world(seed) if seed % 4 else World.random(seed)
        modes = {"overlap": overlap, "enable_prefix_caching": caching}
        late = Unasked(world, runner_class=RecordingRunner, **modes)
        at_once = Loop(world, runner_class=RecordingRunner, scheduler_class=TellsAtOnce, **modes)
        counts += late.run()
        at_once.run()
        assert late.runner.wires == at_once.runner.wires
    return counts


@pytest.mark.parametrize(("overlap", "caching"), MODES)
def test_sequences_told_late_run_as_those_told_at_once(overlap: bool, caching: bool) -> None:
    counts = run_told_late_and_at_once(range(NUM_WORLDS_OF_OTHER_MODES), overlap, caching)
    assert counts["mixed steps"] >= 200
    assert counts["preemptions"] >= 50


@pytest.mark.slow
def test_thousands_told_late_run_as_those_told_at_once() -> None:
    counts: Counter[str] = Counter()
    for overlap, caching in MODES:
        counts += run_told_late_and_at_once(range(NUM_WORLDS_SLOW), overlap, caching)
    print(dict(counts))
    assert counts["mixed steps"] >= 20_000
    assert counts["preemptions"] >= 2000


class LeavesBehind(Decodes):
    """Goes on without those that ended by count, and tells nobody how far they are."""

    def without_exhausted(self) -> Decodes:
        if self.num_steps_of_shortest > 0:
            return self
        may_go_on = (self.starts < self.limits).tolist()
        return Decodes(list(itertools.compress(self.sequences, may_go_on)))


def test_sequence_that_is_left_behind_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.engine.scheduler.Decodes", LeavesBehind)
    with pytest.raises(AssertionError):
        run_told_late_and_at_once(range(NUM_WORLDS_OF_OTHER_MODES), True, True)


# who waits for whom


class NobodyWaits(Loop):
    """Checks that a step holds all who may have a token, and as much of the prompts as it may.

    With mixed steps, whatever waits: there every wait is for a row or for blocks, which others give
    back as they end.
    """

    def step(self) -> list[Sequence]:
        self.scheduler.check_invariants()  # lets them be told how far they are
        running = self.scheduler.running
        self.due = [seq for seq in running if seq.num_computed_tokens < seq.max_stored_tokens]
        return super().step()

    def _count(self, step: Step) -> None:
        super()._count(step)
        scheduler, batch = self.scheduler, step.batch
        readmitted = set(batch.new_rows[:, 0].tolist())  # or new
        expected = {seq.row for seq in self.due if seq.row is not None} - readmitted
        assert expected == set(batch.rows[batch.num_prefills :].tolist()), "who runs waits"
        if not batch.num_decodes or not scheduler.waiting:
            return
        room = num_mixed_prompt_tokens(batch.num_decodes, scheduler.max_num_mixed_tokens)
        room = min(room, scheduler.max_num_batched_tokens - batch.num_decodes)
        if batch.num_prefills < MAX_MIXED_PREFILLS and len(batch.prompt_tokens) < room:
            first = scheduler.waiting[0]
            assert first.row is None, f"{first} is half through and waits"
            assert scheduler._admission(first) is None, f"{first} waits, yet fits"
            self.counts["waits for a row or blocks"] += 1


@pytest.mark.parametrize("overlap", [True, False])
def test_nobody_waits_with_mixed_steps(overlap: bool) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_WORLDS_OF_OTHER_MODES):
        world = replace(mixed_world(seed), num_riding_steps=ALWAYS)
        counts += NobodyWaits(world, overlap=overlap).run()
    assert counts["mixed steps"] >= 200
    assert counts["waits for a row or blocks"] >= 100


# hashes that collide


def weak_hash(token_ids: list[int], prefix_hash: int | None = None) -> int:
    """Collides all the time."""
    return (sum(token_ids) + (prefix_hash or 0)) % WEAK_HASHES


def test_colliding_hashes_answer_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(weak_hash))
    counts = run_worlds(range(100))
    assert counts["prefix hits"] >= 50


def test_colliding_hashes_without_content_check_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(weak_hash))
    monkeypatch.setattr(Block, "holds", lambda *args: True)
    with pytest.raises(AssertionError, match="reads what is not its own"):
        run_worlds(range(100))


# mistakes of the block manager


class PublishesUnwrittenSlot(BlockManager):
    """Calls a block full as soon as its tokens are known, stored or not."""

    def hash_blocks(self, seq: Sequence) -> None:
        num_computed_tokens = seq.num_computed_tokens
        num_slots = len(seq.block_table) * self.block_size
        seq.num_computed_tokens = min(seq.num_tokens, num_slots)
        super().hash_blocks(seq)
        seq.num_computed_tokens = num_computed_tokens


class MatchesWholePrompt(BlockManager):
    """Lets a cached prompt match to its last token, so that none is left to compute."""

    def _match_prefix(self, seq: Sequence) -> tuple[list[int], int]:
        seq.token_ids.append(0)
        match = super()._match_prefix(seq)
        seq.token_ids.pop()
        return match


class FreesTwice(BlockManager):
    """Takes the same blocks back twice."""

    def deallocate(self, seq: Sequence) -> None:
        block_table = list(seq.block_table)
        super().deallocate(seq)
        seq.block_table += block_table
        super().deallocate(seq)


class FreesSharedBlocks(BlockManager):
    """Frees a block although another sequence still uses it."""

    def deallocate(self, seq: Sequence) -> None:
        for block_id in seq.block_table:
            self.blocks[block_id].ref_count = 1
        super().deallocate(seq)


class KeepsStaleHash(BlockManager):
    """Leaves a reused block findable under what it held before."""

    def _claim_free_block(self) -> int:
        old = self.blocks[next(iter(self.free_block_ids))]
        content = old.hash, old.token_ids, old.parent_content_id, old.content_id
        block_id = super()._claim_free_block()
        if content[0] is not None:
            old.update(*content)
            self.hash_to_block_id.setdefault(content[0], block_id)
        return block_id


class IgnoresParent(BlockManager):
    """Takes a block for any prefix, as long as its own tokens match."""

    @staticmethod
    def compute_hash(token_ids: list[int], prefix_hash: int | None = None) -> int:
        return BlockManager.compute_hash(token_ids)

    def _match_prefix(self, seq: Sequence) -> tuple[list[int], int]:
        holds = Block.holds
        try:
            Block.holds = lambda block, token_ids, parent: block.token_ids == token_ids
            return super()._match_prefix(seq)
        finally:
            Block.holds = holds


# mistakes of the scheduler


class PublishesTokenInFlight(Scheduler):
    """Hashes a block whose last token is still in flight, with a guess in its place."""

    def schedule(self, *, in_flight: bool = False) -> Step | None:
        step = super().schedule(in_flight=in_flight)
        for seq in self.running:
            seq.token_ids.append(seq.last_token)
            self.block_manager.hash_blocks(seq)
            seq.token_ids.pop()
        return step


class PublishesWholePrompt(Scheduler):
    """Publishes all of a prompt when it is admitted, though only a chunk of it runs."""

    def _admit(self, seq: Sequence, *args: object) -> None:
        super()._admit(seq, *args)
        num_computed_tokens, seq.num_computed_tokens = seq.num_computed_tokens, seq.num_tokens
        self.block_manager.hash_blocks(seq)
        seq.num_computed_tokens = num_computed_tokens


class PreemptsInFlight(Scheduler):
    """Doesn't wait for the step in flight when blocks are short."""

    def _schedule_decode(self, in_flight: bool) -> Step | None:
        return super()._schedule_decode(in_flight=False)


class KeepsTokenOfChunk(Scheduler):
    """Takes the token of a prompt that isn't through."""

    def schedule(self, *, in_flight: bool = False) -> Step | None:
        step = super().schedule(in_flight=in_flight)
        if step is None:
            return None
        return Step(step.batch, [seq or self.waiting[0] for seq in step.sequences])


class KeepsLateToken(Scheduler):
    """Takes a token that was in flight when its sequence ended."""

    def postprocess(self, step: Step, token_ids: list[int]) -> list[Sequence]:
        for seq, token_id in zip(step.sequences, token_ids, strict=True):
            if seq is not None and seq.is_finished:
                seq.token_ids.append(token_id)
        return super().postprocess(step, token_ids)


class RunsOneTooMany(Scheduler):
    """Computes the last token of an answer, which nothing needs."""

    def add(self, seq: Sequence) -> None:
        seq.max_stored_tokens += 1
        super().add(seq)


class ForgetsNewBlock(Scheduler):
    """Takes a block, but doesn't tell the ranks."""

    def _append_block(self, seq: Sequence) -> None:
        super()._append_block(seq)
        self._new_blocks.pop()


class PreemptsTheEarliest(Scheduler):
    """Takes the blocks of the sequence that has run longest."""

    def preempt(self, seq: Sequence) -> None:
        super().preempt(self.running[0])


class AttendsLaneByLane(SlotRunner):
    """Lets a lane read before the lanes after it have stored."""

    def execute(self, lanes: list[Lane]) -> list[int]:
        tokens = []
        for lane in reversed(lanes):
            self.store(lane)
            tokens.append(self.attend(lane))
        return tokens[::-1]


def with_blocks(manager_class: type[BlockManager]) -> type[Scheduler]:
    """A scheduler whose blocks are managed by `manager_class`."""

    class Planted(Scheduler):
        def __init__(self, **options: int) -> None:
            super().__init__(**options)
            right = self.block_manager
            self.block_manager = manager_class(
                len(right.blocks), right.block_size, right.enable_prefix_caching
            )

    return Planted


@pytest.mark.parametrize(
    ("manager_class", "symptom"),
    [
        (PublishesUnwrittenSlot, "reads what is not its own"),
        (MatchesWholePrompt, "computes nothing|is through"),
        (FreesTwice, "double free"),
        (FreesSharedBlocks, "refs|double free|owners"),
        (KeepsStaleHash, "stale hash|reads what is not its own"),
        (IgnoresParent, "reads what is not its own"),
    ],
)
def test_mistake_of_blocks_is_caught(manager_class: type[BlockManager], symptom: str) -> None:
    with pytest.raises(AssertionError, match=symptom):
        run_planted(scheduler_class=with_blocks(manager_class))


@pytest.mark.parametrize(
    ("scheduler_class", "symptom"),
    [
        (PublishesTokenInFlight, "holds other tokens|reads what is not its own"),
        (PublishesWholePrompt, "reads what is not its own"),
        (PreemptsInFlight, "preempted with a token in flight"),
        (KeepsTokenOfChunk, "foreign tokens|too long|says"),
        (KeepsLateToken, "says"),
        (RunsOneTooMany, "computes its last token"),
        (ForgetsNewBlock, "without a slot"),
        (PreemptsTheEarliest, "isn't the latest"),
    ],
)
def test_mistake_of_scheduler_is_caught(scheduler_class: type[Scheduler], symptom: str) -> None:
    with pytest.raises(AssertionError, match=symptom):
        run_planted(scheduler_class=scheduler_class)


def test_read_before_store_is_caught() -> None:
    with pytest.raises(AssertionError, match="reads what is not its own"):
        run_planted(runner_class=AttendsLaneByLane)


def run_planted(**classes: type) -> None:
    for overlap in (True, False):
        run_worlds(range(NUM_WORLDS), overlap, **classes)
