"""The sequences that decode, kept as arrays from step to step while they stay the same.

In a step of 256 sequences about one ends or needs a block. What is the same for all is done on
arrays; gathering these anew from the sequences would take longer than the rest of a step. So would
telling each sequence that it has advanced. Hence the one rule here: `settle` before reading a
sequence's num_computed_tokens.
"""

import numpy as np

from nanovllm.engine.sequence import Sequence


class Decodes:
    """Some running sequences, and what their next tokens need, by lane.

    Invariant: `starts` is what each has computed; the sequences' own counts lag until `settle`. The
    Scheduler owns the current Decodes, and drops it when a sequence joins or leaves.
    """

    __slots__ = (
        "limits",
        "max_total_tokens",
        "num_steps_of_shortest",
        "num_steps_of_longest",
        "rows",
        "sequences",
        "starts",
        "stop_token_ids",
        "token_lists",
    )

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.rows = np.array([seq.row for seq in sequences], dtype=np.int32)
        # Positions of their next tokens, and the first ones that nobody computes.
        self.starts = np.array([seq.num_computed_tokens for seq in sequences], dtype=np.int32)
        self.limits = np.array([seq.max_stored_tokens for seq in sequences], dtype=np.int32)
        # Steps until the first sequence has its last token in flight, and until all have.
        steps_left = self.limits - self.starts
        self.num_steps_of_shortest = int(steps_left.min(initial=1 << 30))
        self.num_steps_of_longest = int(steps_left.max(initial=0))
        self.max_total_tokens = int(self.limits.max(initial=0)) + 1  # the last one isn't computed
        self.token_lists = [seq.token_ids for seq in sequences]
        # Most sequences share one set of ids, so few are joined.
        self.stop_token_ids = frozenset().union(*{seq.stop_token_ids for seq in sequences})

    def without_exhausted(self) -> "Decodes":
        """Those whose last token isn't in flight yet, which their lengths tell."""
        if self.num_steps_of_shortest > 0:
            return self
        self.settle()
        may_go_on = self.starts < self.limits
        return Decodes([self.sequences[i] for i in np.flatnonzero(may_go_on).tolist()])

    def advance(self) -> None:
        """Count one token of each as computed."""
        self.starts = self.starts + 1  # not in place: the step just built holds the old one
        self.num_steps_of_shortest -= 1
        self.num_steps_of_longest -= 1

    def settle(self) -> None:
        """Tell the sequences how far they are."""
        for seq, start in zip(self.sequences, self.starts.tolist(), strict=True):
            seq.num_computed_tokens = start
