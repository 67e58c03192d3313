"""Ray Data: all rows come back right, from engines that share the work, one of them lost."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from test_batch_file import SMALL, TINY_QWEN3, StubEngine, by_key, problems, simple

import nanovllm.__main__ as command
from nanovllm import RequestOutput, SamplingParams
from nanovllm.batch_file import Ledger, Tally
from nanovllm.ray_data import EngineThread, NanoVLLM, plan_chunks, read_chunk

OPTIONS = {
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "kvcache_block_size": 16,
}


# Without Ray


def test_chunks_hold_each_line_once_on_any_host(tmp_path: Path) -> None:
    lines = [b"\xef\xbb\xbf" + simple(0)]
    lines += [random.Random(i).choice([simple(i), b"\r\n", b"{\n", simple(0)]) for i in range(99)]
    lines[-1] = simple("last").rstrip()
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(lines))
    errors: list[dict] = []
    tally = Tally()
    with path.open("rb") as file:
        chunks = list(plan_chunks(file, path, Ledger(), errors.append, tally, 7))
    rows = [row for chunk in chunks for row in read_chunk(chunk._asdict())]
    assert all(len(chunk.todo) == 7 for chunk in chunks[:-1])
    assert len(errors) == tally.num_failed
    for row in rows:
        raw = lines[row["line"] - 1].removeprefix(b"\xef\xbb\xbf").strip()
        assert row["text"].encode() == raw
    ids = [json.loads(row["text"])["id"] for row in rows]
    assert len(set(ids)) == len(ids)
    assert ids[-1] == "last"
    assert len(rows) + len(errors) == sum(bool(line.strip()) for line in lines)


class SharedStub(StubEngine):
    """Notes the thread that steps it and how many requests it held."""

    threads: set[int]

    def step(self) -> list[RequestOutput]:
        time.sleep(0.001)
        self.threads = getattr(self, "threads", set()) | {threading.get_ident()}
        return super().step()


def test_batches_share_an_engine_that_one_thread_steps() -> None:
    engine, closed = SharedStub(), threading.Event()
    thread = EngineThread(engine, closed.set)

    async def batch(length: int) -> list[RequestOutput]:
        prompts = [[1] * length for _ in range(5)]
        return list(
            await asyncio.gather(*(thread.answer(prompt, SamplingParams()) for prompt in prompts))
        )

    async def all_batches() -> list[list[RequestOutput]]:
        return list(await asyncio.gather(*(batch(length) for length in range(1, 9))))

    for length, outputs in enumerate(asyncio.run(all_batches()), start=1):
        assert [output.token_ids[0] for output in outputs] == [length] * 5
    assert max(engine.sizes) > 5
    assert len(engine.threads) == 1
    with pytest.raises(ValueError, match="101 tokens"):
        asyncio.run(thread.answer([1] * 101, SamplingParams()))
    thread.close()
    thread.close()
    assert closed.is_set()
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(thread.answer([1], SamplingParams()))


def test_failing_step_fails_who_waits_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StubEngine()
    thread = EngineThread(engine, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(thread.answer([1], SamplingParams()))
    engine.queued.clear()  # as LLMEngine does
    assert asyncio.run(thread.answer([1], SamplingParams())).finished
    thread.close()


def test_class_answers_rows_in_order_and_bad_ones_with_an_error() -> None:
    model = NanoVLLM(str(TINY_QWEN3), {"max_tokens": 4}, **OPTIONS)
    prompts = np.array(["a", "", "b", "c"], dtype=object)
    wishes = np.array([{"temperature": 0.0}, {}, {"n": 2}, {"max_tokens": 2}], dtype=object)
    batch = {"prompt": prompts, "sampling_params": wishes, "id": np.arange(4)}
    answer = asyncio.run(model(batch))
    again = asyncio.run(model({name: column[::-1] for name, column in batch.items()}))
    thread = model._thread._thread
    assert thread.is_alive()
    del model  # as Ray does at the end
    assert not thread.is_alive()
    assert list(answer["text"]) == list(again["text"])[::-1]
    assert [error is None for error in answer["error"]] == [True, False, False, True]
    assert len(answer["token_ids"][3]) <= 2
    assert "empty" in answer["error"][1]
    assert "repeat rows" in answer["error"][2]


# With Ray


@pytest.fixture(scope="module")
def ray() -> Iterator[ModuleType]:
    """Ray on this machine alone."""
    ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
    pytest.importorskip("ray.data", reason="needs the extra 'ray'")
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, address="local")
    yield ray
    ray.shutdown()


def actor_pids() -> list[int]:
    """Processes of the actors that hold engines."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::MapWorker"):
            pids.append(int(path.parent.name))
    return pids


def test_map_batches_answers_all_rows_with_two_actors(ray: ModuleType) -> None:
    rows = [{"id": i, "prompt": f"{100 + i}+{200 + i}="} for i in range(64)]
    dataset = ray.data.from_items(rows, override_num_blocks=8).map_batches(
        NanoVLLM,
        fn_constructor_kwargs={
            "model": str(TINY_QWEN3),
            "sampling_params": {"max_tokens": 6},
            **OPTIONS,
        },
        batch_size=8,
        compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=4),
    )
    answers = {row["id"]: row for row in dataset.iter_rows()}
    assert sorted(answers) == list(range(64))
    assert all(row["error"] is None and len(row["token_ids"]) for row in answers.values())
    model = NanoVLLM(str(TINY_QWEN3), {"max_tokens": 6}, **OPTIONS)
    columns = {name: np.array([row[name] for row in rows], dtype=object) for name in rows[0]}
    alone = asyncio.run(model(columns))
    model.close()
    assert [answers[i]["text"] for i in range(64)] == list(alone["text"])


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("kills", [0, 1])
def test_command_on_ray_equals_the_one_without(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, alone, out = (tmp_path / name for name in ("in.jsonl", "alone.jsonl", "out.jsonl"))
    source.write_bytes(problems(300) + b"\n" + simple(0) + b"{\n" + simple("long", n=0))
    assert command.main([str(source), str(alone), *SMALL]) == command.SOME_FAILED
    killed: list[int] = []

    def update(progress: command.Progress, tally: Tally) -> None:
        if len(killed) < kills and tally.num_answered > 50:
            killed.append(actor_pids()[0])
            os.kill(killed[-1], signal.SIGKILL)

    monkeypatch.setattr(command.Progress, "update", update)
    flags = ["--ray", "--ray-actors", "2"]
    assert command.main([str(source), str(out), *SMALL, *flags]) == command.SOME_FAILED
    assert len(killed) == kills
    assert by_key(out) == by_key(alone)
    finished = out.read_bytes()
    assert command.main([str(source), str(out), *SMALL, *flags]) == command.SOME_FAILED
    assert out.read_bytes() == finished
