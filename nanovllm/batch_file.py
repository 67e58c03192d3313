"""A file of requests in, a file of results out, whatever happens in between.

The output file is the only state of a job. A result is appended with one write and never touched
again, so after a crash the file holds whole lines and at most one torn one at its end. A run starts
by reading it: ids with a result are done, a torn line goes, the rest of the input is run. Of both
files only a digest of each id stays in memory.

The engine is any object with `add_request` and `step`. It is kept full by a window: as many
sequences wait as run, and a line is read when there is room for it.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol, cast

from nanovllm.config import Config
from nanovllm.engine.input_processor import InputProcessor, load_tokenizer
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.settings import resolve_settings
from nanovllm.llm import as_conversation_list, chat_prompt
from nanovllm.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tokenizer import Tokenizer

MAX_LINE_BYTES = 256 << 20  # a longer line is no request but a file of another kind
SYNC_SECONDS = 2.0  # results that a power failure can cost; a killed process costs none

_MAX_MESSAGE = 1000  # characters of an error record's text
_FIRST_WINDOW = 64  # sequences queued before the first step; doubles until the window is full
_UNBOUNDED_BLOCKS = 2**40  # for a check without a KV cache

Id = str | int
Kind = Literal["chat", "completion", "simple"]
Json = dict[str, object]


class BadLine(ValueError):
    """A line that can't be answered; it becomes an error record and the run goes on."""

    def __init__(self, code: str, message: str, line_id: Id | None = None) -> None:
        super().__init__(message)
        self.code = code  # invalid_json, invalid_encoding, line_too_long, invalid_request, ...
        self.line_id = line_id  # None: the line has none that can be read

    def record(self, number: int) -> Json:
        """What the output file says of line `number`."""
        error = {"code": self.code, "message": str(self)[:_MAX_MESSAGE]}
        return {"line": number, "id": self.line_id, "error": error}


class BatchRequest(NamedTuple):
    """One line, ready to be queued."""

    id: Id
    kind: Kind  # which record answers it
    model: str  # as its record names it
    prompt: Prompt
    params: SamplingParams


# Lines


class Line(NamedTuple):
    """A line of the input; the first is number 1."""

    number: int
    raw: bytes | None  # without its end; None: longer than MAX_LINE_BYTES


