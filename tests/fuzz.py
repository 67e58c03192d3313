"""Random workloads against the bundled model; every answer must be that of the request run alone.

    python -m tests.fuzz --minutes 30            # prints what it did; stops at the first mistake
    python -m tests.fuzz --seed 17 --workloads 1 # one workload again
    python -m tests.fuzz --mixed                 # every engine mixes prompts with decode lanes

A workload is an engine with random options (odd block sizes, tiny pools, one or two ranks), and
calls one after another: prompts in all forms, params of all fields, requests that come late or are
aborted, streams left early, errors and Ctrl-C raised at a random point, weights replaced, sleep. An
answer is compared with a plain engine's (one block size, no overlap, no prefix cache) that gets the
request alone: tokens, text, why it ended, logprobs within TOLERANCE. Tokens may part only where the
two best scores are that close. After each call nothing is queued and every block is free.

A workload is a function of its seed. One that fails is made smaller before it is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file

import nanovllm
from nanovllm import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from nanovllm.engine import second_pass
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.logprobs import LogprobLog
from nanovllm.engine.model_runner import ModelRunner, PendingTokens
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.worker import PendingReply, WorkerGroup
from nanovllm.kernels.sampling import sample_torch
from nanovllm.layers import sampler
from nanovllm.utils.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parent / "tiny_qwen3"
PACKAGE = str(Path(nanovllm.__file__).parent)
VOCAB_SIZE = 944
# Of logprobs, and of scores that decide between two tokens. On random tokens this network is so
# sensitive that transformers' float32 is up to 4e-4 from its float64: any order of a sum counts.
TOLERANCE = 1e-3
CLOSE = 1e-4  # what differences that round alike stay under
MAX_STEPS = 5000  # a call that needs more hangs
SHRINK_S = 30.0
SAME_FAILURE = 20  # characters of a message that tell what failed
BLOCK_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 64, 128, 255, 256)
STOPS = ("1", "7", "12", "k", "=", "b\n", "\n", "ab", "é", "Sum")
TEXTS = (
    "17 + 25 =", "Reverse: abcdef", "a", "é ü 漢字 \U0001f600", "Look up k in a=1 b=2 k=7",
    "  two spaces", "line\nbreak\n\n", "Sum 1 2 3 4 5 6 7 8 9", "<|im_start|>user\nhi<|im_end|>\n",
)  # fmt: skip

PromptForm = str | list[int] | np.ndarray | dict[str, object] | tuple[int, ...]


class Mistake(AssertionError):
    """The engine broke a promise."""


# what is asked


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: PromptForm
    params: SamplingParams
    arrives_at: int = 0  # step of a call of kind "steps"
    aborted_at: int | None = None

    def __repr__(self) -> str:
        default = SamplingParams()
        changed = [
            f"{field.name}={value!r}"
            for field in fields(default)
            if (value := getattr(self.params, field.name)) != getattr(default, field.name)
        ]
        when = f", {self.arrives_at}, {self.aborted_at}"
        return f"Ask({self.prompt!r}, SamplingParams({', '.join(changed)}){when})"


@dataclass(frozen=True)
class Fault:
    """An exception at the `count`-th time that a place is passed."""

    place: str  # of PLACES, or "entry": any function of the package
    count: int
    is_late: bool  # raised when the place has done its work
    kind: type[BaseException]


@dataclass(frozen=True)
class Call:
    """What is done with the engine at once."""

    kind: str  # generate, chat, stream, deltas or steps
    asks: tuple[Ask, ...]
    before: str = ""  # reset, sleep or weights
    close_after: int | None = None  # outputs of a stream
    fault: Fault | None = None


@dataclass(frozen=True)
class Workload:
    """An engine's options and its calls."""

    options: dict[str, int | bool | None]
    calls: tuple[Call, ...]

    @property
    def max_tokens_of_pool(self) -> int:
        """Prompt and output that fit: the last token is never stored."""
        blocks, size = self.options["num_kvcache_blocks"], self.options["kvcache_block_size"]
        return min((blocks or 0) * (size or 0) + 1, self.options["max_model_len"] or 0)


