"""Blocks: who gets which, who shares what, and what a reused block must have forgotten.

The smallest cases by hand, then random walks against a model that keeps whole contents instead of
hashes.
"""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence

A, B, C, D = ([letter] * 4 for letter in range(1, 5))  # contents of one block each


def make_sequence(tokens: list[int], block_size: int = 4) -> Sequence:
    return Sequence(0, tokens, block_size=block_size, max_total_tokens=100_000)


def admit(blocks: BlockManager, tokens: list[int]) -> Sequence:
    """A sequence whose whole prompt has been computed."""
    seq = make_sequence(tokens, blocks.block_size)
    admission = blocks.can_allocate(seq)
    assert admission is not None, "the pool is short"
    blocks.allocate(seq, admission)
    compute(blocks, seq)
    return seq


def compute(blocks: BlockManager, seq: Sequence) -> None:
    seq.num_computed_tokens = seq.num_tokens
    blocks.hash_blocks(seq)


# allocate and free


def test_blocks_are_given_for_all_known_tokens() -> None:
    blocks = BlockManager(4, 4)
    seq = admit(blocks, [*A, *B, 9])
    assert seq.block_table == [0, 1, 2]
    assert [blocks.blocks[i].ref_count for i in range(4)] == [1, 1, 1, 0]
    assert (blocks.num_free_blocks, blocks.used_block_ids) == (1, {0, 1, 2})
    blocks.check_invariants([seq])


def test_sequence_that_doesnt_fit_takes_nothing() -> None:
    blocks = BlockManager(2, 4)
    assert blocks.can_allocate(make_sequence([*A, *B, 9])) is None
    assert blocks.num_free_blocks == 2


def test_asking_claims_nothing() -> None:
    blocks = BlockManager(4, 4)
    blocks.deallocate(admit(blocks, [*A, *B, 9]))
    free = list(blocks.free_block_ids)
    assert blocks.can_allocate(make_sequence([*A, *B, 8])) is not None
    assert list(blocks.free_block_ids) == free


def test_cached_free_blocks_count_once_against_the_pool() -> None:
    """Two of the pool's three blocks are cached and free: sharing them uses them up."""
    blocks = BlockManager(3, 4)
    blocks.deallocate(admit(blocks, [*A, *B, 9]))
    assert blocks.can_allocate(make_sequence([*A, *B, *C, 9])) is None
    admission = blocks.can_allocate(make_sequence([*A, *B, *C]))
    assert admission is not None
    assert (admission.cached_block_ids, admission.num_new_blocks) == ([0, 1], 1)


def test_double_free_is_refused() -> None:
    blocks = BlockManager(2, 4)
    seq = admit(blocks, A)
    table = list(seq.block_table)
    blocks.deallocate(seq)
    seq.block_table += table
    with pytest.raises(AssertionError, match="double free of block 0"):
        blocks.deallocate(seq)


# the next token's block (C15)


@pytest.mark.parametrize("block_size", [4, 256])
@pytest.mark.parametrize("num_free", [0, 1])
@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_block_is_taken_only_for_the_token_that_begins_it(
    block_size: int, num_free: int, surplus: int
) -> None:
    """Lengths 255, 256, 257 at block_size 256: the newest token is the one about to be stored.

    This reads like an off-by-one to many: a sequence of 256 tokens fills its block by the very
    token that is stored next, so it needs no second block before it has 257.
    """
    num_tokens = block_size + surplus
    blocks = BlockManager(1 + num_free, block_size)
    seq = admit(blocks, [7] * (num_tokens - 1))
    seq.token_ids.append(7)
    assert blocks.needs_block(seq) == (num_tokens == block_size + 1)
    assert blocks.can_append(seq) == (num_tokens <= block_size or num_free == 1)
    if blocks.can_append(seq):
        block_id = blocks.may_append(seq)
        assert (block_id is not None) == (num_tokens == block_size + 1)
        assert len(seq.block_table) == seq.num_blocks
        assert not blocks.needs_block(seq)


# sharing


