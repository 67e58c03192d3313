"""The command line: `python -m nanovllm in.jsonl out.jsonl --model FOLDER`.

Answers a file of requests; see `nanovllm.batch_file` for what survives what. Exit status: 0 if
every line has an answer, 1 if all are dealt with and some are errors, 2 if nothing could start, 3
if the run broke off (disk full, engine lost), 130 after Ctrl-C. After 3 and 130 the same command
goes on where it stopped.
"""

import argparse
import dataclasses
import errno
import functools
import inspect
import json
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

from tqdm.auto import tqdm

from nanovllm.batch_file import (
    BatchRun,
    DryEngine,
    Json,
    Ledger,
    OutputFile,
    RequestReader,
    Tally,
    check_lines,
    count_lines,
    file_error,
    read_lines,
)
from nanovllm.config import Config
from nanovllm.engine.settings import resolve_settings
from nanovllm.llm import LLM, check_template_kwargs
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tokenizer import Tokenizer

ALL_ANSWERED, SOME_FAILED, NOT_STARTED, BROKEN_OFF, INTERRUPTED = 0, 1, 2, 3, 130
_PROGRESS_SECONDS = 0.5  # between updates of the bar
_MAX_DRY_ERRORS = 20  # shown; all are counted
_FILE_ERRORS = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "a folder, but a file is due",
    PermissionError: "no permission to open it",
}


class NotStarted(Exception):
    """The engine can't be made; the text says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = parse_args(argv)
    try:
        config = make_config(args)
        defaults = make_defaults(args)
        _check_args(args)
        if args.ray:  # an actor would only say it much later; its GPUs may be on another host
            resolve_settings(dataclasses.replace(config, device="cpu"))
        if args.dry_run:
            return dry_run(args, config, defaults)
        ledger = Ledger()
        output = OutputFile(args.output, ledger)
    except (ValueError, TypeError, OSError) as error:
        return _fail(NOT_STARTED, _in_words(error))
    return _run_guarded(args, config, defaults, output, ledger)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; an option for every field of Config."""
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm",
        description="Answer a file of requests, one JSON object a line, and survive anything.",
    )
    parser.add_argument("input", type=Path, help="requests, in OpenAI's batch format or simple")
    parser.add_argument("output", type=Path, nargs="?", help="results; may exist: it goes on")
    parser.add_argument("--dry-run", action="store_true", help="check the input, count its tokens")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster, or on local Ray")
    parser.add_argument("--ray-actors", type=int, help="engines; default: as the GPUs allow")
    sampling = parser.add_argument_group("sampling, where a request doesn't say")
    for name, kind in _SAMPLING_FLAGS.items():
        default = getattr(SamplingParams(), name)
        action = sampling.add_argument(_flag_of(name), type=kind, default=default)
        _explain(action, SamplingParams)
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="""for the chat template, as '{"enable_thinking": false}'; a line's own go first""",
    )
    add_config_flags(parser.add_argument_group("engine"))
    args = parser.parse_args(argv)
    if args.output is None and not args.dry_run:
        parser.error("an output file is due, or --dry-run")
    return args


def add_config_flags(group: argparse._ArgumentGroup) -> None:
    """An option for each field of Config, by its name."""
    hints = get_type_hints(Config)
    for field in dataclasses.fields(Config):
        flag, kind, default = _flag_of(field.name), _without_none(hints[field.name]), field.default
        if default is dataclasses.MISSING:
            action = group.add_argument(flag, type=str, required=True)
        elif kind is bool:
            action = group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=default
            )
        elif get_origin(kind) is Literal:
            action = group.add_argument(flag, choices=get_args(kind), default=default)
        else:
            action = group.add_argument(flag, type=kind, default=default)  # type: ignore[arg-type]
        _explain(action, Config)


def _explain(action: argparse.Action, kind: type) -> None:
    """Give an option its field's comment as help, and its default."""
    text = field_comments(kind).get(action.dest, "").replace("%", "%%")
    action.help = text if action.required else f"{text} (default: %(default)s)"


@functools.cache
def field_comments(kind: type) -> dict[str, str]:
    """The comment beside each field in a class's source, with the lines that go on below it."""
    try:
        source = inspect.getsource(kind)
    except OSError:  # an installation without sources
        return {}
    found = re.findall(r"^    (\w+): [^#\n]*((?:\s*# .*\n)+)", source, flags=re.MULTILINE)
    return {name: " ".join(re.findall(r"# (.*)", comment)) for name, comment in found}


def make_config(args: argparse.Namespace) -> Config:
    """The Config that the options ask for."""
    return Config(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Config)})


