"""An engine starts, fails, stops and shares a process without leaving a trace."""

import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MakeCheckpoint
from fuzz import Fault, raising
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import ModelRunner

TESTS = Path(__file__).resolve().parent
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(50)), [7] * 20]


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint()


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as opened:
        yield opened


def open_llm(folder: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "kvcache_block_size": 16,
        "max_num_seqs": 16,
    }
    return LLM(str(folder), **{**defaults, **options})


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert llm.llm_engine.is_finished()
    assert (stats.num_waiting, stats.num_running) == (0, 0)
    assert stats.num_free_kvcache_blocks == stats.num_kvcache_blocks
    llm.llm_engine.scheduler.check_invariants()


def run_script(code: str, **names: object) -> subprocess.CompletedProcess[str]:
    """Run a program of its own that starts with `folder` and the like defined."""
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    code = head + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS.parent, timeout=120
    )


# the end


def test_exit_may_be_called_again_and_use_after_it_is_an_error(folder: Path) -> None:
    llm = open_llm(folder)
    llm.exit()
    llm.exit()
    uses: list[Callable[[], object]] = [
        lambda: llm.generate(PROMPTS, GREEDY),
        lambda: llm.generate([]),
        lambda: next(llm.stream(PROMPTS, GREEDY)),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.llm_engine.add_request([1], GREEDY),
        lambda: llm.llm_engine.step(),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="closed: make a new LLM"):
            use()
    llm.llm_engine.abort("0")
    assert llm.stats().device == ""


def test_with_block_closes_also_on_error(folder: Path) -> None:
    with pytest.raises(KeyError), open_llm(folder) as llm:
        raise KeyError
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(PROMPTS, GREEDY)


def test_exit_in_the_middle_of_a_stream_ends_it(folder: Path) -> None:
    llm = open_llm(folder)
    stream = llm.stream(PROMPTS, GREEDY, deltas=True)
    next(stream)
    llm.exit()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)
    llm.exit()


@pytest.mark.parametrize("call_exit", [True, False])
def test_memory_is_given_back(folder: Path, call_exit: bool) -> None:
    llm = open_llm(folder)
    answers(llm)
    runner = weakref.ref(llm.llm_engine._runner)
    weight = weakref.ref(llm.llm_engine._runner.model.lm_head.weight)
    cache = weakref.ref(llm.llm_engine._runner.kv_cache)
    if call_exit:
        llm.exit()
        # At once, with no collection to wait for: the next LLM needs the room.
        assert [ref() for ref in (runner, weight, cache)] == [None] * 3
    else:
        del llm
        gc.collect()
        assert [ref() for ref in (runner, weight, cache)] == [None] * 3


ENDS = {
    "idle": "",
    "closed twice": "llm.exit(); llm.exit()",
    "in a stream": "stream = llm.stream([[1], [2]], params, deltas=True); next(stream)",
    "queued": "llm.llm_engine.add_request([1], params); llm.llm_engine.step()",
    "after an error": """
llm.llm_engine._runner.run_model = None
try:
    llm.generate([[1]], params, use_tqdm=False)
except TypeError:
    pass
""",
    "asleep": "llm.sleep()",
    "in a cycle": "llm.me = llm; llm.stream_of_me = llm.stream([[1]]); next(llm.stream_of_me)",
    "used in a thread": """
import threading
thread = threading.Thread(target=llm.generate, args=([[1]], params), kwargs={"use_tqdm": False})
thread.start()
""",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=list(ENDS))
def test_interpreter_ends_in_silence(folder: Path, end: str) -> None:
    code = """
        from nanovllm import LLM, SamplingParams
        llm = LLM(folder, skip_tokenizer_init=True, device="cpu", max_model_len=64)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        print(len(llm.generate([[1, 2], [3]], params, use_tqdm=False)))
    """
    done = run_script(textwrap.dedent(code) + end, folder=str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_interpreter_ends_in_silence_with_an_engine_that_was_never_used(folder: Path) -> None:
    code = """
        from nanovllm import LLM
        llm = LLM(folder, skip_tokenizer_init=True, device="cpu", max_model_len=64)
        other = LLM(folder, skip_tokenizer_init=True, device="cpu", max_model_len=64)
        stream = other.stream([[1]])
    """
    done = run_script(code, folder=str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def used_memory_bytes() -> int:
    gc.collect()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)  # else what earlier tests freed may count or not
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("num_engines", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_engines_one_after_another_leave_nothing(folder: Path, num_engines: int) -> None:
    """One engine's pool here is 8 MiB, its weights 0.7 MiB: a leak of either shows."""
    options = {"max_model_len": 1024, "num_kvcache_blocks": 1024}

    def live(number: int) -> None:
        llm = open_llm(folder, **options)
        assert llm.stats().kvcache_bytes >= 8 << 20
        answers(llm, SamplingParams(max_tokens=8, logprobs=2, top_p=0.9))
        if number % 2:
            llm.exit()  # else it is only dropped

    for number in range(4):  # the allocator's own appetite
        live(number)
    before = used_memory_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(num_engines):
        live(number)
    after = used_memory_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 16 << 20


# failures in a step


class Break(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), KeyboardInterrupt(), Break(), MemoryError()]
)
@pytest.mark.parametrize("num_good", [0, 1, 4])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_error_in_a_step_comes_out_and_leaves_the_engine_usable(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    num_good: int,
    async_scheduling: bool,
) -> None:
    """The very same exception; nothing queued, no block held, and right answers afterwards."""
    with open_llm(folder, async_scheduling=async_scheduling) as llm:
        expected = answers(llm)
        run_model, calls = llm.llm_engine._runner.run_model, []

        def fail(inputs: object) -> torch.Tensor:
            calls.append(1)
            if len(calls) > num_good:
                raise error
            return run_model(inputs)

        with monkeypatch.context() as patch:
            patch.setattr(llm.llm_engine._runner, "run_model", fail)
            with pytest.raises(type(error)) as caught:
                answers(llm)
        assert caught.value is error
        assert_idle(llm)
        assert answers(llm) == expected