def test_common_prefix_is_shared_and_counted() -> None:
    blocks = BlockManager(8, 4)
    one = admit(blocks, [*A, *B, 9])
    other = admit(blocks, [*A, *B, 8])
    assert other.block_table[:2] == one.block_table[:2]
    assert other.block_table[2] != one.block_table[2]
    assert other.num_cached_tokens == 8
    assert blocks.blocks[one.block_table[0]].ref_count == 2
    blocks.check_invariants([one, other])
    blocks.deallocate(one)
    assert blocks.blocks[other.block_table[0]].ref_count == 1
    blocks.check_invariants([other])


@pytest.mark.parametrize("num_full", [1, 2, 3])
def test_last_token_of_a_cached_prompt_is_left_to_compute(num_full: int) -> None:
    """C13: a prompt that is an exact multiple of the block size, and all of it cached."""
    blocks = BlockManager(8, 4)
    prompt = [*A, *B, *C][: 4 * num_full]
    blocks.deallocate(admit(blocks, prompt))
    again = make_sequence(prompt)
    admission = blocks.can_allocate(again)
    assert admission is not None
    blocks.allocate(again, admission)
    assert again.num_cached_tokens == 4 * (num_full - 1)
    assert again.num_computed_tokens < again.num_tokens


def test_equal_tokens_after_another_prefix_are_not_shared() -> None:
    blocks = BlockManager(8, 4)
    admit(blocks, [*A, *C, 9])
    other = admit(blocks, [*B, *C, 9])
    assert other.num_cached_tokens == 0


def test_partial_block_is_never_shared() -> None:
    blocks = BlockManager(8, 4)
    admit(blocks, [*A, 5, 6, 7])
    assert admit(blocks, [*A, 5, 6, 7, 8]).num_cached_tokens == 4


def test_chunk_publishes_only_what_it_computed() -> None:
    blocks = BlockManager(8, 4)
    seq = make_sequence([*A, *B, *C, 9])
    admission = blocks.can_allocate(seq)
    assert admission is not None
    blocks.allocate(seq, admission)
    seq.num_computed_tokens = 7  # one block and three slots of the next
    blocks.hash_blocks(seq)
    assert admit(blocks, [*A, *B, *C, 9]).num_cached_tokens == 4


def test_generated_tokens_are_shared_once_known_and_stored() -> None:
    blocks = BlockManager(8, 4)
    seq = admit(blocks, [1, 1, 1])
    seq.token_ids.append(1)  # known, not stored
    blocks.hash_blocks(seq)
    assert blocks.can_allocate(make_sequence([*A, 9])).cached_block_ids == []
    seq.num_computed_tokens = 4  # stored
    blocks.hash_blocks(seq)
    assert blocks.can_allocate(make_sequence([*A, 9])).cached_block_ids == seq.block_table


def test_token_in_flight_is_not_published() -> None:
    blocks = BlockManager(8, 4)
    seq = admit(blocks, [1, 1, 1])
    seq.num_computed_tokens = 4  # its slot is stored, but its value isn't known here
    blocks.hash_blocks(seq)
    assert blocks.hash_to_block_id == {}


def test_same_content_computed_twice_leads_to_the_same_continuations() -> None:
    """Both sequences computed block A themselves; what follows either is found by anyone."""
    blocks = BlockManager(8, 4)
    one, two = admit(blocks, A), admit(blocks, A)
    assert one.block_table != two.block_table
    two.token_ids += [*B, 9]
    for _ in range(2):
        blocks.may_append(two)
        two.num_computed_tokens += 4
    blocks.hash_blocks(two)
    later = admit(blocks, [*A, *B, 8])
    assert later.block_table[:2] == [one.block_table[0], two.block_table[1]]


def test_caching_off_shares_nothing() -> None:
    blocks = BlockManager(8, 4, enable_prefix_caching=False)
    admit(blocks, [*A, 9])
    assert admit(blocks, [*A, 9]).num_cached_tokens == 0
    assert blocks.hash_to_block_id == {}


def test_sequence_that_must_run_whole_shares_nothing_but_is_shared() -> None:
    blocks = BlockManager(8, 4)
    admit(blocks, [*A, 9])
    whole = Sequence(1, [*A, *B, 9], block_size=4, max_total_tokens=50, reads_prefix_cache=False)
    admission = blocks.can_allocate(whole)
    assert admission is not None
    assert admission.cached_block_ids == []
    blocks.allocate(whole, admission)
    compute(blocks, whole)
    assert admit(blocks, [*A, *B, 8]).num_cached_tokens == 8