def make_defaults(args: argparse.Namespace) -> SamplingParams:
    """SamplingParams of requests that leave fields out."""
    return SamplingParams(**{name: getattr(args, name) for name in _SAMPLING_FLAGS})


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _without_none(hint: object) -> object:
    """`int` of `int | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
    return hint


def int_or_none(text: str) -> int | None:
    """The value of an option that may be `none`."""
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an integer nor none") from None


def json_object(text: str) -> Json:
    """The value of an option that is a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON object")
    return value


_SAMPLING_FLAGS: dict[str, Callable[[str], object]] = {
    "max_tokens": int_or_none,
    "temperature": float,
    "top_p": float,
    "top_k": int,
}


def _check_args(args: argparse.Namespace) -> None:
    if args.ray_actors is not None and args.ray_actors < 1:
        raise ValueError(f"--ray-actors is {args.ray_actors}, at least 1 is due")
    if args.ray_actors is not None and not args.ray:
        raise ValueError("--ray-actors means nothing without --ray")
    check_template_kwargs(args.chat_template_kwargs or {})
    _check_input(args.input)
    if args.ray and not args.input.is_file():
        raise ValueError(f"{args.input} is a device or a pipe: --ray needs a regular file")
    if args.output is not None and args.output.exists() and args.input.samefile(args.output):
        raise ValueError(f"{args.output} is the input too: choose another output file")
    if args.output is not None and not args.output.parent.is_dir():
        raise ValueError(f"{args.output}: there is no folder {args.output.parent}")


def _check_input(path: Path) -> None:
    """Raise an OSError unless it can be read. A pipe can be opened only once, so it isn't here."""
    if not path.exists():
        raise file_error(errno.ENOENT, path)
    if not os.access(path, os.R_OK):
        raise file_error(errno.EACCES, path)
    if path.is_dir():
        raise file_error(errno.EISDIR, path)


def _in_words(error: Exception) -> str:
    """The text of an error, which for a file's is its name and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {_FILE_ERRORS.get(type(error), error.strerror)}"
    return str(error)


def _fail(status: int, message: str) -> int:
    print(f"nanovllm: {message}", file=sys.stderr)
    return status


# The run


def _run_guarded(
    args: argparse.Namespace,
    config: Config,
    defaults: SamplingParams,
    output: OutputFile,
    ledger: Ledger,
) -> int:
    """Run the file, and turn what ends a run into a message and a status."""
    try:
        with output:
            if args.ray:
                tally = run_file_on_ray(args, config, defaults, output, ledger)
            else:
                with start_engine(config) as llm:
                    tally = run_file(args, llm, defaults, output, ledger)
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, f"interrupted: {_how_to_go_on(args.output)}")
    except (NotStarted, ImportError) as error:
        return _fail(NOT_STARTED, str(error))
    except Exception as error:  # a write's, or whatever a step raised
        message = f"{type(error).__name__}: {error}\n{_how_to_go_on(args.output)}"
        return _fail(BROKEN_OFF, message)
    return SOME_FAILED if ledger.num_failed + tally.num_failed else ALL_ANSWERED


def _how_to_go_on(output: Path) -> str:
    kept = f"; {output} holds all results so far" if output.exists() else ""
    return f"run the same command again to go on{kept}"


def start_engine(config: Config) -> LLM:
    """Load the model.

    Raises:
        NotStarted: It or an option can't be used, or memory isn't enough.
    """
    try:
        return LLM(**dataclasses.asdict(config))
    except (ValueError, TypeError, OSError) as error:
        raise NotStarted(_in_words(error)) from error
    except Exception as error:
        raise NotStarted(f"{type(error).__name__}: {error}") from error


def run_file(
    args: argparse.Namespace,
    llm: LLM,
    defaults: SamplingParams,
    output: OutputFile,
    ledger: Ledger,
) -> Tally:
    """Answer what is left of the input file."""
    engine = llm.llm_engine
    config = engine.config
    reader = make_reader(args, engine.tokenizer, config, defaults)
    count_tokens = engine.count_generated_tokens
    with show_progress(args, ledger, count_tokens) as progress, args.input.open("rb") as file:
        run = BatchRun(engine, reader, ledger, output.write, config.max_num_seqs, progress.update)
        tally = run.run(read_lines(file))
        output.sync()
        progress.finish(tally)
    return tally


def make_reader(
    args: argparse.Namespace,
    tokenizer: Tokenizer | None,
    config: Config,
    defaults: SamplingParams,
) -> RequestReader:
    """What turns the input's lines into requests."""
    return RequestReader(tokenizer, defaults, config.seed, config.model, args.chat_template_kwargs)


