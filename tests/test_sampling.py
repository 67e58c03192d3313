"""Draws of a whole engine: exact, seeded, and nobody else's business.

Everything is float32 on the CPU, where a request's tokens are promised to be the same whatever runs
beside it.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MakeCheckpoint

from nanovllm import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=42)
UNSEEDED = DRAWN.replace(seed=None)


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as opened:
        yield opened


def open_llm(folder: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "kvcache_block_size": 16,
        "max_num_seqs": 32,
    }
    return LLM(str(folder), **{**defaults, **options})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 900, length).tolist()


def run(llm: LLM, prompts: list[list[int]], params: object) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


# greedy


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 9e-6])
def test_tiny_temperature_is_argmax(llm: LLM, temperature: float) -> None:
    prompts = [prompt_of(10 + i, seed=i) for i in range(6)]
    assert run(llm, prompts, GREEDY.replace(temperature=temperature)) == run(llm, prompts, GREEDY)


def test_greedy_and_drawn_rows_of_one_batch_stay_as_they_are_alone(llm: LLM) -> None:
    prompts = [prompt_of(10 + i, seed=i) for i in range(8)]
    wishes = [GREEDY if i % 2 else DRAWN.replace(seed=i) for i in range(8)]
    alone = [run(llm, [p], w)[0] for p, w in zip(prompts, wishes, strict=True)]
    assert run(llm, prompts, wishes) == alone
    assert run(llm, prompts[::-1], wishes[::-1]) == alone[::-1]


@pytest.mark.parametrize("params", [GREEDY, DRAWN, DRAWN.replace(temperature=100.0)])
def test_extreme_logits_are_no_nan(
    llm: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of ±1e4, and rows of -inf but for two tokens of which one is 1e4 ahead."""
    run_model = llm.llm_engine._runner.run_model

    def change(inputs: object) -> torch.Tensor:
        logits = run_model(inputs)
        logits[:] = -1e4
        logits[1:] = -torch.inf
        logits[:, 17] = -1e4
        logits[:, 5] = 1e4
        return logits

    monkeypatch.setattr(llm.llm_engine._runner, "run_model", change)
    answers = run(llm, [[1], [2], [3]], params)
    assert answers == [[5] * 12] * 3


def test_token_that_cannot_be_is_never_drawn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run_model = llm.llm_engine._runner.run_model

    def change(inputs: object) -> torch.Tensor:
        logits = run_model(inputs)
        logits[:, 2:] = -torch.inf
        return logits

    monkeypatch.setattr(llm.llm_engine._runner, "run_model", change)
    answers = run(llm, [[1]] * 20, UNSEEDED.replace(temperature=50.0))
    assert {token for tokens in answers for token in tokens} == {0, 1}


# seeds


@pytest.fixture(scope="module")
def seeded(llm: LLM) -> list[int]:
    """The tokens of seed 42 for one prompt, alone."""
    return run(llm, [prompt_of(30)], DRAWN)[0]


def test_seed_repeats_and_other_seeds_differ(llm: LLM, seeded: list[int]) -> None:
    assert run(llm, [prompt_of(30)], DRAWN)[0] == seeded
    others = run(llm, [prompt_of(30)] * 20, [DRAWN.replace(seed=s) for s in range(20)])
    assert len({tuple(tokens) for tokens in [*others, seeded]}) == 21
    big = [DRAWN.replace(seed=s) for s in (0, 2**32, 2**63 - 1)]  # all 63 bits count
    assert len({tuple(tokens) for tokens in run(llm, [prompt_of(30)] * 3, big)}) == 3