# eviction


def test_block_free_longest_is_reused_first_and_tails_before_heads() -> None:
    blocks = BlockManager(5, 4)
    one, two = admit(blocks, [*A, *B, 9]), admit(blocks, [*C, 9])
    assert (one.block_table, two.block_table) == ([0, 1, 2], [3, 4])
    blocks.deallocate(two)
    blocks.deallocate(one)
    assert list(blocks.free_block_ids) == [4, 3, 2, 1, 0]
    assert admit(blocks, [*D, *D, *D]).block_table == [4, 3, 2]
    assert admit(blocks, [*A, 8]).block_table == [0, 1], "the head outlives the tail"


def test_prefix_hit_revives_a_block_from_the_middle_of_the_free_list() -> None:
    blocks = BlockManager(5, 4)
    one, two = admit(blocks, [*A, 9]), admit(blocks, [*B, 9])
    blocks.deallocate(one)
    blocks.deallocate(two)
    assert list(blocks.free_block_ids) == [4, 1, 0, 3, 2]
    again = admit(blocks, [*A, 8])
    assert again.block_table == [0, 4]
    assert list(blocks.free_block_ids) == [1, 3, 2]
    blocks.check_invariants([again])


def test_reused_block_is_not_found_under_its_old_content() -> None:
    """C14: fill the pool with A, evict with B, ask A again."""
    blocks = BlockManager(2, 4)
    blocks.deallocate(admit(blocks, [*A, 9]))
    blocks.deallocate(admit(blocks, [*B, *C]))
    again = admit(blocks, [*A, 9])
    assert again.num_cached_tokens == 0
    for hash, block_id in blocks.hash_to_block_id.items():
        assert blocks.blocks[block_id].hash == hash
    blocks.check_invariants([again])


def test_continuation_of_an_evicted_head_is_not_found() -> None:
    blocks = BlockManager(3, 4)
    seq = admit(blocks, [*A, *B, 9])
    blocks.deallocate(seq)
    head = blocks.blocks[0]
    blocks.free_block_ids.move_to_end(0, last=False)  # evict the head before its tail
    blocks.deallocate(admit(blocks, C))
    assert head.token_ids == C
    blocks.deallocate(admit(blocks, [*A, 9]))
    assert admit(blocks, [*A, *B, 9]).num_cached_tokens == 4


def test_reset_forgets_all_content() -> None:
    blocks = BlockManager(4, 4)
    seq = admit(blocks, [*A, 9])
    with pytest.raises(AssertionError, match="2 blocks are in use"):
        blocks.reset()
    blocks.deallocate(seq)
    blocks.reset()
    assert blocks.hash_to_block_id == {}
    assert admit(blocks, [*A, 9]).num_cached_tokens == 0


# hashes


def test_hash_depends_on_tokens_and_on_what_precedes() -> None:
    hash_a = BlockManager.compute_hash(A)
    assert hash_a == BlockManager.compute_hash(list(A))
    assert len({hash_a, *(BlockManager.compute_hash(A, prefix) for prefix in (0, 1, hash_a))}) == 4
    assert BlockManager.compute_hash([1, 2]) != BlockManager.compute_hash([2, 1])


def test_collision_costs_a_miss_and_never_a_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda *_: 0))
    blocks = BlockManager(8, 4)
    one, other = admit(blocks, [*A, 9]), admit(blocks, [*B, 9])
    assert other.num_cached_tokens == 0
    assert admit(blocks, [*A, 8]).block_table[0] == one.block_table[0], "first come, first served"
    assert admit(blocks, [*B, 8]).num_cached_tokens == 0
    blocks.check_invariants()


# check_invariants


def lose_block(blocks: BlockManager, seq: Sequence) -> None:
    blocks.free_block_ids.popitem()


def free_used_block(blocks: BlockManager, seq: Sequence) -> None:
    blocks.free_block_ids[seq.block_table[0]] = None