@pytest.mark.parametrize("place", ["postprocess", "schedule"])
def test_error_in_the_scheduler_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    expected = answers(llm)

    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(llm.llm_engine.scheduler, place, fail)
    with pytest.raises(ZeroDivisionError):
        answers(llm)
    assert_idle(llm)
    assert answers(llm) == expected


def test_error_in_the_callers_loop_aborts_the_rest(llm: LLM) -> None:
    expected = answers(llm)

    def loop() -> None:
        for _ in llm.stream(PROMPTS, GREEDY, deltas=True):
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    gc.collect()  # the abandoned iterator, where reference counting doesn't do it at once
    assert_idle(llm)
    assert answers(llm) == expected


def test_interrupt_while_requests_are_queued_leaves_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first and the last request of a call there is time for Ctrl-C."""
    add, calls = llm.llm_engine.scheduler.add, []

    def interrupted(seq: object) -> None:
        add(seq)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.scheduler, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answers(llm)
    assert_idle(llm)
    assert len(answers(llm)) == 3


def test_interrupt_while_one_request_is_added_leaves_the_others_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known and not queued, it kept the engine busy for ever."""
    engine, expected = llm.llm_engine, answers(llm)
    kept = engine.add_request(PROMPTS[1], GREEDY)
    engine.step()

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    places = [(engine._inputs, "make_sample"), (engine.scheduler, "add")]
    for place in places:
        with monkeypatch.context() as patch:
            patch.setattr(*place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.add_request(PROMPTS[0], GREEDY)
        engine.scheduler.check_invariants()
        assert list(engine._requests) == [kept]
    outputs = []
    while not engine.is_finished():
        outputs += engine.step()
    assert [output.token_ids for output in outputs] == [expected[1]]
    assert_idle(llm)


@pytest.mark.parametrize(("place", "num_good"), [("finish", 0), ("_release", 0), ("_release", 1)])
def test_interrupted_abort_leaves_nothing_queued(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, num_good: int
) -> None:
    """Ctrl-C while a stream is closed: a request was forgotten, and its blocks stayed taken."""
    expected = answers(llm)
    stream = llm.stream(PROMPTS, GREEDY, deltas=True)
    next(stream)
    real, calls = getattr(llm.llm_engine.scheduler, place), []

    def interrupted(*args: object) -> None:
        calls.append(1)
        if len(calls) > num_good:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.scheduler, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    assert_idle(llm)
    assert answers(llm) == expected


def test_closing_a_stream_looks_through_the_queue_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20,000 prompts each was taken out by itself, which took 46 s."""
    finish, calls = llm.llm_engine.scheduler.finish, []

    def note(*args: object) -> None:
        calls.append(args)
        finish(*args)

    stream = llm.stream(PROMPTS * 20, GREEDY, deltas=True)
    next(stream)
    monkeypatch.setattr(llm.llm_engine.scheduler, "finish", note)
    stream.close()
    assert len(calls) == 1
    assert_idle(llm)


def test_engine_closed_in_the_middle_of_a_step_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, say; the step failed with an AttributeError."""
    with open_llm(folder) as llm:
        schedule = llm.llm_engine.scheduler.schedule

        def close_first(**options: bool) -> object:
            llm.exit()
            return schedule(**options)

        monkeypatch.setattr(llm.llm_engine.scheduler, "schedule", close_first)
        with pytest.raises(RuntimeError, match="closed"):
            answers(llm)


INTERRUPTED: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: answers(llm, WITH_LOGPROBS),
    "stream": lambda llm: list(llm.stream(PROMPTS, WITH_LOGPROBS, deltas=True)),
    "closing a stream": lambda llm: take_one_and_close(llm),
    "sleep": lambda llm: llm.sleep(),
    "sleep and wake_up": lambda llm: (llm.sleep(), llm.wake_up()),
    "load_weights": lambda llm: llm.load_weights(weights_of(llm)),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
}
WITH_LOGPROBS = GREEDY.replace(max_tokens=3, logprobs=1)


