"""What can go wrong does: memory runs out, files are hostile, ranks die. Each time a clear error
within seconds, a process that can go on, memory given back, nothing left behind.

Damaged weights are in `test_loader.py`, hostile fields of config.json in `test_model_config.py`,
errors of a step in `test_lifecycle.py`, ranks that fail in steps in `engine/test_worker.py`.
"""

import contextlib
import gc
import json
import multiprocessing.util
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import MakeCheckpoint
from fuzz import Fault, raising
from processes import rank_pids
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.engine import model_runner
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.second_pass import SecondPass

BUNDLED = Path(__file__).resolve().parent / "tiny_qwen3"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(40)), [7] * 20]
OutOfMemory = torch.OutOfMemoryError


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint()


def open_llm(folder: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "kvcache_block_size": 8,
        "max_num_seqs": 8,
    }
    return LLM(str(folder), **{**defaults, **options})


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def num_live_runners() -> int:
    gc.collect()
    return sum(type(thing) is ModelRunner for thing in gc.get_objects())


def run_out(*args: object, **options: object) -> None:
    raise OutOfMemory("out of memory for a test")


# memory runs out


def fail_at_warm_up(patch: pytest.MonkeyPatch) -> None:
    """A CPU needs no warm-up: make it run one, as a GPU does."""

    def allocate(self: ModelRunner) -> int:
        self._bind_pool(1)
        self.warmup_model()
        return 1

    patch.setattr(ModelRunner, "allocate_kv_cache", allocate)
    patch.setattr(ModelRunner, "run_model", run_out)


def fail_at_pool(patch: pytest.MonkeyPatch) -> None:
    """There is room for the first pool, of one block, and not for the second."""
    bind = ModelRunner._bind_pool

    def bind_small(self: ModelRunner, num_blocks: int) -> None:
        bind(self, num_blocks) if num_blocks == 1 else run_out()

    patch.setattr(ModelRunner, "_bind_pool", bind_small)


START_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "network": lambda patch: patch.setattr(model_runner, "build_network", run_out),
    "weights": lambda patch: patch.setattr(model_runner, "load_model", run_out),
    "buffers": lambda patch: patch.setattr(ModelRunner, "_allocate_buffers", run_out),
    "warm-up": fail_at_warm_up,
    "KV cache": fail_at_pool,
    "graphs": lambda patch: patch.setattr(ModelRunner, "capture_cudagraph", run_out),
}


@pytest.mark.parametrize("place", START_FAULTS)
def test_memory_that_runs_out_at_the_start_is_given_back(folder: Path, place: str) -> None:
    num_before = num_live_runners()
    with pytest.MonkeyPatch.context() as patch:
        START_FAULTS[place](patch)
        with pytest.raises(OutOfMemory, match="for a test"):
            open_llm(folder)
    assert num_live_runners() == num_before
    with open_llm(folder) as llm:
        assert len(answers(llm)) == 3


def interrupt_starts(folder: Path, strides: range, **options: object) -> int:
    """Open an engine with Ctrl-C at one function after the other; return how many were met."""
    num_interrupted = 0
    for count in strides:
        fault = Fault("entry", count, False, KeyboardInterrupt)
        with raising(fault) as raised, contextlib.suppress(KeyboardInterrupt):
            open_llm(folder, **options).exit()
        num_interrupted += bool(raised)
        raised.clear()
        if rank_pids():
            gc.collect()  # an engine that was being made when it was interrupted
        assert rank_pids() == {}
    return num_interrupted


def test_interrupted_start_leaves_no_memory(folder: Path) -> None:
    num_before = num_live_runners()
    assert interrupt_starts(folder, range(1, 2000, 9)) > 20
    assert num_live_runners() == num_before
    assert len(answers(open_llm(folder))) == 3


@pytest.mark.usefixtures("hard_timeout", "quick_start")
def test_interrupted_start_leaves_no_rank(folder: Path) -> None:
    open_llm(folder, tensor_parallel_size=2).exit()  # the fork server stays
    num_fds = len(os.listdir("/proc/self/fd"))
    assert interrupt_starts(folder, range(60, 700, 37), tensor_parallel_size=2) > 3
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == num_fds


STEP_FAULTS = {
    "prefill": (ModelRunner, "prepare_prefill"),
    "decode": (ModelRunner, "prepare_decode"),
    "network": (ModelRunner, "run_model"),
    "second pass": (SecondPass, "_draw"),
    "logprobs": (SecondPass, "_report"),
}


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("place", STEP_FAULTS)
def test_memory_that_runs_out_in_a_step_leaves_the_engine_usable(
    folder: Path, place: str, async_scheduling: bool
) -> None:
    params = GREEDY.replace(logprobs=2, repetition_penalty=1.2)
    with open_llm(folder, async_scheduling=async_scheduling) as llm:
        expected = answers(llm, params)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*STEP_FAULTS[place], run_out)
            with pytest.raises(OutOfMemory, match="for a test"):
                answers(llm, params)
        stats = llm.stats()
        assert llm.llm_engine.is_finished()
        assert stats.num_free_kvcache_blocks == stats.num_kvcache_blocks
        assert answers(llm, params) == expected


