"""Filters, penalties, bias and bans through a whole engine, against transformers' processors.

The oracle runs transformers' model on what our engine has drawn so far, lets transformers' own
processors change the logits, and draws with our noise: the token must be ours, at every position of
every request, however the engine batches, chunks, preempts or overlaps. Everything is float32 on
the CPU with fixed seeds.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import MakeCheckpoint
from transformers import Qwen3ForCausalLM
from word_tokenizer import words, write_word_tokenizer

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.input_processor import derive_seed
from nanovllm.engine.second_pass import SecondPass
from nanovllm.kernels.sampling import sample_torch

VOCAB, EOS = 200, 199
NUM_NEW = 24

# On this model greedy answers soon go in circles, so penalties and bans have much to do.
FIELDS: dict[str, dict[str, object]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.4},
    "counts": {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    "negative counts": {"presence_penalty": -0.6, "frequency_penalty": -0.4, "top_k": 50},
    "bias": {"logit_bias": {3: 4.0, 77: -100.0, 150: 2.5}},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 3)), "top_p": 0.9},
    "all": {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 1.5},
        "min_tokens": 6,
        "stop_token_ids": list(range(0, VOCAB, 4)),
        "bad_words": [words([5]), words([7, 8])],
    },
}

MODES: dict[str, dict[str, object]] = {
    "one batch": {},
    "nothing in flight": {"async_scheduling": False},
    "16 tokens a step": {"max_num_batched_tokens": 16},
    "three at once": {"max_num_seqs": 3},
    "mixed steps": {"max_num_seqs": 5, "max_num_mixed_tokens": 11},
    "tight pool": {"num_kvcache_blocks": 20},
    "tight pool, 16 tokens a step, nothing in flight": {
        "num_kvcache_blocks": 20,
        "max_num_batched_tokens": 16,
        "async_scheduling": False,
    },
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()


def params_of(number: int, fields: dict[str, object]) -> SamplingParams:
    defaults: dict[str, object] = {"temperature": 1.0, "seed": number, "max_tokens": NUM_NEW}
    return SamplingParams(**(defaults | fields))


PROMPTS = [prompt_of(5 + 3 * i, seed=i) for i in range(len(FIELDS))]
PARAMS = [params_of(i, fields) for i, fields in enumerate(FIELDS.values())]


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


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[list[int]]:
    return tokens_of(llm, PROMPTS, PARAMS)


def open_llm(folder: Path, tokenizer: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "device": "cpu",
        "tokenizer": str(tokenizer),
        "max_model_len": 128,
        "kvcache_block_size": 4,
        "num_kvcache_blocks": 400,
    }
    return LLM(str(folder), **(defaults | options))


def outputs_of(llm: LLM, prompts: list[list[int]], params: object) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(llm: LLM, prompts: list[list[int]], params: object) -> list[list[int]]:
    return [output.token_ids for output in outputs_of(llm, prompts, params)]


def processed_by_transformers(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> torch.Tensor:
    """(1, vocabulary) logits, in vLLM's order, after temperature; greedy rows have none."""
    seen, drawn = torch.tensor([prompt + output]), torch.tensor([output], dtype=torch.int64)
    if params.bad_words:
        bad_ids = [[int(word[1:]) for word in text.split()] for text in params.bad_words]
        logits = transformers.NoBadWordsLogitsProcessor(bad_ids)(drawn, logits)
    if params.min_tokens > 1:
        stops = torch.tensor([*params.stop_token_ids, EOS])
        logits = transformers.MinNewTokensLengthLogitsProcessor(
            len(prompt), params.min_tokens - 1, stops
        )(seen, logits)
    if params.logit_bias:
        biases = {(token_id,): bias for token_id, bias in params.logit_bias}
        logits = transformers.SequenceBiasLogitsProcessor(biases)(seen, logits)
    if params.repetition_penalty != 1.0:
        penalize = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        logits = penalize(seen, logits)
    counts = torch.bincount(drawn[0], minlength=VOCAB)
    logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.is_greedy:
        return logits
    logits = logits / params.temperature
    if params.min_p > 0:
        logits = transformers.MinPLogitsWarper(params.min_p)(seen, logits)
    if params.top_k > 0:
        logits = transformers.TopKLogitsWarper(params.top_k)(seen, logits)
    if params.top_p < 1:
        logits = transformers.TopPLogitsWarper(params.top_p)(seen, logits)
    return logits


def draw(
    logits: torch.Tensor, params: SamplingParams, position: int, num_draws: int = 1
) -> torch.Tensor:
    """Tokens that our noise draws from logits after temperature, for samples 0, 1, ..."""
    seeds = [derive_seed(1, params.seed or 0, sample) for sample in range(num_draws)]
    return sample_torch(
        logits.expand(num_draws, -1),
        torch.full((num_draws,), 0.0 if params.is_greedy else 1.0),
        torch.tensor(seeds),
        torch.full((num_draws,), position),
    ).token_ids


