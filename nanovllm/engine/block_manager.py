"""Paged KV-cache blocks: allocate, share by hash chain, free, evict.

Why blocks at all: a contiguous KV region per request must be reserved for the longest answer it
might give, so most of the memory sits idle, the rest fragments, and nothing can be preempted or
shared. Cut into blocks of a few hundred tokens, memory is claimed as tokens come, any free block
serves any sequence, and two sequences with the same beginning can point to the same blocks. 256
tokens keep block tables short and attention tiles inside one block; at most 255 slots of a
sequence's last block are unused.

Why hashes are chained: keys and values of a token depend on everything before it, so equal tokens
are reusable only after an equal prefix. The hash of a block covers its tokens and the hash of the
block before it. Why the last block of a prompt never matches whole: its last token must run,
because its logits are sampled.

A hash is a hint, not a proof. A block is shared only if its own tokens equal the sequence's and it
continues the same content: every distinct (parent content, tokens) pair is given a `content_id`
when it is published, so a match is an induction over verified blocks and a collision costs a miss,
never a wrong answer.

Source: block tables as in PagedAttention (Kwon et al., 2023); chained block hashes and
lazily evicted free blocks as in vLLM's automatic prefix caching.
"""

import struct
from collections import OrderedDict
from collections.abc import Sequence as Tokens
from typing import NamedTuple

import xxhash

from nanovllm.engine.sequence import Sequence

ROOT_CONTENT_ID = 0  # what comes before a sequence's first block


class Admission(NamedTuple):
    """What it takes to admit a sequence."""

    cached_block_ids: list[int]  # shared from the prefix cache, in order
    content_id: int  # identity of the content those blocks hold
    num_new_blocks: int