@pytest.mark.parametrize("place", [0, 3, 7])
def test_seed_does_not_depend_on_batch_mates(llm: LLM, seeded: list[int], place: int) -> None:
    prompts = [prompt_of(5 + 9 * i, seed=50 + i) for i in range(7)]
    wishes = [UNSEEDED.replace(max_tokens=3 + 2 * i, temperature=i / 3) for i in range(7)]
    prompts.insert(place, prompt_of(30))
    wishes.insert(place, DRAWN)
    assert run(llm, prompts, wishes)[place] == seeded


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"kvcache_block_size": 256},
        {"max_num_batched_tokens": 7},
        {"enable_prefix_caching": False},
        {"seed": 9},
        {"max_num_seqs": 1},
        {"max_num_mixed_tokens": 8},
    ],
)
def test_seed_does_not_depend_on_the_engine(
    folder: Path, seeded: list[int], options: dict[str, object]
) -> None:
    with open_llm(folder, **options) as other:
        prompts = [prompt_of(40, seed=3), prompt_of(30), prompt_of(30)]
        assert run(other, prompts, [UNSEEDED, DRAWN, DRAWN])[1:] == [seeded] * 2


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_seed_survives_preemption(folder: Path, llm: LLM, async_scheduling: bool) -> None:
    prompts = [prompt_of(30, seed=i) for i in range(8)]
    wishes = [DRAWN.replace(seed=i, max_tokens=40) for i in range(8)]
    expected = run(llm, prompts, wishes)
    with open_llm(folder, num_kvcache_blocks=12, async_scheduling=async_scheduling) as tight:
        assert run(tight, prompts, wishes) == expected
        assert tight.stats().num_preemptions > 2


def test_without_a_seed_reruns_repeat_and_calls_differ(folder: Path) -> None:
    prompts = [prompt_of(30)] * 4
    with open_llm(folder) as one, open_llm(folder) as rerun, open_llm(folder, seed=1) as other:
        first, second = run(one, prompts, UNSEEDED), run(one, prompts, UNSEEDED)
        assert [run(rerun, prompts, UNSEEDED), run(rerun, prompts, UNSEEDED)] == [first, second]
        answers = [*first, *second, *run(other, prompts, UNSEEDED)]
    assert len({tuple(tokens) for tokens in answers}) == 12


