"""A sequence counts its tokens, blocks and steps in flight."""

import pytest

from nanovllm.engine.sequence import Sequence, SequenceStatus


def make_sequence(prompt: list[int], block_size: int = 4, max_tokens: int = 10) -> Sequence:
    return Sequence(0, prompt, block_size=block_size, max_total_tokens=len(prompt) + max_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "last_block_num_tokens"),
    [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4), (9, 3, 1)],
)
def test_blocks_cover_all_tokens(
    num_tokens: int, num_blocks: int, last_block_num_tokens: int
) -> None:
    seq = make_sequence(list(range(num_tokens)))
    assert seq.num_blocks == num_blocks
    assert seq.last_block_num_tokens == last_block_num_tokens
    assert len(seq.block(num_blocks - 1)) == last_block_num_tokens
    assert sum((seq.block(i) for i in range(num_blocks)), []) == seq.token_ids


def test_block_beyond_the_tokens_is_refused() -> None:
    with pytest.raises(AssertionError, match="block 1 of 1"):
        make_sequence([1, 2, 3, 4]).block(1)


def test_prompt_is_copied_and_output_follows_it() -> None:
    prompt = [5, 6]
    seq = make_sequence(prompt)
    seq.token_ids.append(7)
    assert prompt == [5, 6]
    assert (seq.num_prompt_tokens, seq.num_output_tokens) == (2, 1)
    assert (seq.output_token_ids, seq.last_token) == ([7], 7)


def test_pending_is_what_was_launched_and_not_confirmed() -> None:
    seq = make_sequence([1, 2, 3])
    assert seq.num_pending == 0
    seq.num_computed_tokens = 2  # a chunk of the prompt: its token is dropped
    assert seq.num_pending == 0
    seq.num_computed_tokens = 3  # the rest of it
    assert seq.num_pending == 1
    seq.token_ids.append(9)
    assert seq.num_pending == 0
    seq.num_computed_tokens += 1  # a decode step, and one more before its token is read
    seq.num_computed_tokens += 1
    assert seq.num_pending == 2


def test_last_token_is_never_stored() -> None:
    seq = make_sequence([1, 2, 3], max_tokens=5)
    assert seq.max_stored_tokens == seq.max_total_tokens - 1 == 7


def test_new_sequence_waits_and_holds_nothing() -> None:
    seq = make_sequence([1])
    assert seq.status is SequenceStatus.WAITING
    assert not seq.is_finished
    assert (seq.row, seq.block_table, seq.num_cached_tokens) == (None, [], 0)


@pytest.mark.parametrize(("prompt", "max_total_tokens"), [([], 5), ([1, 2], 2)])
def test_sequence_without_prompt_or_room_is_our_bug(
    prompt: list[int], max_total_tokens: int
) -> None:
    with pytest.raises(AssertionError):
        Sequence(0, prompt, block_size=4, max_total_tokens=max_total_tokens)


def test_sequences_share_no_state() -> None:
    one, other = make_sequence([1]), make_sequence([1], block_size=8)
    one.token_ids.append(2)
    one.block_table.append(0)
    assert (other.token_ids, other.block_table) == ([1], [])
    assert (one.block_size, other.block_size) == (4, 8)
    assert not hasattr(one, "__dict__")