@pytest.mark.parametrize("name", FIELDS)
def test_every_token_is_the_one_that_transformers_processors_leave(name, answers, reference):
    number = list(FIELDS).index(name)
    prompt, params, output = PROMPTS[number], PARAMS[number], answers[number]
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 :]
    for i, token_id in enumerate(output):
        processed = processed_by_transformers(logits[i : i + 1], prompt, output[:i], params)
        assert draw(processed, params, len(prompt) + i).item() == token_id, f"token {i}"
    stops = {*params.stop_token_ids, EOS}
    assert len(output) == NUM_NEW or output[-1] in stops
    assert len(output) >= params.min_tokens


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_same_however_they_are_scheduled(mode, folder, tokenizer, answers):
    with open_llm(folder, tokenizer, **MODES[mode]) as other:
        assert tokens_of(other, PROMPTS, PARAMS) == answers
        assert tokens_of(other, PROMPTS[::-1], PARAMS[::-1]) == answers[::-1]
        assert (other.stats().num_preemptions > 0) == ("tight pool" in mode)


def test_answers_do_not_depend_on_batch_mates(llm, answers):
    for prompt, params, answer in zip(PROMPTS, PARAMS, answers, strict=True):
        assert tokens_of(llm, [prompt], params) == [answer]


def test_plain_rows_beside_special_ones_stay_as_they_were(llm):
    plain = SamplingParams(temperature=0.9, max_tokens=NUM_NEW, ignore_eos=True)
    mixed = [
        param if i % 2 else plain.replace(seed=i)
        for i, param in enumerate(param.replace(logprobs=3) for param in PARAMS)
    ]
    alone = tokens_of(llm, PROMPTS[::2], mixed[::2])
    assert tokens_of(llm, PROMPTS, mixed)[::2] == alone


def test_filters_that_keep_everything_change_no_draw(llm):
    plain = SamplingParams(max_tokens=NUM_NEW, seed=7)
    everything = plain.replace(top_k=VOCAB, logit_bias={0: 0.0}, min_tokens=1)
    assert tokens_of(llm, PROMPTS, everything) == tokens_of(llm, PROMPTS, plain)


def test_rows_are_forgotten_when_others_take_them_over(llm):
    """A row's parameters stay with the rank until the row is given away."""
    plain = SamplingParams(max_tokens=NUM_NEW, seed=3, ignore_eos=True)
    expected = tokens_of(llm, PROMPTS, plain)
    tokens_of(llm, PROMPTS, PARAMS)
    assert tokens_of(llm, PROMPTS, plain) == expected


def test_bad_words_never_show(llm):
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    prompt = PROMPTS[4]
    answer = tokens_of(llm, [prompt], greedy)[0]
    bad = [words(answer[:1]), words(answer[3:5]), words([*answer[5:8]])]
    without = tokens_of(llm, [prompt], greedy.replace(bad_words=bad))[0]
    assert answer[0] not in without
    for word in (answer[3:5], answer[5:8]):
        assert not any(without[i : i + len(word)] == word for i in range(NUM_NEW))


def test_bad_words_may_begin_in_the_prompt(llm):
    """Only a word wholly in the output is forbidden, as in vLLM."""
    greedy = SamplingParams(temperature=0, max_tokens=1)
    prompt = PROMPTS[2]
    answer = tokens_of(llm, [prompt], greedy)[0]
    bad = [words([prompt[-1], answer[0]])]
    assert tokens_of(llm, [prompt], greedy.replace(bad_words=bad)) == [answer]


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("is_overlapped", [True, False])
def test_min_tokens_holds_for_eos_stop_ids_and_stop_strings(
    folder, tokenizer, min_tokens, is_overlapped
):
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_llm(folder, tokenizer, async_scheduling=is_overlapped) as llm:
        for prompt in PROMPTS[:4]:
            free = tokens_of(llm, [prompt], greedy)[0]
            early = outputs_of(
                llm, [prompt], greedy.replace(stop=[f"t{free[0]}"], min_tokens=min_tokens)
            )[0].outputs[0]
            assert len(early.token_ids) >= max(min_tokens, 1)
            if early.finish_reason == "stop":
                assert f"t{free[0]}" in words(early.token_ids[min_tokens - 1 :]).split()
            by_id = tokens_of(
                llm, [prompt], greedy.replace(stop_token_ids=free[:1], min_tokens=min_tokens)
            )[0]
            assert free[0] not in by_id[: max(min_tokens - 1, 0)]
            assert len(by_id) == 12 or by_id[-1] == free[0]
            assert len(by_id) >= max(min_tokens, 1)