def read_lines(file: IO[bytes], max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Yield the lines that hold something, one in memory at a time."""
    number = 0
    while raw := file.readline(max_bytes):
        number += 1
        is_whole = raw.endswith(b"\n") or len(raw) < max_bytes
        if not is_whole:
            _skip_rest_of_line(file, max_bytes)
            yield Line(number, None)
            continue
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        raw = raw.strip()
        if raw:
            yield Line(number, raw)


def count_lines(path: Path) -> int | None:
    """How many lines `read_lines` yields of a file; None if it can be read only once.

    It asks `read_lines`: a million lines of 500 bytes take 0.8 s, to count their ends alone 0.2 s.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(1 for _ in read_lines(file))


def _skip_rest_of_line(file: IO[bytes], max_bytes: int) -> None:
    while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
        pass


def parse_line(line: Line) -> Json:
    """The line's JSON object.

    Raises:
        BadLine: It holds none.
    """
    if line.raw is None:
        raise BadLine("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        text = line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine("invalid_encoding", f"the line is not UTF-8: {error.reason}") from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadLine("invalid_json", f"the line is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadLine("invalid_json", f"the line is a JSON {type(value).__name__}, not an object")
    if "\\ud" in text.lower() and _has_lone_surrogate(value):
        raise BadLine("invalid_json", "the line holds half a surrogate pair (\\ud800 to \\udfff)")
    return value


def _has_lone_surrogate(value: Json) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except RecursionError as error:
        raise BadLine("invalid_json", f"the line is nested too deep: {error}") from error
    return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_id(row: Json) -> Id:
    """The id of a line in either format.

    Raises:
        BadLine: It has none, or one of the wrong kind.
    """
    name = "custom_id" if _is_openai(row) else "id"
    found = row.get(name)
    if isinstance(found, str) or (name == "id" and type(found) is int):
        return cast(Id, found)
    expected = "a string" if name == "custom_id" else "a string or an integer"
    problem = f"got {found!r:.80}" if name in row else "and is missing"
    raise BadLine("invalid_request", f"{name} must be {expected}, {problem}")


def _is_openai(row: Json) -> bool:
    return "custom_id" in row or "body" in row


# Requests

_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
_TEMPLATE_FIELDS = frozenset(
    {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
)
_SIMPLE_FIELDS = _SAMPLING_FIELDS | _TEMPLATE_FIELDS | {"id", *PROMPT_FIELDS}
_OPENAI_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
# Fields of OpenAI's bodies that change no answer, and those that do unless they say "off".
_WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "store", "service_tier"})
_ONLY: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_BODY_FIELDS = (
    _SAMPLING_FIELDS
    | _TEMPLATE_FIELDS
    | _WITHOUT_EFFECT
    | set(_ONLY)
    | {"messages", "prompt", "max_completion_tokens", "top_logprobs"}
)


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Turns a line's object into a request: OpenAI's batch format or the simple one.

    A request without a seed gets one that depends on `seed` and its id alone. So an answer is the
    same whenever it is computed: in the first run or after a crash, beside whatever else runs.
    """

    tokenizer: Tokenizer | None  # None: token ids only
    defaults: SamplingParams  # of fields that a line leaves out
    seed: int = 0
    model: str = ""  # named in answers to lines that name no model
    chat_template_kwargs: Mapping[str, object] | None = None  # a line's own go before them

    def read(self, row: Json) -> BatchRequest:
        """Return the request of a line that has an id.

        Raises:
            ValueError, TypeError: A field is unknown, missing or has a value that can't be run.
        """
        if _is_openai(row):
            return self._read_openai(row)
        _check_known(row, _SIMPLE_FIELDS, "field")
        sampling = {name: row[name] for name in _SAMPLING_FIELDS & row.keys()}
        prompt = self._prompt(row)
        line_id = cast(Id, row["id"])
        return BatchRequest(line_id, "simple", self.model, prompt, self._params(sampling, line_id))

    def _read_openai(self, row: Json) -> BatchRequest:
        _check_known(row, _OPENAI_FIELDS, "field")
        body = row.get("body")
        if not isinstance(body, dict):
            raise TypeError(f"body must be an object, got {body!r:.80}")
        body = {name: value for name, value in body.items() if value is not None}
        _check_target(row, body)
        _check_known(body, _BODY_FIELDS, "body field")
        for name, allowed in _ONLY.items():
            if name in body and body[name] not in allowed:
                raise ValueError(f"{name}={body[name]!r:.80} is not supported: leave it out")
        prompt, is_chat = self._prompt(body), "messages" in body
        line_id = cast(Id, row["custom_id"])
        params = self._params(_openai_sampling(body, is_chat), line_id)
        kind: Kind = "chat" if is_chat else "completion"
        return BatchRequest(line_id, kind, str(body.get("model", self.model)), prompt, params)

    def _prompt(self, row: Json) -> Prompt:
        given = [name for name in PROMPT_FIELDS if row.get(name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"one of {', '.join(PROMPT_FIELDS)} is due, {found} is given")
        (name,) = given
        if name == "messages":
            return self._render(row)
        template = sorted(_TEMPLATE_FIELDS & row.keys())
        if template:
            raise ValueError(f"{', '.join(template)} need messages, not {name}")
        prompt = row[name]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) != 1:
                raise ValueError(f"{len(prompt)} prompts in one line: give each a line of its own")
            prompt = prompt[0]
        if isinstance(prompt, list) and any(type(token_id) is not int for token_id in prompt):
            raise TypeError(f"{name} must hold token ids: ints")
        if name == "prompt" and not isinstance(prompt, str | list):
            raise TypeError(f"prompt must be a string or token ids, got {prompt!r:.80}")
        return cast(Prompt, prompt)

    def _render(self, row: Json) -> Prompt:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise TypeError(f"messages must be a list of messages, got {messages!r:.80}")
        kwargs = row.get("chat_template_kwargs")
        if not isinstance(kwargs, dict | None):
            raise TypeError(f"chat_template_kwargs must be an object, got {kwargs!r:.80}")
        (conversation,) = as_conversation_list([messages])
        try:
            return chat_prompt(
                self.tokenizer,
                conversation,
                add_generation_prompt=_flag(row, "add_generation_prompt", True),
                continue_final_message=_flag(row, "continue_final_message", False),
                chat_template_kwargs={**(self.chat_template_kwargs or {}), **(kwargs or {})},
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(f"the chat template refuses messages: {error}") from error

    def _params(self, sampling: Json, line_id: Id) -> SamplingParams:
        if isinstance(sampling.get("logit_bias"), dict):  # JSON's keys are strings
            biases = cast(Mapping[str, float], sampling["logit_bias"])
            sampling["logit_bias"] = {_token_id(key): bias for key, bias in biases.items()}
        params = self.defaults.replace(**sampling)
        if params.seed is None and not params.is_greedy:
            digest = _digest(f"{self.seed}:{_id_text(line_id)}")
            params = params.replace(seed=digest & (2**63 - 1))
        return params


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"logit_bias has {text!r:.80}, which is no token id") from None


def _check_known(row: Json, known: frozenset[str], what: str) -> None:
    unknown = sorted(row.keys() - known)
    if unknown:
        raise ValueError(
            f"unknown {what} {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )


def _check_target(row: Json, body: Json) -> None:
    """Check method and url as vLLM's run-batch does; both may be left out."""
    if row.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, got {row['method']!r:.80}")
    url = row.get("url")
    if url is None:
        return
    if not isinstance(url, str) or url not in _URLS:
        raise ValueError(f"url must be one of {', '.join(_URLS)}, got {url!r:.80}")
    due = _URLS[url]
    if due not in body:
        raise ValueError(f"a body for {url} needs {due}")


def _openai_sampling(body: Json, is_chat: bool) -> Json:
    """SamplingParams' fields from OpenAI's."""
    sampling = {name: body[name] for name in _SAMPLING_FIELDS & body.keys()}
    if "max_completion_tokens" in body:
        sampling["max_tokens"] = body["max_completion_tokens"]
    top = body.get("top_logprobs")
    if not is_chat:
        if top is not None:
            raise ValueError("top_logprobs needs messages: with prompt, logprobs is the number")
        return sampling
    wants_logprobs = _flag(sampling, "logprobs", False)
    if top is not None and not wants_logprobs:
        raise ValueError(f"top_logprobs is {top!r:.80} without logprobs=true")
    sampling["logprobs"] = (0 if top is None else top) if wants_logprobs else None
    return sampling


def _flag(row: Json, name: str, default: bool) -> bool:
    value = row.get(name, default)
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r:.80}")
    return value