PLACES: dict[str, tuple[type, str]] = {
    f"{owner.__name__}.{name}": (owner, name)
    for owner, names in {
        ModelRunner: ("launch", "run_model", "prepare_prefill", "prepare_decode"),
        PendingTokens: ("wait", "wait_logprobs"),
        WorkerGroup: ("launch", "collect"),
        PendingReply: ("wait", "wait_logprobs"),
        sampler.Sampler: ("forward",),
        second_pass.SecondPass: ("take", "run"),
        Tokenizer: ("encode_batch", "decode_token"),
        Detokenizer: ("append", "finish", "take_delta"),
        LogprobLog: ("add", "entries"),
        Request: ("output",),
        Scheduler: ("add", "schedule", "postprocess", "finish", "preempt"),
        BlockManager: ("allocate", "may_append", "deallocate", "hash_blocks"),
    }.items()
    for name in names
}
ERRORS = (RuntimeError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, OSError, ValueError)


def random_workload(
    seed: int, tokenizer: Tokenizer, *, num_ranks: int | None = None, is_mixed: bool = False
) -> Workload:
    """The workload of this seed; with `is_mixed` its engine has mixed steps in any case."""
    rng = random.Random(seed)
    max_model_len = rng.choice((24, 64, 130, rng.randint(8, 320)))
    block_size = rng.choice(BLOCK_SIZES)
    blocks_of_longest = -(-max_model_len // block_size)
    options = {
        "max_model_len": max_model_len,
        "kvcache_block_size": block_size,
        "num_kvcache_blocks": max(1, int(blocks_of_longest * rng.choice((0.5, 1, 1, 1.5, 2, 6)))),
        "max_num_seqs": rng.choice((1, 2, 3, 5, 8, 16)),
        "max_num_batched_tokens": rng.choice((rng.randint(1, 16), rng.randint(16, 128), 1024)),
        "max_num_mixed_tokens": rng.choice((0, 0, rng.randint(1, 16), rng.randint(16, 256))),
        "async_scheduling": rng.random() < 0.7,
        "enable_prefix_caching": rng.random() < 0.75,
        "seed": rng.choice((0, 1, 2**63 - 1)),
        "tensor_parallel_size": num_ranks or (2 if rng.random() < 0.02 else 1),
    }
    if is_mixed and not options["max_num_mixed_tokens"]:
        options["max_num_mixed_tokens"] = 1 + seed % 32
    workload = Workload(options, ())
    maker = _AskMaker(rng, tokenizer, workload.max_tokens_of_pool)
    calls = tuple(_random_call(rng, maker, options) for _ in range(rng.randint(1, 6)))
    return replace(workload, calls=calls)


def _random_call(rng: random.Random, maker: _AskMaker, options: dict[str, object]) -> Call:
    kind = rng.choice(("generate", "generate", "chat", "stream", "deltas", "steps", "steps"))
    asks = tuple(maker.ask(kind) for _ in range(rng.choice((1, 2, rng.randint(1, 12)))))
    closes = kind in ("stream", "deltas") and rng.random() < 0.4
    return Call(
        kind=kind,
        asks=tuple(ask for ask in asks if ask is not None),
        before=rng.choice(("",) * 8 + ("reset", "sleep", "weights")),
        close_after=rng.randint(1, 6) if closes else None,
        fault=_random_fault(rng) if rng.random() < 0.3 else None,
    )


def _random_fault(rng: random.Random) -> Fault:
    is_entry = rng.random() < 0.4
    return Fault(
        place="entry" if is_entry else rng.choice(sorted(PLACES)),
        count=rng.randint(1, 4000) if is_entry else rng.choice((1, 2, rng.randint(1, 40))),
        is_late=rng.random() < 0.4,
        kind=KeyboardInterrupt if is_entry else rng.choice(ERRORS),
    )


class _AskMaker:
    """Makes requests that the engine must accept."""

    def __init__(self, rng: random.Random, tokenizer: Tokenizer, max_total_tokens: int) -> None:
        self._rng = rng
        self._tokenizer = tokenizer
        self._max_total_tokens = max_total_tokens
        self._families = [self._ids(max_total_tokens) for _ in range(3)]

    def ask(self, kind: str) -> Ask | None:
        """A request, or None: its prompt happens not to fit."""
        rng = self._rng
        form, token_ids = self._chat() if kind == "chat" else self._prompt()
        room = self._max_total_tokens - len(token_ids)
        if room < 1:
            return None
        limit = min(room, rng.choice((1, 2, rng.randint(1, 30), rng.randint(1, 30), 80)))
        aborts = kind == "steps" and rng.random() < 0.25
        return Ask(
            form,
            self._params(limit, room),
            arrives_at=rng.choice((0, 0, rng.randint(0, 20))),
            aborted_at=rng.randint(0, 40) if aborts else None,
        )

    def _prompt(self) -> tuple[PromptForm, list[int]]:
        rng = self._rng
        if rng.random() < 0.3:
            text = "".join(rng.choices(TEXTS, k=rng.choice((1, 1, 3))))
            token_ids = self._tokenizer.encode(text)
            return rng.choice((text, {"prompt": text})), token_ids
        longest = max(1, self._max_total_tokens - rng.choice((1, 2, 10, 40)))
        shared = rng.choice((*self._families, []))[: rng.randint(0, longest)]
        token_ids = (shared + self._ids(rng.randint(0, 9)))[:longest] or [5]
        forms = (token_ids, tuple(token_ids), np.array(token_ids, dtype=rng.choice("ilH")))
        return rng.choice((*forms, {"prompt_token_ids": token_ids})), token_ids

    def _chat(self) -> tuple[PromptForm, list[int]]:
        text = self._rng.choice(TEXTS[:6])
        messages = [{"role": "user", "content": text}]
        written = self._tokenizer.apply_chat_template(messages)
        return text, self._tokenizer.encode(written, add_special_tokens=False)

    def _ids(self, length: int) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(length)]

    def _params(self, limit: int, room: int) -> SamplingParams:
        """Each field at its default more often than not."""
        rng = self._rng

        def maybe(value: object, default: object, odds: float = 0.15) -> object:
            return value if rng.random() < odds else default

        temperature = rng.choice((0, 0, 0.3, 0.8, 1.0, 1.5, 4.0))
        detokenize = rng.random() < 0.9
        max_tokens = maybe(None, limit, 0.1) if room <= 60 else limit
        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=rng.random() < 0.5,
            top_p=maybe(rng.uniform(0.01, 1), 1.0),
            top_k=maybe(rng.choice((1, 2, 20, 943, 5000)), 0),
            min_p=maybe(rng.choice((0.02, 0.3, 1.0)), 0.0),
            n=maybe(rng.randint(2, 4), 1) if temperature else 1,
            seed=maybe(rng.choice((0, 7, 2**63 - 1)), None, 0.4),
            stop=maybe(rng.sample(STOPS, rng.randint(1, 3)), None, 0.3) if detokenize else None,
            stop_token_ids=maybe(self._ids(20), None, 0.2),
            min_tokens=maybe(rng.randint(0, limit), 0, 0.2),
            logprobs=maybe(rng.choice((0, 1, 3, -1)), None, 0.25),
            prompt_logprobs=maybe(rng.choice((0, 1, 4, -1)), None, 0.12),
            presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
            frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
            repetition_penalty=maybe(rng.choice((0.5, 1.1, 1.7)), 1.0),
            logit_bias=maybe({i: rng.uniform(-20, 20) for i in self._ids(3)}, None),
            bad_words=maybe(rng.sample(("12", "1", "ab", "k", "= "), 2), None),
            skip_special_tokens=rng.random() < 0.7,
            include_stop_str_in_output=rng.random() < 0.3,
            detokenize=detokenize,
        )