def test_ending_at_exactly_min_tokens_is_allowed(llm):
    """Every token ends it, and nothing else can be drawn."""
    everything = SamplingParams(stop_token_ids=list(range(VOCAB)), seed=0, max_tokens=9)
    assert [len(t) for t in tokens_of(llm, PROMPTS, everything)] == [1] * len(PROMPTS)
    mostly = everything.replace(stop_token_ids=list(range(VOCAB))[2:], min_tokens=5)
    lengths = [len(tokens) for tokens in tokens_of(llm, PROMPTS, mostly)]
    assert min(lengths) == 5


@pytest.mark.parametrize(
    ("fields", "num_draws"),
    [
        ({"top_k": 30, "top_p": 0.95}, 2_000),
        ({"temperature": 0.8, "top_p": 0.9, "min_p": 0.01}, 2_000),
        pytest.param({"top_k": 30, "top_p": 0.95}, 20_000, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.97, "repetition_penalty": 1.3}, 20_000, marks=pytest.mark.slow),
    ],
)
def test_samples_follow_the_filtered_distribution(llm, reference, fields, num_draws):
    """Chi-square over the first tokens of two requests' n samples."""
    prompt = prompt_of(6, seed=99)
    params = [
        SamplingParams(n=num_draws // 2, seed=seed, max_tokens=1, **fields) for seed in (5, 6)
    ]
    outputs = outputs_of(llm, [prompt] * 2, params)
    drawn = torch.tensor([sample.token_ids[0] for out in outputs for sample in out.outputs])
    counts = torch.bincount(drawn, minlength=VOCAB)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, -1:]
    expected = processed_by_transformers(logits, prompt, [], params[0]).double().softmax(dim=-1)[0]
    expected *= num_draws
    assert counts[expected == 0].sum() == 0
    is_common = expected >= 5  # below, a chi-square's approximation breaks down; pool those
    observed = torch.cat([counts[is_common], counts[~is_common].sum().view(1)])
    wanted = torch.cat([expected[is_common], expected[~is_common].sum().view(1)])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    freedom = len(wanted) - 1
    # Mean plus five standard deviations: seeds are fixed, so this passes always or never.
    assert freedom > 3
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_samples_of_one_request_differ_and_repeat(llm):
    params = SamplingParams(n=4, seed=11, top_p=0.95, max_tokens=12, logprobs=1)
    first, second = (outputs_of(llm, [PROMPTS[6]], params)[0] for _ in range(2))
    samples = [tuple(sample.token_ids) for sample in first.outputs]
    assert len(set(samples)) == 4
    assert [tuple(sample.token_ids) for sample in second.outputs] == samples
    assert [sample.index for sample in first.outputs] == [0, 1, 2, 3]


def test_samples_of_one_request_share_the_full_blocks_of_its_prompt(llm):
    before = llm.stats().num_cached_tokens
    params = SamplingParams(n=4, seed=1, max_tokens=6, top_k=30)
    outputs_of(llm, [prompt_of(23, seed=1234)], params)
    assert llm.stats().num_cached_tokens - before == 3 * 20