# Records


def answer_record(request: BatchRequest, output: RequestOutput) -> Json:
    """The line of the output file that answers a request."""
    if request.kind == "simple":
        return _simple_record(request.id, output)
    name = f"{_digest(_id_text(request.id)):030x}"
    body = _body(request, output, name)
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {
        "id": f"batch_req_{name}",
        "custom_id": request.id,
        "response": response,
        "error": None,
    }


def _simple_record(line_id: Id, output: RequestOutput) -> Json:
    record: Json = {
        "id": line_id,
        "outputs": [_simple_sample(sample) for sample in output.outputs],
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprob_objects(output.prompt_logprobs)
    return record


def _simple_sample(sample: CompletionOutput) -> Json:
    result: Json = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        result["cumulative_logprob"] = _finite(sample.cumulative_logprob or 0.0)
        result["logprobs"] = _logprob_objects(list(sample.logprobs))
    return result


def _body(request: BatchRequest, output: RequestOutput, name: str) -> Json:
    """OpenAI's response, with vLLM's additions."""
    is_chat = request.kind == "chat"
    num_generated = output.num_generated_tokens
    num_top = request.params.logprobs
    body: Json = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [_choice(sample, is_chat, num_top) for sample in output.outputs],
        "usage": {
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": output.num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = _logprob_objects(output.prompt_logprobs)
    return body


def _choice(sample: CompletionOutput, is_chat: bool, num_top: int | None) -> Json:
    if is_chat:
        said: Json = {"message": {"role": "assistant", "content": sample.text}}
        logprobs = _chat_logprobs(sample, num_top)
    else:
        said = {"text": sample.text}
        logprobs = _completion_logprobs(sample, num_top)
    return {
        "index": sample.index,
        **said,
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }


def _chat_logprobs(sample: CompletionOutput, num_top: int | None) -> Json | None:
    if sample.logprobs is None:
        return None
    content = []
    for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        top = [_chat_token(i, token) for i, token in _likeliest(entry, num_top)]
        content.append({**_chat_token(token_id, entry[token_id]), "top_logprobs": top})
    return {"content": content}


def _chat_token(token_id: int, token: Logprob) -> Json:
    text = _token_text(token_id, token)
    return {"token": text, "logprob": _finite(token.logprob), "bytes": list(text.encode())}


def _completion_logprobs(sample: CompletionOutput, num_top: int | None) -> Json | None:
    if sample.logprobs is None:
        return None
    tokens, token_logprobs, tops, offsets = [], [], [], []
    offset = 0
    for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        text = _token_text(token_id, entry[token_id])
        tokens.append(text)
        token_logprobs.append(_finite(entry[token_id].logprob))
        top = _likeliest(entry, num_top)
        tops.append({_token_text(i, token): _finite(token.logprob) for i, token in top})
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _likeliest(entry: dict[int, Logprob], num_top: int | None) -> list[tuple[int, Logprob]]:
    """The tokens of one position that were asked for, by rank."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    return ranked if num_top is None or num_top < 0 else ranked[:num_top]


def _token_text(token_id: int, token: Logprob) -> str:
    return f"token_id:{token_id}" if token.decoded_token is None else token.decoded_token


def _logprob_objects(logprobs: PromptLogprobs) -> list[Json | None]:
    """vLLM's form: a position is an object from token id to what is known of the token."""
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": _finite(token.logprob),
                "rank": token.rank,
                "decoded_token": token.decoded_token,
            }
            for token_id, token in entry.items()
        }
        for entry in logprobs
    ]