def test_memory_that_runs_out_at_wake_up_may_be_asked_for_again(folder: Path) -> None:
    with open_llm(folder) as llm:
        expected = answers(llm)
        llm.sleep()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelRunner, "_bind_pool", run_out)
            for _ in range(2):
                with pytest.raises(OutOfMemory, match="for a test"):
                    llm.wake_up()
        with pytest.raises(RuntimeError, match="wake_up"):
            answers(llm)
        llm.wake_up()
        assert answers(llm) == expected


def test_network_larger_than_memory_is_named(folder: Path, tmp_path: Path) -> None:
    """The allocator's own text doesn't say that it is config.json which asks for so much."""
    target = shutil.copytree(folder, tmp_path / "model")
    fields = json.loads((target / "config.json").read_text())
    huge = {"vocab_size": 2**24, "hidden_size": 2**20}
    (target / "config.json").write_text(json.dumps({**fields, **huge}))
    with pytest.raises(RuntimeError, match=r"no room for the network that config\.json describes"):
        open_llm(target)
    assert len(answers(open_llm(folder))) == 3


# ranks die


def verbs() -> dict[str, Callable[[LLM, dict[str, torch.Tensor]], object]]:
    """What LLM does with its ranks besides steps."""
    return {
        "load_weights": lambda llm, weights: llm.load_weights(weights),
        "sleep": lambda llm, weights: llm.sleep(),
        "wake_up": lambda llm, weights: llm.wake_up(),
        "exit": lambda llm, weights: llm.exit(),
    }


@pytest.mark.usefixtures("hard_timeout", "quick_start")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_copy_that_ends_leaves_the_ranks_alone(folder: Path) -> None:
    """At its end multiprocessing terminated them: the copy had inherited the list of them."""
    with open_llm(folder, tensor_parallel_size=2) as llm:
        before = answers(llm)
        pid = os.fork()
        if pid == 0:
            try:
                multiprocessing.util._exit_function()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert answers(llm) == before


@pytest.mark.usefixtures("hard_timeout", "quick_start")
@pytest.mark.parametrize("verb", verbs())
def test_rank_killed_between_calls_is_an_error_and_closes(folder: Path, verb: str) -> None:
    """The next command meets a dead rank; exit() has nothing to complain of."""
    num_fds = len(os.listdir("/proc/self/fd"))
    llm = open_llm(folder, tensor_parallel_size=2)
    weights = load_file(folder / "model.safetensors")
    if verb == "wake_up":
        llm.sleep()
    os.kill(rank_pids()["nanovllm rank 1"], signal.SIGKILL)
    if verb != "exit":
        with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
            verbs()[verb](llm, weights)
        with pytest.raises(RuntimeError, match="closed"):
            answers(llm)
    llm.exit()
    assert rank_pids() == {}
    del llm
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_fds + 8  # the fork server's own, the first time


FULL_DEV_SHM = """
mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && exec "$@"
"""
TWO_RANKS = """
from pathlib import Path
from nanovllm import LLM, SamplingParams
if __name__ == "__main__":
    try:
        Path("/dev/shm/another").write_bytes(bytes(4096))
    except OSError as error:
        print(error.strerror)
    with LLM(FOLDER, device="cpu", max_model_len=64, tensor_parallel_size=2) as llm:
        print(len(llm.generate("1 + 2 =", SamplingParams(max_tokens=4), use_tqdm=False)))
"""


def may_mount() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not may_mount(), reason="needs a mount namespace of its own")
def test_full_dev_shm_does_not_matter(tmp_path: Path) -> None:
    """Containers give it 64 MB, and others fill it; ranks share memory that isn't in it."""
    path = tmp_path / "script.py"
    path.write_text(TWO_RANKS.replace("FOLDER", repr(str(BUNDLED))))
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", FULL_DEV_SHM, "sh", sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(BUNDLED.parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert (done.stdout, done.returncode) == ("No space left on device\n1\n", 0), done.stderr


# hostile files