def test_random_states_of_the_user_are_left_alone(llm):
    """C39: seeded and unseeded draws, with and without filters."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    tokens_of(llm, PROMPTS, PARAMS)
    tokens_of(llm, PROMPTS, SamplingParams(top_p=0.5, max_tokens=4))
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_unseeded_requests_differ_within_an_engine_and_repeat_in_a_new_one(folder, tokenizer):
    params = SamplingParams(max_tokens=8, top_p=0.95)
    calls = []
    for _ in range(2):
        with open_llm(folder, tokenizer, seed=5) as llm:
            calls.append([tokens_of(llm, [PROMPTS[3]] * 2, params) for _ in range(2)])
    assert calls[0] == calls[1]
    first, second = calls[0]
    assert len({tuple(tokens) for tokens in first + second}) == 4


def test_top_p_keeps_the_token_that_crosses_p_in_an_engine(llm):
    """Four tokens of probability .1 .2 .3 .4 by bias, the others impossible (C36)."""
    prompt = PROMPTS[1]
    raw = outputs_of(llm, [prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=-1))
    logprobs = raw[0].outputs[0].logprobs[0]
    wanted = dict(zip((10, 20, 30, 40), (0.1, 0.2, 0.3, 0.4), strict=True))
    bias = {token_id: -1e4 for token_id in range(VOCAB)}
    for token_id, probability in wanted.items():
        bias[token_id] = float(torch.tensor(probability).log()) - logprobs[token_id].logprob
    params = SamplingParams(n=400, seed=1, max_tokens=1, logit_bias=bias)
    kept = {
        p: {s.token_ids[0] for s in outputs_of(llm, [prompt], params.replace(top_p=p))[0].outputs}
        for p in (0.05, 0.4, 0.41, 0.7, 0.71, 1.0)
    }
    assert kept[0.05] == kept[0.4] == {40}
    assert kept[0.41] == kept[0.7] == {30, 40}
    assert kept[0.71] == {20, 30, 40}
    assert kept[1.0] == {10, 20, 30, 40}


def test_requests_that_cannot_be_run_are_refused(folder, llm):
    with pytest.raises(ValueError, match="prompt 1: logit_bias names token id 200"):
        llm.generate([[1], [2]], [SamplingParams(), SamplingParams(logit_bias={VOCAB: 1.0})])
    with pytest.raises(ValueError, match="prompt 0: bad_words holds ' '"):
        llm.generate([[1]], SamplingParams(bad_words=[" "]))
    with (
        LLM(str(folder), device="cpu", skip_tokenizer_init=True, max_model_len=64) as bare,
        pytest.raises(ValueError, match="bad_words need a tokenizer"),
    ):
        bare.generate([[1]], SamplingParams(bad_words=["t1"]))
    assert llm.llm_engine.is_finished()


GPU_MODES: dict[str, dict[str, object]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "graphs, nothing in flight": {"async_scheduling": False},
    "graphs, tight pool": {"num_kvcache_blocks": 8},
    "graphs, 16 tokens a step": {"max_num_batched_tokens": 16},
    "graphs, mixed steps": {"max_num_seqs": 5, "max_num_mixed_tokens": 11},
}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", GPU_MODES)
def test_a_gpu_draws_what_the_cpu_draws(mode, folder, tokenizer, answers):
    torch.backends.cuda.matmul.allow_tf32 = False
    options = {"device": "cuda", "dtype": "float32", "kvcache_block_size": 16, **GPU_MODES[mode]}
    with open_llm(folder, tokenizer, **options) as gpu:
        assert tokens_of(gpu, PROMPTS, PARAMS) == answers
        reported = [params.replace(logprobs=2, prompt_logprobs=1) for params in PARAMS]
        outputs = outputs_of(gpu, PROMPTS, reported)
        assert [output.token_ids for output in outputs] == answers
        assert (gpu.stats().num_preemptions > 0) == ("tight pool" in mode)
    with open_llm(folder, tokenizer) as cpu:
        for output, expected in zip(outputs, outputs_of(cpu, PROMPTS, reported), strict=True):
            ours = output.outputs[0].logprobs + output.prompt_logprobs[1:]
            theirs = expected.outputs[0].logprobs + expected.prompt_logprobs[1:]
            for entry, other in zip(ours, theirs, strict=True):
                assert list(entry) == list(other)
                for token_id, logprob in entry.items():
                    assert logprob.rank == other[token_id].rank
                    assert abs(logprob.logprob - other[token_id].logprob) < 1e-4


@pytest.mark.gpu
def test_plain_rows_on_a_gpu_are_bit_identical_beside_special_ones(folder, tokenizer):
    plain = SamplingParams(temperature=0.9, max_tokens=NUM_NEW, ignore_eos=True)
    mixed = [p if i % 2 else plain.replace(seed=i) for i, p in enumerate(PARAMS)]
    only_plain = [plain.replace(seed=i) for i in range(len(PARAMS))]
    options = {"device": "cuda", "dtype": "bfloat16", "kvcache_block_size": 16}
    with open_llm(folder, tokenizer, **options) as gpu:
        # The same lanes in both calls: bfloat16 products may depend on the batch's size.
        endless = [p.replace(stop_token_ids=(), min_tokens=0, ignore_eos=True) for p in mixed]
        beside = tokens_of(gpu, PROMPTS, endless)
        assert beside[::2] == tokens_of(gpu, PROMPTS, only_plain)[::2]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_request_that_ended_slows_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    """What was known of its row lasted until the row was reused: no step was a plain one, and with
    a prompt half read, none a graph's.
    """
    found: list[bool] = []

    def watch(name: str) -> None:
        asks = getattr(SecondPass, name)
        monkeypatch.setattr(
            SecondPass, name, lambda self, batch: found.append(asks(self, batch)) or found[-1]
        )

    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 8}
    with LLM(str(folder), device="cpu", **options) as llm:
        engine = llm.llm_engine
        others = [engine.add_request([1], SamplingParams(max_tokens=9, ignore_eos=True))]
        request_id = engine.add_request(
            prompt_of(20), SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)
        )
        others.append(engine.add_request([2], SamplingParams(max_tokens=9, ignore_eos=True)))
        engine.step()
        if is_aborted:
            engine.abort(request_id)
        while request_id in engine._requests:
            engine.step()
        watch("concerns")
        watch("reads_prompts")
        finished: list[str] = []
        while not engine.is_finished():
            finished += [output.request_id for output in engine.step()]
    assert sorted(finished) == sorted(others)
    assert found
    assert not any(found)