def _finite(logprob: float) -> float:
    """JSON knows no infinity; -9999 stands for it in OpenAI's and vLLM's answers."""
    return logprob if logprob > -9999.0 else -9999.0


# What is done


class Ledger:
    """Which lines have been seen and which have a result, in about 100 bytes each.

    Invariant: a line with a result holds one entry. It is the id's, or for a line without an id
    of its own (broken, or a repetition) that of its number together with the id.
    """

    def __init__(self) -> None:
        self.num_done = 0  # results that the output file held at the start
        self.num_failed = 0  # of those, error records
        # Digest to whether the input has shown it. Ints, not bytes: 48 bytes each instead of 64.
        self._seen: dict[int, bool] = {}

    def note_result(self, record: Json) -> None:
        """Learn from a record of the output file.

        Raises:
            ValueError: This program didn't write it.
        """
        error = record.get("error")
        if "line" in record and isinstance(error, dict):
            self.num_failed += 1
            is_own = record.get("id") is not None and error.get("code") != "repeated_id"
            key = _id_text(record["id"]) if is_own else _line_text(record["line"], record.get("id"))
        elif "custom_id" in record and "response" in record:
            key = _id_text(record["custom_id"])
        elif "id" in record and "outputs" in record:
            key = _id_text(record["id"])
        else:
            raise ValueError("the line is not a result")
        self.num_done += 1
        self._seen[_digest(key)] = False

    def claim(self, line_id: Id) -> bool:
        """Whether a line has to run, given its id.

        Raises:
            BadLine: An earlier line has this id.
        """
        key = _digest(_id_text(line_id))
        is_seen = self._seen.get(key)
        if is_seen:
            raise BadLine("repeated_id", "an earlier line has this id", line_id)
        self._seen[key] = True
        return is_seen is None

    def is_reported(self, number: int, bad: BadLine) -> bool:
        """Whether the output file has this line's error record already."""
        return _digest(_line_text(number, bad.line_id)) in self._seen