def take_one_and_close(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, GREEDY, deltas=True)
    next(stream)
    stream.close()


def weights_of(llm: LLM) -> dict[str, torch.Tensor]:
    return load_file(Path(llm.llm_engine.config.model) / "model.safetensors")


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupt_at_any_function_leaves_the_engine_usable(
    folder: Path, name: str, stride: int
) -> None:
    """Where a function of the package begins, Python looks whether Ctrl-C was pressed."""
    call, fault = INTERRUPTED[name], Fault("entry", 0, False, KeyboardInterrupt)
    with open_llm(folder, max_num_batched_tokens=32) as llm:
        expected = answers(llm)
        for count in itertools.count(1, stride):
            with raising(replace(fault, count=count)) as raised, suppress(KeyboardInterrupt):
                call(llm)
            if llm.llm_engine._is_asleep:
                llm.wake_up()
            assert_idle(llm)
            assert answers(llm) == expected, f"after function {count}"
            if not raised:
                break
    assert count > 1


# failures at the start


@pytest.mark.parametrize("place", ["allocate_kv_cache", "capture_cudagraph", "_allocate_buffers"])
def test_failed_start_leaves_defaults_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(self: object) -> None:
        raise MemoryError(place)

    before = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    monkeypatch.setattr(ModelRunner, place, fail)
    with pytest.raises(MemoryError, match=place):
        open_llm(folder)
    assert before == (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
    )
    monkeypatch.undo()
    with open_llm(folder) as llm:
        assert len(answers(llm)) == 3


