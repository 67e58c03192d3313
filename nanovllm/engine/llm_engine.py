"""The step loop: schedule, launch, postprocess, and what surrounds it.

The loop keeps one step in flight. While the device runs step N + 1, the host confirms the tokens of
step N, detokenises them and builds results, so the device never waits for Python:

    step = scheduler.schedule()              # counts only, never the value of a token in flight
    launched = runner.launch(step.batch)     # one copy, one graph replay
    scheduler.postprocess(previous, ...)     # while it runs

A token that ends a sequence by its value (eos, a stop id, a stop string) is therefore seen one step
late; the token drawn meanwhile is *late* and dropped. With async_scheduling=False nothing is in
flight when a step is scheduled, and nothing else differs.

Every mistake of the caller is raised before any state changes. After any exception inside a step
the engine rebuilds its scheduler and blocks rather than repairing them, and can go on.
"""

import itertools
import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.commands import Pending
from nanovllm.engine.input_processor import InputProcessor, load_tokenizer
from nanovllm.engine.logprobs import read_rows
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.request import Request, Sample
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.settings import RunnerSettings, resolve_settings
from nanovllm.engine.worker import WorkerGroup, start_workers
from nanovllm.outputs import EngineStats, RequestOutput, RunnerDescription
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.model_folder import eos_token_ids, read_json

logger = logging.getLogger("nanovllm")

# What a generation_config.json may recommend, and the field of SamplingParams that it means.
_RECOMMENDED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class InFlight(NamedTuple):
    """A launched step whose tokens have not been read."""

    step: Step
    tokens: Pending


class StepCounts(NamedTuple):
    """How many tokens a step ran."""

    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0

    @classmethod
    def of(cls, step: Step | None) -> "StepCounts":
        """0 and 0 of no step."""
        if step is None:
            return cls()
        return cls(len(step.batch.prompt_tokens), step.batch.num_decodes)