def drop_reference(blocks: BlockManager, seq: Sequence) -> None:
    blocks.blocks[seq.block_table[0]].ref_count = 0


def add_reference(blocks: BlockManager, seq: Sequence) -> None:
    blocks.blocks[seq.block_table[0]].ref_count = 2


def leave_stale_hash(blocks: BlockManager, seq: Sequence) -> None:
    blocks.blocks[seq.block_table[0]].hash = None


def swap_content(blocks: BlockManager, seq: Sequence) -> None:
    blocks.blocks[seq.block_table[0]].token_ids = B


def hold_block_twice(blocks: BlockManager, seq: Sequence) -> None:
    seq.block_table[1] = seq.block_table[0]


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_block,
        free_used_block,
        drop_reference,
        add_reference,
        leave_stale_hash,
        swap_content,
        hold_block_twice,
    ],
)
def test_check_invariants_notices(corrupt: Callable[[BlockManager, Sequence], None]) -> None:
    blocks = BlockManager(4, 4)
    seq = admit(blocks, [*A, 9])
    blocks.check_invariants([seq])
    corrupt(blocks, seq)
    with pytest.raises(AssertionError):
        blocks.check_invariants([seq])


# against a model


class ModelBlock:
    """What the model knows of a block: how many use it and the whole content up to its end."""

    def __init__(self) -> None:
        self.num_owners = 0
        self.content: tuple[int, ...] | None = None
        self.generation = 0  # distinguishes contents that were forgotten and came again
        self.parent_generation = 0


