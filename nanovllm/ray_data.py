"""Ray Data as the way to many GPUs and hosts: one engine an actor, Ray does the rest.

Ray Data reads, splits, schedules, retries and starts lost actors again; nothing of that is here.
A class for `map_batches` holds an engine, and its calls are coroutines, so several batches are in
the engine at once and it is not drained at the end of each. A call returns its rows in the order it
got them: a retried task then returns what the lost one would have.
"""

import asyncio
import dataclasses
import json
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

import numpy as np

from nanovllm.batch_file import (
    PROMPT_FIELDS,
    BadLine,
    BatchRequest,
    Engine,
    Json,
    Ledger,
    Line,
    RequestReader,
    Tally,
    answer_record,
    parse_line,
    read_id,
    read_lines,
    reason,
    report_bad_line,
)
from nanovllm.config import Config
from nanovllm.engine.prompt import Prompt
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ray.data import Dataset

Batch = dict[str, np.ndarray]  # a column a name
CONCURRENT_BATCHES = 4  # of an actor: together they are twice what its engine runs at once
_READER_CPUS = 0.1  # of a chunk; an engine leaves as much, or one core would not be enough for both

_ANSWER_COLUMNS = (
    "text",
    "token_ids",
    "finish_reason",
    "num_prompt_tokens",
    "num_cached_tokens",
    "error",
)


