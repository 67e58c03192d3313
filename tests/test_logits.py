"""Filters, penalties, bias and bans against transformers' processors on the same logits."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from nanovllm.kernels.sampling import sample_torch
from nanovllm.layers import logits as logits_module
from nanovllm.layers.logits import (
    History,
    LogitsParams,
    LogitsRow,
    compute_logprobs,
    process_logits,
)
from nanovllm.sampling_params import SamplingParams

transformers = pytest.importorskip("transformers")
VOCAB = 500


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


class Seen(NamedTuple):
    """A row and its tokens so far."""

    params: SamplingParams
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()


def gather(rows: Sequence[Seen], vocab: int, device: str = "cpu") -> tuple[LogitsParams, History]:
    fixed = [LogitsRow(r.params, len(r.prompt), r.stop_token_ids, r.bad_words) for r in rows]
    seen = [[*row.prompt, *row.output] for row in rows]
    width = max(map(len, seen)) + 2  # what lies behind a row's tokens must not count
    token_ids = [tokens + [1] * (width - len(tokens)) for tokens in seen]
    history = History(
        torch.tensor([len(tokens) for tokens in seen], device=device),
        torch.tensor(token_ids, dtype=torch.int32, device=device),
    )
    return LogitsParams.of(fixed, vocab, device), history


def run(logits: torch.Tensor, *rows: Seen | SamplingParams) -> torch.Tensor:
    rows = [row if isinstance(row, Seen) else Seen(row) for row in rows]
    return process_logits(logits, *gather(rows, logits.shape[-1]))


def kept(logits: torch.Tensor) -> torch.Tensor:
    return logits > -torch.inf


def kept_of(probabilities: list[float], **fields: object) -> list[int]:
    """Ids that stay of one row with these probabilities."""
    output = run(torch.tensor([probabilities]).log(), SamplingParams(**fields))
    return kept(output)[0].nonzero()[:, 0].tolist()


def oracle(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' warpers in vLLM's order: temperature, min_p, top_k, top_p."""
    warped = logits / params.temperature
    if params.min_p > 0:
        warped = transformers.MinPLogitsWarper(params.min_p)(None, warped)
    if params.top_k > 0:
        warped = transformers.TopKLogitsWarper(params.top_k)(None, warped)
    if params.top_p < 1:
        warped = transformers.TopPLogitsWarper(params.top_p)(None, warped)
    return kept(warped)


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB + 10},
    {"top_p": 0.95},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 20, "top_p": 0.3, "min_p": 0.02},
    {"top_p": 0.8, "min_p": 0.1},
    {"top_k": 3, "min_p": 0.5},
]