class BlockManagerWalk(RuleBasedStateMachine):
    """Sequences come, grow and go; a model with whole contents says what must be shared."""

    @initialize(block_size=st.sampled_from([1, 2, 3, 4, 16, 256]), num_blocks=st.integers(1, 8))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.blocks = BlockManager(num_blocks, block_size)
        self.model = [ModelBlock() for _ in range(num_blocks)]
        self.free = list(range(num_blocks))
        self.findable: dict[tuple[int, ...], int] = {}  # content -> block
        self.generations: dict[Sequence, int] = {}  # of the published content of each sequence
        self.num_generations = 0
        self.seen: list[list[int]] = []

    @rule(
        data=st.data(),
        num_shared=st.integers(0, 5),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        is_computed=st.booleans(),
    )
    def admit(
        self, data: st.DataObject, num_shared: int, tail: list[int], is_computed: bool
    ) -> None:
        """A prompt that begins as an earlier one did, to a block's end or beside it."""
        begin = data.draw(st.sampled_from(self.seen)) if self.seen else []
        cut = max(num_shared * self.block_size + data.draw(st.integers(-1, 1)), 0)
        seq = make_sequence((begin[:cut] + tail)[: 6 * self.block_size], self.block_size)
        expected = self._expected_match(seq)
        num_new = seq.num_blocks - len(expected)
        num_revived = sum(i in self.free for i in expected)
        admission = self.blocks.can_allocate(seq)
        if num_new + num_revived > len(self.free):
            assert admission is None
            return
        assert admission is not None
        assert admission.cached_block_ids == expected
        self.blocks.allocate(seq, admission)
        for block_id in expected:
            self._own(block_id)
        taken = [self._take_oldest() for _ in range(num_new)]
        assert seq.block_table == expected + taken
        assert seq.num_computed_tokens == len(expected) * self.block_size < seq.num_tokens
        self.generations[seq] = self.model[expected[-1]].generation if expected else 0
        self.seen.append(seq.token_ids)
        if is_computed:
            seq.num_computed_tokens = seq.num_tokens
            self._publish(seq)

    @precondition(lambda self: self.generations)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 2, 3, 5, 17, 255, 256, 600]))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        """A chunk of what is known."""
        seq = self._any_sequence(data)
        num_slots = len(seq.block_table) * self.block_size
        end = min(seq.num_computed_tokens + num_tokens, seq.num_tokens, num_slots)
        seq.num_computed_tokens = max(seq.num_computed_tokens, end)
        self._publish(seq)

    @precondition(lambda self: self.generations)
    @rule(data=st.data(), token=st.integers(0, 2), num_tokens=st.sampled_from([1, 1, 5, 255]))
    def decode(self, data: st.DataObject, token: int, num_tokens: int) -> None:
        """New tokens one by one, as far as the pool goes."""
        seq = self._any_sequence(data)
        for _ in range(num_tokens):
            if seq.num_computed_tokens < seq.num_tokens - 1:
                return  # its prompt isn't through
            if seq.num_computed_tokens == seq.num_tokens:
                seq.token_ids.append(token)
            needs_block = seq.num_computed_tokens == len(seq.block_table) * self.block_size
            assert self.blocks.needs_block(seq) == needs_block
            assert self.blocks.can_append(seq) == (not needs_block or bool(self.free))
            if not self.blocks.can_append(seq):
                return
            assert self.blocks.may_append(seq) == (self._take_oldest() if needs_block else None)
            seq.num_computed_tokens += 1
            self._publish(seq)

    @precondition(lambda self: self.generations)
    @rule(data=st.data())
    def free_sequence(self, data: st.DataObject) -> None:
        seq = self._any_sequence(data)
        for block_id in reversed(seq.block_table):
            self.model[block_id].num_owners -= 1
            if self.model[block_id].num_owners == 0:
                self.free.append(block_id)
        self.blocks.deallocate(seq)
        del self.generations[seq]
        assert seq.block_table == []

    @precondition(lambda self: not self.generations)
    @rule()
    def reset(self) -> None:
        self.blocks.reset()
        self.findable.clear()
        for block in self.model:
            block.content = None

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.blocks.check_invariants(list(self.generations))
        assert list(self.blocks.free_block_ids) == self.free
        assert sorted(self.blocks.hash_to_block_id.values()) == sorted(self.findable.values())
        for block, model in zip(self.blocks.blocks, self.model, strict=True):
            assert block.ref_count == model.num_owners
            content = model.content[-self.block_size :] if model.content else ()
            assert tuple(block.token_ids) == content

    def _any_sequence(self, data: st.DataObject) -> Sequence:
        sequences = list(self.generations)
        return sequences[data.draw(st.integers(0, len(sequences) - 1))]

    def _expected_match(self, seq: Sequence) -> list[int]:
        found: list[int] = []
        generation = 0
        for end in range(self.block_size, seq.num_tokens, self.block_size):
            block_id = self.findable.get(tuple(seq.token_ids[:end]))
            if block_id is None or self.model[block_id].parent_generation != generation:
                break
            found.append(block_id)
            generation = self.model[block_id].generation
        return found

    def _publish(self, seq: Sequence) -> None:
        begin = seq.num_published_blocks
        self.blocks.hash_blocks(seq)
        num_full = min(seq.num_computed_tokens, seq.num_tokens) // self.block_size
        for i in range(begin, num_full):
            content = tuple(seq.token_ids[: (i + 1) * self.block_size])
            parent = self.generations[seq]
            known = self.findable.get(content)
            if known is not None and self.model[known].parent_generation == parent:
                generation = self.model[known].generation
            else:
                self.num_generations += 1
                generation = self.num_generations
            block = self.model[seq.block_table[i]]
            block.content, block.generation = content, generation
            block.parent_generation = parent
            self.findable.setdefault(content, seq.block_table[i])
            self.generations[seq] = generation

    def _own(self, block_id: int) -> None:
        if self.model[block_id].num_owners == 0:
            self.free.remove(block_id)
        self.model[block_id].num_owners += 1

    def _take_oldest(self) -> int:
        block_id = self.free.pop(0)
        block = self.model[block_id]
        if block.content is not None and self.findable.get(block.content) == block_id:
            del self.findable[block.content]
        block.content = None
        block.num_owners = 1
        return block_id


TestBlockManagerWalk = BlockManagerWalk.TestCase
TestBlockManagerWalk.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.slow
def test_many_walks() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        BlockManagerWalk,
        settings=settings(max_examples=2000, stateful_step_count=60, deadline=None),
    )


def test_block_compares_tokens_and_parent() -> None:
    block = Block(0)
    block.update(1, A, parent_content_id=5, content_id=6)
    assert block.holds(A, 5)
    assert not block.holds(B, 5)
    assert not block.holds(A, 4)