# running it


@contextlib.contextmanager
def raising(fault: Fault | None) -> Iterator[list[BaseException]]:
    """Plant a fault; the list holds it as soon as it has been raised."""
    raised: list[BaseException] = []

    def fire() -> NoReturn:
        raised.append(fault.kind("a planted fault"))  # type: ignore[union-attr]
        raise raised[0]

    if fault is None:
        yield raised
    elif fault.place == "entry":
        with _raising_at_entry(fault.count, fire):
            yield raised
    else:
        owner, name = PLACES[fault.place]
        original, passes = getattr(owner, name), itertools.count(1)

        def pass_by(*args: object, **options: object) -> object:
            is_due = not raised and next(passes) == fault.count
            if is_due and not fault.is_late:
                fire()
            value = original(*args, **options)
            if is_due:
                fire()
            return value

        setattr(owner, name, pass_by)
        try:
            yield raised
        finally:
            setattr(owner, name, original)


@contextlib.contextmanager
def _raising_at_entry(count: int, fire: Callable[[], NoReturn]) -> Iterator[None]:
    """Call `fire` where the package's `count`-th function begins: there Python sees a Ctrl-C."""
    entries = itertools.count(1)

    def trace(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        # What is raised here as a generator goes on passes by its `finally`; Ctrl-C doesn't.
        is_whole = code.co_filename.startswith(PACKAGE) and not code.co_flags & inspect.CO_GENERATOR
        if is_whole and next(entries) == count:
            sys.settrace(None)
            fire()

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


class Fuzzer:
    """Runs workloads and compares their answers; owns the engines that answer alone."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_folder(FOLDER)
        self.counts: Counter[str] = Counter()
        self._weights = [load_file(FOLDER / "model.safetensors")]
        # The same network, less sure of itself.
        self._weights.append({name: value * 0.8 for name, value in self._weights[0].items()})
        self._plain = [self._plain_engine(weights) for weights in self._weights]

    def close(self) -> None:
        for llm in self._plain:
            llm.exit()

    def _plain_engine(self, weights: dict[str, torch.Tensor]) -> LLM:
        llm = LLM(
            str(FOLDER),
            device="cpu",
            max_model_len=400,
            max_num_seqs=4,
            async_scheduling=False,
            enable_prefix_caching=False,
        )
        llm.load_weights(weights)
        return llm

    def run_seed(self, seed: int, num_ranks: int | None = None, *, is_mixed: bool = False) -> None:
        """Run one workload; if it fails, name a smaller one that does.

        Raises:
            Mistake: With the seed and the workload.
        """
        workload = random_workload(seed, self.tokenizer, num_ranks=num_ranks, is_mixed=is_mixed)
        try:
            self.run(workload)
        except Exception as error:
            kind = f"{type(error).__name__}: {error}"
            smaller = self._shrink(workload, kind[:SAME_FAILURE])
            raise Mistake(f"seed {seed}: {kind[:2000]}\n{smaller}") from error

    def run(self, workload: Workload) -> None:
        """Run one workload and check all of it."""
        self.counts["workloads"] += 1
        self.counts["workloads of mixed steps"] += bool(workload.options["max_num_mixed_tokens"])
        self.counts["workloads of two ranks"] += workload.options["tensor_parallel_size"] == 2
        # A handful makes a group here, and rides in mixed steps of few tokens, long as it takes.
        in_small = patch.multiple(Scheduler, num_groups=3, num_riding_steps=10**9)
        with in_small, LLM(str(FOLDER), device="cpu", **workload.options) as llm:
            version = 0
            for call in workload.calls:
                version = self._prepare(llm, call.before, version)
                self._call(llm, workload, call, version)
                if llm.llm_engine._runner is None:
                    break
            stats = llm.stats()
            self.counts["preemptions"] += stats.num_preemptions
            self.counts["prompt tokens found in the cache"] += stats.num_cached_tokens
            self.counts["steps"] += stats.num_steps

    def _prepare(self, llm: LLM, before: str, version: int) -> int:
        if before == "reset":
            llm.reset_prefix_cache()
        elif before == "sleep":
            llm.sleep()
            llm.wake_up()
        elif before == "weights":
            version = 1 - version
            llm.load_weights(self._weights[version])
        if before:
            self.counts[f"calls after {before}"] += 1
        return version

    def _call(self, llm: LLM, workload: Workload, call: Call, version: int) -> None:
        self.counts["calls"] += 1
        before = llm.stats()
        outputs: list[tuple[int, RequestOutput]] = []
        with raising(call.fault) as raised:
            try:
                outputs = _run_call(llm, call)
            except BaseException as error:
                if not raised or error is not raised[0]:
                    raise
        self.counts["faults raised"] += bool(raised)
        if raised and llm.llm_engine._runner is None:
            if not isinstance(raised[0], KeyboardInterrupt) or _num_ranks(workload) == 1:
                raise Mistake(f"the engine is closed after {raised[0]!r}")
            self.counts["ranks ended by Ctrl-C in half a command"] += 1
            return
        _check_idle(llm)
        if raised:
            return
        is_whole = call.close_after is None and all(a.aborted_at is None for a in call.asks)
        if is_whole:
            _check_counts(llm, before.num_prompt_tokens, before.num_generated_tokens, outputs)
            if sorted(i for i, _ in outputs) != list(range(len(call.asks))):
                raise Mistake(f"{len(call.asks)} asked, answered: {[i for i, _ in outputs]}")
        for index, output in outputs:
            self._check(workload, call, call.asks[index], output, version)

    # comparing

    def _check(
        self, workload: Workload, call: Call, ask: Ask, output: RequestOutput, version: int
    ) -> None:
        """Compare one answer with the plain engine's."""
        limit = workload.max_tokens_of_pool - len(output.prompt_token_ids)
        max_tokens = limit if ask.params.max_tokens is None else ask.params.max_tokens
        params = ask.params.replace(max_tokens=min(max_tokens, limit))
        _check_prompt(self.tokenizer, call, ask, output)
        alone = self._alone(workload, output, params, version)
        if len(output.outputs) != params.n:
            raise Mistake(f"{len(output.outputs)} samples, asked for {params.n}: {ask}")
        if (output.prompt_logprobs is None) != (alone.prompt_logprobs is None):
            raise Mistake(f"prompt logprobs are missing: {ask}")
        for mine, right in zip(
            output.prompt_logprobs or [], alone.prompt_logprobs or [], strict=True
        ):
            if mine is not None or right is not None:
                _check_logprobs(mine or {}, right or {}, str(ask))
        for mine, right in zip(output.outputs, alone.outputs, strict=True):
            self.counts["answers"] += 1
            self.counts["tokens"] += len(mine.token_ids)
            if mine.token_ids == right.token_ids:
                _check_sample(mine, right, str(ask))
            else:
                self._check_tie(workload, output, params, version, (mine, right))

    def _alone(
        self, workload: Workload, output: RequestOutput, params: SamplingParams, version: int
    ) -> RequestOutput:
        llm = self._plain[version]
        engine = llm.llm_engine
        # Requests without a seed get one from the engine's seed and their number.
        engine._inputs._seed = workload.options["seed"]
        engine._num_requests = int(output.request_id)
        return llm.generate([output.prompt_token_ids], params, use_tqdm=False)[0]

    def _check_tie(
        self,
        workload: Workload,
        output: RequestOutput,
        params: SamplingParams,
        version: int,
        samples: tuple[CompletionOutput, CompletionOutput],
    ) -> None:
        """Raise unless two samples part where the scores of their tokens are all but equal."""
        mine, right = (sample.token_ids for sample in samples)
        place = next((i for i, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b), None)
        if place is None:
            raise Mistake(f"one answer is the other's beginning: {mine}, alone {right}; {params}")
        position = len(output.prompt_token_ids) + place
        with _recorded_draws() as draws:
            self._alone(workload, output, params, version)
        gaps = [
            gap
            for logits, *rest in draws
            for gap in _gaps(logits, *rest, position, right[place], mine[place])
        ]
        if not gaps or gaps[-1] > TOLERANCE:
            parted = f"{mine}, alone {right}, parted at {place} by scores {gaps}"
            raise Mistake(f"{parted}: {params}")
        self.counts[f"ties within {CLOSE if gaps[-1] <= CLOSE else TOLERANCE}"] += 1

    # making smaller

    def _shrink(self, workload: Workload, kind: str) -> Workload:
        """Leave out what the failure doesn't need."""
        deadline = time.monotonic() + SHRINK_S
        is_smaller = True
        while is_smaller:
            is_smaller = False
            for candidate in _smaller(workload):
                if time.monotonic() > deadline:
                    return workload
                try:
                    self.run(candidate)
                except Exception as error:
                    is_smaller = f"{type(error).__name__}: {error}".startswith(kind)
                if is_smaller:
                    workload = candidate
                    break
        return workload


def _num_ranks(workload: Workload) -> int:
    return workload.options["tensor_parallel_size"] or 1


def _run_call(llm: LLM, call: Call) -> list[tuple[int, RequestOutput]]:
    """Outputs that are whole, with the index of what they answer."""
    prompts, params = [ask.prompt for ask in call.asks], [ask.params for ask in call.asks]
    if call.kind == "steps":
        return _run_steps(llm, call)
    if call.kind == "chat":
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return list(enumerate(llm.chat(chats, params, use_tqdm=False)))
    if call.kind == "generate":
        return list(enumerate(llm.generate(prompts, params, use_tqdm=False)))
    stream = llm.stream(prompts, params, deltas=call.kind == "deltas")
    taken = list(itertools.islice(stream, call.close_after))
    stream.close()
    outputs = _join(taken) if call.kind == "deltas" else taken
    return [(output.prompt_index or 0, output) for output in outputs]


def _run_steps(llm: LLM, call: Call) -> list[tuple[int, RequestOutput]]:
    """Requests that come and go while others run, with the invariants checked at every step."""
    engine, index_of, outputs = llm.llm_engine, {}, []
    last_arrival = max((ask.arrives_at for ask in call.asks), default=0)
    try:
        for step in range(MAX_STEPS):
            for i, ask in enumerate(call.asks):
                if ask.arrives_at == step:
                    index_of[engine.add_request(ask.prompt, ask.params)] = i
            for request_id, i in index_of.items():
                if call.asks[i].aborted_at == step:
                    engine.abort(request_id)
            outputs += [(index_of[output.request_id], output) for output in engine.step()]
            engine.scheduler.check_invariants()
            if step >= last_arrival and engine.is_finished():
                return outputs
    finally:
        for request_id in index_of:  # those queued before one that couldn't be
            engine.abort(request_id)
    raise Mistake(f"{MAX_STEPS} steps, and it isn't done")


def _join(deltas: list[RequestOutput]) -> list[RequestOutput]:
    """Whole outputs of the requests whose last delta is there."""
    parts: dict[str, dict[int, list[CompletionOutput]]] = {}
    last: dict[str, RequestOutput] = {}
    for output in deltas:
        if output.request_id in last and last[output.request_id].finished:
            raise Mistake("a delta after the last one")
        last[output.request_id] = output
        for sample in output.outputs:
            parts.setdefault(output.request_id, {}).setdefault(sample.index, []).append(sample)
    return [
        replace(output, outputs=[_joined(pieces) for _, pieces in sorted(parts[key].items())])
        for key, output in last.items()
        if output.finished
    ]


def _joined(pieces: list[CompletionOutput]) -> CompletionOutput:
    logprobs = [piece.logprobs for piece in pieces]
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=list(itertools.chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=None if None in logprobs else list(itertools.chain.from_iterable(logprobs)),
    )


def _check_idle(llm: LLM) -> None:
    """Nothing queued, every block free."""
    stats, engine = llm.stats(), llm.llm_engine
    engine.scheduler.check_invariants()
    left = (stats.num_waiting, stats.num_running, len(engine._requests), len(engine._samples))
    if any(left) or not engine.is_finished():
        raise Mistake(f"still queued: waiting, running, requests, samples {left}")
    if stats.num_free_kvcache_blocks != stats.num_kvcache_blocks:
        raise Mistake(f"{stats.num_free_kvcache_blocks} of {stats.num_kvcache_blocks} blocks free")


def _check_counts(
    llm: LLM, num_prompt: int, num_generated: int, outputs: list[tuple[int, RequestOutput]]
) -> None:
    """What the engine says it did is what it returned."""
    stats = llm.stats()
    prompt = sum(len(out.outputs) * out.num_prompt_tokens for _, out in outputs)
    generated = sum(out.num_generated_tokens for _, out in outputs)
    found = stats.num_prompt_tokens - num_prompt, stats.num_generated_tokens - num_generated
    if found != (prompt, generated):
        raise Mistake(f"tokens counted {found}, returned {(prompt, generated)}")


def _check_prompt(tokenizer: Tokenizer, call: Call, ask: Ask, output: RequestOutput) -> None:
    """It is the prompt of its index that was answered."""
    prompt = ask.prompt
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids") or prompt["prompt"]
    if call.kind == "chat":
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if output.prompt_token_ids != token_ids:
        raise Mistake(f"answers {output.prompt_token_ids}, asked {ask}")
    if not 0 <= output.num_cached_tokens < len(token_ids):
        raise Mistake(f"{output.num_cached_tokens} cached tokens of {ask}")


def _check_sample(mine: CompletionOutput, right: CompletionOutput, ask: str) -> None:
    for name in ("index", "text", "finish_reason", "stop_reason"):
        if getattr(mine, name) != getattr(right, name):
            found, expected = getattr(mine, name), getattr(right, name)
            raise Mistake(f"{name} is {found!r}, alone {expected!r}: {ask}")
    if (mine.logprobs is None) != (right.logprobs is None):
        raise Mistake(f"logprobs are missing: {ask}")
    for entry, expected in zip(mine.logprobs or [], right.logprobs or [], strict=True):
        _check_logprobs(entry, expected, ask)
    slack = TOLERANCE * max(len(mine.token_ids), 1)
    if abs((mine.cumulative_logprob or 0) - (right.cumulative_logprob or 0)) > slack:
        raise Mistake(f"cumulative {mine.cumulative_logprob}, {right.cumulative_logprob}: {ask}")


def _check_logprobs(mine: dict[int, Logprob], right: dict[int, Logprob], ask: str) -> None:
    """The token's own entry, and the likeliest ones by value: equal values may swap places."""
    own, expected = next(iter(mine.items())), next(iter(right.items()))
    if own[0] != expected[0] or len(mine) != len(right):
        raise Mistake(f"logprobs of other tokens {list(mine)}, alone {list(right)}: {ask}")
    pairs = [(own[1], expected[1])]
    by_value = [sorted(e.values(), key=lambda e: e.logprob) for e in (mine, right)]
    pairs += zip(*by_value, strict=True)
    found, alone = np.array([(a.logprob, b.logprob) for a, b in pairs]).T
    if not np.allclose(found, alone, rtol=0, atol=TOLERANCE):
        worst = int(np.abs(found - alone).argmax())
        raise Mistake(f"logprobs: {found[worst]}, alone {alone[worst]} (of {len(found)}): {ask}")
    if abs((own[1].rank or 0) - (expected[1].rank or 0)) > 1:
        raise Mistake(f"rank {own}, alone {expected}: {ask}")


@contextlib.contextmanager
def _recorded_draws() -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """Copies of what every draw on the CPU is made from."""
    draws: list[tuple[torch.Tensor, ...]] = []

    def record(*args: torch.Tensor) -> object:
        draws.append(tuple(arg.clone() for arg in args[:4]))
        return sample_torch(*args)

    modules = sampler, second_pass
    for module in modules:
        module.sample_torch = record  # type: ignore[attr-defined]
    try:
        yield draws
    finally:
        for module in modules:
            module.sample_torch = sample_torch  # type: ignore[attr-defined]


def _gaps(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    position: int,
    right: int,
    mine: int,
) -> Iterator[float]:
    """Score of the token drawn at a position, less that of another, in rows that drew it."""
    for row in (positions == position).nonzero().flatten().tolist():
        rest = temperatures[row : row + 1], seeds[row : row + 1], positions[row : row + 1]
        scores = []
        for token_id in (right, mine):
            only = torch.full_like(logits[row : row + 1], -torch.inf)
            only[0, token_id] = logits[row, token_id]
            scores.append(sample_torch(only, *rest).values.item())
        drawn = sample_torch(logits[row : row + 1], *rest).token_ids.item()
        if drawn == right:
            # Both hold logit / T: what rounds differently in a logit counts so many times.
            yield (scores[0] - scores[1]) * min(1.0, max(float(rest[0]), 0.0) or 1.0)


def _smaller(workload: Workload) -> Iterator[Workload]:
    """The workload less a call, a fault or a request, the largest pieces first."""
    calls = workload.calls
    for i in range(len(calls)):
        if len(calls) > 1:
            yield replace(workload, calls=calls[:i] + calls[i + 1 :])
    for i, call in enumerate(calls):
        changes = [replace(call, fault=None)] if call.fault else []
        changes += [replace(call, before="")] if call.before else []
        changes += [
            replace(call, asks=call.asks[:k] + call.asks[k + 1 :]) for k in range(len(call.asks))
        ]
        for change in changes:
            yield replace(workload, calls=(*calls[:i], change, *calls[i + 1 :]))
    for name, plain in (("async_scheduling", False), ("enable_prefix_caching", False)):
        if workload.options[name] != plain:
            yield replace(workload, options={**workload.options, name: plain})
    if workload.options["max_num_mixed_tokens"]:
        yield replace(workload, options={**workload.options, "max_num_mixed_tokens": 0})


# for hours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument("--workloads", type=int, help="how many; default: as time allows")
    parser.add_argument("--mixed", action="store_true", help="mixed steps in every workload")
    parser.add_argument("--keep-going", action="store_true", help="also after a mistake")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fuzzer = Fuzzer()
    start = time.monotonic()
    num_mistakes = 0
    for seed in itertools.count(args.seed):
        is_late = time.monotonic() - start > 60 * args.minutes
        if seed - args.seed == args.workloads or (is_late and args.workloads is None):
            break
        try:
            fuzzer.run_seed(seed, is_mixed=args.mixed)
        except Mistake as mistake:
            num_mistakes += 1
            print(mistake, flush=True)
            if not args.keep_going:
                raise
    minutes = (time.monotonic() - start) / 60
    print(f"{minutes:.1f} minutes, seeds {args.seed}..{seed - 1}, {num_mistakes} mistakes")
    for name, count in sorted(fuzzer.counts.items()):
        print(f"{count:>9,}  {name}")
    fuzzer.close()
    if num_mistakes:
        sys.exit(1)


if __name__ == "__main__":
    main()