class Block:
    """One block of the KV cache: who uses it and, once it is full and published, what it holds."""

    __slots__ = ("block_id", "content_id", "hash", "parent_content_id", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.reset()

    def update(
        self, hash: int, token_ids: list[int], parent_content_id: int, content_id: int
    ) -> None:
        """Record the full content of the block, making it comparable."""
        self.hash: int | None = hash
        self.token_ids = token_ids
        self.parent_content_id = parent_content_id
        self.content_id = content_id

    def reset(self) -> None:
        """Forget the content: the block is about to be written anew."""
        self.hash = None
        self.token_ids = []
        self.parent_content_id = ROOT_CONTENT_ID
        self.content_id = ROOT_CONTENT_ID

    def holds(self, token_ids: list[int], parent_content_id: int) -> bool:
        """Whether this block holds these tokens after that parent."""
        return self.parent_content_id == parent_content_id and self.token_ids == token_ids


class BlockManager:
    """Owner of all blocks.

    Invariants (`check_invariants`): free + used = total; a block's ref_count is the number of
    block tables that hold it, and 0 exactly when it is free; `hash_to_block_id[h]` is a block whose
    own hash is h. A freed block keeps its content and stays findable until it is reused; the block
    free longest is reused first, a sequence's tail before its head.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        assert num_blocks > 0, f"a pool needs at least one block, not {num_blocks}"
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        # OrderedDict, not deque: a prefix hit must leave the middle of the free list in O(1).
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self._num_contents = ROOT_CONTENT_ID

    @staticmethod
    def compute_hash(token_ids: Tokens[int], prefix_hash: int | None = None) -> int:
        """64-bit hash of a full block, chained to that of the block before it (None: the first)."""
        prefix = b"" if prefix_hash is None else prefix_hash.to_bytes(8, "little")
        return xxhash.xxh64_intdigest(prefix + struct.pack(f"{len(token_ids)}i", *token_ids))

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    def can_allocate(self, seq: Sequence) -> Admission | None:
        """Return which cached blocks `seq` would share and how many it would take, or None.

        None means that the pool is short. Blocks are not claimed: allocate before any other call.
        """
        assert not seq.block_table, f"{seq} already holds blocks"
        cached_block_ids, content_id = self._match_prefix(seq)
        num_new_blocks = seq.num_blocks - len(cached_block_ids)
        num_revived = sum(self.blocks[i].ref_count == 0 for i in cached_block_ids)
        if num_new_blocks + num_revived > self.num_free_blocks:
            return None
        return Admission(cached_block_ids, content_id, num_new_blocks)

    def allocate(self, seq: Sequence, admission: Admission) -> None:
        """Give `seq` the blocks of its confirmed tokens; the cached ones count as computed."""
        assert not seq.block_table, f"{seq} already holds blocks"
        for block_id in admission.cached_block_ids:
            self._share(block_id)
            seq.block_table.append(block_id)
        for _ in range(admission.num_new_blocks):
            seq.block_table.append(self._claim_free_block())
        seq.num_published_blocks = len(admission.cached_block_ids)
        seq.content_id = admission.content_id
        seq.num_cached_tokens = seq.num_published_blocks * self.block_size
        seq.num_computed_tokens = seq.num_cached_tokens

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the next token to store finds no slot left in the blocks of `seq`.

        That token is the newest one, which isn't stored yet. A sequence of 256 tokens has used
        255 slots, so with blocks of 256 it needs a second one only to store token 257, not when
        token 256 fills the first.
        """
        return seq.num_computed_tokens == len(seq.block_table) * self.block_size

    def can_append(self, seq: Sequence) -> bool:
        """Whether the next token of `seq` can be stored without preempting anyone."""
        return not self.needs_block(seq) or self.num_free_blocks > 0

    def may_append(self, seq: Sequence) -> int | None:
        """Give `seq` a block if its next token needs one, and return it."""
        if not self.needs_block(seq):
            return None
        block_id = self._claim_free_block()
        seq.block_table.append(block_id)
        return block_id

    def deallocate(self, seq: Sequence) -> None:
        """Take all blocks of `seq` back; their content stays findable until they are reused."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"double free of block {block_id}"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
        seq.block_table.clear()
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0
        seq.content_id = ROOT_CONTENT_ID

    def hash_blocks(self, seq: Sequence) -> None:
        """Publish the blocks of `seq` that became full.

        A block is full once its tokens are confirmed *and* the step that stores the last of them
        is scheduled: a token still in flight has no value to hash, and a slot that no step writes
        must not be read. Call it after a prefill chunk, when the sequence takes a block, and
        before it gives its blocks back.
        """
        if not self.enable_prefix_caching:
            return
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        for i in range(seq.num_published_blocks, num_full):
            self._publish(seq, i)

    def reset(self) -> None:
        """Forget all content. Blocks in use would lose theirs, so nothing may be in use."""
        assert not self.used_block_ids, f"{len(self.used_block_ids)} blocks are in use"
        self.hash_to_block_id.clear()
        for block in self.blocks:
            block.reset()

    def check_invariants(self, sequences: list[Sequence] | None = None) -> None:
        """Raise AssertionError unless the class invariants hold.

        Args:
            sequences: All sequences that hold blocks; with them, owners are counted too.
        """
        free, used = set(self.free_block_ids), self.used_block_ids
        assert not free & used, f"both free and used: {free & used}"
        assert len(free) + len(used) == len(self.blocks), "blocks were lost"
        for block in self.blocks:
            is_used = block.block_id in used
            assert (block.ref_count > 0) == is_used, f"{block.ref_count} refs: {block.block_id}"
        for hash, block_id in self.hash_to_block_id.items():
            assert self.blocks[block_id].hash == hash, f"stale hash of block {block_id}"
        if sequences is not None:
            self._check_owners(sequences)

    def _check_owners(self, sequences: list[Sequence]) -> None:
        owners = [0] * len(self.blocks)
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq}: block held twice"
            for block_id in seq.block_table:
                owners[block_id] += 1
            for i in range(seq.num_published_blocks):
                block = self.blocks[seq.block_table[i]]
                assert block.token_ids == seq.block(i), f"{seq}: block {i} holds other tokens"
        for block, num_owners in zip(self.blocks, owners, strict=True):
            assert block.ref_count == num_owners, (
                f"block {block.block_id}: {block.ref_count} references, {num_owners} owners"
            )

    def _match_prefix(self, seq: Sequence) -> tuple[list[int], int]:
        """Longest run of leading full blocks found in the cache, short of the last token."""
        block_ids: list[int] = []
        content_id = ROOT_CONTENT_ID
        if not (self.enable_prefix_caching and seq.reads_prefix_cache):
            return block_ids, content_id
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            block_id = self.hash_to_block_id.get(self._block_hash(seq, i))
            if block_id is None or not self.blocks[block_id].holds(seq.block(i), content_id):
                break
            block_ids.append(block_id)
            content_id = self.blocks[block_id].content_id
        return block_ids, content_id

    def _block_hash(self, seq: Sequence, i: int) -> int:
        """Chained hash of a full block of confirmed tokens, computed once per sequence."""
        hashes = seq.block_hashes
        while len(hashes) <= i:
            prefix_hash = hashes[-1] if hashes else None
            hashes.append(self.compute_hash(seq.block(len(hashes)), prefix_hash))
        return hashes[i]

    def _publish(self, seq: Sequence, i: int) -> None:
        hash, token_ids = self._block_hash(seq, i), seq.block(i)
        known_id = self.hash_to_block_id.get(hash)
        known = self.blocks[known_id] if known_id is not None else None
        if known is not None and known.holds(token_ids, seq.content_id):
            # The same content computed twice: one identity, so that what follows either is shared.
            content_id = known.content_id
        else:
            self._num_contents += 1
            content_id = self._num_contents
        block = self.blocks[seq.block_table[i]]
        block.update(hash, token_ids, seq.content_id, content_id)
        # A block found under this hash keeps it, whatever it holds: first come, first served.
        self.hash_to_block_id.setdefault(hash, block.block_id)
        seq.content_id = content_id
        seq.num_published_blocks = i + 1

    def _share(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_block_ids[block_id]
            self.used_block_ids.add(block_id)
        block.ref_count += 1

    def _claim_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        assert block.ref_count == 0, f"block {block_id} is free with {block.ref_count} references"
        if block.hash is not None and self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.reset()
        block.ref_count = 1
        self.used_block_ids.add(block_id)
        return block_id
