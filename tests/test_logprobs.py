"""Logprobs of sampled and prompt tokens against transformers' log_softmax, in float32 on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import MakeCheckpoint
from transformers import Qwen3ForCausalLM
from word_tokenizer import write_word_tokenizer

from nanovllm import LLM, Logprob, RequestOutput, SamplingParams
from nanovllm.engine import second_pass
from nanovllm.engine.logprobs import LogprobGroup, LogprobLog, join_groups, read_rows

VOCAB, EOS = 200, 199
NUM_NEW = 12
TOLERANCE = 1e-4


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()


PROMPTS = [prompt_of(length, seed=length) for length in (1, 2, 3, 4, 5, 8, 11, 30)]
MODES: dict[str, dict[str, object]] = {
    "one batch": {},
    "nothing in flight": {"async_scheduling": False},
    "5 tokens a step": {"max_num_batched_tokens": 5},
    "mixed steps": {"max_num_seqs": 3, "max_num_mixed_tokens": 6},
    "tight pool": {"num_kvcache_blocks": 14},
    "tight pool, 7 tokens a step": {"num_kvcache_blocks": 14, "max_num_batched_tokens": 7},
}


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(vocab_size=VOCAB, eos_token_id=EOS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_word_tokenizer(tmp_path_factory.mktemp("words"), VOCAB, eos=EOS)


@pytest.fixture(scope="module")
def llm(folder: Path, tokenizer: Path) -> Iterator[LLM]:
    with open_llm(folder, tokenizer) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(folder: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def open_llm(folder: Path, tokenizer: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "device": "cpu",
        "tokenizer": str(tokenizer),
        "max_model_len": 128,
        "kvcache_block_size": 4,
        "num_kvcache_blocks": 200,
    }
    return LLM(str(folder), **(defaults | options))


def outputs_of(llm: LLM, prompts: list[list[int]], params: object) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def log_softmax(model: Qwen3ForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary) float64: of the token behind each."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].double().log_softmax(dim=-1)


def check_entry(entry: dict[int, Logprob], token_id: int, expected: torch.Tensor, k: int) -> None:
    """`entry` reports `token_id` and the k likeliest of (vocabulary,) `expected`."""
    assert next(iter(entry)) == token_id
    likeliest = expected.topk(min(k, VOCAB)).indices.tolist()
    assert set(entry) == {token_id, *likeliest}
    ranks = {candidate: rank for rank, candidate in enumerate(likeliest, start=1)}
    own_rank = int((expected > expected[token_id]).sum()) + 1
    for candidate, logprob in entry.items():
        assert abs(logprob.logprob - expected[candidate].item()) < TOLERANCE
        assert logprob.rank == ranks.get(candidate, own_rank)
        assert logprob.decoded_token == f"t{candidate}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [0, 1, 5, -1])
def test_sampled_logprobs_equal_transformers(mode, k, folder, tokenizer, reference):
    params = [
        SamplingParams(logprobs=k, seed=i, temperature=0.5 * i, top_p=0.9, max_tokens=NUM_NEW)
        for i in range(len(PROMPTS))
    ]
    with open_llm(folder, tokenizer, **MODES[mode]) as llm:
        outputs = outputs_of(llm, PROMPTS, params)
        assert (llm.stats().num_preemptions > 0) == ("tight pool" in mode)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (sample,) = output.outputs
        expected = log_softmax(reference, prompt + sample.token_ids)[len(prompt) - 1 :]
        assert len(sample.logprobs) == len(sample.token_ids)
        for entry, token_id, row in zip(
            sample.logprobs, sample.token_ids, expected[:-1], strict=True
        ):
            check_entry(entry, token_id, row, VOCAB if k < 0 else k)
        total = sum(
            entry[token].logprob
            for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)
        )
        assert sample.cumulative_logprob == pytest.approx(total, abs=TOLERANCE)
        assert output.prompt_logprobs is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [0, 3])
def test_prompt_logprobs_equal_transformers(mode, k, folder, tokenizer, reference, monkeypatch):
    monkeypatch.setattr(second_pass, "ROWS_PER_REPORT", 4)
    params = SamplingParams(prompt_logprobs=k, max_tokens=NUM_NEW, seed=1, ignore_eos=True)
    with open_llm(folder, tokenizer, **MODES[mode]) as llm:
        outputs_of(llm, PROMPTS, params.replace(prompt_logprobs=None))  # fills the prefix cache
        outputs = outputs_of(llm, PROMPTS, params)
        again = outputs_of(llm, PROMPTS, params.replace(prompt_logprobs=None))
    for prompt, output, plain in zip(PROMPTS, outputs, again, strict=True):
        assert output.num_cached_tokens == 0
        assert output.token_ids == plain.token_ids
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        expected = log_softmax(reference, prompt)
        for entry, token_id, row in zip(
            output.prompt_logprobs[1:], prompt[1:], expected[:-1], strict=True
        ):
            check_entry(entry, token_id, row, k)
    assert "tight pool" in mode or any(output.num_cached_tokens > 0 for output in again)


def test_a_request_with_prompt_logprobs_fills_the_prefix_cache_for_others(llm):
    prompt = prompt_of(21, seed=77)
    params = SamplingParams(max_tokens=1)
    outputs_of(llm, [prompt], params.replace(prompt_logprobs=0))
    assert outputs_of(llm, [prompt], params)[0].num_cached_tokens == 20
    assert outputs_of(llm, [prompt], params.replace(prompt_logprobs=0))[0].num_cached_tokens == 0


def test_logprobs_do_not_depend_on_batch_mates_or_change_the_draws(llm):
    params = [
        SamplingParams(seed=i, max_tokens=NUM_NEW, logprobs=k, prompt_logprobs=p)
        for i, (k, p) in enumerate([(None, 1), (3, None), (0, 0), (3, 2), (7, None), (-1, 1)] * 2)
    ]
    prompts = [prompt_of(5 + i, seed=i) for i in range(len(params))]
    together = outputs_of(llm, prompts, params)
    for prompt, wish, output in zip(prompts, params, together, strict=True):
        (alone,) = outputs_of(llm, [prompt], wish)
        assert output.token_ids == alone.token_ids
        assert_alike(output.prompt_logprobs, alone.prompt_logprobs)
        assert_alike(output.outputs[0].logprobs, alone.outputs[0].logprobs)
        plain = wish.replace(logprobs=None, prompt_logprobs=None)
        assert outputs_of(llm, [prompt], plain)[0].token_ids == output.token_ids


def assert_alike(ours: list | None, theirs: list | None) -> None:
    """Equal but for float32 rounding, which may depend on how many rows a product has."""
    assert (ours is None) == (theirs is None)
    for one, other in zip(ours or (), theirs or (), strict=True):
        assert (one and list(one)) == (other and list(other))
        for token_id in one or ():
            assert one[token_id].rank == other[token_id].rank
            assert one[token_id].logprob == pytest.approx(other[token_id].logprob, abs=1e-5)


def test_samples_each_have_their_logprobs_and_share_those_of_the_prompt(llm, reference):
    prompt = PROMPTS[5]
    params = SamplingParams(n=3, seed=4, max_tokens=6, logprobs=2, prompt_logprobs=1)
    (output,) = outputs_of(llm, [prompt], params)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    for sample in output.outputs:
        expected = log_softmax(reference, prompt + sample.token_ids)[len(prompt) - 1 : -1]
        for entry, token_id, row in zip(sample.logprobs, sample.token_ids, expected, strict=True):
            check_entry(entry, token_id, row, 2)
    assert len(output.prompt_logprobs) == len(prompt)


def test_a_stopped_sample_has_no_logprobs_of_late_tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)
    free = outputs_of(llm, PROMPTS, params)
    for prompt, output in zip(PROMPTS, free, strict=True):
        word = f"t{output.token_ids[2]}"
        for stopped in (
            params.replace(stop_token_ids=output.token_ids[2:3]),
            params.replace(stop=[word]),
        ):
            (sample,) = outputs_of(llm, [prompt], stopped)[0].outputs
            assert sample.finish_reason == "stop"
            assert len(sample.logprobs) == len(sample.token_ids) <= 3
            assert list(map(list, sample.logprobs)) == [[token] for token in sample.token_ids]


def test_streamed_deltas_hold_only_their_own_logprobs(llm):
    params = SamplingParams(seed=1, max_tokens=8, logprobs=2, prompt_logprobs=0)
    (whole,) = outputs_of(llm, [PROMPTS[6]], params)
    deltas = list(llm.stream([PROMPTS[6]], params, deltas=True))
    samples = [delta.outputs[0] for delta in deltas]
    for sample in samples:
        assert len(sample.logprobs) == len(sample.token_ids)
    joined = [entry for sample in samples for entry in sample.logprobs]
    assert joined == whole.outputs[0].logprobs
    assert samples[-1].cumulative_logprob == whole.outputs[0].cumulative_logprob
    assert deltas[-1].prompt_logprobs == whole.prompt_logprobs


def test_logprobs_without_text_have_none(llm, folder):
    params = SamplingParams(max_tokens=2, logprobs=1, detokenize=False)
    (sample,) = outputs_of(llm, [[5]], params)[0].outputs
    assert {token.decoded_token for entry in sample.logprobs for token in entry.values()} == {None}


def test_perplexity_of_a_prompt_needs_one_generated_token(llm, reference):
    prompt = PROMPTS[-1]
    params = SamplingParams(prompt_logprobs=0, max_tokens=1)
    (output,) = outputs_of(llm, [prompt], params)
    logprobs = [
        entry[token].logprob
        for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    with torch.inference_mode():
        loss = reference(torch.tensor([prompt]), labels=torch.tensor([prompt])).loss
    assert -sum(logprobs) / len(logprobs) == pytest.approx(loss.item(), abs=TOLERANCE)


def test_groups_read_back_as_they_were_joined():
    groups = [
        LogprobGroup(torch.tensor([4, 7]).numpy(), torch.tensor([10, 3]).numpy(), 0),
        LogprobGroup(torch.tensor([1]).numpy(), torch.tensor([2]).numpy(), 2),
    ]
    values = torch.arange(2 * 3 + 7, dtype=torch.int32).numpy()
    rows = list(read_rows(join_groups(groups, values)))
    assert [(row.lane, row.position, row.values.tolist()) for row in rows] == [
        (4, 10, [0, 1, 2]),
        (7, 3, [3, 4, 5]),
        (1, 2, [6, 7, 8, 9, 10, 11, 12]),
    ]


def test_a_log_takes_consecutive_positions_only():
    group = LogprobGroup(torch.tensor([0] * 4).numpy(), torch.tensor([3, 3, 5, 4]).numpy(), 0)
    values = torch.zeros(12, dtype=torch.int32)
    values[::3] = torch.tensor([30, 31, 50, 40], dtype=torch.int32)
    log = LogprobLog(3, None)
    for row in read_rows(join_groups([group], values.numpy())):
        log.add(row)
    assert [list(entry) for entry in log.entries()] == [[30], [40]]
