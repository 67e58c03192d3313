"""One call for an answer: a prompt, its params, and the n sequences that sample it.

The scheduler knows sequences only. A Request gathers what belongs together for the user: the text
of each sample, why it ended, and when things happened.
"""

import time

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.logprobs import LogprobLog
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, PromptLogprobs, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams


class Sample:
    """One of a request's n samples: its sequence and its text."""

    __slots__ = ("_num_read", "detokenizer", "index", "logprobs", "num_reported", "request", "seq")

    def __init__(
        self,
        request: "Request",
        index: int,
        seq: Sequence,
        detokenizer: Detokenizer | None,
        logprobs: LogprobLog | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.seq = seq
        self.detokenizer = detokenizer  # None: the caller wants token ids only
        self.logprobs = logprobs  # None: the caller wants none
        self.num_reported = 0  # output tokens that earlier deltas held
        self._num_read = seq.num_tokens  # tokens that the text has, or the prompt's

    def read_text(self) -> bool:
        """Give the detokenizer the tokens it hasn't seen.

        Returns:
            Whether they complete a stop string, which then is what ended the sample.
        """
        seq, detokenizer = self.seq, self.detokenizer
        if detokenizer is None or isinstance(seq.stop_reason, str):
            return False
        ends_with_stop_id = seq.finish_reason == "stop"  # the id itself is no part of the text
        end = seq.num_tokens - ends_with_stop_id
        while self._num_read < end:
            stop = detokenizer.append(seq.token_ids[self._num_read])
            self._num_read += 1
            if stop is not None:
                seq.finish_reason, seq.stop_reason = "stop", stop
                return True
        return False

    def close_text(self, eos_token_ids: frozenset[int]) -> None:
        """Read the rest of an ended sample's tokens and say what ended it."""
        seq = self.seq
        if not self.read_text() and self.detokenizer is not None:
            stop = self.detokenizer.finish()
            if stop is not None:
                seq.finish_reason, seq.stop_reason = "stop", stop
        if seq.finish_reason == "stop" and seq.stop_reason is None:
            is_eos = seq.last_token in eos_token_ids and not self.request.params.ignore_eos
            seq.stop_reason = None if is_eos else seq.last_token

    def completion(self) -> CompletionOutput:
        """The sample as it stands."""
        text = self.detokenizer.text if self.detokenizer is not None else ""
        return self._output(text, self.seq.output_token_ids, 0)

    def take_delta(self) -> CompletionOutput:
        """What is new since the last delta."""
        start = self.num_reported
        token_ids = self.seq.output_token_ids[start:]
        self.num_reported += len(token_ids)
        text = self.detokenizer.take_delta() if self.detokenizer is not None else ""
        return self._output(text, token_ids, start)

    def _output(self, text: str, token_ids: list[int], start: int) -> CompletionOutput:
        log = self.logprobs
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=log.total if log is not None else None,
            logprobs=log.entries()[start:] if log is not None else None,
            finish_reason=self.seq.finish_reason,  # type: ignore[arg-type]  # one of FinishReason
            stop_reason=self.seq.stop_reason,
        )


class Request:
    """A prompt on its way; only the engine writes to it."""

    __slots__ = (
        "arrival_time",
        "first_token_time",
        "num_unfinished",
        "params",
        "prompt",
        "prompt_index",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "samples",
    )

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt_index: int | None,
    ) -> None:
        self.request_id = ""  # until it is queued
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.prompt_index = prompt_index  # place in its call
        self.samples: list[Sample] = []
        self.prompt_logprobs: LogprobLog | None = None  # of the tokens from the second on
        self.num_unfinished = params.n
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def output(self, completions: list[CompletionOutput] | None = None) -> RequestOutput:
        """The request as the user sees it: all samples whole, or the given parts of them."""
        if completions is None:
            completions = [sample.completion() for sample in self.samples]
        first = self.samples[0].seq
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=completions,
            finished=self.is_finished,
            prompt_logprobs=self._prompt_logprobs(),
            num_cached_tokens=first.num_prompt_cached_tokens or 0,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_scheduled_time=first.first_scheduled_time,
                first_token_time=self.first_token_time,
                finished_time=time.monotonic() if self.is_finished else None,
            ),
            prompt_index=self.prompt_index,
        )

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """None where nobody asked, and until the prompt is through."""
        entries = self.prompt_logprobs.entries() if self.prompt_logprobs is not None else None
        if entries is None or len(entries) + 1 < len(self.prompt_token_ids):
            return None
        return [None, *entries]