def test_drawn_tokens_follow_the_distribution(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens of 3000 samples: total variation distance about what chance makes of it."""
    run_model, rows = llm.llm_engine._runner.run_model, []

    def watch(inputs: object) -> torch.Tensor:
        logits = run_model(inputs)
        rows.append(logits[0].clone())
        return logits

    monkeypatch.setattr(llm.llm_engine._runner, "run_model", watch)
    num_draws, temperature = 3000, 0.4
    params = SamplingParams(temperature=temperature, max_tokens=1, n=num_draws, ignore_eos=True)
    (output,) = llm.generate([prompt_of(20)], params, use_tqdm=False)
    right = (rows[0] / temperature).double().softmax(0)
    counts = torch.zeros_like(right)
    for sample in output.outputs:
        counts[sample.token_ids[0]] += 1
    distance = (counts / num_draws - right).abs().sum() / 2
    by_chance = (right * (1 - right) / num_draws * 2 / torch.pi).sqrt().sum() / 2  # its mean
    assert distance < 1.25 * by_chance


# several samples


def test_samples_differ_repeat_and_share_the_prompt(folder: Path) -> None:
    params = DRAWN.replace(n=5)
    with open_llm(folder) as llm:
        (output,) = llm.generate([prompt_of(100)], params, use_tqdm=False)
        stats = llm.stats()
        # 6 full blocks of the prompt, computed once and read by four more.
        assert stats.num_cached_tokens == 4 * 96
        assert stats.num_prompt_tokens == 500
        (again,) = llm.generate([prompt_of(100)], params, use_tqdm=False)
        assert again.num_cached_tokens == 96
    samples = [sample.token_ids for sample in output.outputs]
    assert [sample.index for sample in output.outputs] == list(range(5))
    assert len({tuple(tokens) for tokens in samples}) == 5
    assert samples == [sample.token_ids for sample in again.outputs]
    assert output.token_ids == samples[0]


def test_first_samples_do_not_depend_on_their_number(llm: LLM) -> None:
    (few,) = llm.generate([prompt_of(20)], DRAWN.replace(n=2), use_tqdm=False)
    (many,) = llm.generate([prompt_of(20)], DRAWN.replace(n=6), use_tqdm=False)
    assert [s.token_ids for s in few.outputs] == [s.token_ids for s in many.outputs[:2]]
    assert few.outputs[0].token_ids == run(llm, [prompt_of(20)], DRAWN)[0]


def test_more_samples_than_rows_come_back_whole(folder: Path) -> None:
    with open_llm(folder, max_num_seqs=2) as llm:
        outputs = llm.generate([prompt_of(5), prompt_of(40)], UNSEEDED.replace(n=5), use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [5, 5]
    assert all(len(s.token_ids) == 12 and s.finished() for o in outputs for s in o.outputs)


# ends by token


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def either(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with open_llm(folder, async_scheduling=request.param) as opened:
        yield opened


def end_of(output: RequestOutput) -> tuple[list[int], str | None, int | str | None]:
    (sample,) = output.outputs
    return sample.token_ids, sample.finish_reason, sample.stop_reason


@pytest.mark.parametrize("place", [0, 1, 5, 11])
def test_stop_id_ends_an_answer_where_it_first_comes(either: LLM, place: int) -> None:
    prompt = prompt_of(16)
    answer = run(either, [prompt], GREEDY)[0]
    stop = answer[place]
    first = answer.index(stop)
    params = GREEDY.replace(stop_token_ids=[stop, 998])
    for _ in range(2):  # the second time on a warm cache
        (output,) = either.generate([prompt], params, use_tqdm=False)
        assert end_of(output) == (answer[: first + 1], "stop", stop)
    # With mates that go on, and with max_tokens exactly there: the stop id wins.
    outputs = either.generate(
        [prompt, prompt, prompt],
        [GREEDY, params, params.replace(max_tokens=first + 1)],
        use_tqdm=False,
    )
    assert end_of(outputs[0]) == (answer, "length", None)
    assert end_of(outputs[1]) == (answer[: first + 1], "stop", stop)
    assert end_of(outputs[2]) == (answer[: first + 1], "stop", stop)
    stats = either.stats()
    assert stats.num_free_kvcache_blocks == stats.num_kvcache_blocks


def test_late_token_is_never_cached(either: LLM) -> None:
    """Under overlap a stop is seen one step late: what that step wrote must not be found again."""
    prompt = prompt_of(20)
    answer = run(either, [prompt], GREEDY)[0]
    stop = next(t for i, t in enumerate(answer) if i >= 3 and t not in answer[:i])
    either.reset_prefix_cache()
    ended = run(either, [prompt], GREEDY.replace(stop_token_ids=[stop]))[0]
    follow_up = prompt + ended + prompt_of(30, seed=8)
    warm = run(either, [follow_up], GREEDY)
    either.reset_prefix_cache()
    assert run(either, [follow_up], GREEDY) == warm


@pytest.fixture
def with_eos(folder: Path, tmp_path: Path) -> Path:
    """A folder whose generation_config lists two eos ids, as Qwen3's does."""
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    with open_llm(folder) as llm:
        answer = run(llm, [prompt_of(16)], GREEDY)[0]
    fields = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(fields | {"eos_token_id": answer[6]}))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [997, answer[4]]}))
    return copy


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_all_eos_ids_end_an_answer_and_ignore_eos_ignores_them_all(
    with_eos: Path, async_scheduling: bool
) -> None:
    prompt = prompt_of(16)
    with open_llm(with_eos, async_scheduling=async_scheduling) as llm:
        assert len(llm.llm_engine.eos_token_ids) == 3
        full = run(llm, [prompt], GREEDY)[0]
        eos = {full[4], full[6]}
        first = next(i for i, token in enumerate(full) if token in eos)
        assert len(full) == 12
        (output,) = llm.generate([prompt], GREEDY.replace(ignore_eos=False), use_tqdm=False)
        assert end_of(output) == (full[: first + 1], "stop", None)
        # stop_token_ids still stop under ignore_eos, and an eos id may be one of them.
        (output,) = llm.generate(
            [prompt], GREEDY.replace(stop_token_ids=[full[first]]), use_tqdm=False
        )
        assert end_of(output) == (full[: first + 1], "stop", full[first])


def test_async_and_sync_ends_are_the_same(folder: Path) -> None:
    """Random stop ids, so that many requests end by token, some by length, in one batch."""
    rng = np.random.default_rng(5)
    prompts = [prompt_of(int(n), seed=i) for i, n in enumerate(rng.integers(1, 60, 30))]
    wishes = [
        DRAWN.replace(seed=i, max_tokens=30, stop_token_ids=rng.integers(0, 1000, 40).tolist())
        for i in range(30)
    ]
    ends = []
    for async_scheduling in (True, False):
        with open_llm(folder, async_scheduling=async_scheduling) as llm:
            ends.append([end_of(output) for output in llm.generate(prompts, wishes, False)])
    assert ends[0] == ends[1]
    assert {reason for _, reason, _ in ends[0]} == {"stop", "length"}
