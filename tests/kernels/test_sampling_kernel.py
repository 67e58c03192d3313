"""Gumbel-max sampling: Philox against published vectors, the distribution by chi-square, kernels
against torch.
"""

import math

import pytest
import torch
from compiling import CAPABILITIES, DEVICE, compile_for, needs_compiler, needs_launch

from nanovllm.kernels.sampling import (
    Sampled,
    combine_kernel,
    combine_shards,
    philox4x32,
    philox_uint32,
    sample,
    sample_kernel,
    sample_torch,
    scores_of,
)

# From the known-answer file of Random123: counter, key, result of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
LAUNCHES = [
    pytest.param(sample, marks=needs_launch, id="triton"),
    pytest.param(sample_torch, id="torch"),
]


def draw_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + vocab)
    return (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).to(DEVICE)


def rows_of(
    temperatures: list[float], seed: int = 11
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Temperatures, 64-bit seeds and positions of as many rows."""
    count = len(temperatures)
    seeds = torch.arange(count, device=DEVICE) * (1 << 40) + seed
    positions = torch.arange(count, dtype=torch.int32, device=DEVICE) + 100
    return torch.tensor(temperatures, device=DEVICE), seeds, positions


def chi_square(draws: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square statistic of draws; its mean is the number of outcomes - 1, its variance twice
    that.
    """
    counts = torch.bincount(draws.long().cpu(), minlength=len(probabilities))
    expected = probabilities.cpu().double() * len(draws)
    return ((counts - expected) ** 2 / expected).sum().item()


def assert_same(actual: Sampled, expected: Sampled) -> None:
    assert torch.equal(actual.token_ids, expected.token_ids)
    torch.testing.assert_close(actual.values, expected.values, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    words = philox4x32((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert [int(word) for word in words] == expected


def test_words_depend_on_seed_position_and_id_alone() -> None:
    """Counter (id // 4, position, 0, 0), key (low, high) of the seed, word id % 4; rows and ranges
    change nothing.
    """
    seed, position = (0x299F31D0 << 32) | 0xA4093822, 77
    all_ids = philox_uint32(torch.tensor([5, seed]), torch.tensor([3, position]), 30)
    some_ids = philox_uint32(torch.tensor([seed]), torch.tensor([position]), 17, first_id=13)
    assert torch.equal(all_ids[1:, 13:], some_ids)
    tensors = [torch.tensor(number) for number in (21 // 4, position, 0, 0)]
    words = philox4x32(tuple(tensors), (torch.tensor(0xA4093822), torch.tensor(0x299F31D0)))
    assert int(words[21 % 4]) == int(all_ids[1, 21])


def test_noise_is_finite_for_every_word_and_matches_float64() -> None:
    """Smallest, largest and middling words; the float32 noise is within 1e-5 bits of double
    precision.
    """
    words = torch.tensor([0, 511, 512, 1 << 20, 1 << 26, (1 << 26) - 1, 1 << 31, 0xFFFFFFFF])
    v = ((words >> 9).double() + 0.5) / 2**23
    expected = -torch.log2(torch.log1p(-v) / -math.log(2))
    noise = scores_of(torch.zeros(len(words)), words)
    assert noise.isfinite().all()
    torch.testing.assert_close(noise.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_takes_the_lowest_id_of_the_largest_logit(launch, temperature: float) -> None:
    logits = draw_logits(3, 301)
    logits[0, [17, 250]] = 50.0
    logits[1, 300] = 50.0
    logits[2, [3, 2, 1]] = 50.0
    sampled = launch(logits, *rows_of([temperature] * 3))
    assert sampled.token_ids.tolist() == [17, 300, 1]
    assert sampled.values.tolist() == [50.0] * 3


@pytest.mark.parametrize("launch", LAUNCHES)
def test_greedy_rows_do_not_disturb_sampled_ones(launch) -> None:
    logits = draw_logits(4, 301)
    columns = rows_of([0.8, 0.0, 1.5, 0.0])
    mixed = launch(logits, *columns)
    for row in range(4):
        alone = launch(logits[row : row + 1], *(column[row : row + 1] for column in columns))
        assert alone.token_ids[0] == mixed.token_ids[row]
        assert alone.values[0] == mixed.values[row]


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_of_the_vocabulary_combine_to_the_whole(launch, num_shards: int) -> None:
    """Shards begin at any id; bounds 67 and 134 share counters between neighbours."""
    logits = draw_logits(7, 201)
    logits[6, [5, 100, 199]] = 99.0
    columns = rows_of([0.0, 0.3, 0.6, 1.0, 2.0, 0.7, 0.0])
    whole = launch(logits, *columns)
    bounds = [201 * shard // num_shards for shard in range(num_shards + 1)]
    shards = [
        launch(logits[:, start:end], *columns, vocab_start=start)
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    combined = combine_shards(*(torch.stack(part) for part in zip(*shards, strict=True)))
    assert torch.equal(combined.token_ids, whole.token_ids)
    assert torch.equal(combined.values, whole.values)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_extreme_logits_give_no_nan_and_never_a_masked_id(launch) -> None:
    logits = draw_logits(5, 70)
    logits[0], logits[1] = 1e4, -1e4
    logits[2, ::2], logits[2, 1::2] = 1e4, -1e4
    logits[3] = -float("inf")
    logits[4, :69] = -float("inf")
    sampled = launch(logits, *rows_of([0.01, 0.6, 1.0, 0.6, 0.6]))
    assert not sampled.values.isnan().any()
    assert sampled.token_ids[2] % 2 == 0
    assert sampled.token_ids[3:].tolist() == [0, 69]


def test_draws_follow_the_softmax() -> None:
    """20,000 draws of 13 outcomes at successive positions: chi-square below its 1 - 1e-6 quantile
    of 52.
    """
    logits = draw_logits(1, 13) * 0.5
    draws = 20_000
    columns = (torch.full((draws,), 0.7), torch.full((draws,), 42), torch.arange(draws))
    sampled = sample_torch(logits.cpu().expand(draws, 13), *columns)
    assert chi_square(sampled.token_ids, torch.softmax(logits[0].cpu() / 0.7, dim=-1)) < 52


@pytest.mark.parametrize("varied", ["seeds", "positions"])
def test_draws_of_other_seeds_and_positions_are_independent(varied: str) -> None:
    """Pairs of neighbours cover the 16 combinations of 4 equal outcomes evenly: 15 degrees, 1 -
    1e-6 quantile 57.
    """
    draws = 20_000
    counting, fixed = torch.arange(2 * draws), torch.full((2 * draws,), 9)
    seeds, positions = (counting, fixed) if varied == "seeds" else (fixed, counting)
    sampled = sample_torch(torch.zeros(2 * draws, 4), torch.ones(2 * draws), seeds, positions)
    pairs = sampled.token_ids.view(draws, 2)
    assert chi_square(4 * pairs[:, 0] + pairs[:, 1], torch.full((16,), 1 / 16)) < 57


def test_wrong_inputs_raise_naming_them() -> None:
    logits = draw_logits(2, 8)
    temperatures, seeds, positions = rows_of([1.0, 1.0])
    with pytest.raises(ValueError, match="seeds"):
        sample(logits, temperatures, seeds[:1], positions)
    with pytest.raises(ValueError, match="int64"):
        sample_torch(logits, temperatures, seeds.int(), positions)
    with pytest.raises(ValueError, match="strides"):
        sample(logits.t(), temperatures, seeds, positions)


@needs_launch
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("vocab", "vocab_start", "num_splits"),
    [(1, 0, None), (1003, 0, None), (5000, 6, 3), (2048, 4, 1)],
)
def test_kernel_draws_what_torch_draws(
    vocab: int, vocab_start: int, num_splits: int | None, dtype: torch.dtype
) -> None:
    """The scores agree to 1e-4, so the integers do: another word would move a score by whole
    bits.
    """
    logits = draw_logits(4, vocab + 3, dtype)[:, :vocab]
    columns = rows_of([0.6, 0.0, 1.3, 0.05])
    actual = sample(logits, *columns, vocab_start, num_splits=num_splits)
    assert_same(actual, sample_torch(logits, *columns, vocab_start))


@needs_launch
def test_kernel_words_equal_torch_words() -> None:
    """With all logits but one masked the score is one word's noise, which tells the word to within
    its 2**9 bucket.
    """
    vocab = 24
    logits = torch.full((vocab, vocab), -float("inf"), device=DEVICE).fill_diagonal_(0.0)
    columns = (
        torch.ones(vocab, device=DEVICE),
        torch.full((vocab,), 0x7123456789ABCDEF, device=DEVICE),
        torch.full((vocab,), 5, device=DEVICE),
    )
    words = philox_uint32(columns[1][:1], columns[2][:1], vocab)
    sampled = sample(logits, *columns)
    assert sampled.token_ids.tolist() == list(range(vocab))
    expected = scores_of(torch.zeros(vocab, device=DEVICE), words[0])
    torch.testing.assert_close(sampled.values, expected, rtol=0, atol=2e-5)


@needs_launch
def test_no_rows_give_no_tokens() -> None:
    assert sample(draw_logits(0, 5000), *rows_of([])).token_ids.shape == (0,)


@needs_compiler
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_sampling_kernels_compile_for_gpus_that_are_not_there(capability: int, dtype: str) -> None:
    columns = {"temperatures_ptr": "*fp32", "seeds_ptr": "*i64", "positions_ptr": "*i64"}
    results = {"values_ptr": "*fp32", "token_ids_ptr": "*i32"}
    sizes = dict.fromkeys(("row_stride", "vocab", "vocab_start", "tiles_per_split"), "i32")
    constexprs = {"BLOCK_COUNTERS": 256, "GREEDY_BELOW": 1e-5, "FAST_LOG2": True}
    signature = {"logits_ptr": f"*{dtype}"} | columns | results | sizes
    compile_for(capability, sample_kernel, signature, constexprs, num_warps=4)
    combined = {"best_ptr": "*fp32", "winners_ptr": "*i32", "splits": "i32"}
    compile_for(capability, combine_kernel, results | combined, {"BLOCK_SPLITS": 256}, num_warps=1)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 256])
def test_sampling_at_real_sizes(num_rows: int) -> None:
    """bfloat16, Qwen3's vocabulary: winners equal torch's, but for scores closer than 1e-4; twice
    the same bits.
    """
    logits = draw_logits(num_rows, 151_936, torch.bfloat16)
    columns = rows_of([(0.6, 0.0, 1.0, 0.3)[row % 4] for row in range(num_rows)])
    actual, again = sample(logits, *columns), sample(logits, *columns)
    expected = sample_torch(logits, *columns)
    assert torch.equal(actual.token_ids, again.token_ids)
    assert torch.equal(actual.values, again.values)
    torch.testing.assert_close(actual.values, expected.values, rtol=0, atol=1e-4)
    differ = actual.token_ids != expected.token_ids
    assert differ.sum() <= 0.01 * num_rows