def _id_text(line_id: object) -> str:
    return "i" + json.dumps(line_id)  # json: 1 and "1" are two ids


def _line_text(number: object, line_id: object) -> str:
    return f"l{number}:{json.dumps(line_id)}"


def _digest(text: str) -> int:
    """120 bits: a Python int of four digits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=15).digest(), "little")


# The output file


def file_error(number: int, path: Path) -> OSError:
    """The error of this errno, as `open` would raise it for `path`."""
    return OSError(number, os.strerror(number), str(path))


class OutputFile:
    """The results, appended line by line; held by one run at a time.

    Invariant: the file is whole lines, each a record, whenever no write is under way. A line is
    one write to a file opened for appending, so a killed process leaves at most one torn line, at
    the end; the next run drops it. Until `begin` nothing is created or changed: whatever fails
    before the first result leaves no trace.
    """

    def __init__(self, path: Path, ledger: Ledger) -> None:
        """Lock the file if there is one, and tell `ledger` what it holds.

        Raises:
            ValueError: Another run writes it, or it can't be or isn't a file of results.
            OSError: It can't be opened, or made.
        """
        self.path = path.resolve()  # not a link to it
        self._size = 0
        self._fd: int | None = None
        self._has_begun = False
        self._synced_at = time.monotonic()
        if self.path.is_file():
            self._open()
            try:
                self._size = _scan_results(self.path, ledger)
            except BaseException:
                self.close()
                raise
        elif self.path.is_dir():
            raise file_error(errno.EISDIR, path)
        elif self.path.exists():
            raise ValueError(f"{path} is a device or a pipe: results are due in a regular file")
        elif not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise file_error(errno.EACCES, path)

    def begin(self) -> int:
        """Make the file, or drop a torn last line, unless that is done; return its descriptor.

        Raises:
            ValueError: Another run has made it since.
            OSError: It can't be made.
        """
        fd = self._open(os.O_CREAT | os.O_EXCL) if self._fd is None else self._fd
        if not self._has_begun:
            os.ftruncate(fd, self._size)
            _sync_folder(self.path)
            self._has_begun = True
        return fd

    def write(self, record: Json) -> None:
        """Append one record; every SYNC_SECONDS, wait until the disk has all of them.

        Raises:
            OSError: It can't be written; the file holds the records before it.
        """
        fd = self.begin()
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        num_written = 0
        try:
            while num_written < len(line):  # once, unless the disk is full
                num_written += os.write(fd, line[num_written:])
        except OSError as error:
            os.ftruncate(fd, self._size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._size += len(line)
        if time.monotonic() - self._synced_at > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Return when the disk has everything; without a single result, an empty file."""
        os.fsync(self.begin())
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Sync what was written and give the file free."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            if self._has_begun:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _open(self, flags: int = 0) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | flags, 0o666)
        except FileExistsError as error:
            raise ValueError(f"another run has begun {self.path}: wait for it or end it") from error
        try:
            _lock(fd, self.path)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return fd

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _lock(fd: int, path: Path) -> None:
    import fcntl  # not on Windows, where the rest can be imported

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise ValueError(f"another run is writing {path}: wait for it or end it") from error


