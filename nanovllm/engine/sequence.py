"""One request's tokens and progress.

A Sequence lives in the caller's process and is never sent to a rank: what a rank must know of a
step is in `ScheduledBatch`. It is WAITING until it is admitted, RUNNING while it holds a device
row and blocks, FINISHED at the end; only preemption takes it back from RUNNING to WAITING.

Two facts tell where it stands, and keeping them apart is what makes overlapped scheduling simple.
`token_ids` holds the *confirmed* tokens: their values are known here, and `postprocess` appends to
them. `num_computed_tokens` counts the tokens whose keys and values are stored by a launched step,
and `schedule` moves it. What lies between them is `num_pending`, the launched steps whose token
for this sequence isn't confirmed yet: at most 1 when a step is scheduled.
"""

from collections.abc import Sequence as Tokens
from enum import Enum, auto

from nanovllm.engine.row_params import RowParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A prompt and what was generated from it.

    Only the Scheduler and the BlockManager write to it.
    """

    __slots__ = (
        "block_hashes",
        "block_size",
        "block_table",
        "content_id",
        "finish_reason",
        "first_scheduled_time",
        "max_stored_tokens",
        "max_total_tokens",
        "min_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_cached_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_scheduled_tokens",
        "reads_prefix_cache",
        "row",
        "row_params",
        "seed",
        "seq_id",
        "status",
        "stop_reason",
        "stop_token_ids",
        "temperature",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: Tokens[int],
        *,
        block_size: int,
        max_total_tokens: int,
        temperature: float = 1.0,
        seed: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        row_params: RowParams | None = None,
        reads_prefix_cache: bool = True,
    ) -> None:
        assert len(prompt_token_ids) > 0, "a sequence needs at least one prompt token"
        assert len(prompt_token_ids) < max_total_tokens, "no room for a single new token"
        self.seq_id = seq_id
        self.block_size = block_size
        self.token_ids = list(prompt_token_ids)  # confirmed tokens, the prompt first
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = max_total_tokens  # length at which it finishes
        self.max_stored_tokens = max_total_tokens - 1  # nothing reads the keys of the last token
        self.min_total_tokens = self.num_prompt_tokens + min_tokens  # no stop before this length
        self.temperature = temperature
        self.seed = seed  # of its noise, 63 bits
        self.stop_token_ids = stop_token_ids
        self.row_params = row_params  # what a rank must know beyond temperature and seed
        self.reads_prefix_cache = reads_prefix_cache  # False: all its prompt must run

        self.status = SequenceStatus.WAITING
        self.row: int | None = None  # device row while it runs
        self.block_table: list[int] = []  # its blocks, in order; only grows while it runs
        self.num_computed_tokens = 0  # keys and values stored by a launched step
        self.num_scheduled_tokens = 0  # of its latest prefill chunk; a decode step runs one token
        self.num_cached_tokens = 0  # found in the prefix cache at the latest admission
        self.num_prompt_cached_tokens: int | None = None  # the same at the first; None before it
        self.first_scheduled_time: float | None = None  # time.monotonic() at the first admission
        self.finish_reason: str | None = None  # "stop", "length" or "abort"
        self.stop_reason: int | str | None = None  # the stop id (not eos) or string that ended it

        self.block_hashes: list[int] = []  # chained hashes of its full blocks, as far as asked
        self.num_published_blocks = 0  # leading blocks that are findable in the prefix cache
        self.content_id = 0  # identity of the content up to there; see BlockManager

    @property
    def num_tokens(self) -> int:
        """Confirmed tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Launched steps whose token isn't confirmed.

        Computing the newest token yields the next one, so a sequence with nothing in flight has
        computed all its tokens but one, or, while its prompt isn't through, even fewer.
        """
        return max(self.num_computed_tokens + 1 - len(self.token_ids), 0)

    @property
    def num_blocks(self) -> int:
        """Blocks that its confirmed tokens span."""
        return -(-len(self.token_ids) // self.block_size)

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def last_block_num_tokens(self) -> int:
        return len(self.token_ids) - (self.num_blocks - 1) * self.block_size

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def block(self, i: int) -> list[int]:
        """Confirmed tokens of its i-th block."""
        assert 0 <= i < self.num_blocks, f"block {i} of {self.num_blocks}"
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, tokens={self.num_tokens}"
            f"+{self.num_pending}, computed={self.num_computed_tokens}, blocks={self.block_table})"
        )