@pytest.mark.parametrize("fields", FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_filters_keep_the_same_sets_as_transformers(fields, temperature):
    logits = random_logits(64)
    params = SamplingParams(temperature=temperature, **fields)
    output = run(logits, *[params] * 64)
    expected = oracle(logits, params)
    assert torch.equal(kept(output), expected)
    assert torch.equal(output[expected], logits[expected]), "kept logits leave as they came"


def test_rows_of_one_batch_keep_what_they_keep_alone():
    params = [SamplingParams(temperature=0.7 + 0.1 * i, **f) for i, f in enumerate(FILTERS)]
    params += [SamplingParams(), SamplingParams(temperature=0.0, top_k=1), SamplingParams(top_k=-1)]
    logits = random_logits(len(params), seed=3)
    together = run(logits, *params)
    for i, row_params in enumerate(params):
        assert torch.equal(together[i : i + 1], run(logits[i : i + 1], row_params))
        if not row_params.is_greedy:
            assert torch.equal(kept(together[i : i + 1]), oracle(logits[i : i + 1], row_params))
    assert torch.equal(together[-3:], logits[-3:])


def test_large_top_k_is_found_by_sorting(monkeypatch):
    logits = random_logits(8)
    params = [SamplingParams(top_k=k, top_p=0.9) for k in (3, 40, 100, 499, 3, 40, 100, 499)]
    expected = run(logits, *params)
    monkeypatch.setattr(logits_module, "MAX_PICKED", 10)
    monkeypatch.setattr(logits_module, "ROWS_PER_PICK", 1)
    monkeypatch.setattr(logits_module, "ROWS_PER_SORT", 4)
    assert torch.equal(run(logits, *params), expected)


def test_top_p_keeps_the_token_that_crosses_p():
    tenths = [0.1, 0.2, 0.3, 0.4]
    assert kept_of(tenths, top_p=0.6) == [2, 3]
    assert kept_of(tenths, top_p=0.4) == [3]
    assert kept_of(tenths, top_p=0.41) == [2, 3]
    assert kept_of(tenths, top_p=1e-9) == [3]
    assert kept_of(tenths, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_reached_exactly_is_reached_whatever_rounding_says():
    assert kept_of([0.1, 0.2, 0.3, 0.4], top_p=0.7) == [2, 3]
    assert kept_of([0.1, 0.2, 0.3, 0.4], top_p=0.9) == [1, 2, 3]
    assert kept_of([0.4, 0.2, 0.1, 0.3], min_p=0.5) == [0, 1, 3]
    assert kept_of([0.4, 0.2, 0.1, 0.3], min_p=0.75) == [0, 3]


def test_top_p_is_of_what_top_k_and_min_p_left():
    assert kept_of([0.1, 0.2, 0.3, 0.4], top_k=2, top_p=0.5) == [3]
    assert kept_of([0.1, 0.2, 0.3, 0.4], min_p=0.7, top_p=0.5) == [3]
    assert kept_of([0.1, 0.2, 0.3, 0.4], top_k=2, top_p=0.6) == [2, 3]


def test_equal_logits_stay_or_go_together():
    assert kept_of([0.1, 0.3, 0.3, 0.3], top_k=1) == [1, 2, 3]
    assert kept_of([0.2, 0.2, 0.2, 0.4], top_k=2) == [0, 1, 2, 3]
    assert kept_of([0.25] * 4, top_p=0.5) == [0, 1, 2, 3]
    assert kept_of([0.2, 0.2, 0.2, 0.4], top_p=0.5) == [0, 1, 2, 3]
    # The three equal to the second have their part in the probability: 0.4 of 1.0 isn't p.
    assert kept_of([0.2, 0.2, 0.2, 0.4], top_k=2, top_p=0.4) == [3]
    assert kept_of([0.2, 0.2, 0.2, 0.4], top_k=2, top_p=0.45) == [0, 1, 2, 3]


def test_extreme_logits_give_no_nan():
    extreme = torch.tensor([[1e4, -1e4, 0.0, -torch.inf], [-torch.inf] * 4, [-1e4, -1e4, 1e4, 1e4]])
    for fields in ({"top_p": 0.9}, {"top_k": 2, "top_p": 0.9}, {"min_p": 0.1}, {"top_k": 4}):
        for temperature in (1e-5, 1.0, 100.0):
            params = [SamplingParams(temperature=temperature, **fields)] * 3
            output = run(extreme, *params)
            assert not output.isnan().any()
            assert output[0].argmax() == 0
            assert kept(output[2]).tolist()[2:] == [True, True]
    assert not compute_logprobs(extreme[[0, 2]], torch.tensor([0, 2]), 2).logprobs.isnan().any()


def test_filters_keep_in_bfloat16_what_they_keep_in_float32():
    """Where only filters and bans apply the dtype stays; comparing bfloat16 numbers is exact."""
    logits = random_logits(rows=4).bfloat16()
    rows = [
        SamplingParams(top_k=20, top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(top_p=0.7, min_tokens=3),
        SamplingParams(top_k=7),
    ]
    seen = [Seen(params, prompt=(1,), stop_token_ids=(5,)) for params in rows]
    short, wide = run(logits, *seen), run(logits.float(), *seen)
    assert short.dtype == torch.bfloat16
    assert torch.equal(short.float(), wide)


def test_input_logits_are_left_as_they_were():
    logits = random_logits(2)
    before = logits.clone()
    run(logits, SamplingParams(top_k=2, logit_bias={1: 3.0}), SamplingParams(min_p=0.5))
    assert torch.equal(logits, before)
    biased = SamplingParams(logit_bias={1: 3.0})
    assert run(logits.bfloat16(), biased, SamplingParams()).dtype == torch.float32


def test_repetition_penalty_equals_transformers():
    logits = random_logits(2)
    prompts, outputs = [[3, 4, 4, 9], [1, 2, 3, 4]], [[4, 7, 11], [0, 0, 499]]
    params = SamplingParams(repetition_penalty=1.3)
    rows = [Seen(params, prompt=p, output=o) for p, o in zip(prompts, outputs, strict=True)]
    seen = torch.tensor([p + o for p, o in zip(prompts, outputs, strict=True)])
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.3)(seen, logits.clone())
    assert torch.equal(run(logits, *rows), expected)


def test_presence_and_frequency_penalties_count_the_output_alone():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    row = Seen(params, prompt=[1, 1, 1], output=[2, 2, 3])
    logits = random_logits(1, vocab=5)
    expected = logits - torch.tensor([[0.0, 0.0, 0.25 * 2 + 0.5, 0.25 + 0.5, 0.0]])
    torch.testing.assert_close(run(logits, row), expected, rtol=0, atol=1e-6)


def test_penalties_leave_other_rows_alone():
    logits = random_logits(3)
    penalized = Seen(SamplingParams(repetition_penalty=2.0), output=[5])
    output = run(logits, SamplingParams(top_k=VOCAB), penalized, SamplingParams())
    assert torch.equal(output[[0, 2]], logits[[0, 2]])
    assert (output[1] != logits[1]).nonzero()[:, 0].tolist() == [5]


def test_many_penalized_rows_are_done_in_pieces(monkeypatch):
    logits = random_logits(5)
    rows = [Seen(SamplingParams(frequency_penalty=0.1 * i), output=[i, i, 7]) for i in range(5)]
    expected = run(logits, *rows)
    monkeypatch.setattr(logits_module, "ROWS_PER_PENALTY", 2)
    assert torch.equal(run(logits, *rows), expected)


def test_logit_bias_is_added():
    logits = random_logits(2)
    params = SamplingParams(logit_bias={0: 2.0, 7: -100.0, VOCAB: 1.0})
    expected = logits.clone()
    expected[1, 0] += 2.0
    expected[1, 7] -= 100.0
    assert torch.equal(run(logits, SamplingParams(), params), expected)


def test_order_is_bias_then_penalties_then_filters():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    params = SamplingParams(logit_bias={0: 9.0}, repetition_penalty=2.0, top_k=2)
    row = Seen(params, prompt=[0, 3])
    assert run(logits, row).tolist() == [[5.0, -torch.inf, 3.0, -torch.inf]]


def test_bad_words_equal_transformers():
    words = [[4], [5, 6], [1, 2, 3], [9, 9]]
    processor = transformers.NoBadWordsLogitsProcessor(words)
    params = SamplingParams(bad_words=["given as ids below"])
    for output_ids in ([5], [1, 2], [2, 1, 2], [9], [9, 9], [6, 5, 1], [2]):
        logits = random_logits(1, vocab=12)
        row = Seen(params, bad_words=words, output=output_ids)
        expected = processor(torch.tensor([output_ids]), logits.clone())
        assert torch.equal(run(logits, row), expected)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
def test_stop_tokens_are_out_until_they_would_be_the_min_tokens_th(min_tokens):
    """transformers counts the tokens before eos, our min_tokens counts eos too."""
    params = SamplingParams(min_tokens=min_tokens)
    processor = transformers.MinNewTokensLengthLogitsProcessor(
        3, max(min_tokens - 1, 0), torch.tensor([2, 6])
    )
    for num_output_tokens in range(7):
        logits = random_logits(1, vocab=10)
        row = Seen(params, [1, 1, 1], [1] * num_output_tokens, stop_token_ids=[2, 6])
        history = torch.zeros(1, 3 + num_output_tokens, dtype=torch.int64)
        assert torch.equal(run(logits, row), processor(history, logits.clone()))


def test_bad_words_begin_in_the_output():
    words = [[5, 6, 7], [6, 8], [6, 7, 9]]
    row = Seen(SamplingParams(), prompt=[4, 5], output=[6], bad_words=words)
    output = run(random_logits(1, vocab=12), row)
    assert (~kept(output))[0].nonzero()[:, 0].tolist() == [8]


def test_rows_say_whether_their_tokens_count():
    assert not LogitsRow(SamplingParams(top_k=3, logit_bias={1: 1.0}, min_tokens=3)).needs_history
    assert not LogitsRow(SamplingParams(), bad_words=[[1]]).needs_history
    assert LogitsRow(SamplingParams(frequency_penalty=0.1)).needs_history
    assert LogitsRow(SamplingParams(), bad_words=[[1], [1, 2]]).needs_history


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB])
def test_logprobs_equal_log_softmax(num_top):
    logits = random_logits(6)
    token_ids = torch.tensor([0, 5, 499, 3, 3, 42])
    reference = logits.double().log_softmax(dim=-1)
    result = compute_logprobs(logits, token_ids, num_top)
    expected = reference.sort(dim=-1, descending=True)
    rows = torch.arange(6)
    torch.testing.assert_close(
        result.logprobs.double(), reference[rows, token_ids], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        result.top_logprobs.double(), expected.values[:, :num_top], rtol=0, atol=1e-5
    )
    assert torch.equal(result.top_token_ids, expected.indices[:, :num_top])
    places = (expected.indices == token_ids[:, None]).nonzero()[:, 1]
    assert torch.equal(result.ranks, places + 1)


