"""Rows that need more than the plain sampler are sampled again, from the same logits.

Every step, graph or not, draws all its tokens with the plain sampler. Rows with filters, penalties,
bias, bad words, min_tokens or logprobs then come here: their logits are processed, their tokens
drawn anew with the same temperature, seed and position, and what the plain sampler left is
overwritten before the next step and before the copy to the host, all on one stream. So plain rows
never notice, graphs have no variants, and a step without such rows does nothing here.

While a step is in flight the host doesn't know the newest token. What depends on tokens therefore
reads them on the device, from a history of the row that is written where the token is drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.logprobs import LogprobGroup, join_groups
from nanovllm.engine.row_params import RowRecord, read_records
from nanovllm.kernels.row_state import RowState
from nanovllm.kernels.sampling import sample, sample_torch
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.logits import (
    History,
    LogitsParams,
    LogitsRow,
    compute_logprobs,
    process_logits,
    upload,
)
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.pinned import PinnedRing

# Rows at once: 128 rows of 152k float32 logits are 78 MB, and of a prompt there may be thousands.
ROWS_PER_DRAW = 128
ROWS_PER_REPORT = 128


class StepResult(NamedTuple):
    """What a step left on the device; lanes may be followed by padding."""

    logits: torch.Tensor  # (lanes, this rank's vocabulary)
    ends: torch.Tensor  # (lanes,) int32: position of the token drawn
    tokens: torch.Tensor  # (lanes,) int32
    hidden_states: torch.Tensor | None  # (tokens, hidden); None: no prompt is read


class PendingLogprobs:
    """Logprobs of a launched step."""

    def __init__(
        self, groups: list[LogprobGroup], values: np.ndarray, event: torch.cuda.Event | None
    ) -> None:
        self._groups = groups
        self._values = values  # flat int32, valid once the event has passed
        self._event = event

    def wait(self) -> np.ndarray:
        """Block until they are there and return them as `logprobs.read_rows` takes them."""
        if self._event is not None:
            self._event.synchronize()
        return join_groups(self._groups, self._values)


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Some lanes of a step and the rows that they name."""

    lanes: torch.Tensor | slice  # (n,) int64; a slice where they are the first ones
    rows: torch.Tensor  # (n,) int64

    @classmethod
    def of(cls, lanes: np.ndarray, rows: np.ndarray, device: torch.device) -> "_Lanes":
        is_prefix = np.array_equal(lanes, np.arange(len(lanes)))
        indices = slice(0, len(lanes)) if is_prefix else upload(lanes, torch.int64, device)
        return cls(indices, upload(rows, torch.int64, device))


@dataclass(frozen=True, slots=True)
class _Draw:
    """Lanes that are drawn again together."""

    lanes: _Lanes
    params: LogitsParams
    needs_history: bool


