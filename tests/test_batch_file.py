"""Batch files: whatever a line holds and whenever a run ends, every id is answered exactly once."""

import dataclasses
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

import nanovllm.__main__ as command
from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.batch_file import (
    BatchRun,
    Ledger,
    OutputFile,
    RequestReader,
    Tally,
    count_lines,
    read_lines,
)
from nanovllm.config import Config

ROOT = Path(__file__).resolve().parents[1]
TINY_QWEN3 = ROOT / "tests" / "tiny_qwen3"
CPU = ["--device", "cpu", "--no-progress", "--model", str(TINY_QWEN3)]
SMALL = [*CPU, "--max-model-len", "128", "--max-num-seqs", "8", "--kvcache-block-size", "16"]


class StubEngine:
    """Answers with the prompt's length after a few steps, out of order; refuses long prompts."""

    tokenizer = None

    def __init__(self, max_num_seqs: int = 8, fails_at: int | None = None) -> None:
        self.config = Config(model="stub", max_num_seqs=max_num_seqs)
        self.queued: dict[str, object] = {}
        self.sizes: list[int] = []  # queued requests at each step
        self._rng = random.Random(0)
        self._num_requests = 0
        self._fails_at = fails_at

    def add_request(self, prompt: object, params: SamplingParams) -> str:
        if len(prompt) > 100:
            raise ValueError(f"prompt 0: the prompt has {len(prompt)} tokens, max_model_len is 100")
        self._num_requests += 1
        request_id = str(self._num_requests)
        self.queued[request_id] = (prompt, params)
        return request_id

    def step(self) -> list[RequestOutput]:
        self.sizes.append(len(self.queued))
        if len(self.sizes) == self._fails_at:
            raise KeyboardInterrupt
        running = list(self.queued)[: self.config.max_num_seqs]
        finished = self._rng.sample(running, self._rng.randint(0, len(running)))
        return [self._output(request_id) for request_id in finished]

    def count_generated_tokens(self) -> int:
        raise AssertionError("the bar isn't shown")

    def _output(self, request_id: str) -> RequestOutput:
        prompt, params = self.queued.pop(request_id)
        tokens = [len(prompt), (params.seed or 0) % 1000]
        answer = CompletionOutput(0, f"{tokens}", tokens, finish_reason="stop")
        return RequestOutput(request_id, None, list(prompt), [answer], finished=True)


def run_stub(source: bytes | Path, out: Path, engine: StubEngine | None = None) -> Tally:
    engine = engine or StubEngine()
    reader = RequestReader(None, SamplingParams())
    ledger = Ledger()
    file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    with file, OutputFile(out, ledger) as output:
        run = BatchRun(engine, reader, ledger, output.write, engine.config.max_num_seqs)
        return run.run(read_lines(file))


def records_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def by_key(path: Path) -> dict[tuple, object]:
    """Each record by its line or id, without what may differ between runs; no key twice."""
    found: dict[tuple, object] = {}
    for record in records_of(path):
        if "line" in record:
            key = ("line", record["line"])
        else:
            key = ("id", record.get("custom_id", record["id"]))
        assert key not in found, f"two records for {key}"
        found[key] = answer_of(record)
    return found


def answer_of(record: dict) -> object:
    if "response" in record:
        return record["response"]["body"]["choices"]
    return record.get("outputs") or record["error"]


def simple(line_id: object, **fields: object) -> bytes:
    return json.dumps({"id": line_id, "prompt_token_ids": [1, 2], **fields}).encode() + b"\n"


# Lines