@pytest.fixture
def changed_defaults() -> Iterator[None]:
    """A user whose own default dtype is float64 and whose default device holds no data."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_users_defaults_neither_matter_nor_change(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    special = SamplingParams(
        seed=1, top_p=0.9, repetition_penalty=1.2, logit_bias={3: 1.0}, logprobs=1,
        prompt_logprobs=1, max_tokens=4,
    )  # fmt: skip
    with open_llm(folder) as llm:
        expected = answers(llm), answers(llm, special)
    request.getfixturevalue("changed_defaults")
    with open_llm(folder) as llm:
        assert (answers(llm), answers(llm, special)) == expected
        # Nothing to report of a prompt of one token.
        assert llm.generate([[1]], special, use_tqdm=False)[0].prompt_logprobs == [None]
        assert llm.generate([[1]], GREEDY.replace(temperature=1.0, seed=1), use_tqdm=False)
    assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_device().type == "meta"


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_users_random_states_stay_as_they_are(folder: Path, async_scheduling: bool) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with open_llm(folder, async_scheduling=async_scheduling, load_format="dummy") as llm:
        answers(llm, SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_inference_and_autocast_modes_of_the_caller_do_not_matter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(folder) as llm:
        expected = answers(llm)
        run_model, logits_dtypes = llm.llm_engine._runner.run_model, set()

        def watch(inputs: object) -> torch.Tensor:
            logits = run_model(inputs)
            logits_dtypes.add(logits.dtype)
            return logits

        monkeypatch.setattr(llm.llm_engine._runner, "run_model", watch)
        with torch.inference_mode():
            assert answers(llm) == expected
        with torch.enable_grad():
            assert answers(llm) == expected
        with torch.autocast("cpu", dtype=torch.bfloat16):
            llm.reset_prefix_cache()
            assert answers(llm) == expected
            assert logits_dtypes == {torch.float32}
        assert not torch.is_inference_mode_enabled()
    with torch.inference_mode(), open_llm(folder) as llm:
        assert answers(llm) == expected


# company


def test_two_engines_take_turns_step_by_step(folder: Path, make_checkpoint: MakeCheckpoint) -> None:
    other_folder = make_checkpoint(seed=1, num_attention_heads=8)
    with open_llm(folder) as one, open_llm(other_folder, kvcache_block_size=7) as two:
        expected = answers(one), answers(two)
        assert expected[0] != expected[1]
        finished: list[dict[str, list[int]]] = [{}, {}]
        ids = [
            [llm.llm_engine.add_request(prompt, GREEDY) for prompt in PROMPTS] for llm in (one, two)
        ]
        while not (one.llm_engine.is_finished() and two.llm_engine.is_finished()):
            for llm, outputs in zip((one, two), finished, strict=True):
                outputs.update({o.request_id: o.token_ids for o in llm.llm_engine.step()})
        for outputs, its_ids, right in zip(finished, ids, expected, strict=True):
            assert [outputs[i] for i in its_ids] == right


def test_engines_of_two_threads_do_not_meet(folder: Path) -> None:
    with open_llm(folder) as one, open_llm(folder) as two:
        expected = answers(one)
        results: dict[int, list[list[list[int]]]] = {}

        def run(number: int, llm: LLM) -> None:
            results[number] = [answers(llm) for _ in range(3)]

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {0: [expected] * 3, 1: [expected] * 3}


def test_ctrl_c_at_any_moment_leaves_the_llm_free(llm: LLM) -> None:
    """Two in a hundred came between a lock's acquire() and `try`, and the LLM refused all calls."""
    is_due = False

    def interrupt(*args: object) -> None:
        if is_due:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for seed in range(400):
            with suppress(KeyboardInterrupt):
                is_due = True
                signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(5e-5, 4e-4))
                while True:
                    llm.generate([], GREEDY, use_tqdm=False)
            is_due = False
            assert llm.generate([], GREEDY, use_tqdm=False) == []
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_second_thread_in_a_call_is_an_error(llm: LLM) -> None:
    expected = answers(llm)
    stream = llm.stream(PROMPTS, GREEDY)
    first = next(stream)
    errors: list[BaseException] = []

    def intrude() -> None:
        for call in (lambda: answers(llm), lambda: next(llm.stream([[1]]))):
            try:
                call()
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert len(errors) == 2
    assert all("is running on this LLM" in str(error) for error in errors)
    with pytest.raises(RuntimeError, match="is running on this LLM"):
        answers(llm)  # the same thread, in the middle of its own stream
    outputs = sorted([first, *stream], key=lambda output: output.prompt_index)
    assert [output.token_ids for output in outputs] == expected
    assert answers(llm) == expected


def test_engine_may_be_made_in_one_thread_and_used_in_another(folder: Path) -> None:
    made: list[LLM] = []
    found: list[list[list[int]]] = []
    with open_llm(folder) as llm:
        expected = answers(llm)
    for target in (
        lambda: made.append(open_llm(folder)),
        lambda: found.append(answers(made[0])),
        lambda: found.append(answers(made[0])),
    ):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    made[0].exit()
    assert found == [expected] * 2


def _use_after_fork(llm: LLM, results: "multiprocessing.SimpleQueue[str]") -> None:
    for call in (lambda: answers(llm), llm.llm_engine.step, llm.reset_prefix_cache):
        try:
            call()
            results.put("no error")
        except RuntimeError as error:
            results.put(str(error))
    llm.exit()


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork()")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_after_fork_is_an_error(llm: LLM) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_use_after_fork, args=(llm, results))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    for _ in range(3):
        assert "process that made it: make a new LLM after fork" in results.get()
    assert len(answers(llm)) == 3  # the parent's own isn't disturbed by the child's exit


def test_trainers_process_group_is_left_alone(folder: Path) -> None:
    """A default group that we didn't create is neither used nor destroyed."""
    done = run_script(
        """
        import tempfile, torch
        import torch.distributed as dist
        from nanovllm import LLM, SamplingParams
        with tempfile.NamedTemporaryFile() as file:
            dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        group = dist.group.WORLD
        llm = LLM(folder, skip_tokenizer_init=True, device="cpu", max_model_len=64)
        print(len(llm.generate([[1, 2]], SamplingParams(max_tokens=4), use_tqdm=False)))
        llm.exit()
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        print(dist.is_initialized(), dist.group.WORLD is group, tensor.tolist())
        dist.destroy_process_group()
        """,
        folder=str(folder),
    )
    assert done.stdout == "1\nTrue True [1.0, 1.0, 1.0]\n", done.stderr
