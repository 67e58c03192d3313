"""The whole engine on one GPU: numerics by backend, graphs against eager, memory, failures.

The model has the shape of Qwen3-0.6B and random weights, so that nothing needs to be downloaded:
all its 28 layers for numerics, four for the rest. Numerics are measured on the runner itself, which
is told which tokens come next: the same inputs for every backend, with no draw in between.
"""

import gc
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import ScheduledBatch, new_row
from nanovllm.engine.cuda_graph import StepGraphs
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.kernels.row_state import StepShape

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BLOCK = 256
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
TIE = 1e-4  # float32 logits closer than this may be ordered either way
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=42)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-0.6b-shape")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-0.6b")
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 28}))
    return path


def open_llm(folder: Path, **options: object) -> LLM:
    """Eight rows, four of the smallest graphs, a small pool."""
    defaults: dict[str, object] = {
        "device": DEVICE,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "num_kvcache_blocks": 48,
    }
    return LLM(str(folder), **{**defaults, **options})


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.llm_engine._runner
    assert isinstance(runner, ModelRunner)
    return runner


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG["vocab_size"], length).tolist()


@contextmanager
def without_graphs(llm: LLM) -> Iterator[None]:
    """Decode eagerly inside the block, on the same engine."""
    runner = runner_of(llm)
    graphs, runner.graphs = runner.graphs, None
    yield
    runner.graphs = graphs


# logits