def run_file_on_ray(
    args: argparse.Namespace,
    config: Config,
    defaults: SamplingParams,
    output: OutputFile,
    ledger: Ledger,
) -> Tally:
    """Answer what is left of the input file with the engines of a Ray cluster."""
    from nanovllm.ray_data import run_on_ray

    with show_progress(args, ledger) as progress:
        tally = run_on_ray(
            args.input,
            config,
            defaults,
            ledger,
            output.write,
            chat_template_kwargs=args.chat_template_kwargs,
            num_actors=args.ray_actors,
            on_progress=progress.update,
        )
        output.sync()
        progress.finish(tally)
    return tally


@contextmanager
def show_progress(
    args: argparse.Namespace, ledger: Ledger, count_tokens: Callable[[], int] | None = None
) -> Iterator["Progress"]:
    """Show a bar inside the `with`, and a summary below it if the run was finished."""
    total = None if args.no_progress else count_lines(args.input)
    progress = Progress(total, ledger, count_tokens, is_shown=not args.no_progress)
    try:
        yield progress
    finally:
        progress.close()


class Progress:
    """A bar over lines, with speeds of this run's requests."""

    def __init__(
        self,
        num_lines: int | None,
        ledger: Ledger,
        count_tokens: Callable[[], int] | None = None,
        *,
        is_shown: bool,
    ) -> None:
        """Start the clock.

        Args:
            num_lines: Of the input; None = unknown.
            ledger: Of the results of earlier runs: they take no part in the time left.
            count_tokens: Output tokens of this run so far; None: a tally's, of finished requests.
            is_shown: False: only `summary`.
        """
        self._count_tokens = count_tokens
        self._start = self._last_shown = time.perf_counter()
        self._num_done, self._num_failed_before = ledger.num_done, ledger.num_failed
        self._summary = ""
        self._bar = tqdm(
            total=num_lines,
            initial=ledger.num_done,
            desc="Requests",
            unit="req",
            dynamic_ncols=True,
            disable=not is_shown,
        )

    def update(self, tally: Tally) -> None:
        """Show a tally, unless the last one was shown a moment ago."""
        now = time.perf_counter()
        if self._bar.disable or now - self._last_shown < _PROGRESS_SECONDS:
            return
        self._last_shown = now
        count_tokens = self._count_tokens
        self._show(tally, count_tokens() if count_tokens else tally.num_generated_tokens)

    def finish(self, tally: Tally) -> None:
        """Show the last tally, with a line on the whole run."""
        self._show(tally, tally.num_generated_tokens)
        seconds = time.perf_counter() - self._start
        failed = f" ({self._num_failed_before} of them errors)" if self._num_failed_before else ""
        self._summary = (
            f"{tally.num_answered} answered, {tally.num_failed} errors, {tally.num_skipped} done "
            f"before{failed}; {tally.num_prompt_tokens} prompt tokens ({_hit_rate(tally):.1%} "
            f"cached), {tally.num_generated_tokens} output tokens in {seconds:.2f} s, "
            f"{tally.num_generated_tokens / seconds:.0f} tok/s"
        )
        if self._num_failed_before + tally.num_failed:
            self._summary += "\nerror records stay: a line to run again needs a new id"

    def close(self) -> None:
        """End the bar."""
        self._bar.close()
        if self._summary:
            print(self._summary, file=sys.stderr)

    def _show(self, tally: Tally, num_generated_tokens: int) -> None:
        seconds = time.perf_counter() - self._start
        self._bar.set_postfix(
            {
                "prompt": f"{tally.num_prompt_tokens / seconds:.0f}tok/s",
                "output": f"{num_generated_tokens / seconds:.0f}tok/s",
                "cached": f"{_hit_rate(tally):.0%}",
            },
            refresh=False,
        )
        num_new = tally.num_answered + tally.num_failed
        self._bar.update(self._num_done + num_new - self._bar.n)
        self._bar.refresh()  # update() shows nothing new until a request has finished


def _hit_rate(tally: Tally) -> float:
    return tally.num_cached_tokens / max(tally.num_prompt_tokens, 1)


# The check


def dry_run(args: argparse.Namespace, config: Config, defaults: SamplingParams) -> int:
    """Check the input, print its errors and its tokens; return the exit status."""
    engine = DryEngine(config)
    reader = make_reader(args, engine.tokenizer, config, defaults)
    shown: list[Json] = []

    def report(record: Json) -> None:
        if len(shown) < _MAX_DRY_ERRORS:
            shown.append(record)
            print(json.dumps(record))

    with args.input.open("rb") as file:
        num_failed = check_lines(read_lines(file), engine, reader, report)
    print(
        f"{engine.num_requests} requests, {num_failed} errors; {engine.num_prompt_tokens} prompt "
        f"tokens, at most {engine.max_generated_tokens} output tokens"
    )
    return SOME_FAILED if num_failed else ALL_ANSWERED


if __name__ == "__main__":
    sys.exit(main())