BAD_LINES: dict[str, tuple[bytes, object, str]] = {
    "broken JSON": (b'{"id": 1, "prompt": "x"', None, "invalid_json"),
    "not an object": (b"[1, 2]", None, "invalid_json"),
    "NaN": (b'{"id": 1, "prompt": "x", "temperature": NaN}', None, "invalid_json"),
    "a number beyond all floats": (
        b'{"id": 1, "prompt": "x", "temperature": 1' + b"0" * 400 + b"}",
        1,
        "invalid_request",
    ),
    "more than 64 bits": (
        b'{"id": 1, "prompt": "x", "min_tokens": 1' + b"0" * 30 + b', "max_tokens": null}',
        1,
        "invalid_request",
    ),
    "deep": (b'{"id": 1, "prompt": ' + b"[" * 200_000, None, "invalid_json"),
    "half a surrogate pair": (b'{"id": 1, "prompt": "\\uD800"}', None, "invalid_json"),
    "not UTF-8": (b'{"id": 1, "prompt": "\xff"}', None, "invalid_encoding"),
    "no id": (b'{"prompt": "x"}', None, "invalid_request"),
    "id of another kind": (b'{"id": true, "prompt": "x"}', None, "invalid_request"),
    "unknown field": (b'{"id": 1, "prompt": "x", "beams": 2}', 1, "invalid_request"),
    "no prompt": (b'{"id": 1}', 1, "invalid_request"),
    "two prompts": (b'{"id": 1, "prompt": "x", "prompt_token_ids": [1]}', 1, "invalid_request"),
    "range": (b'{"id": 1, "prompt": "x", "top_p": 2}', 1, "invalid_request"),
    "kind": (b'{"id": 1, "prompt": "x", "n": "2"}', 1, "invalid_request"),
    "ids": (b'{"id": 1, "prompt_token_ids": [1.5]}', 1, "invalid_request"),
    "no tokenizer": (b'{"id": 1, "messages": [{"role": "user"}]}', 1, "invalid_request"),
    "body": (b'{"custom_id": "a", "body": 3}', "a", "invalid_request"),
    "body field": (b'{"custom_id": "a", "body": {"prompt": "x", "zz": 1}}', "a", "invalid_request"),
    "url": (b'{"custom_id": "a", "url": "/v1/x", "body": {"prompt": "x"}}', "a", "invalid_request"),
    "url of another kind": (
        b'{"custom_id": "a", "url": ["x"], "body": {"prompt": "x"}}',
        "a",
        "invalid_request",
    ),
    "embeddings": (
        b'{"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "x"}}',
        "a",
        "invalid_request",
    ),
    "streaming": (
        b'{"custom_id": "a", "body": {"prompt": "x", "stream": true}}',
        "a",
        "invalid_request",
    ),
    "many prompts": (
        b'{"custom_id": "a", "body": {"prompt": ["x", "y"]}}',
        "a",
        "invalid_request",
    ),
    "prompt of 10 MB": (
        b'{"id": 1, "prompt": "' + b"x" * 10_000_000 + b'"}',
        1,
        "invalid_request",
    ),
    "field of 10 MB": (
        b'{"id": 1, "prompt": "x", "' + b"x" * 10_000_000 + b'": 1}',
        1,
        "invalid_request",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_becomes_a_record_and_the_run_goes_on(case: str, tmp_path: Path) -> None:
    raw, line_id, code = BAD_LINES[case]
    out = tmp_path / "out.jsonl"
    tally = run_stub(simple("first") + raw + b"\n" + simple("last"), out)
    assert (tally.num_answered, tally.num_failed) == (2, 1)
    (record,) = (record for record in records_of(out) if "line" in record)
    assert list(record) == ["line", "id", "error"]
    assert (record["line"], record["id"], record["error"]["code"]) == (2, line_id, code)
    assert 0 < len(record["error"]["message"]) <= 1000


def test_line_longer_than_the_limit_is_skipped_to_its_end() -> None:
    lines = list(read_lines(io.BytesIO(b"short\n" + b"x" * 25 + b"\nlast"), max_bytes=10))
    assert lines == [(1, b"short"), (2, None), (3, b"last")]


def test_bom_crlf_and_empty_lines_are_no_errors(tmp_path: Path) -> None:
    source = b"\xef\xbb\xbf" + simple("a") + b"\r\n \n" + simple("b").rstrip() + b"\r\n\n"
    tally = run_stub(source + simple("c").rstrip(), tmp_path / "out.jsonl")
    assert (tally.num_answered, tally.num_failed) == (3, 0)


@pytest.mark.parametrize(
    ("source", "num_lines"),
    [
        (b"", 0),
        (b"a", 1),
        (b"a\nb\n", 2),
        (b"\xef\xbb\xbf\r\n\na", 1),
        (b"\n \t\r\n" + b" " * 2_000_000 + b"\na\r\n\nb", 2),
    ],
)
def test_lines_are_counted_without_empty_ones(
    source: bytes, num_lines: int, tmp_path: Path
) -> None:
    """A bar over all lines ended below 100 %."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(source)
    assert count_lines(path) == num_lines


def test_long_good_line_is_answered(tmp_path: Path) -> None:
    raw = json.dumps(
        {
            "custom_id": "a",
            "body": {"prompt": "x", "metadata": {"text": "x" * 10_000_000}},
        }
    )
    tally = run_stub(raw.encode(), tmp_path / "out.jsonl")
    assert tally.num_answered == 1


def test_repeated_id_is_an_error_and_not_the_ids_answer(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = simple("a") + simple("a", prompt_token_ids=[1]) + simple(1) + simple("1")
    run_stub(source, out)
    found = by_key(out)
    assert found[("line", 2)]["code"] == "repeated_id"
    assert {key for key in found if key[0] == "id"} == {("id", "a"), ("id", 1), ("id", "1")}
    assert found[("id", "a")][0]["token_ids"][0] == 2  # the first line's


def test_bad_line_claims_its_id(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = simple("a", n=0) + simple("a")
    run_stub(source, out)
    again = run_stub(source, out)
    assert [record["error"]["code"] for record in records_of(out)] == [
        "invalid_request",
        "repeated_id",
    ]
    assert again.num_skipped == 2


def test_nulls_in_a_body_mean_left_out() -> None:
    row = {"custom_id": "a", "body": {"prompt": "x", "temperature": None, "max_tokens": None}}
    params = RequestReader(None, SamplingParams(max_tokens=9)).read(row).params
    assert (params.temperature, params.max_tokens) == (1.0, 9)


def test_openai_names_reach_sampling_params() -> None:
    body = {
        "messages": [{"role": "user", "content": "1+1="}],
        "max_completion_tokens": 3,
        "top_p": 0.5,
        "stop": "x",
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": 2.5},
        "top_k": 5,
        "min_p": 0.1,
        "n": 2,
    }
    params = SamplingParams(
        max_tokens=3,
        top_p=0.5,
        stop=["x"],
        seed=4,
        logprobs=2,
        presence_penalty=1,
        frequency_penalty=0.5,
        logit_bias={7: 2.5},
        top_k=5,
        min_p=0.1,
        n=2,
    )
    from nanovllm.utils.tokenizer import Tokenizer

    reader = RequestReader(Tokenizer.from_folder(TINY_QWEN3), SamplingParams())
    request = reader.read({"custom_id": "a", "url": "/v1/chat/completions", "body": body})
    assert request.params == params
    assert request.kind == "chat"


def test_seed_depends_on_the_id_alone() -> None:
    def seed(line_id: object, seed: int = 0, **fields: object) -> int | None:
        row = {"id": line_id, "prompt": "x", **fields}
        return RequestReader(None, SamplingParams(), seed).read(row).params.seed

    assert seed("a") == seed("a", top_p=0.5)
    assert len({seed("a"), seed("b"), seed("a", seed=1), seed(1), seed("1")}) == 5
    assert seed("a", **{"temperature": 0}) is None


def test_arguments_of_the_chat_template_are_the_lines_then_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[object] = []

    def note(tokenizer: object, conversation: object, **options: object) -> str:
        given.append(options["chat_template_kwargs"])
        return "x"

    monkeypatch.setattr("nanovllm.batch_file.chat_prompt", note)
    flags = ["--chat-template-kwargs", '{"enable_thinking": false, "a": 1}']
    args = command.parse_args(["in", "out", "--model", "m", *flags])
    reader = command.make_reader(args, None, Config(model="m"), SamplingParams())
    messages = [{"role": "user", "content": "hi"}]
    reader.read({"id": 1, "messages": messages})
    reader.read({"id": 2, "messages": messages, "chat_template_kwargs": {"a": 2}})
    assert given == [{"enable_thinking": False, "a": 1}, {"enable_thinking": False, "a": 2}]


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--chat-template-kwargs", "{enable_thinking: false}", "is no JSON"),
        ("--chat-template-kwargs", "[1]", "is no JSON object"),
        ("--max-tokens", "many", "'many' is neither an integer nor none"),
    ],
)
def test_option_of_another_kind_is_refused(
    flag: str, value: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.parse_args(["in", "out", "--model", "m", flag, value])
    assert text in capsys.readouterr().err


# Reruns


def messy_input(seed: int) -> bytes:
    """40 lines, some of them broken, repeated or empty."""
    rng = random.Random(seed)
    kinds = [
        lambda i: simple(f"id {i}", prompt_token_ids=[1] * rng.randint(1, 100)),
        lambda i: simple(i, prompt_token_ids=[1] * rng.randint(90, 110)),
        lambda i: simple(f"id {rng.randint(0, i)}"),
        lambda i: simple(f"bad {rng.randint(0, i)}", n=0),
        lambda i: b'{"id": "broken\n',
        lambda i: b"\n",
    ]
    weights = [10, 3, 2, 2, 1, 1]
    return b"".join(rng.choices(kinds, weights)[0](i) for i in range(40))


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_and_rerun_equals_an_uninterrupted_run(seed: int, tmp_path: Path) -> None:
    source, whole, out = messy_input(seed), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_stub(source, whole)
    rng = random.Random(seed)
    for _ in range(4):
        with suppress(KeyboardInterrupt):  # what is left may need fewer steps
            run_stub(source, out, StubEngine(fails_at=rng.randint(1, 3)))
        os.truncate(out, rng.randint(max(out.stat().st_size - 80, 0), out.stat().st_size))
    run_stub(source, out)
    assert by_key(out) == by_key(whole)
    finished = out.read_bytes()
    again = run_stub(source, out)
    assert (again.num_answered, again.num_failed) == (0, 0)
    assert out.read_bytes() == finished


def test_torn_line_is_dropped_wherever_it_was_torn(tmp_path: Path) -> None:
    source, out = simple("a") + simple("a") + simple("b"), tmp_path / "out.jsonl"
    run_stub(source, out)
    whole, answers = out.read_bytes(), by_key(out)
    last = whole.rstrip().rfind(b"\n") + 1
    for end in [0, 1, *range(last, len(whole))]:
        out.write_bytes(whole[:end])
        run_stub(source, out)
        assert by_key(out) == answers


@pytest.mark.parametrize(
    "text", [b"precious\n", b"precious", simple("a"), simple("a").rstrip(), b"3\n", b"\n", b"3"]
)
def test_other_files_are_refused_and_left_alone(text: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(text)
    with pytest.raises(ValueError, match="no result of a batch run"):
        run_stub(simple("a"), out)
    assert out.read_bytes() == text


def test_second_run_on_a_file_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with OutputFile(out, Ledger()) as first:
        second = OutputFile(out, Ledger())  # there is no file to lock yet
        first.begin()
        with pytest.raises(ValueError, match="another run has begun"):
            second.begin()
        with pytest.raises(ValueError, match="another run is writing"):
            OutputFile(out, Ledger())
    OutputFile(out, Ledger()).close()


def test_full_disk_leaves_whole_lines_and_can_be_resumed(tmp_path: Path) -> None:
    source, out = b"".join(simple(i) for i in range(30)), tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # a write beyond it is cut, then refused
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"out\.jsonl"):
            run_stub(source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out.read_bytes().endswith(b"\n")
    assert 0 < len(records_of(out)) < 30
    run_stub(source, out)
    assert len(by_key(out)) == 30


# The engine's side


def test_engine_is_kept_full_by_a_bounded_queue(tmp_path: Path) -> None:
    engine = StubEngine(max_num_seqs=100)
    run_stub(b"".join(simple(i) for i in range(3000)), tmp_path / "out.jsonl", engine)
    assert engine.sizes[0] == 64
    assert max(engine.sizes) == 200
    assert all(size == 200 for size in engine.sizes[2 : len(engine.sizes) // 2])


def test_memory_grows_by_the_ids_alone(tmp_path: Path) -> None:
    peaks = []
    for num_lines in (1000, 10_000):
        source, out = tmp_path / f"{num_lines}.jsonl", tmp_path / f"{num_lines}.out"
        source.write_bytes(b"".join(simple(f"request {i}") for i in range(num_lines)))
        for _ in ("first run", "rerun"):
            tracemalloc.start()
            run_stub(source, out)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    for few, many in zip(peaks[:2], peaks[2:], strict=True):
        assert many - few <= 150 * 9000


PEAK_SCRIPT = """
import re, sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_batch_file import StubEngine, run_stub
run_stub(Path(sys.argv[1]), Path(sys.argv[2]), StubEngine(512))
# Not ru_maxrss: it begins with what the parent had.
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024)
"""


@pytest.mark.slow
def test_peak_memory_of_100_000_lines(tmp_path: Path) -> None:
    def peak(num_lines: int) -> int:
        source, out = tmp_path / f"{num_lines}.jsonl", tmp_path / f"{num_lines}.out"
        if not source.exists():
            source.write_bytes(b"".join(simple(f"request {i}") for i in range(num_lines)))
        call = [sys.executable, "-c", PEAK_SCRIPT, str(source), str(out)]
        return int(subprocess.run(call, cwd=ROOT, check=True, capture_output=True).stdout)

    for run in ("first run", "rerun"):
        few, many = peak(1000), peak(100_000)
        print(f"{run}: {few} bytes, {many} bytes, {(many - few) / 99_000:.0f} a line")
        assert many - few <= 150 * 99_000


# The command


@pytest.fixture
def run_command(tmp_path: Path) -> Callable[..., int]:
    """Run the command line on text in this process and return its status."""

    def run(source: bytes, *flags: str) -> int:
        (tmp_path / "in.jsonl").write_bytes(source)
        paths = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
        return command.main([*paths, *SMALL, *flags])

    return run


@pytest.fixture
def stub_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubEngine]:
    """Let the command run on a stub."""
    engine = StubEngine()

    class StubLLM:
        def __init__(self, **options: object) -> None:
            self.llm_engine = engine

        __enter__ = LLM.__enter__

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(command, "LLM", StubLLM)
    return engine


CHAT = {
    "custom_id": "sum",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "123+456=?"}],
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 2,
    },
}
COMPLETION = {
    "custom_id": "text",
    "url": "/v1/completions",
    "body": {"prompt": "hello", "n": 2, "logprobs": 1, "max_tokens": 4},
}


def test_command_answers_in_openais_shape(run_command: Callable[..., int], tmp_path: Path) -> None:
    lines = [CHAT, COMPLETION, {"id": 3, "prompt": "hello", "max_tokens": 2}]
    assert run_command("\n".join(map(json.dumps, lines)).encode()) == command.ALL_ANSWERED
    found = {r.get("custom_id", r["id"]): r for r in records_of(tmp_path / "out.jsonl")}
    chat, text = found["sum"], found["text"]
    assert chat["error"] is None
    assert chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "579"}
    assert choice["finish_reason"] == "stop"
    tokens = choice["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    assert "".join(token["token"] for token in tokens).startswith(choice["message"]["content"])
    usage = body["usage"]
    assert usage["completion_tokens"] == len(tokens)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(tokens)
    choices = text["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(len(choice["logprobs"]["tokens"]) == 4 for choice in choices)
    assert len(found[3]["outputs"][0]["token_ids"]) == 2


def test_command_reports_what_the_engine_refuses(
    run_command: Callable[..., int], tmp_path: Path
) -> None:
    source = simple("good", max_tokens=2) + simple("long", prompt_token_ids=[1] * 128)
    assert run_command(source) == command.SOME_FAILED
    assert run_command(source) == command.SOME_FAILED  # an earlier run's error counts
    (bad,) = (r for r in records_of(tmp_path / "out.jsonl") if "line" in r)
    assert bad["error"]["message"].startswith("the prompt has 128 tokens, max_model_len is 128")


def test_dry_run_checks_and_counts(
    run_command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = simple(1, n=2, max_tokens=5) + simple(2, max_tokens=None) + simple(1) + b"{\n"
    assert run_command(source, "--dry-run") == command.SOME_FAILED
    shown = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["line"] for line in shown[:2]] == [3, 4]
    assert shown[2] == "2 requests, 2 errors; 4 prompt tokens, at most 136 output tokens"
    assert not (tmp_path / "out.jsonl").exists()


def test_ctrl_c_can_be_resumed(
    run_command: Callable[..., int],
    stub_llm: StubEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = b"".join(simple(i) for i in range(100))
    stub_llm._fails_at = 5
    assert run_command(source) == command.INTERRUPTED
    assert "run the same command again" in capsys.readouterr().err
    num_done = len(records_of(tmp_path / "out.jsonl"))
    assert 0 < num_done < 100
    stub_llm.queued.clear()
    assert run_command(source) == command.ALL_ANSWERED
    assert len(by_key(tmp_path / "out.jsonl")) == 100


def test_failing_engine_breaks_off(
    run_command: Callable[..., int], stub_llm: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> list[RequestOutput]:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(stub_llm, "step", step)
    assert run_command(simple(1)) == command.BROKEN_OFF


def test_nothing_starts_with_wrong_options(
    run_command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(simple(1), "--max-num-seqs", "0") == command.NOT_STARTED
    assert "max_num_seqs is 0" in capsys.readouterr().err
    assert run_command(simple(1), "--temperature", "-1") == command.NOT_STARTED
    assert run_command(simple(1), "--ray-actors", "2") == command.NOT_STARTED
    path = str(tmp_path / "in.jsonl")
    assert command.main([path, path, *SMALL]) == command.NOT_STARTED
    assert command.main([path + "x", path + "y", *SMALL]) == command.NOT_STARTED
    with pytest.raises(SystemExit) as raised:
        command.main([path, *SMALL])
    assert raised.value.code == command.NOT_STARTED


def test_file_that_cannot_be_used_is_named_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(simple(1))
    missing, lost = tmp_path / "missing.jsonl", tmp_path / "missing" / "out.jsonl"
    for paths, text in [
        ((missing, out), f"{missing}: no such file"),
        ((tmp_path, out), f"{tmp_path}: a folder, but a file is due"),
        ((source, lost), f"{lost}: there is no folder {lost.parent}"),
        ((source, tmp_path), f"{tmp_path}: a folder, but a file is due"),
    ]:
        assert command.main([*map(str, paths), *SMALL]) == command.NOT_STARTED
        assert capsys.readouterr().err == f"nanovllm: {text}\n"
    assert list(tmp_path.iterdir()) == [source]


def test_unreadable_input_is_named_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.touch()
    # Patched: who runs the tests may be allowed to read everything.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert command.main([str(path), str(path) + ".out", *SMALL]) == command.NOT_STARTED
    assert capsys.readouterr().err == f"nanovllm: {path}: no permission to open it\n"


@pytest.mark.parametrize("before", [None, b"", b'{"id": 1, "outputs": []}\n{"id": 2'])
@pytest.mark.parametrize(
    "fault", ["no folder", "no folder for Ray", "no weights", "no memory", "no Ray"]
)
def test_run_that_cannot_start_leaves_the_output_as_it_was(
    fault: str,
    before: bytes | None,
    run_command: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing model left an empty file."""
    model, out, flags = tmp_path / "model", tmp_path / "out.jsonl", []
    if before is not None:
        out.write_bytes(before)
    if fault.endswith("Ray"):
        flags = ["--ray"]
    if fault == "no weights":
        shutil.copytree(TINY_QWEN3, model, ignore=shutil.ignore_patterns("*.safetensors"))
    elif fault == "no memory":
        model = TINY_QWEN3
        monkeypatch.setattr(command, "LLM", Mock(side_effect=MemoryError("8 TiB")))
    elif fault == "no Ray":
        model = TINY_QWEN3
        monkeypatch.setitem(sys.modules, "ray", None)
    assert run_command(simple(2), "--model", str(model), *flags) == command.NOT_STARTED
    assert (out.read_bytes() if out.exists() else None) == before


def test_link_to_an_output_is_followed_and_kept(
    run_command: Callable[..., int], stub_llm: StubEngine, tmp_path: Path, monkeypatch
) -> None:
    """A start that failed removed the link, and left what it pointed to."""
    link, target = tmp_path / "out.jsonl", tmp_path / "target.jsonl"
    link.symlink_to(target)
    with monkeypatch.context() as patch:
        patch.setattr(command, "LLM", Mock(side_effect=ValueError("no model")))
        assert run_command(simple(1)) == command.NOT_STARTED
    assert (link.is_symlink(), target.exists()) == (True, False)
    assert run_command(simple(1)) == command.ALL_ANSWERED
    assert (link.is_symlink(), len(records_of(target))) == (True, 1)


@pytest.mark.parametrize("kind", ["fifo", "/dev/null", "/dev/full"])
def test_output_that_is_no_regular_file_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was read as results of an earlier run, which never ends for some."""
    source, out = tmp_path / "in.jsonl", Path(kind)
    source.write_bytes(simple(1))
    if kind == "fifo":
        out = tmp_path / "out.jsonl"
        os.mkfifo(out)
    assert command.main([str(source), str(out), *SMALL]) == command.NOT_STARTED
    assert f"{out} is a device or a pipe" in capsys.readouterr().err


def test_input_may_be_a_pipe(stub_llm: StubEngine, tmp_path: Path) -> None:
    """It was opened twice, and the second time nobody wrote."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    os.mkfifo(source)
    writer = threading.Thread(target=source.write_bytes, args=(simple(1),), daemon=True)
    writer.start()
    assert command.main([str(source), str(out), *SMALL]) == command.ALL_ANSWERED
    writer.join()
    assert len(records_of(out)) == 1


def test_interrupt_after_a_write_keeps_the_result(tmp_path: Path, monkeypatch) -> None:
    out, write = tmp_path / "out.jsonl", os.write

    def interrupted(fd: int, data: bytes) -> int:
        write(fd, data)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_stub(simple(1), out)
    assert run_stub(simple(1), out).num_skipped == len(records_of(out)) == 1


def test_run_without_requests_makes_the_output(
    run_command: Callable[..., int], stub_llm: StubEngine, tmp_path: Path
) -> None:
    assert run_command(b"\n") == command.ALL_ANSWERED
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_bar_counts_tokens_of_running_requests_and_reaches_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It showed no output until the first request had finished."""
    monkeypatch.setattr(command, "_PROGRESS_SECONDS", 0)
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n \r\n" + simple(1, max_tokens=40, ignore_eos=True, n=2) + b"\n{\n")
    flags = [flag for flag in SMALL if flag != "--no-progress"]
    assert command.main([str(source), str(tmp_path / "out.jsonl"), *flags]) == command.SOME_FAILED
    shown = capsys.readouterr().err
    assert re.search(r" 1/2 .*output=[1-9]", shown)
    assert re.search(r"100%.* 2/2 ", shown)
    assert "1 answered, 1 errors, 0 done before; 2 prompt tokens" in shown
    assert " 80 output tokens in " in shown
    assert command.main([str(source), str(tmp_path / "out.jsonl"), *flags]) == command.SOME_FAILED
    again = capsys.readouterr().err
    assert "0 answered, 0 errors, 2 done before (1 of them errors); 0 prompt tokens" in again


def test_tokens_of_unfinished_requests_are_counted() -> None:
    with LLM(str(TINY_QWEN3), device="cpu", max_model_len=128, max_num_seqs=8) as llm:
        engine = llm.llm_engine
        params = SamplingParams(max_tokens=40, ignore_eos=True, n=2)
        for length in (5, 40):
            engine.add_request([1, 2], params.replace(max_tokens=length))
        counts = []
        while not engine.is_finished():
            engine.step()
            counts.append(engine.count_generated_tokens())
    assert counts[1:] == [4 * i for i in range(1, 6)] + [20 + 2 * i for i in range(1, 36)]


def test_help_says_what_each_option_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        command.parse_args(["--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for option in [
        "--model MODEL checkpoint folder, or the id of a model on the hub --tokenizer",
        "--seed SEED of requests that bring no seed of their own (default: 0) --device",
        "--enforce-eager, --no-enforce-eager no CUDA graphs (default: False) --async",
        "decode lanes; 0: no such steps; None: as many as were measured to be fastest for the "
        "model's size (default: None) --gpu-memory-utilization",
        "--top-k TOP_K >= 1: the k likeliest tokens; 0 or -1 = off (default: 0) engine:",
    ]:
        assert option in text
    names = [field.name for field in dataclasses.fields(Config)]
    assert list(command.field_comments(Config)) == names


def test_every_option_of_the_engine_is_one_of_the_command() -> None:
    flags = ["--tensor-parallel-size", "2", "--no-enable-prefix-caching", "--enforce-eager"]
    args = command.parse_args(["in", "out", "--model", "m", *flags, "--max-model-len", "7"])
    assert command.make_config(args) == Config(
        model="m",
        tensor_parallel_size=2,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_model_len=7,
    )


# kill -9


def problems(num_lines: int) -> bytes:
    """Chat lines in both formats, most of them drawn at temperature 1."""
    lines = []
    for i in range(num_lines):
        messages = [{"role": "user", "content": f"{100 + i % 900}+{999 - i % 899}="}]
        fields = {"messages": messages, "max_tokens": 4 + i % 13, "temperature": float(i % 4 > 0)}
        is_openai = i % 2
        lines.append({"custom_id": f"{i}", "body": fields} if is_openai else {"id": i, **fields})
    return "\n".join(map(json.dumps, lines)).encode()


def kill_after(call: list[str], out: Path, num_bytes: int) -> None:
    """Start a run and kill it when its output has grown by so many bytes."""
    size = out.stat().st_size if out.exists() else 0
    process = subprocess.Popen(call, cwd=ROOT, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if out.exists() and out.stat().st_size > size + num_bytes:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    process.wait()


def kill_and_rerun(
    run_command: Callable[..., int], tmp_path: Path, num_lines: int, kills: int
) -> None:
    source, out = problems(num_lines), tmp_path / "out.jsonl"
    assert run_command(source) == command.ALL_ANSWERED
    whole, num_bytes = by_key(out), out.stat().st_size
    out.unlink()
    rng = random.Random(num_lines)
    call = [sys.executable, "-m", "nanovllm", str(tmp_path / "in.jsonl"), str(out), *SMALL]
    for _ in range(kills):
        kill_after(call, out, rng.randint(0, int(1.5 * num_bytes / kills)))
    num_left = num_lines - len(out.read_bytes().splitlines())
    print(f"{kills} kills, {num_left} of {num_lines} lines left")
    assert run_command(source) == command.ALL_ANSWERED
    assert by_key(out) == whole
    assert len(whole) == num_lines


def test_killed_runs_finish_with_the_same_answers(
    run_command: Callable[..., int], tmp_path: Path
) -> None:
    kill_and_rerun(run_command, tmp_path, num_lines=60, kills=3)


@pytest.mark.slow
def test_2000_lines_survive_20_kills(run_command: Callable[..., int], tmp_path: Path) -> None:
    kill_and_rerun(run_command, tmp_path, num_lines=2000, kills=20)