class Driver:
    """Runs steps of given tokens on an engine's runner and returns their logits."""

    def __init__(self, llm: LLM) -> None:
        self._runner = runner_of(llm)
        self._num_blocks = 1  # used; block 0 is left for what warm-up wrote
        self._logits: torch.Tensor | None = None
        self._run_model = self._runner.run_model
        self._runner.run_model = self._watch  # type: ignore[method-assign]

    def _watch(self, inputs: object) -> torch.Tensor:
        self._logits = self._run_model(inputs).clone()
        return self._logits

    def blocks(self, num_tokens: int) -> list[int]:
        """Blocks that nobody has used, enough for `num_tokens`."""
        start, self._num_blocks = self._num_blocks, self._num_blocks + -(-num_tokens // BLOCK)
        return list(range(start, self._num_blocks))

    def take_row(self, row: int, blocks: list[int]) -> tuple[list[object], list[object]]:
        """Records that give `row` to a new sequence with these blocks."""
        return [new_row(row, 0.0, 0)], [(row, i, block) for i, block in enumerate(blocks)]

    def step(
        self,
        prefills: list[tuple[int, int, list[int]]] = (),  # type: ignore[assignment]
        decodes: list[tuple[int, int, int]] = (),  # type: ignore[assignment]
        new: list[tuple[list[object], list[object]]] = (),  # type: ignore[assignment]
    ) -> torch.Tensor:
        """Float32 logits of each lane's last token, prefill lanes first.

        Args:
            prefills: (row, position of the first token, tokens).
            decodes: (row, position, token).
            new: What `take_row` returned.
        """
        for row, _, token in decodes:
            self._runner.row_state.last_tokens[row] = token
        flat = [token for _, _, tokens in prefills for token in tokens]
        lanes = [(row, start) for row, start, _ in (*prefills, *decodes)]
        rows = [record for records, _ in new for record in records]
        blocks = [record for _, records in new for record in records]
        batch = ScheduledBatch(
            rows=np.array([row for row, _ in lanes], dtype=np.int32),
            starts=np.array([start for _, start in lanes], dtype=np.int32),
            num_tokens=np.array([len(tokens) for _, _, tokens in prefills], dtype=np.int32),
            prompt_tokens=np.array(flat, dtype=np.int32),
            new_rows=np.array(rows, dtype=np.int32).reshape(-1, 4),
            new_blocks=np.array(blocks, dtype=np.int32).reshape(-1, 3),
        )
        self._logits = None
        self._runner.run(batch)
        # A replayed graph passes no Python: its logits stay in the buffer.
        logits = self._runner.logits if self._logits is None else self._logits
        return logits[: len(lanes)].float().clone()


LENGTHS = [1, 17, 256, 300, 700, 1000]


def run_scenario(driver: Driver) -> dict[str, torch.Tensor]:
    """Logits of every kind of step, (rows, vocabulary) each, for the same tokens."""
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    follow = np.random.default_rng(9).integers(0, CONFIG["vocab_size"], (8, 8)).tolist()
    blocks = [driver.blocks(length + 8) for length in LENGTHS]
    out: dict[str, torch.Tensor] = {}
    out["fresh prefill"] = driver.step(
        prefills=[(row, 0, prompt) for row, prompt in enumerate(prompts)],
        new=[driver.take_row(row, its_blocks) for row, its_blocks in enumerate(blocks)],
    )
    longest = prompts[-1]
    taken = [driver.take_row(6, driver.blocks(1008))]
    for start, end in ((0, 400), (400, 800), (800, 1000)):
        out["chunked prefill"] = driver.step([(6, start, longest[start:end])], new=taken)
        taken = []
    shared = blocks[-1][:3] + driver.blocks(BLOCK)
    out["prefix-cached prefill"] = driver.step(
        [(7, 768, longest[768:])], new=[driver.take_row(7, shared)]
    )
    steps = []
    for i in range(4):
        lanes = [(row, len(p) + i, follow[row][i]) for row, p in enumerate(prompts)]
        steps.append(driver.step(decodes=lanes))
    out["decode"] = torch.cat(steps)
    out["decode alone"] = torch.cat(
        [driver.step(decodes=[(4, 700 + i, follow[4][i])]) for i in range(4, 6)]
    )
    # Positions that row 4 has stored just now; mixed lanes below need them of every row.
    pairs = [[(row, LENGTHS[row] + i, follow[row][i]) for row in (1, 5)] for i in (4, 5)]
    out["decode in pairs"] = torch.cat([driver.step(decodes=lanes) for lanes in pairs])
    lanes = [(row, LENGTHS[row] + 6, follow[row][6]) for row in (1, 4, 5)]
    out["mixed"] = driver.step(
        [(0, 0, longest[:333])], decodes=lanes, new=[driver.take_row(0, driver.blocks(333))]
    )
    return out


def rows_errors(ours: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return ((ours - right).norm(dim=1) / right.norm(dim=1)).cpu()


@pytest.fixture(scope="module")
def bf16_weights(whole_folder: Path) -> dict[str, torch.Tensor]:
    with open_llm(
        whole_folder, enforce_eager=True, dtype="bfloat16", attention_backend="torch"
    ) as llm:
        parameters = runner_of(llm).model.named_parameters()
        return {name: parameter.clone() for name, parameter in parameters}


@pytest.fixture(scope="module")
def right_logits(
    whole_folder: Path, bf16_weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of the torch backend in float32, from the very weights of the bf16 engines."""
    with open_llm(whole_folder, dtype="float32", attention_backend="torch") as llm:
        for name, parameter in runner_of(llm).model.named_parameters():
            parameter.copy_(bf16_weights[name])
        return run_scenario(Driver(llm))


@pytest.fixture(scope="module")
def torch_errors(whole_folder: Path, right_logits: dict[str, torch.Tensor]) -> dict[str, float]:
    """Worst row of each kind of step in bf16, by the torch backend."""
    with open_llm(whole_folder, dtype="bfloat16", attention_backend="torch") as llm:
        logits = run_scenario(Driver(llm))
    return {kind: float(rows_errors(logits[kind], right_logits[kind]).max()) for kind in logits}


def in_words(errors: dict[str, float]) -> str:
    return ", ".join(f"{kind} {error:.1e}" for kind, error in errors.items())


@pytest.mark.parametrize("backend", ["triton", "flash_attn", "auto"])
def test_bf16_logits_are_as_close_to_float32_as_the_torch_backends(
    whole_folder: Path,
    right_logits: dict[str, torch.Tensor],
    torch_errors: dict[str, float],
    backend: str,
) -> None:
    """Replayed and eager, every kind of step."""
    try:
        # Of 512 tokens, so that the prompt of the mixed step fits a captured one.
        llm = open_llm(
            whole_folder, dtype="bfloat16", attention_backend=backend, max_num_mixed_tokens=512
        )
    except ImportError as error:
        pytest.skip(str(error))
    with llm:
        assert llm.stats().graph_batch_sizes == (1, 2, 4, 8)
        graphs = runner_of(llm).graphs
        assert graphs is not None
        assert StepShape(16, 480, 8) in graphs._graphs
        driver = Driver(llm)
        found = {"graphs": run_scenario(driver)}
        with without_graphs(llm):
            found["eager"] = run_scenario(driver)
    overall = max(torch_errors.values())
    report = [f"torch backend: {in_words(torch_errors)}"]
    for mode, logits in found.items():
        assert all(torch.isfinite(rows).all() for rows in logits.values())
        worst = {
            kind: float(rows_errors(logits[kind], right_logits[kind]).max()) for kind in logits
        }
        report.append(f"{backend}, {mode}: {in_words(worst)}")
        for kind, error in worst.items():
            assert error < 2e-2, report
            # Of a kind with one or two rows torch's own worst may be lucky, by half at most.
            assert error <= 1.5 * max(torch_errors[kind], overall / 2), report
    print("\n" + "\n".join(report))


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_replay_after_a_wider_batch_reads_no_stale_column(folder: Path, backend: str) -> None:
    """Lanes of 5, 2, then 5 blocks; unused columns of the tables name a block of NaN."""
    try:
        llm = open_llm(folder, dtype="bfloat16", attention_backend=backend)
    except ImportError as error:
        pytest.skip(str(error))
    with llm:
        driver, runner = Driver(llm), runner_of(llm)
        wide, narrow, poison = prompt_of(1100), prompt_of(300, 1), 47
        blocks = [driver.blocks(1280), driver.blocks(512)]
        driver.step(
            [(0, 0, wide), (1, 0, narrow)],
            new=[driver.take_row(row, its_blocks) for row, its_blocks in enumerate(blocks)],
        )
        assert runner.kv_cache is not None
        runner.kv_cache[:, :, poison] = torch.nan
        for row, its_blocks in enumerate(blocks):
            runner.row_state.block_tables[row, len(its_blocks) :] = poison
            runner.buffers.block_tables[:, len(its_blocks) :] = poison
        lanes = {"wide": (0, 1100, 5), "narrow": (1, 300, 6)}
        order = ["wide", "narrow", "wide", "narrow"]
        replayed = [driver.step(decodes=[lanes[name]]) for name in order]
        with without_graphs(llm):
            eager = [driver.step(decodes=[lanes[name]]) for name in order]
    for ours, right in zip(replayed, eager, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, right)


# float32


def spread(llm: LLM) -> LLM:
    """Larger random weights, so that greedy outputs vary and depend on attention."""
    for parameter in runner_of(llm).model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(2.5)
    return llm


def tokens_of(llm: LLM, prompts: list[list[int]], params: object = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[LLM]:
    """The torch backend in float32, eager, nothing in flight."""
    options = {"dtype": "float32", "attention_backend": "torch", "async_scheduling": False}
    with spread(open_llm(folder, **options)) as opened:
        yield opened


@pytest.fixture(scope="module")
def triton_llm(folder: Path) -> Iterator[LLM]:
    """The Triton backend in float32, graphs, overlap."""
    with spread(open_llm(folder, dtype="float32", attention_backend="triton")) as opened:
        yield opened


def prompts_alike() -> list[list[int]]:
    """Twelve prompts of 1 to 900 tokens, most of which begin alike."""
    common = prompt_of(900)
    shapes = [(0, 1), (256, 0), (256, 1), (0, 100), (512, 0), (300, 7), (700, 33), (899, 1)]
    shapes += [(16, 0), (17, 200), (900, 0), (640, 60)]
    return [common[:shared] + prompt_of(own, seed=i) for i, (shared, own) in enumerate(shapes)]


@pytest.fixture(scope="module")
def right_answers(reference: LLM) -> list[list[int]]:
    answers = tokens_of(reference, prompts_alike())
    assert sum(len(set(tokens)) == 1 for tokens in answers) <= 1
    return answers


def check_answers(reference: LLM, right: list[list[int]], ours: list[list[int]]) -> None:
    """Equal up to the first place where the reference hardly prefers its own token."""
    for prompt, its_right, its_ours in zip(prompts_alike(), right, ours, strict=True):
        if its_ours == its_right:
            continue
        place = next(i for i, token in enumerate(its_right) if its_ours[i] != token)
        driver = Driver(reference)
        tokens_of(reference, [prompt + its_right[:place]], GREEDY.replace(max_tokens=1))
        assert driver._logits is not None
        logits = driver._logits[0]
        gap = float(logits.max() - logits[its_ours[place]])
        assert gap < TIE, f"prompt of {len(prompt)} tokens, output {place}: {gap} below the best"


def test_float32_tokens_are_the_same_by_graph_and_eager(
    triton_llm: LLM, reference: LLM, right_answers: list[list[int]]
) -> None:
    assert triton_llm.stats().graph_batch_sizes == (1, 2, 4, 8)
    assert triton_llm.stats().decode_backend == "triton"
    triton_llm.reset_prefix_cache()
    cold = tokens_of(triton_llm, prompts_alike())
    check_answers(reference, right_answers, cold)
    check_answers(reference, right_answers, tokens_of(triton_llm, prompts_alike()))  # warm
    with without_graphs(triton_llm):
        triton_llm.reset_prefix_cache()
        check_answers(reference, right_answers, tokens_of(triton_llm, prompts_alike()))
    triton_llm.reset_prefix_cache()
    assert tokens_of(triton_llm, prompts_alike()) == cold  # the same bits twice


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"num_kvcache_blocks": 9, "max_num_mixed_tokens": 0},  # preemptions
        {"kvcache_block_size": 16, "num_kvcache_blocks": 512, "max_num_batched_tokens": 200},
        {"max_num_mixed_tokens": 64, "enable_prefix_caching": False},
        {"max_num_mixed_tokens": 256},
        {"max_num_mixed_tokens": 64, "num_kvcache_blocks": 9, "async_scheduling": False},
        {"max_num_mixed_tokens": 64, "enforce_eager": True},
    ],
)
def test_float32_tokens_are_the_same_however_they_are_scheduled(
    folder: Path, reference: LLM, right_answers: list[list[int]], options: dict[str, object]
) -> None:
    options = {"dtype": "float32", "attention_backend": "triton", **options}
    with spread(open_llm(folder, **options)) as llm:
        check_answers(reference, right_answers, tokens_of(llm, prompts_alike()))
        if options.get("num_kvcache_blocks") == 9 and options["max_num_mixed_tokens"] == 0:
            assert llm.stats().num_preemptions > 0


def test_seed_repeats_beside_other_mates_and_leaves_random_states_alone(triton_llm: LLM) -> None:
    states = torch.get_rng_state(), torch.cuda.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()[1].tolist()
    prompt = prompt_of(30)
    alone = tokens_of(triton_llm, [prompt], DRAWN)[0]
    mates = [prompt_of(40 * i + 1, seed=i) for i in range(11)]
    wishes = [DRAWN.replace(seed=None, temperature=i / 4, max_tokens=4 + i) for i in range(11)]
    for place in (0, 5, 11):
        prompts = [*mates[:place], prompt, *mates[place:]]
        params = [*wishes[:place], DRAWN, *wishes[place:]]
        assert tokens_of(triton_llm, prompts, params)[place] == alone
    with without_graphs(triton_llm):
        assert tokens_of(triton_llm, [prompt], DRAWN)[0] == alone
    assert tokens_of(triton_llm, [prompt], DRAWN.replace(seed=43))[0] != alone
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
    assert random.getstate() == states[2]
    assert np.random.get_state()[1].tolist() == numpy_state


def test_greedy_rows_beside_drawn_ones_stay_as_they_are(triton_llm: LLM) -> None:
    prompts = [prompt_of(20 + i, seed=i) for i in range(8)]
    greedy = GREEDY.replace(max_tokens=12)
    wishes = [greedy if i % 2 else DRAWN.replace(seed=i) for i in range(8)]
    alone = [tokens_of(triton_llm, [p], w)[0] for p, w in zip(prompts, wishes, strict=True)]
    assert tokens_of(triton_llm, prompts, wishes) == alone


def test_cpu_draws_the_same_tokens(triton_llm: LLM, folder: Path) -> None:
    """The same weights, seeds and noise on either device."""
    prompt = prompt_of(30)
    wishes = [DRAWN.replace(max_tokens=6), GREEDY.replace(max_tokens=6)]
    ours = tokens_of(triton_llm, [prompt] * 2, wishes)
    weights = dict(runner_of(triton_llm).model.named_parameters())
    with open_llm(folder, device="cpu", dtype="float32", max_num_seqs=2) as llm:
        for name, parameter in runner_of(llm).model.named_parameters():
            parameter.copy_(weights[name])
        assert tokens_of(llm, [prompt] * 2, wishes) == ours


@pytest.mark.parametrize("length", [256, 512, 1024])
def test_fully_cached_prompt_runs_its_last_token(triton_llm: LLM, length: int) -> None:
    prompt, params = prompt_of(length, seed=3), GREEDY.replace(max_tokens=6)
    triton_llm.reset_prefix_cache()
    cold = triton_llm.generate([prompt], params, use_tqdm=False)[0]
    warm = triton_llm.generate([prompt], params, use_tqdm=False)[0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, length - BLOCK)
    assert warm.token_ids == cold.token_ids


def test_evicted_prompt_is_computed_again(folder: Path) -> None:
    options = {"dtype": "float32", "attention_backend": "triton", "num_kvcache_blocks": 4}
    first, second = prompt_of(1000, 1), prompt_of(1000, 2)
    with spread(open_llm(folder, **options)) as llm:
        expected, other = tokens_of(llm, [first]), tokens_of(llm, [second])
        (again,) = llm.generate([first], GREEDY, use_tqdm=False)
        assert again.num_cached_tokens == 0
        assert [again.token_ids] == expected
        assert tokens_of(llm, [second]) == other


def test_replaced_weights_need_a_reset_which_running_requests_refuse(folder: Path) -> None:
    prompt = prompt_of(600)
    with spread(open_llm(folder, dtype="float32", attention_backend="triton")) as llm:
        before = tokens_of(llm, [prompt])
        stream = llm.stream([prompt, prompt[:5]], GREEDY, deltas=True)
        next(stream)
        with pytest.raises(RuntimeError, match="finish or abort"):
            llm.reset_prefix_cache()
        stream.close()
        for layer in runner_of(llm).model.model.layers:
            layer.self_attn.qkv_proj.weight.neg_()
            layer.mlp.down_proj.weight.mul_(0.5)
        llm.reset_prefix_cache()
        (after,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert after.num_cached_tokens == 0
        assert [after.token_ids] != before
        llm.reset_prefix_cache()
        with without_graphs(llm):
            assert tokens_of(llm, [prompt]) == [after.token_ids]


# failures and company


def test_error_in_a_step_leaves_the_engine_usable(
    triton_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [prompt_of(30 + i) for i in range(4)], GREEDY.replace(max_tokens=8)
    expected = tokens_of(triton_llm, prompts, params)
    launch, calls = runner_of(triton_llm).launch, []

    def fail(batch: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return launch(batch)

    with monkeypatch.context() as patch:
        patch.setattr(runner_of(triton_llm), "launch", fail)
        with pytest.raises(KeyboardInterrupt):
            tokens_of(triton_llm, prompts, params)
    stats = triton_llm.stats()
    assert stats.num_free_kvcache_blocks == stats.num_kvcache_blocks
    assert tokens_of(triton_llm, prompts, params) == expected


@pytest.mark.parametrize("is_launched", [False, True])
def test_step_that_breaks_off_around_its_launch_leaves_host_and_device_in_step(
    triton_llm: LLM, monkeypatch: pytest.MonkeyPatch, is_launched: bool
) -> None:
    """The slot is filled; the device may have taken its turn, and the host doesn't know."""
    prompts, params = [prompt_of(30 + i) for i in range(4)], GREEDY.replace(max_tokens=8)
    expected = tokens_of(triton_llm, prompts, params)
    graphs = runner_of(triton_llm).graphs
    assert graphs is not None
    replay = graphs.replay
    for num_replays in (1, 2, 3):
        calls: list[StepShape] = []

        def fail(
            shape: StepShape, calls: list[StepShape] = calls, limit: int = num_replays
        ) -> None:
            calls.append(shape)
            if len(calls) < limit or is_launched:
                replay(shape)
            if len(calls) == limit:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(graphs, "replay", fail)
            with pytest.raises(KeyboardInterrupt):
                tokens_of(triton_llm, prompts, params)
        assert tokens_of(triton_llm, prompts, params) == expected


def test_second_engine_and_default_device_do_not_disturb(folder: Path, triton_llm: LLM) -> None:
    prompts, params = [prompt_of(30), prompt_of(300)], GREEDY.replace(max_tokens=8)
    expected = tokens_of(triton_llm, prompts, params)
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.float64)
    try:
        with spread(open_llm(folder, dtype="float32", attention_backend="triton")) as other:
            engines = [triton_llm.llm_engine, other.llm_engine]
            ids = [[engine.add_request(p, params) for p in prompts] for engine in engines]
            done: list[dict[str, list[int]]] = [{}, {}]
            while not all(engine.is_finished() for engine in engines):
                for engine, outputs in zip(engines, done, strict=True):
                    outputs.update({o.request_id: o.token_ids for o in engine.step()})
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for outputs, its_ids in zip(done, ids, strict=True):
        assert [outputs[i] for i in its_ids] == expected
    assert not torch.distributed.is_initialized()


# memory


# What an engine may leave with the allocator: workspaces that cuBLAS keeps for a stream.
LEFT_BYTES = 100e6


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_closed_engine_gives_its_memory_back_at_once(folder: Path) -> None:
    settle()
    before = torch.cuda.memory_allocated()
    llm = open_llm(folder, dtype="bfloat16")
    tokens_of(llm, [prompt_of(10)])
    assert torch.cuda.memory_allocated() - before > 400e6
    gc.disable()
    llm.exit()
    left = torch.cuda.memory_allocated() - before
    gc.enable()
    assert left < LEFT_BYTES


@pytest.mark.parametrize("num_engines", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_engines_come_and_go_with_flat_memory(folder: Path, num_engines: int) -> None:
    """From the third on: the first ones fill what is kept for all, on the device and the host."""
    used: list[tuple[int, int]] = []
    for _ in range(num_engines):
        with open_llm(folder, dtype="bfloat16", max_num_mixed_tokens=64) as llm:
            tokens_of(llm, [prompt_of(10), prompt_of(300)])
        del llm
        settle()
        statm = Path("/proc/self/statm").read_text().split()
        used.append((torch.cuda.memory_reserved(), int(statm[1]) * os.sysconf("SC_PAGE_SIZE")))
    device_bytes, host_bytes = zip(*used[2:], strict=True)
    assert max(device_bytes) - min(device_bytes) < LEFT_BYTES
    assert host_bytes[-1] - host_bytes[0] < 64e6


def test_memory_of_others_is_not_charged(folder: Path) -> None:
    """A tenth of the GPU is ours, whoever holds more than that already."""
    options = {"num_kvcache_blocks": None, "gpu_memory_utilization": 0.1, "dtype": "bfloat16"}
    settle()
    with open_llm(folder, **options) as llm:
        alone = llm.stats()
    settle()
    total = torch.cuda.mem_get_info()[1]
    others = torch.empty(int(0.2 * total), dtype=torch.uint8, device="cuda")
    with open_llm(folder, **options) as llm:
        beside = llm.stats()
    del others
    settle()
    assert alone.kvcache_bytes < 0.1 * total
    assert abs(beside.num_kvcache_blocks - alone.num_kvcache_blocks) * 20 < alone.num_kvcache_blocks


def test_pool_that_comes_out_empty_names_numbers_and_knob(folder: Path) -> None:
    settle()
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match=r"no room for a KV cache.*GiB.*raise gpu_memory_util"):
        open_llm(folder, num_kvcache_blocks=None, gpu_memory_utilization=0.001)
    settle()
    assert torch.cuda.memory_allocated() - before < LEFT_BYTES


def test_largest_steps_fit_after_the_pool_took_the_rest(folder: Path) -> None:
    """The largest prefill, then the largest decode with filters and without, at 90% of the GPU."""
    options = {"num_kvcache_blocks": None, "max_num_seqs": 64, "max_num_batched_tokens": 16384}
    settle()
    with open_llm(folder, dtype="bfloat16", **options) as llm:
        assert llm.stats().kvcache_bytes > 0.5 * torch.cuda.mem_get_info()[1]
        prompts = [prompt_of(256, seed=i) for i in range(64)]
        wishes = [
            DRAWN.replace(max_tokens=4, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(64)
        ]
        assert len(tokens_of(llm, prompts, wishes)) == 64
        prompts = [prompt_of(2000, seed=i) for i in range(8)]
        assert len(tokens_of(llm, prompts, GREEDY.replace(max_tokens=2))) == 8
    settle()


def test_interrupted_capture_is_raised_and_gives_back_its_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: StepGraphs, run: object) -> None:
        raise KeyboardInterrupt

    settle()
    before, rng_state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    monkeypatch.setattr(StepGraphs, "_capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_llm(folder, dtype="bfloat16")
    settle()
    assert torch.equal(torch.cuda.get_rng_state(), rng_state)
    assert torch.cuda.memory_allocated() - before < LEFT_BYTES


# captures that fail (last:
# what they leave behind would show in every later test)


def _raise() -> None:
    raise RuntimeError("no capture today")


def _synchronize() -> None:
    torch.cuda.synchronize()  # forbidden while a stream is captured


def _run_out_of_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("break_capture", [_raise, _synchronize, _run_out_of_memory])
def test_failed_capture_decodes_eagerly_and_leaves_no_trace(
    folder: Path,
    triton_llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    break_capture: Callable[[], None],
) -> None:
    prompts, params = [prompt_of(30), prompt_of(300)], GREEDY.replace(max_tokens=8)
    expected = tokens_of(triton_llm, prompts, params)
    run_shape = ModelRunner._run_shape

    def broken(self: ModelRunner, *args: object) -> None:
        run_shape(self, *args)  # type: ignore[arg-type]
        if torch.cuda.is_current_stream_capturing():
            break_capture()

    monkeypatch.setattr(ModelRunner, "_run_shape", broken)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    options = {"dtype": "float32", "attention_backend": "triton"}
    with pytest.warns(UserWarning, match="capture failed, decoding eagerly"):
        llm = spread(open_llm(folder, **options))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"
    assert not torch.cuda.is_current_stream_capturing()
    with llm:
        assert llm.stats().graph_batch_sizes == ()
        assert tokens_of(llm, prompts, params) == expected
    monkeypatch.undo()
    torch.randn(3, device="cuda")  # the generator isn't left in a capturing state
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="CUDA graph capture failed")
        with spread(open_llm(folder, **options)) as llm:
            assert llm.stats().graph_batch_sizes == (1, 2, 4, 8)
            assert tokens_of(llm, prompts, params) == expected