class _EngineActor:
    """An engine in an actor, and what makes its requests."""

    def __init__(
        self,
        llm: LLM,
        defaults: SamplingParams,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        engine, config = llm.llm_engine, llm.llm_engine.config
        self._reader = RequestReader(
            engine.tokenizer, defaults, config.seed, config.model, chat_template_kwargs
        )
        self._thread = EngineThread(engine, llm.exit)

    def close(self) -> None:
        """End the engine; calling it again does nothing."""
        self._thread.close()

    def __del__(self) -> None:  # how Ray lets go of it at the end of a job
        if hasattr(self, "_thread"):
            self.close()


class NanoVLLM(_EngineActor):
    """One engine in an actor of Ray Data: pass the class to `map_batches`.

        ds.map_batches(
            NanoVLLM,
            fn_constructor_kwargs={"model": "Qwen3-0.6B", "sampling_params": {"max_tokens": 64}},
            batch_size=256,  # half of max_num_seqs: four of them keep an engine full
            compute=ray.data.ActorPoolStrategy(size=8, max_concurrent_calls_per_actor=4),
            num_gpus=1,  # tensor_parallel_size
        )

    A row has one of the columns prompt, messages and prompt_token_ids, and may have sampling_params
    (fields that differ from the constructor's) and id: with one, its answer depends on nothing but
    the row. It leaves with text, token_ids, finish_reason, num_prompt_tokens, num_cached_tokens and
    error. A row that can't be run has a text in `error` and nothing in the others; what the engine
    itself raises fails the job.
    """

    def __init__(
        self,
        model: str,
        sampling_params: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        """Load the model.

        Args:
            model: As for `LLM`; every host must find it.
            sampling_params: Fields of SamplingParams, for all rows; one sample, no logprobs.
            **options: As for `LLM`.
        """
        defaults = SamplingParams().replace(**(sampling_params or {}))
        _check_flat(defaults)
        super().__init__(LLM(model, **options), defaults)

    async def __call__(self, batch: Batch) -> Batch:
        """Answer the rows of a batch."""
        values_of_rows = zip(*batch.values(), strict=True)
        rows = [dict(zip(batch, values, strict=True)) for values in values_of_rows]
        answers = await asyncio.gather(*(self._answer(row) for row in rows))
        found = {name: _column([answer[name] for answer in answers]) for name in _ANSWER_COLUMNS}
        return {**batch, **found}

    async def _answer(self, row: dict[str, object]) -> Json:
        try:
            request = self._read(row)
            output = await self._thread.answer(request.prompt, request.params)
        except (ValueError, TypeError) as error:
            return dict.fromkeys(_ANSWER_COLUMNS) | {"error": reason(error)}
        sample = output.outputs[0]
        values = (
            sample.text,
            sample.token_ids,
            sample.finish_reason,
            output.num_prompt_tokens,
            output.num_cached_tokens,
            None,
        )
        return dict(zip(_ANSWER_COLUMNS, values, strict=True))

    def _read(self, row: dict[str, object]) -> BatchRequest:
        known = {name: _plain(row[name]) for name in PROMPT_FIELDS if name in row}
        wishes = _plain(row.get("sampling_params")) or {}
        if not isinstance(wishes, dict):
            raise TypeError(f"sampling_params must be a struct, got {wishes!r:.80}")
        # A struct's column has the fields of all its rows, empty where a row has none.
        wishes = {name: value for name, value in wishes.items() if value is not None}
        line_id = _plain(row["id"]) if "id" in row else uuid.uuid4().hex
        request = self._reader.read({**wishes, **known, "id": line_id})
        _check_flat(request.params)
        return request


def _check_flat(params: SamplingParams) -> None:
    """Raise unless one row holds the answer."""
    if params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None:
        raise ValueError(
            "a row is one sample without logprobs: repeat rows for n > 1, or run a batch file"
        )


def _plain(value: object) -> object:
    """numpy's arrays and scalars, at any depth, as Python's."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _column(values: list[object]) -> np.ndarray:
    """Values of any kind as one column: lists stay lists."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


# An engine that many callers share


class _Submission(NamedTuple):
    prompt: Prompt
    params: SamplingParams
    future: "Future[RequestOutput]"


class EngineThread:
    """Steps an engine in a thread of its own as long as anybody waits for an answer.

    Invariant: only this thread touches the engine; callers leave prompts in a queue.
    """

    def __init__(self, engine: Engine, on_close: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            engine: Empty; nobody else uses it.
            on_close: Called in the thread when it ends.
        """
        self._submissions: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        # The thread holds no reference to this object, so that it can go while the thread runs.
        self._thread = threading.Thread(
            target=_serve, args=(engine, self._submissions, on_close), daemon=True
        )
        self._thread.start()

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """The answer to one prompt.

        Raises:
            ValueError, TypeError: It can't be run.
            RuntimeError: The thread has ended.
            Exception: Whatever a step raised.
        """
        if not self._thread.is_alive():
            raise RuntimeError("this engine has been closed")
        future: Future[RequestOutput] = Future()
        self._submissions.put(_Submission(prompt, params, future))
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # an exception in it knows this frame: a cycle that keeps the caller alive

    def close(self) -> None:
        """End the thread, failing what is unanswered; calling it again does nothing."""
        self._submissions.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _serve(
    engine: Engine,
    submissions: "queue.SimpleQueue[_Submission | None]",
    on_close: Callable[[], None],
) -> None:
    pending: dict[str, Future[RequestOutput]] = {}
    try:
        while _accept(engine, submissions, pending):
            try:
                outputs = engine.step()
            except Exception as error:  # the engine has dropped them all
                _fail_all(pending, error)
                continue
            for output in outputs:
                _settle(pending.pop(output.request_id), output)
    finally:
        on_close()
        closed = RuntimeError("this engine has been closed")
        _fail_all(pending, closed)
        while not submissions.empty():
            submission = submissions.get()
            if submission is not None:
                _settle(submission.future, closed)


def _accept(
    engine: Engine,
    submissions: "queue.SimpleQueue[_Submission | None]",
    pending: dict[str, "Future[RequestOutput]"],
) -> bool:
    """Queue what has been left, waiting for it if the engine is idle; False at the end."""
    while True:
        try:
            submission = submissions.get(block=not pending)
        except queue.Empty:
            return True
        if submission is None:
            return False
        try:
            request_id = engine.add_request(submission.prompt, submission.params)
        except Exception as error:
            _settle(submission.future, error)
        else:
            pending[request_id] = submission.future


def _fail_all(pending: dict[str, "Future[RequestOutput]"], error: Exception) -> None:
    for future in pending.values():
        _settle(future, error)
    pending.clear()


def _settle(future: "Future[RequestOutput]", result: RequestOutput | Exception) -> None:
    if not future.set_running_or_notify_cancel():
        return  # the caller has gone
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


# A batch file on Ray


class Chunk(NamedTuple):
    """Some lines of the input: enough to read them on another host."""

    path: str
    offset: int  # of the first line, in bytes
    num_bytes: int
    first_number: int
    todo: np.ndarray  # (lines,) int64: numbers of the lines to answer


class FileAnswers(_EngineActor):
    """The engine of an actor that answers lines of a batch file."""

    def __init__(
        self,
        config: Config,
        defaults: SamplingParams,
        chat_template_kwargs: Mapping[str, object] | None,
    ) -> None:
        super().__init__(LLM(**dataclasses.asdict(config)), defaults, chat_template_kwargs)

    async def __call__(self, batch: Batch) -> Batch:
        """Rows of line and text to rows of their records, in the same order."""
        lines = zip(batch["line"].tolist(), batch["text"].tolist(), strict=True)
        answers = await asyncio.gather(*(self._answer(number, text) for number, text in lines))
        names = ("record", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens")
        columns = zip(*answers, strict=True)
        return {name: _column(list(values)) for name, values in zip(names, columns, strict=True)}

    async def _answer(self, number: int, text: str) -> tuple[str, int, int, int]:
        row = parse_line(Line(number, text.encode()))
        line_id = read_id(row)
        try:
            request = self._reader.read(row)
            output = await self._thread.answer(request.prompt, request.params)
        except (ValueError, TypeError) as error:
            record = BadLine("invalid_request", reason(error), line_id).record(number)
            return json.dumps(record), 0, 0, 0
        return (
            json.dumps(answer_record(request, output), allow_nan=False),
            output.num_prompt_tokens,
            output.num_cached_tokens,
            output.num_generated_tokens,
        )


def run_on_ray(
    path: Path,
    config: Config,
    defaults: SamplingParams,
    ledger: Ledger,
    write: Callable[[Json], None],
    *,
    chat_template_kwargs: Mapping[str, object] | None = None,
    num_actors: int | None = None,
    on_progress: Callable[[Tally], None] | None = None,
) -> Tally:
    """Answer what is left of a file on the Ray cluster, or on this machine if there is none.

    Args:
        path: Of the input; every host must find the same file there.
        config: Of each actor's engine.
        defaults: Of requests that leave fields out.
        ledger: Has noted the output file.
        write: Takes each record; called in this process only.
        chat_template_kwargs: For lines that give others, or none.
        num_actors: Engines; None: as many as the cluster's GPUs hold, without GPUs one.
        on_progress: Called with the tally after every record.

    Raises:
        ImportError: Ray isn't installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError("--ray needs Ray Data: pip install 'nanovllm[ray]'") from error
    ray.init(ignore_reinit_error=True)
    ray.data.DataContext.get_current().enable_progress_bars = False  # the caller has its own
    tally = Tally()
    with path.open("rb") as file:
        chunks = list(
            plan_chunks(file, path, ledger, write, tally, max(1, config.max_num_seqs // 2))
        )
    if chunks:
        records = answers_of(chunks, config, defaults, chat_template_kwargs, num_actors)
        for row in records.iter_rows():
            _take_row(row, write, tally)
            if on_progress is not None:
                on_progress(tally)
    return tally


def answers_of(
    chunks: list[Chunk],
    config: Config,
    defaults: SamplingParams,
    chat_template_kwargs: Mapping[str, object] | None,
    num_actors: int | None,
) -> "Dataset":
    """The dataset of records of some chunks; a chunk is a block, a task and a batch."""
    import ray

    num_gpus = config.tensor_parallel_size if config.device != "cpu" else 0
    num_cluster_gpus = int(ray.cluster_resources().get("GPU", 0))
    if not num_cluster_gpus:
        num_gpus = 0
    if num_actors is None:
        num_actors = max(1, num_cluster_gpus // num_gpus) if num_gpus else 1
    rows = [chunk._asdict() for chunk in chunks]
    lines = ray.data.from_items(rows, override_num_blocks=len(rows)).flat_map(
        read_chunk, num_cpus=_READER_CPUS
    )
    return lines.map_batches(
        FileAnswers,
        fn_constructor_args=(config, defaults, chat_template_kwargs),
        batch_size=max(len(chunk.todo) for chunk in chunks),
        compute=ray.data.ActorPoolStrategy(
            size=min(num_actors, len(chunks)),
            max_tasks_in_flight_per_actor=2 * CONCURRENT_BATCHES,
            max_concurrent_calls_per_actor=CONCURRENT_BATCHES,
        ),
        num_cpus=None if num_gpus else 1 - _READER_CPUS,
        num_gpus=num_gpus,
    )


def plan_chunks(
    file: IO[bytes],
    path: Path,
    ledger: Ledger,
    write: Callable[[Json], None],
    tally: Tally,
    max_lines: int,
) -> Iterator[Chunk]:
    """Chunks of the lines without a result; bad lines are written on the way."""
    start, first = 0, 1
    todo: list[int] = []

    def chunk() -> Chunk:
        return Chunk(str(path.resolve()), start, file.tell() - start, first, np.asarray(todo))

    for line in read_lines(file):
        try:
            if ledger.claim(read_id(parse_line(line))):
                todo.append(line.number)
            else:
                tally.num_skipped += 1
        except BadLine as bad:
            report_bad_line(line, bad, ledger, write, tally)
        if len(todo) == max_lines:
            yield chunk()
            start, first, todo = file.tell(), line.number + 1, []
    if todo:
        yield chunk()


def read_chunk(chunk: dict[str, object]) -> list[Json]:
    """The rows of a chunk: line number and text."""
    with open(cast(str, chunk["path"]), "rb") as file:
        file.seek(cast(int, chunk["offset"]))
        raw_lines = file.read(cast(int, chunk["num_bytes"])).split(b"\n")
    first = cast(int, chunk["first_number"])
    return [
        {"line": int(number), "text": raw_lines[number - first].decode("utf-8-sig").strip()}
        for number in cast(list[int], chunk["todo"])
    ]


def _take_row(row: Json, write: Callable[[Json], None], tally: Tally) -> None:
    record = json.loads(cast(str, row["record"]))
    write(record)
    if "line" in record:
        tally.num_failed += 1
        return
    tally.num_answered += 1
    tally.num_prompt_tokens += cast(int, row["num_prompt_tokens"])
    tally.num_cached_tokens += cast(int, row["num_cached_tokens"])
    tally.num_generated_tokens += cast(int, row["num_generated_tokens"])
