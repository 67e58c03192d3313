"""Small worlds that prove the scheduler right: random requests, tiny pools, a device with memory.

`SlotRunner` stands for a ModelRunner. It has no network; it remembers which token, after which
prefix, each slot of the KV cache holds, and checks every read of every step against what the
sequence's content must be. A sampled token is a hash of the seed and of all tokens read, so what a
request must answer is known beforehand (`Order.answer`) and any mixed-up read shows in the output.

`Loop` is the step loop of the engine around them, with and without a step in flight.
"""

import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanovllm.engine.batch import FlatBatch, ScheduledBatch, apply_new_blocks, flatten
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence, SequenceStatus

VOCAB_SIZE = 8  # small: contents coincide by chance, and eos comes early
EOS = 0
MAX_STEPS = 3000  # a world that needs more hangs


class Answer(NamedTuple):
    """What a request ends with."""

    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Order:
    """One request of a world."""

    number: int
    seed: int  # names the order: unique in its world
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    arrives_at: int = 0  # step
    aborted_at: int | None = None  # step

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt) + self.max_tokens

    @property
    def temperature(self) -> float:
        return 0.5 + self.number

    def content(self) -> np.ndarray:
        """Prompt and output of this request, run alone, if nothing stopped it early."""
        content = np.zeros(self.max_total_tokens, dtype=np.int32)
        content[: len(self.prompt)] = self.prompt
        for end in range(len(self.prompt), len(content)):
            content[end] = draw(self.seed, content[:end])
        return content

    def answer(self) -> Answer:
        """What it must end with, unless it is aborted."""
        tokens = self.content()[len(self.prompt) :].tolist()
        for i, token in enumerate(tokens):
            if token in self.stop_token_ids:
                return Answer(tuple(tokens[: i + 1]), "stop")
        return Answer(tuple(tokens), "length")


def draw(seed: int, content: np.ndarray) -> int:
    """The token that follows `content`, int32: any change of either gives another draw."""
    return zlib.crc32(content.tobytes(), zlib.crc32(seed.to_bytes(8, "little"))) % VOCAB_SIZE


def prefix_digests(content: np.ndarray) -> np.ndarray:
    """For each position a digest of the tokens up to it: what its keys and values depend on."""
    digests = np.zeros(len(content), dtype=np.int64)
    digest = 0
    for i, token in enumerate(content):
        digests[i] = digest = zlib.crc32(token.tobytes(), digest)
    return digests


@dataclass(frozen=True, slots=True)
class World:
    """A pool, its limits, and the orders that come."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int = 0
    num_groups: int = Scheduler.num_groups
    num_riding_steps: int = Scheduler.num_riding_steps
    orders: tuple[Order, ...] = ()

    @classmethod
    def random(cls, seed: int) -> "World":
        rng = random.Random(seed)
        block_size, num_blocks = rng.choice((1, 2, 4)), rng.choice((8, 12, rng.randint(8, 24)))
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=rng.choice((8, rng.randint(1, 8))),
            max_num_batched_tokens=rng.choice((rng.randint(1, 8), rng.randint(8, 64))),
            num_groups=(16, 16, 3, 2)[seed % 4],  # a dozen sequences make no group of a sixteenth
            max_num_mixed_tokens=random.Random(~seed).choice((0, 0, 1, 3, 8, 16)),
            orders=tuple(random_orders(rng, num_slots=block_size * num_blocks)),
        )


def random_orders(rng: random.Random, num_slots: int) -> Iterator[Order]:
    """Up to 12 orders that fit the pool; many begin as another one begins, or goes on."""
    families = [_random_tokens(rng, 40) for _ in range(2)]
    contents: list[list[int]] = []
    longest = rng.choice((6, 24))
    for number in range(rng.randint(1, 12)):
        beginning = rng.choice((*families, *families, *contents, []))
        prompt = beginning[: rng.randint(0, longest)] + _random_tokens(rng, rng.randint(0, 4))
        prompt = prompt[:num_slots] or [1]
        max_tokens = rng.randint(1, min(num_slots + 1 - len(prompt), 20))
        arrives_at = rng.choice((0, 0, rng.randint(1, 40)))
        is_aborted = rng.random() < 0.2
        order = Order(
            number=number,
            seed=rng.getrandbits(31) << 32 | rng.getrandbits(32),
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            stop_token_ids=rng.choice((frozenset(), frozenset(), frozenset({EOS}))),
            arrives_at=arrives_at,
            aborted_at=arrives_at + rng.randint(0, 30) if is_aborted else None,
        )
        contents.append(order.content().tolist())
        yield order


def _random_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


class Lane(NamedTuple):
    """One sequence's part of a step, as the device sees it."""

    order: Order
    start: int  # position of its first new token
    input_ids: np.ndarray  # (new tokens,)
    slots: np.ndarray  # (context,) of all its tokens up to the newest

    @property
    def context_len(self) -> int:
        return len(self.slots)