class LLMEngine:
    """Requests in, finished outputs out, one `step` at a time.

    Raises:
        ValueError: The model or an option can't be used; nothing stays behind.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        marks = [time.perf_counter()]
        settings = resolve_settings(config)
        self.model_config, self.max_model_len = settings.model_config, settings.max_model_len
        self._settings = settings
        self.tokenizer = load_tokenizer(config, settings.folder)
        self.generation_config = read_json(settings.folder / "generation_config.json")
        # Qwen3's generation_config lists two, of which its config.json and tokenizer name one each.
        self.eos_token_ids = frozenset(self.model_config.eos_token_ids).union(
            self.tokenizer.eos_token_ids if self.tokenizer else (),
            eos_token_ids("generation_config.json", self.generation_config),
        )
        self._pid = os.getpid()
        marks.append(time.perf_counter())
        self._runner: ModelRunner | WorkerGroup | None = start_runner(settings)
        marks.append(time.perf_counter())
        try:
            self._num_blocks = self._runner.allocate_kv_cache()
            marks.append(time.perf_counter())
            self._runner.capture_cudagraph()
        except BaseException:
            self.exit()
            raise
        marks.append(time.perf_counter())
        self._startup_s = _startup_s(marks, self._runner.describe().compile_s)
        self._inputs = InputProcessor(
            settings, self.tokenizer, self.eos_token_ids, self._num_blocks
        )
        self._in_flight: InFlight | None = None
        self._num_requests = 0
        self._num_prompt_tokens = self._num_cached_tokens = self._num_generated_tokens = 0
        self._num_steps = 0
        self._num_past_preemptions = 0  # of schedulers that were dropped
        self.last_step = StepCounts()  # of the step that the last `step()` waited for
        self._is_asleep = False
        self._start_over()
        self._log_choices()

    def make_requests(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[Request]:
        """Check prompts and params and build their requests, without queueing any.

        Raises:
            ValueError, TypeError: A prompt or its params can't be run; the text names the prompt's
                index.
        """
        return self._inputs.make_requests(prompts, params)

    def add(self, requests: list[Request]) -> None:
        """Queue requests that `make_requests` built.

        With mixed steps those that may run longest go first, so that the last steps are full ones.
        Ids, and with them seeds, follow the order given.
        """
        try:
            for request in requests:
                self._number(request)
            if self._settings.max_num_mixed_tokens:
                requests = sorted(requests, key=_longest_first)
            for request in requests:
                for sample in request.samples:
                    self.scheduler.add(sample.seq)
        except BaseException:  # Ctrl-C has time to come between the first and the last
            self.abort_all(requests)
            raise

    def _number(self, request: Request) -> None:
        """Give a request its id and its samples."""
        number = self._num_requests
        self._num_requests += 1
        request.request_id = str(number)
        self._requests[request.request_id] = request
        for i in range(request.params.n):
            sample = self._inputs.make_sample(request, number, i)
            request.samples.append(sample)
            self._samples[sample.seq] = sample
            if request.params.stop:
                self._watched.add(sample.seq)
        self._num_prompt_tokens += request.params.n * len(request.prompt_token_ids)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> str:
        """Check and queue one prompt; return the request's id.

        Raises:
            ValueError, TypeError: It can't be run.
            RuntimeError: The engine has been closed.
        """
        self.check_usable()
        (request,) = self.make_requests([prompt], [params or SamplingParams()])
        request.prompt_index = None
        self.add([request])
        return request.request_id

    def abort(self, request_id: str) -> None:
        """Drop a request wherever it stands; an unknown or finished one is left alone.

        Raises:
            TypeError: The id isn't a str, as `add_request` returns it.
            KeyboardInterrupt: In the middle; all requests are dropped, as by an error in a step.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"a request's id is a str, not {request_id!r}")
        request = self._requests.get(request_id)
        if request is None:
            return
        try:
            self._drop([request])
        except BaseException:
            self._recover()
            raise

    def abort_all(self, requests: Iterable[Request]) -> None:
        """Drop these, or, if interrupted, all."""
        try:
            self._drop([r for r in requests if r.request_id in self._requests])
        except BaseException:
            self._recover()
            raise

    def _drop(self, requests: list[Request]) -> None:
        samples = itertools.chain.from_iterable(request.samples for request in requests)
        unfinished = [sample.seq for sample in samples if not sample.seq.is_finished]
        self.scheduler.finish(unfinished, "abort")  # all at once: it looks through the queue
        for seq in unfinished:
            if seq in self._samples:  # not yet, if queueing it was interrupted
                self._forget(seq)
        for request in requests:
            request.num_unfinished = 0
            del self._requests[request.request_id]

    def is_finished(self) -> bool:
        """Whether no request is queued or running."""
        return not self._requests

    def step(self, deltas: bool = False) -> list[RequestOutput]:
        """Launch the next step and process the one before it.

        Args:
            deltas: Return the new part of every request that advanced, not finished ones whole.

        Returns:
            Outputs of requests; [] on an empty engine, and while the first step is in flight.

        Raises:
            Exception: Whatever the step raised. All requests are dropped, their blocks are free,
                and the engine can go on.
        """
        self.check_usable()
        try:
            return self._step(deltas)
        except BaseException as error:
            is_closed = self._runner is None  # by another thread
            self._recover()
            if is_closed and isinstance(error, Exception):
                self.check_usable()
            raise

    def _step(self, deltas: bool) -> list[RequestOutput]:
        assert self._runner is not None, "check_usable"
        step = self.scheduler.schedule(in_flight=self._in_flight is not None)
        launched = None
        if step is not None:
            launched = InFlight(step, self._runner.launch(step.batch))
            self._num_steps += 1
        if self.config.async_scheduling:
            previous, self._in_flight = self._in_flight, launched
        else:
            previous = launched
        waited_for = previous.step if previous is not None else None
        self.last_step = StepCounts.of(step if self._runner.runs_at_launch else waited_for)
        return self._process(previous, deltas) if previous is not None else []

    def _process(self, done: InFlight, deltas: bool) -> list[RequestOutput]:
        """Confirm a step's tokens and build what is to be returned for them."""
        step = done.step
        ended = self.scheduler.postprocess(step, done.tokens.wait())
        logprobs = done.tokens.wait_logprobs()
        if logprobs is not None:
            self._note_logprobs(step, logprobs)
        if step.batch.num_prefills:
            self._note_first_tokens(step)
        advanced: list[Sample] = []
        if deltas or self._watched:
            advanced = [self._samples[seq] for seq in step.sequences if seq in self._samples]
            ended += self._read_text(advanced, deltas)
        finished = self._close_samples(ended)
        if not self._requests:
            self._in_flight = None  # holds late tokens only; whatever runs next is enqueued behind
        return _deltas(advanced) if deltas else [request.output() for request in finished]

    def _read_text(self, samples: list[Sample], deltas: bool) -> list[Sequence]:
        """Detokenise where every step counts; return the sequences that a stop string ended."""
        stopped = []
        for sample in samples:
            seq = sample.seq
            if not (deltas or seq in self._watched):
                continue
            if sample.read_text() and not seq.is_finished:
                self.scheduler.finish([seq], "stop")
                stopped.append(seq)
        return stopped

    def _close_samples(self, ended: Iterable[Sequence]) -> list[Request]:
        """Finish the texts of ended sequences and return the requests that are complete."""
        finished = []
        for seq in ended:
            sample = self._forget(seq)
            sample.close_text(self.eos_token_ids)
            request = sample.request
            request.num_unfinished -= 1
            if request.is_finished:
                finished.append(request)
                del self._requests[request.request_id]
        return finished

    def _forget(self, seq: Sequence) -> Sample:
        self._watched.discard(seq)
        self._num_generated_tokens += seq.num_output_tokens
        self._num_cached_tokens += seq.num_prompt_cached_tokens or 0
        return self._samples.pop(seq)

    def _note_logprobs(self, step: Step, words: np.ndarray) -> None:
        """Give logprobs to their samples and prompts; drop those of late tokens."""
        for row in read_rows(words):
            seq = step.sequences[row.lane]
            sample = self._samples.get(seq)
            if sample is None or seq is None:
                continue
            is_prompt = row.position < seq.num_prompt_tokens
            log = sample.request.prompt_logprobs if is_prompt else sample.logprobs
            assert log is not None, f"{seq}: logprobs that nobody asked for"
            log.add(row)

    def _note_first_tokens(self, step: Step) -> None:
        now = time.monotonic()
        for seq in step.sequences[: step.batch.num_prefills]:
            sample = self._samples.get(seq) if seq is not None else None
            if sample is not None and sample.request.first_token_time is None:
                sample.request.first_token_time = now

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            RuntimeError: Requests are queued or running.
        """
        self._check_idle("reset_prefix_cache()")
        self.scheduler.block_manager.reset()

    def load_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Write new values into the model's parameters, in place; see `loader.update_weights`.

        Cached prefixes are forgotten: they hold what the old weights made of them.

        Raises:
            RuntimeError: Requests are queued or running.
        """
        self._check_idle("load_weights()")
        assert self._runner is not None, "_check_idle"
        try:
            self._runner.load_weights(weights)
        finally:
            self.scheduler.block_manager.reset()
            self._close_if_lost()

    def sleep(self) -> None:
        """Give the KV cache's memory back until `wake_up`; cached prefixes are forgotten.

        Asleep already, it only finishes a sleep() that was interrupted.

        Raises:
            RuntimeError: Requests are queued or running, or the engine has been closed.
        """
        self._check_idle("sleep()", may_sleep=True)
        assert self._runner is not None, "_check_idle"
        self._is_asleep = True  # first: an engine half asleep is one that must be woken
        try:
            self._runner.sleep()
        finally:
            self._close_if_lost()

    def wake_up(self) -> None:
        """Take memory for the KV cache again; awake, it does nothing.

        Raises:
            torch.OutOfMemoryError: Others hold it now; free some and call again.
            RuntimeError: The same with several ranks, which closes the engine; or it was closed.
        """
        self._check_alive()
        if self._is_asleep:
            assert self._runner is not None, "_check_alive"
            try:
                self._runner.wake_up(self._num_blocks)
            finally:
                self._close_if_lost()
            self.scheduler.block_manager.reset()
            self._is_asleep = False

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams as generation_config.json recommends them.

        Raises:
            ValueError, TypeError: The file holds something that no request could ask for.
        """
        found = {
            field: self.generation_config[name]
            for name, field in _RECOMMENDED.items()
            if self.generation_config.get(name) is not None
        }
        return SamplingParams().replace(**found)

    def stats(self) -> EngineStats:
        """What the engine has done and what it runs on."""
        runner, blocks = self._runner, self.scheduler.block_manager
        known = runner.describe() if runner is not None else RunnerDescription()
        return EngineStats(
            num_steps=self._num_steps,
            num_preemptions=self._num_past_preemptions + self.scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_kvcache_blocks=self._num_blocks,
            num_free_kvcache_blocks=blocks.num_free_blocks,
            kvcache_block_size=blocks.block_size,
            kvcache_bytes=0 if self._is_asleep else known.block_bytes * self._num_blocks,
            device=known.device,
            dtype=runner.settings.dtype_name if runner is not None else "",
            prefill_backend=known.prefill_name,
            decode_backend=known.decode_name,
            max_num_mixed_tokens=self._settings.max_num_mixed_tokens,
            graph_batch_sizes=tuple(known.graph_sizes),
            startup_s=self._startup_s,
            all_reduce=known.all_reduce,
        )

    def count_generated_tokens(self) -> int:
        """Tokens generated so far, those of unfinished sequences included."""
        unfinished = (sample.seq.num_output_tokens for sample in self._samples.values())
        return self._num_generated_tokens + sum(unfinished)

    def check_usable(self, *, may_sleep: bool = False) -> None:
        """Raise RuntimeError if the engine is closed or asleep, or this is a forked copy of it."""
        self._check_alive()
        if self._is_asleep and not may_sleep:
            raise RuntimeError("this engine sleeps and has no KV cache: call wake_up() first")

    def _check_idle(self, what: str, *, may_sleep: bool = False) -> None:
        self.check_usable(may_sleep=may_sleep)
        if not self.is_finished():
            raise RuntimeError(f"{what} while requests run: finish or abort them")

    def _close_if_lost(self) -> None:
        if self._runner is not None and self._runner.is_lost:
            self.exit()

    def _check_alive(self) -> None:
        if self._runner is None:
            raise RuntimeError("this engine has been closed: make a new LLM")
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this engine belongs to the process that made it: make a new LLM after fork()"
            )

    def exit(self) -> None:
        """Stop and give memory back; calling it again does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None and os.getpid() == self._pid:
            runner.exit()

    def _start_over(self) -> None:
        """An empty scheduler on an empty pool; what ran before is forgotten."""
        config = self.config
        self.scheduler = Scheduler(
            num_blocks=self._num_blocks,
            block_size=config.kvcache_block_size,
            max_num_seqs=self._settings.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_mixed_tokens=self._settings.max_num_mixed_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._in_flight = None
        self._requests: dict[str, Request] = {}
        # Of unfinished sequences; None is no key, but what a lane without a receiver asks for.
        self._samples: dict[Sequence | None, Sample] = {}
        self._watched: set[Sequence] = set()  # those whose text must be read at every step

    def _recover(self) -> None:
        """After an exception in a step: rebuild, never repair."""
        self._num_past_preemptions += self.scheduler.num_preemptions
        self._start_over()
        if self._runner is None:
            return
        if self._runner.is_lost:
            self.exit()
        else:
            self._runner.synchronize()

    def _log_choices(self) -> None:
        stats = self.stats()
        logger.info(
            "%s, %s, attention: prefill %s, decode %s; %d KV blocks of %d tokens; graphs: %s; %s",
            stats.device,
            stats.dtype,
            stats.prefill_backend,
            stats.decode_backend,
            stats.num_kvcache_blocks,
            stats.kvcache_block_size,
            list(stats.graph_batch_sizes) or "none (eager)",
            ", ".join(f"{part} {seconds:.1f} s" for part, seconds in stats.startup_s),
        )


def start_runner(settings: RunnerSettings) -> ModelRunner | WorkerGroup:
    """A lone rank in this process, or a process for each of several."""
    size = settings.config.tensor_parallel_size
    return start_workers(settings, size) if size > 1 else ModelRunner(settings)


def _startup_s(marks: list[float], compile_s: float) -> tuple[tuple[str, float], ...]:
    """What start-up was spent on: the times between marks, with compiling told from warming up."""
    settings_s, weights_s, cache_s, graphs_s = (b - a for a, b in itertools.pairwise(marks))
    return (
        ("configuration and tokenizer", settings_s),
        ("weights", weights_s),
        ("kernels", compile_s),
        ("warm-up and KV cache", cache_s - compile_s),
        ("graphs", graphs_s),
    )


def _longest_first(request: Request) -> int:
    seq = request.samples[0].seq
    return seq.num_prompt_tokens - seq.max_total_tokens


def _deltas(samples: list[Sample]) -> list[RequestOutput]:
    """What is new of these samples, one output a request."""
    advanced: dict[Request, list[Sample]] = {}
    for sample in samples:
        advanced.setdefault(sample.request, []).append(sample)
    return [
        request.output([sample.take_delta() for sample in its_samples])
        for request, its_samples in advanced.items()
    ]