def test_rank_of_equal_logits_is_that_of_the_first():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 3)
    assert compute_logprobs(logits, torch.tensor([1, 2, 3]), 0).ranks.tolist() == [1, 1, 3]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05, "top_k": 10, "top_p": 0.9},
        {"logit_bias": {3: 2.0}, "repetition_penalty": 1.5},
    ],
)
def test_draws_follow_the_renormalized_distribution(fields):
    """Chi-square over 30,000 draws at consecutive positions of one seed."""
    num_draws, logits = 30_000, random_logits(1, vocab=40) / 4
    params = SamplingParams(temperature=0.8, **fields)
    processed = run(logits, Seen(params, output=[1, 3, 5]))
    drawn = sample_torch(
        processed.expand(num_draws, -1),
        torch.full((num_draws,), 0.8),
        torch.full((num_draws,), 42, dtype=torch.int64),
        torch.arange(num_draws),
    ).token_ids
    counts = torch.bincount(drawn.long(), minlength=40)
    expected = (processed[0].double() / 0.8).softmax(dim=-1) * num_draws
    assert counts[expected == 0].sum() == 0
    is_in = expected > 0
    chi_square = ((counts - expected)[is_in] ** 2 / expected[is_in]).sum().item()
    freedom = int(is_in.sum()) - 1
    # Mean plus five standard deviations: seeds are fixed, so this passes always or never.
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.gpu
def test_cuda_keeps_the_same_sets():
    params = [SamplingParams(temperature=0.8, **fields) for fields in FILTERS]
    rows = [Seen(p, output=[1, 2]) for p in params]
    rows.append(Seen(SamplingParams(repetition_penalty=1.5), output=[3, 3]))
    logits = random_logits(len(rows), vocab=151_936)
    expected = process_logits(logits, *gather(rows, logits.shape[-1]))
    actual = process_logits(logits.cuda(), *gather(rows, logits.shape[-1], "cuda"))
    assert torch.equal(kept(actual).cpu(), kept(expected))
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=1e-5)