class SlotRunner:
    """A device that knows only what came over the wire, and checks all that it reads."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.block_size = world.block_size
        num_slots = world.num_blocks * world.block_size
        self.slot_tokens = np.full(num_slots, -1, dtype=np.int32)
        self.slot_digests = np.full(num_slots, -1, dtype=np.int64)
        self.block_tables = np.full((world.max_num_seqs, world.num_blocks), -1, dtype=np.int32)
        self.last_tokens = np.full(world.max_num_seqs, -1, dtype=np.int32)
        self.row_orders: list[Order | None] = [None] * world.max_num_seqs
        # By seed, which is what tells a row whose it is:
        self.orders: dict[int, Order] = {}
        self.contents: dict[int, np.ndarray] = {}  # all tokens it may ever compute
        self.digests: dict[int, np.ndarray] = {}  # of their prefixes

    def expect(self, order: Order) -> None:
        """Learn what an order's tokens will be, to check what is read for it."""
        self.orders[order.seed] = order
        self.contents[order.seed] = content = order.content()
        self.digests[order.seed] = prefix_digests(content)

    def launch(self, batch: ScheduledBatch) -> list[int]:
        """Run a step and return a token for each lane."""
        batch = ScheduledBatch.from_wire(batch.to_wire())
        self._take_over_rows(batch)
        apply_new_blocks(batch, self.block_tables)
        flat = flatten(batch, self.block_tables, self.block_size)
        self._check_limits(batch, flat)
        tokens = self.execute(list(self._lanes(batch, flat)))
        self.last_tokens[batch.rows] = tokens
        return tokens

    def execute(self, lanes: list[Lane]) -> list[int]:
        """Store the new tokens of all lanes, then attend: the order that every layer keeps."""
        for lane in lanes:
            self.store(lane)
        return [self.attend(lane) for lane in lanes]

    def store(self, lane: Lane) -> None:
        new = slice(lane.start, lane.context_len)
        content = self.contents[lane.order.seed]
        assert np.array_equal(lane.input_ids, content[new]), f"{lane.order} runs foreign tokens"
        self.slot_tokens[lane.slots[new]] = lane.input_ids
        self.slot_digests[lane.slots[new]] = self.digests[lane.order.seed][new]

    def attend(self, lane: Lane) -> int:
        """Read the whole context, check it, and draw what follows."""
        digests = self.digests[lane.order.seed][: lane.context_len]
        assert np.array_equal(self.slot_digests[lane.slots], digests), (
            f"{lane.order} reads what is not its own"
        )
        return draw(lane.order.seed, self.slot_tokens[lane.slots])

    def _take_over_rows(self, batch: ScheduledBatch) -> None:
        for row, temperature_bits, low, high in batch.new_rows.tolist():
            order = self.orders[low & 0xFFFFFFFF | (high & 0xFFFFFFFF) << 32]
            temperature = np.int32(temperature_bits).view(np.float32)
            assert temperature == np.float32(order.temperature), f"{order}: {temperature}"
            self.row_orders[row] = order
            self.block_tables[row] = -1  # whoever reads what the last owner left, fails

    def _check_limits(self, batch: ScheduledBatch, flat: FlatBatch) -> None:
        assert 0 < batch.num_lanes <= self.world.max_num_seqs, f"{batch.num_lanes} lanes"
        assert 0 < batch.total_num_tokens <= self.world.max_num_batched_tokens, "over the budget"
        assert len(set(batch.rows.tolist())) == batch.num_lanes, "a row runs twice in one step"
        assert np.all(batch.num_tokens > 0), "a lane computes nothing, yet is sampled"
        assert flat.slot_mapping.min() >= 0, "a token without a slot"
        assert len(np.unique(flat.slot_mapping)) == len(flat.slot_mapping), "a slot stored twice"

    def _lanes(self, batch: ScheduledBatch, flat: FlatBatch) -> Iterator[Lane]:
        decode_tokens = self.last_tokens[batch.rows[batch.num_prefills :]]
        input_ids = np.concatenate([batch.prompt_tokens, decode_tokens])
        new_tokens = np.split(input_ids, flat.cu_seqlens_q[1:-1])
        new_slots = np.split(flat.slot_mapping, flat.cu_seqlens_q[1:-1])
        for i, row in enumerate(batch.rows.tolist()):
            order = self.row_orders[row]
            assert order is not None, f"row {row} was never given to anyone"
            start, context_len = int(batch.starts[i]), int(flat.context_lens[i])
            assert context_len < order.max_total_tokens, f"{order} computes its last token"
            slots = self._slots(row, context_len)
            assert np.array_equal(slots[start:], new_slots[i]), "stored elsewhere than it is read"
            yield Lane(order, start, new_tokens[i], slots)

    def _slots(self, row: int, context_len: int) -> np.ndarray:
        """Cache slots of a row's first tokens, one by one: slower than `slots_of`, and plain."""
        table, size = self.block_tables[row].tolist(), self.block_size
        slots = [table[p // size] * size + p % size for p in range(context_len)]
        assert min(slots) >= 0, f"row {row} reads beyond its block table"
        return np.array(slots)


class Loop:
    """The engine's step loop around a scheduler and a fake device."""

    def __init__(
        self,
        world: World,
        *,
        overlap: bool = True,
        enable_prefix_caching: bool = True,
        scheduler_class: type[Scheduler] = Scheduler,
        runner_class: type[SlotRunner] = SlotRunner,
    ) -> None:
        self.world = world
        self.overlap = overlap
        self.scheduler = scheduler_class(
            num_blocks=world.num_blocks,
            block_size=world.block_size,
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
            max_num_mixed_tokens=world.max_num_mixed_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.scheduler.num_groups = world.num_groups
        self.scheduler.num_riding_steps = world.num_riding_steps
        self.runner = runner_class(world)
        self.sequences: dict[int, Sequence] = {}  # by order number
        self.in_flight: tuple[Step, list[int]] | None = None
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Run the world to its end, checking all on the way; return what happened how often."""
        last_arrival = max(order.arrives_at for order in self.world.orders)
        for number in range(MAX_STEPS):
            self._receive(number)
            self.step()
            if number >= last_arrival and self.scheduler.is_finished():
                break
        else:
            raise AssertionError(f"not through after {MAX_STEPS} steps")
        self._check_end()
        self.counts["preemptions"] += self.scheduler.num_preemptions
        return self.counts

    def add(self, order: Order) -> Sequence:
        self.scheduler.check_fits(order.max_total_tokens)
        seq = Sequence(
            order.number,
            order.prompt,
            block_size=self.world.block_size,
            max_total_tokens=order.max_total_tokens,
            temperature=order.temperature,
            seed=order.seed,
            stop_token_ids=order.stop_token_ids,
        )
        self.sequences[order.number] = seq
        self.runner.expect(order)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[Sequence]:
        """Launch the next step, confirm the one before it (overlap) or this one."""
        step = self.scheduler.schedule(in_flight=self.in_flight is not None)
        launched = None
        if step is not None:
            self._count(step)
            launched = step, self.runner.launch(step.batch)
        previous, self.in_flight = (self.in_flight, launched) if self.overlap else (launched, None)
        finished = self.scheduler.postprocess(*previous) if previous else []
        self.check()
        return finished

    def abort(self, seq: Sequence) -> None:
        self.scheduler.finish([seq], "abort")

    def _receive(self, number: int) -> None:
        for order in self.world.orders:
            if order.arrives_at == number:
                self.add(order)
            if order.aborted_at == number and not self.sequences[order.number].is_finished:
                seq = self.sequences[order.number]
                self.counts[f"aborts {self._stage(seq)}"] += 1
                self.abort(seq)

    def _stage(self, seq: Sequence) -> str:
        if seq.status is SequenceStatus.WAITING:
            return "waiting"
        if seq.num_pending:
            return "in flight"
        return "running" if seq in self.scheduler.running else "half prefilled"

    def _count(self, step: Step) -> None:
        batch = step.batch
        self.counts["steps"] += 1
        self.counts["mixed steps"] += bool(batch.num_prefills and batch.num_decodes)
        self.counts["chunked prefills"] += step.sequences.count(None)
        is_new = np.isin(batch.rows, batch.new_rows[:, 0])
        self.counts["prefix hits"] += np.count_nonzero(is_new & (batch.starts > 0))

    def check(self) -> None:
        self.scheduler.check_invariants()
        for seq in self.sequences.values():
            limit = 1 if self.overlap and not seq.is_finished else 0
            assert seq.num_pending <= limit, f"{seq} has too much in flight"
            assert seq.num_tokens <= seq.max_total_tokens, f"{seq} is too long"
            if seq.row is not None:
                num_known = seq.num_cached_tokens + seq.num_scheduled_tokens
                assert num_known <= seq.num_tokens, f"{seq}: scheduled more than there is"
                assert seq.num_computed_tokens <= len(seq.block_table) * seq.block_size

    def _check_end(self) -> None:
        blocks = self.scheduler.block_manager
        assert blocks.num_free_blocks == self.world.num_blocks, "blocks leaked"
        for order in self.world.orders:
            self.check_answer(order)

    def check_answer(self, order: Order) -> None:
        """The order has ended, and as it would have alone."""
        seq = self.sequences[order.number]
        answer, output = order.answer(), tuple(seq.output_token_ids)
        self.counts[str(seq.finish_reason)] += 1
        if seq.finish_reason == "abort":
            assert order.aborted_at is not None, f"{seq} was aborted by nobody"
            assert output == answer.token_ids[: len(output)], f"{order} says {output}"
        else:
            assert (output, seq.finish_reason) == answer, f"{order} says {output}, not {answer}"