@dataclass(frozen=True, slots=True)
class _Report:
    """Lanes that report equally many logprobs."""

    lanes: _Lanes
    places: np.ndarray  # (n,) int64: which of the step's special lanes they are
    num_top: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is done for a set of special lanes; it holds as long as they stay."""

    draws: tuple[_Draw, ...]
    reports: tuple[_Report, ...]
    history: _Lanes | None  # lanes whose tokens are remembered


class SecondPass:
    """Owner of the special rows' parameters and token histories on one rank.

    Invariant: a row's record is what its latest sequence asks for. It outlives the sequence until
    the row is taken over, but concerns no step meanwhile. All ranks hold the same.
    """

    def __init__(self, lm_head: ParallelLMHead, row_state: RowState, max_model_len: int) -> None:
        self._lm_head = lm_head
        self._row_state = row_state
        self._device = row_state.last_tokens.device
        self._max_model_len = max_model_len
        max_num_seqs = len(row_state.last_tokens) - 1
        self._records: dict[int, RowRecord] = {}  # by row
        self._is_special = np.zeros(max_num_seqs, dtype=bool)  # rows drawn again or reported
        self._num_known = np.zeros(max_num_seqs, dtype=np.int32)  # their tokens when taken
        self._prompt_values: dict[int, list[torch.Tensor]] = {}  # of rows whose prompt is reported
        self._histories: torch.Tensor | None = None  # (rows, max_model_len + 1) int32
        self._plan = _Plan((), (), None)
        self._plan_key: tuple[bytes, bytes] | None = None  # lanes and rows that the plan is for
        self._downloads: PinnedRing | None = None

    def concerns(self, batch: ScheduledBatch) -> bool:
        """Whether `run` has anything to do for this step."""
        if not self._records:
            return False
        return bool(self._is_special[batch.rows].any()) or self.reads_prompts(batch)

    def reads_prompts(self, batch: ScheduledBatch) -> bool:
        """Whether the step runs a prompt whose logprobs are wanted: hidden states must be kept."""
        rows = batch.rows[: batch.num_prefills].tolist()
        return not self._prompt_values.keys().isdisjoint(rows)

    def take(self, batch: ScheduledBatch) -> None:
        """Learn what the step's new rows ask for, and forget who had them before."""
        if self._records:
            for row in batch.new_rows[:, 0].tolist():
                self._forget(row)
        for record in read_records(batch.row_params):
            self._add(record)

    def run(self, batch: ScheduledBatch, result: StepResult) -> PendingLogprobs | None:
        """Enqueue the second pass of a step: new tokens into `result.tokens` and the row state.

        Returns:
            The logprobs that its rows asked for, on their way to the host; None if none did.
        """
        if not self.concerns(batch):
            return None
        groups: list[LogprobGroup] = []
        values: list[torch.Tensor] = []
        if result.hidden_states is not None:
            for group, parts in self._report_prompts(batch, result.hidden_states):
                groups.append(group)
                values += parts
        lanes, ends = self._special_lanes(batch)
        if len(lanes):
            plan = self._plan_for(lanes, batch.rows[lanes])
            for draw in plan.draws:
                self._draw(draw, result, int(ends.max()))
            if plan.history is not None:
                self._remember(plan.history, result)
            for report in plan.reports:
                reported = lanes[report.places], ends[report.places]
                groups.append(LogprobGroup(*reported, num_top=report.num_top))
                values += self._report(report, result)
        return self._download(groups, values) if groups else None

    def warmup(self, result: StepResult) -> None:
        """Do the work that takes most memory once, so that the allocator keeps so much."""
        num_rows = min(ROWS_PER_DRAW, len(result.logits), len(self._is_special))
        row = LogitsRow(SamplingParams(top_p=0.5, repetition_penalty=1.1))
        params = LogitsParams.of([row] * num_rows, self._lm_head.vocab_size, self._device)
        tokens = result.tokens[:num_rows]
        history = History(result.ends[:num_rows], tokens[:, None])
        logits = self._whole_vocab(result.logits[:num_rows])
        state = self._row_state
        for drawn in (logits, process_logits(logits, params, history)):  # its dtype, and float32
            sample(drawn, state.temperatures[:num_rows], state.seeds[:num_rows], history.num_tokens)
        _pack(logits, tokens, num_top=1)

    def _add(self, record: RowRecord) -> None:
        row, params = record.row, record.params
        self._records[row] = record
        is_drawn_again = _needs_new_draw(_logits_row(record))
        self._is_special[row] = is_drawn_again or params.logprobs is not None
        self._num_known[row] = record.num_tokens
        self._plan_key = None
        if _logits_row(record).needs_history:
            token_ids = upload(record.token_ids, torch.int32, self._device)
            self._history_buffer()[row, : record.num_tokens] = token_ids
        # After a preemption with output, the prompt has been reported already.
        if params.prompt_logprobs is not None and record.num_tokens == record.num_prompt_tokens:
            self._prompt_values[row] = []

    def _forget(self, row: int) -> None:
        if self._records.pop(row, None) is not None:
            self._is_special[row] = False
            self._prompt_values.pop(row, None)
            self._plan_key = None

    def _special_lanes(self, batch: ScheduledBatch) -> tuple[np.ndarray, np.ndarray]:
        """Lanes to draw again or to report, and the positions of the tokens that they draw.

        A prompt that isn't through draws nothing.
        """
        lanes = np.flatnonzero(self._is_special[batch.rows])
        ends = batch.starts[lanes] + 1
        if batch.num_prefills:
            num_tokens = np.ones(batch.num_lanes, dtype=np.int32)
            num_tokens[: batch.num_prefills] = batch.num_tokens
            ends = batch.starts[lanes] + num_tokens[lanes]
            is_drawing = ends >= self._num_known[batch.rows[lanes]]
            lanes, ends = lanes[is_drawing], ends[is_drawing]
        return lanes, ends

    def _plan_for(self, lanes: np.ndarray, rows: np.ndarray) -> _Plan:
        key = (lanes.tobytes(), rows.tobytes())
        if key != self._plan_key:
            self._plan, self._plan_key = self._make_plan(lanes, rows), key
        return self._plan

    def _make_plan(self, lanes: np.ndarray, rows: np.ndarray) -> _Plan:
        records = [self._records[row] for row in rows.tolist()]
        logits_rows = [_logits_row(record) for record in records]
        drawn = [i for i, row in enumerate(logits_rows) if _needs_new_draw(row)]
        draws = []
        for start in range(0, len(drawn), ROWS_PER_DRAW):
            piece = drawn[start : start + ROWS_PER_DRAW]
            wishes = [logits_rows[i] for i in piece]
            params = LogitsParams.of(wishes, self._lm_head.vocab_size, self._device)
            needs_history = any(row.needs_history for row in wishes)
            draws.append(_Draw(self._lanes_of(lanes, rows, piece), params, needs_history))
        remembered = [i for i, row in enumerate(logits_rows) if row.needs_history]
        history = self._lanes_of(lanes, rows, remembered) if remembered else None
        return _Plan(tuple(draws), tuple(self._make_reports(records, lanes, rows)), history)

    def _make_reports(
        self, records: list[RowRecord], lanes: np.ndarray, rows: np.ndarray
    ) -> Iterator[_Report]:
        by_num_top: dict[int, list[int]] = {}
        for i, record in enumerate(records):
            if record.params.logprobs is not None:
                by_num_top.setdefault(self._num_top(record.params.logprobs), []).append(i)
        for num_top, reported in by_num_top.items():
            for start in range(0, len(reported), ROWS_PER_REPORT):
                piece = reported[start : start + ROWS_PER_REPORT]
                yield _Report(self._lanes_of(lanes, rows, piece), np.array(piece), num_top)

    def _lanes_of(self, lanes: np.ndarray, rows: np.ndarray, chosen: list[int]) -> _Lanes:
        return _Lanes.of(lanes[chosen], rows[chosen], self._device)

    def _num_top(self, wish: int) -> int:
        vocab_size = self._lm_head.vocab_size
        return vocab_size if wish < 0 else min(wish, vocab_size)

    def _draw(self, draw: _Draw, result: StepResult, max_num_tokens: int) -> None:
        lanes, rows = draw.lanes.lanes, draw.lanes.rows
        state, num_tokens = self._row_state, result.ends[lanes]
        token_ids = num_tokens[:, None][:, :0]
        if draw.needs_history:
            token_ids = self._history_buffer()[:, :max_num_tokens][rows]
        history = History(num_tokens, token_ids)
        logits = process_logits(self._whole_vocab(result.logits[lanes]), draw.params, history)
        draw_tokens = sample if logits.is_cuda else sample_torch
        drawn = draw_tokens(logits, state.temperatures[rows], state.seeds[rows], num_tokens)
        result.tokens[lanes] = drawn.token_ids
        state.last_tokens[rows] = drawn.token_ids

    def _remember(self, lanes: _Lanes, result: StepResult) -> None:
        positions = result.ends[lanes.lanes].long()
        self._history_buffer()[lanes.rows, positions] = result.tokens[lanes.lanes]

    def _report(self, report: _Report, result: StepResult) -> list[torch.Tensor]:
        lanes = report.lanes.lanes
        logits = self._whole_vocab(result.logits[lanes])
        return [_pack(logits, result.tokens[lanes], report.num_top)]

    def _report_prompts(
        self, batch: ScheduledBatch, hidden_states: torch.Tensor
    ) -> Iterator[tuple[LogprobGroup, list[torch.Tensor]]]:
        """Read the prompts' logprobs off this step; yield those of prompts that are through."""
        offsets = np.cumsum(batch.num_tokens) - batch.num_tokens
        for lane, row in enumerate(batch.rows[: batch.num_prefills].tolist()):
            parts = self._prompt_values.get(row)
            if parts is None:
                continue
            record, start = self._records[row], int(batch.starts[lane])
            end = start + int(batch.num_tokens[lane])
            first = int(offsets[lane])
            parts += self._report_prompt(record, start, hidden_states[first : first + end - start])
            if end == record.num_prompt_tokens:
                del self._prompt_values[row]
                positions = np.arange(1, end, dtype=np.int32)
                num_top = self._num_top(record.params.prompt_logprobs or 0)
                yield LogprobGroup(np.full_like(positions, lane), positions, num_top), parts

    def _report_prompt(
        self, record: RowRecord, start: int, hidden_states: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Logprobs of the prompt tokens behind those whose hidden states are given.

        The head runs in pieces: logits of 16k prompt tokens would take gigabytes.
        """
        num_top = self._num_top(record.params.prompt_logprobs or 0)
        following = record.token_ids[start + 1 : start + 1 + len(hidden_states)]
        for i in range(0, len(following), ROWS_PER_REPORT):
            token_ids = upload(following[i : i + ROWS_PER_REPORT], torch.int32, self._device)
            hidden = hidden_states[i : i + len(token_ids)]
            logits = self._whole_vocab(F.linear(hidden, self._lm_head.weight))
            yield _pack(logits, token_ids, num_top)

    def _whole_vocab(self, logits: torch.Tensor) -> torch.Tensor:
        """(rows, this rank's vocabulary) to (rows, vocab_size), the same on all ranks."""
        head = self._lm_head
        if head.tp.size == 1:
            return logits
        padded = F.pad(logits, (0, head.shard_size - logits.shape[1]))
        gathered = head.tp.all_gather(padded)  # (ranks, rows, shard)
        return gathered.transpose(0, 1).flatten(1)[:, : head.vocab_size]

    def _history_buffer(self) -> torch.Tensor:
        """Token histories by row, allocated when the first row needs one."""
        if self._histories is None:
            shape = (len(self._is_special), self._max_model_len + 1)
            self._histories = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._histories

    def _download(self, groups: list[LogprobGroup], values: list[torch.Tensor]) -> PendingLogprobs:
        if values:
            flat = torch.cat([part.flatten() for part in values])
        else:  # of a prompt of one token
            flat = torch.empty(0, dtype=torch.int32, device=self._device)
        if self._device.type == "cpu":
            return PendingLogprobs(groups, flat.numpy(), None)
        if self._downloads is None:
            self._downloads = PinnedRing(flat.numel())
        downloaded, event = self._downloads.download(flat)
        return PendingLogprobs(groups, downloaded[: flat.numel()], event)


def _logits_row(record: RowRecord) -> LogitsRow:
    return LogitsRow(
        record.params, record.num_prompt_tokens, record.stop_token_ids, record.bad_words
    )


def _needs_new_draw(row: LogitsRow) -> bool:
    return row.params.changes_draw or bool(row.bad_words)  # those come as token ids


def _pack(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Logprobs of tokens in rows as `engine.logprobs` reads them: (rows, 3 + 2k) int32."""
    found = compute_logprobs(logits, token_ids, num_top)
    return torch.cat(
        [
            token_ids.int()[:, None],
            found.logprobs.view(torch.int32)[:, None],
            found.ranks.int()[:, None],
            found.top_token_ids.int(),
            found.top_logprobs.view(torch.int32),
        ],
        dim=1,
    )