def header_of(content: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: object, numbers: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


HOSTILE_ENTRIES = {
    "mislabelled as float16": {"dtype": "F16"},
    "mislabelled as float64": {"dtype": "F64"},
    "of an unknown kind": {"dtype": "F7"},
    "of a kind that is no text": {"dtype": 5},
    "with another shape": {"shape": [2**20, 2**20]},
    "with an overflowing shape": {"shape": [2**40, 2**40]},
    "with a negative shape": {"shape": [-1, 64]},
    "with a huge int": {"shape": [10**30]},
    "ending before it begins": {"data_offsets": [64, 0]},
    "beginning before the file": {"data_offsets": [-256, 0]},
    "overlapping another": {"data_offsets": [0, 256]},
    "without offsets": {"data_offsets": None},
}


@pytest.mark.parametrize("how", HOSTILE_ENTRIES)
def test_hostile_header_of_weights_is_refused(folder: Path, tmp_path: Path, how: str) -> None:
    path = shutil.copytree(folder, tmp_path / "model") / "model.safetensors"
    header, numbers = header_of(path.read_bytes())
    header["model.layers.0.mlp.down_proj.weight"].update(HOSTILE_ENTRIES[how])
    path.write_bytes(with_header(header, numbers))
    with pytest.raises(ValueError, match=r"can't be read as safetensors|down_proj|model\.safetens"):
        open_llm(path.parent)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """The file with some bytes of its header changed, or cut somewhere."""
    (length,) = struct.unpack_from("<Q", content)
    if rng.random() < 0.2:
        return content[: rng.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(rng.choice((1, 2, 8))):
        changed[rng.randrange(8 + length)] = rng.choice(b'\0\xff"{}[]:,0519aF ')
    return bytes(changed)


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_of_weights_is_a_value_error_or_harmless(
    folder: Path, tmp_path: Path, seed: int
) -> None:
    path = shutil.copytree(folder, tmp_path / "model") / "model.safetensors"
    content, rng = path.read_bytes(), random.Random(seed)
    for _ in range(20):
        path.write_bytes(damaged(rng, content))
        with contextlib.suppress(ValueError), open_llm(path.parent) as llm:
            assert len(answers(llm)) == 3


def deep_list(depth: int) -> list[object]:
    nested: list[object] = []
    for _ in range(depth):
        nested = [nested]
    return nested


HOSTILE_VALUES = [
    None, True, 0, -1, 3.5, 1e308, float("nan"), float("inf"), 2**31, 2**64, 10**30, "", "x", "\0",
    [], {}, [None], {"a": 1}, {"content": 5}, ["<|im_end|>", 5], deep_list(50), "../../etc/passwd",
    "{{ ().__class__ }}",
]  # fmt: skip
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


def places_in(value: object) -> Iterator[tuple[object, object]]:
    """Every container and key of it."""
    keys: list[object] = []
    if isinstance(value, dict):
        keys = list(value)[:100]
    elif isinstance(value, list):
        keys = list(range(min(len(value), 10)))
    for key in keys:
        yield value, key
        yield from places_in(value[key])  # type: ignore[index]


def copy_of_bundled(target: Path) -> Path:
    target.mkdir()
    for name in (*MODEL_FILES, "model.safetensors"):
        shutil.copy(BUNDLED / name, target / name)
    return target


def use_all_of(folder: Path) -> None:
    with LLM(str(folder), device="cpu", max_model_len=64, num_kvcache_blocks=2) as llm:
        params = SamplingParams(max_tokens=3, logprobs=1, stop="x")
        llm.generate(["1 + 2 =", "<|im_start|>é"], params, use_tqdm=False)
        llm.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)


@pytest.mark.parametrize("name", MODEL_FILES)
@pytest.mark.parametrize("num_changes", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_values_in_a_model_file_are_value_errors_or_harmless(
    tmp_path: Path, name: str, num_changes: int
) -> None:
    folder, rng = copy_of_bundled(tmp_path / "model"), random.Random(name)
    text = (folder / name).read_text()
    for _ in range(num_changes):
        values = json.loads(text)
        container, key = rng.choice([*places_in(values)][: rng.choice((20, 1000))])
        container[key] = rng.choice(HOSTILE_VALUES)  # type: ignore[index]
        (folder / name).write_text(json.dumps(values))
        with contextlib.suppress(ValueError):
            use_all_of(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", "[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_damaged_tokenizer_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    folder = copy_of_bundled(tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        use_all_of(folder)
    with LLM(str(folder), device="cpu", skip_tokenizer_init=True, max_model_len=64) as llm:
        assert llm.generate([[1, 2]], GREEDY, use_tqdm=False)  # token ids need none of it


def test_missing_tokenizer_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    folder = copy_of_bundled(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="skip_tokenizer_init=True"):
        use_all_of(folder)


@pytest.mark.parametrize(
    "template", [5, ["x"], {"a": "b"}, "{% for %}", "{{ 1 / 0 }}", "{{ messages.x.y.z }}"]
)
def test_chat_template_that_cannot_be_used_is_a_value_error(
    tmp_path: Path, template: object
) -> None:
    """transformers and jinja raise TypeError, AttributeError and a dozen kinds of their own."""
    folder = copy_of_bundled(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    with LLM(str(folder), device="cpu", max_model_len=64) as llm:
        with pytest.raises(ValueError, match="chat template|chat_template|tokenizer"):
            llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)
        assert llm.generate("1 + 2 =", GREEDY, use_tqdm=False)