def _scan_results(path: Path, ledger: Ledger) -> int:
    """Note every record; return the bytes that whole lines take.

    Raises:
        ValueError: Something in the file is no result, so that it is left as it is.
    """
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.endswith(b"\n"):
                    ledger.note_result(json.loads(line))
                    size += len(line)
                elif not _is_torn_result(line):
                    raise ValueError("the line is not a result")
            except (ValueError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"line {number} of {path} is no result of a batch run: choose another output "
                    f"file ({error})"
                ) from error
    return size


def _is_torn_result(tail: bytes) -> bool:
    """Whether a last line without an end may be what a run left, rather than another's text."""
    if not tail.strip(b"\0"):
        return True  # a file system's own trace of a power failure
    try:
        Ledger().note_result(json.loads(tail))
    except json.JSONDecodeError:
        starts = (b'{"id": ', b'{"line": ')
        return any(tail.startswith(start) or start.startswith(tail) for start in starts)
    except (ValueError, AttributeError, RecursionError):
        return False
    return True


def _sync_folder(path: Path) -> None:
    """Make the file's name as durable as its lines, where the folder may be read."""
    try:
        fd = os.open(path.parent, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# The run


class TakesRequests(Protocol):
    """What checking lines needs of an engine."""

    def add_request(self, prompt: Prompt, params: SamplingParams) -> str: ...


class Engine(TakesRequests, Protocol):
    """What a run needs of `LLMEngine`."""

    def step(self) -> list[RequestOutput]: ...


@dataclass
class Tally:
    """What a run has done so far."""

    num_answered: int = 0
    num_failed: int = 0  # error records of this run
    num_skipped: int = 0  # lines that had a result
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of those, read from the prefix cache
    num_generated_tokens: int = 0

    def count(self, output: RequestOutput) -> None:
        """Add an answer."""
        self.num_answered += 1
        self.num_prompt_tokens += output.num_prompt_tokens
        self.num_cached_tokens += output.num_cached_tokens
        self.num_generated_tokens += output.num_generated_tokens

    @property
    def num_lines(self) -> int:
        """Lines that are dealt with."""
        return self.num_answered + self.num_failed + self.num_skipped


class BatchRun:
    """Takes lines through an engine and writes what comes of them.

    Invariant: a line that was taken is in the output file, or in the engine, or neither and then
    the run ends with an exception; no line is in both.
    """

    def __init__(
        self,
        engine: Engine,
        reader: RequestReader,
        ledger: Ledger,
        write: Callable[[Json], None],
        max_num_seqs: int,
        on_progress: Callable[[Tally], None] | None = None,
    ) -> None:
        """Bind the parts.

        Args:
            engine: Empty; nobody else uses it.
            reader: Makes requests of lines.
            ledger: Has noted the output file.
            write: Takes each record as soon as it is known.
            max_num_seqs: The engine's: twice as many sequences are queued.
            on_progress: Called with the tally after every step.
        """
        self.tally = Tally()
        self._engine = engine
        self._reader = reader
        self._ledger = ledger
        self._write = write
        self._on_progress = on_progress
        self._max_queued = 2 * max_num_seqs
        self._pending: dict[str, BatchRequest] = {}  # by the engine's request id
        self._num_queued = 0  # sequences

    def run(self, lines: Iterable[Line]) -> Tally:
        """Answer all lines that have no result yet.

        Raises:
            OSError: The output can't be written.
            Exception: Whatever a step raised. Run again to go on in both cases.
        """
        source = iter(lines)
        # The first steps start while later lines are still being read.
        window = min(_FIRST_WINDOW, self._max_queued)
        while self._fill(source, window) or self._pending:
            for output in self._engine.step():
                self._finish(output)
            window = min(2 * window, self._max_queued)
            if self._on_progress is not None:
                self._on_progress(self.tally)
        return self.tally

    def _fill(self, source: Iterator[Line], window: int) -> bool:
        """Queue lines while there is room; return whether there may be more."""
        while self._num_queued < window:
            line = next(source, None)
            if line is None:
                return False
            self._take(line)
        return True

    def _take(self, line: Line) -> None:
        try:
            request = claim_request(line, self._ledger, self._reader)
            if request is None:
                self.tally.num_skipped += 1
            else:
                self._queue(request)
        except BadLine as bad:
            report_bad_line(line, bad, self._ledger, self._write, self.tally)

    def _queue(self, request: BatchRequest) -> None:
        self._pending[queue_request(request, self._engine)] = request
        self._num_queued += request.params.n

    def _finish(self, output: RequestOutput) -> None:
        request = self._pending.pop(output.request_id)
        self._num_queued -= request.params.n
        self._write(answer_record(request, output))
        self.tally.count(output)


def claim_request(line: Line, ledger: Ledger, reader: RequestReader) -> BatchRequest | None:
    """The request of a line, or None if its id has a result.

    Raises:
        BadLine: It can't be answered.
    """
    row = parse_line(line)
    line_id = read_id(row)
    if not ledger.claim(line_id):
        return None
    try:
        return reader.read(row)
    except (ValueError, TypeError) as error:
        raise BadLine("invalid_request", str(error), line_id) from error


def queue_request(request: BatchRequest, engine: TakesRequests) -> str:
    """Add a request to the engine and return its id there.

    Raises:
        BadLine: The engine can't run it.
    """
    try:
        return engine.add_request(request.prompt, request.params)
    except (ValueError, TypeError) as error:
        raise BadLine("invalid_request", reason(error), request.id) from error


def report_bad_line(
    line: Line, bad: BadLine, ledger: Ledger, write: Callable[[Json], None], tally: Tally
) -> None:
    """Write a line's error record, unless an earlier run did."""
    if ledger.is_reported(line.number, bad):
        tally.num_skipped += 1
    else:
        write(bad.record(line.number))
        tally.num_failed += 1


def reason(error: Exception) -> str:
    """The engine's words; it counts prompts of a call, and here a call has one."""
    return str(error).removeprefix("prompt 0: ")


# A check without a model


class DryEngine:
    """Checks requests as an engine with these options would, and keeps nothing of them.

    It loads no weights. Whether the KV cache can hold a request is not known without one.
    """

    def __init__(self, config: Config) -> None:
        settings = resolve_settings(config)
        self.tokenizer = load_tokenizer(config, settings.folder)
        self._inputs = InputProcessor(settings, self.tokenizer, frozenset(), _UNBOUNDED_BLOCKS)
        self._max_model_len = settings.max_model_len
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.max_generated_tokens = 0  # if no request ends before its limit

    def add_request(self, prompt: Prompt, params: SamplingParams) -> str:
        """Check and count one prompt."""
        (request,) = self._inputs.make_requests([prompt], [params])
        num_tokens = len(request.prompt_token_ids)
        room = self._max_model_len - num_tokens
        self.num_requests += 1
        self.num_prompt_tokens += num_tokens
        self.max_generated_tokens += params.n * min(params.max_tokens or room, room)
        return str(self.num_requests)


def check_lines(
    lines: Iterable[Line],
    engine: DryEngine,
    reader: RequestReader,
    report: Callable[[Json], None],
) -> int:
    """Check every line, hand `report` the error records; return how many there are."""
    ledger, num_failed = Ledger(), 0
    for line in lines:
        try:
            request = claim_request(line, ledger, reader)
            assert request is not None, "a fresh ledger knows no results"
            queue_request(request, engine)
        except BadLine as bad:
            num_failed += 1
            report(bad.record(line.number))
    return num_failed
