"""Greedy outputs and logits equal those of transformers' own Qwen3ForCausalLM, whatever the
scheduler, the block size, the prefix cache or the order of the prompts make of a call.

Everything is float32 on the CPU. A token may differ only where transformers itself hardly prefers
its own: where its two best logits are within 1e-4.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import MakeCheckpoint
from transformers import Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams

NUM_NEW = 32
TIE = 1e-4  # logits closer than this may be ordered either way by another order of additions
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)

# Grouped-query ratios 1, 2 and 4; tied and untied heads; head_dim never hidden_size / heads.
MODELS = {
    "ratio1-tied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 24,
        "tie_word_embeddings": True,
    },
    "ratio2-untied": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "ratio4-tied": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 96,
        "tie_word_embeddings": True,
        "vocab_size": 1003,
    },
    "ratio4-untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
    },
}
CI_MODELS = ("ratio1-tied", "ratio4-untied")

SMALL_POOL = {"kvcache_block_size": 16, "num_kvcache_blocks": 60}  # the longest alone takes 59
MODES: dict[str, dict[str, object]] = {
    "blocks of 256": {},
    "blocks of 16": {"kvcache_block_size": 16},
    "64 tokens a step": {"max_num_batched_tokens": 64, "kvcache_block_size": 16},
    "tight pool": SMALL_POOL,
    "tight pool, tight budget": SMALL_POOL | {"max_num_batched_tokens": 64, "max_num_seqs": 5},
    "no prefix cache": {"enable_prefix_caching": False, "kvcache_block_size": 16},
    "tight pool, no prefix cache": SMALL_POOL | {"enable_prefix_caching": False},
    "nothing in flight": {"async_scheduling": False},
    "tight pool, nothing in flight": SMALL_POOL | {"async_scheduling": False},
    "odd blocks": {"kvcache_block_size": 7},
    "prompts beside running sequences": {"kvcache_block_size": 16, "max_num_mixed_tokens": 48},
    "tight pool, prompts beside running sequences": SMALL_POOL | {"max_num_mixed_tokens": 48},
}
CI_MODES = (
    "blocks of 256",
    "64 tokens a step",
    "tight pool",
    "tight pool, nothing in flight",
    "tight pool, prompts beside running sequences",
)


class Reference(NamedTuple):
    """A checkpoint, prompts, and what transformers answers."""

    folder: Path
    model: Qwen3ForCausalLM
    prompts: list[list[int]]
    answers: list[list[int]]


def make_prompts(vocab_size: int) -> list[list[int]]:
    """24 prompts of 1 to 900 tokens, most of which begin alike, some exactly at block borders."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, vocab_size, 900)
    # (tokens in common, tokens of its own)
    shapes = [(0, 1), (1, 0), (0, 15), (16, 0), (17, 0), (0, 31), (64, 1), (64, 30), (128, 0)]
    shapes += [(128, 0), (200, 55), (256, 0), (256, 1), (255, 0), (0, 257), (300, 5), (511, 1)]
    shapes += [(512, 0), (512, 88), (600, 40), (0, 700), (768, 32), (899, 1), (900, 0)]
    return [
        [*common[:shared].tolist(), *rng.integers(0, vocab_size, own).tolist()]
        for shared, own in shapes
    ]


def answer(model: Qwen3ForCausalLM, prompt: list[int]) -> list[int]:
    """What transformers generates greedily, never stopping."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False
        )
    return out[0, len(prompt) :].tolist()


def teacher_forced(model: Qwen3ForCausalLM, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """transformers' logits for each of `tokens`, given those before it: (tokens, vocabulary)."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits
    return logits[0]


def check_answers(reference: Reference, answers: list[list[int]]) -> None:
    """Every answer is transformers' own, up to the first tie."""
    for prompt, right, ours in zip(reference.prompts, reference.answers, answers, strict=True):
        assert len(ours) == NUM_NEW
        if ours == right:
            continue
        place = next(i for i in range(NUM_NEW) if ours[i] != right[i])
        logits = teacher_forced(reference.model, prompt, right[: place + 1])[-1]
        gap = float(logits.max() - logits[ours[place]])
        assert gap < TIE, f"prompt of {len(prompt)} tokens, output {place}: {gap} below the best"


@pytest.fixture(scope="module")
def references(make_checkpoint: MakeCheckpoint) -> "References":
    return References(make_checkpoint)


class References:
    """A Reference for each of MODELS, made when first asked for."""

    def __init__(self, make_checkpoint: MakeCheckpoint) -> None:
        self._make_checkpoint = make_checkpoint
        self._made: dict[str, Reference] = {}

    def __getitem__(self, name: str) -> Reference:
        if name not in self._made:
            folder = self._make_checkpoint(**MODELS[name])
            model = Qwen3ForCausalLM.from_pretrained(folder).eval()
            model.generation_config.eos_token_id = None
            prompts = make_prompts(model.config.vocab_size)
            answers = [answer(model, prompt) for prompt in prompts]
            self._made[name] = Reference(folder, model, prompts, answers)
        return self._made[name]


def open_llm(folder: Path, **options: object) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 1024}
    return LLM(str(folder), **{**defaults, **options})


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def models() -> list[object]:
    """Names of MODELS, those that CI leaves out marked."""
    return [
        name if name in CI_MODELS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS
    ]


def cases(is_slow: bool) -> Iterator[object]:
    for model in MODELS:
        for mode in MODES:
            if is_slow != (model in CI_MODELS and mode in CI_MODES):
                marks = [pytest.mark.slow] if is_slow else []
                yield pytest.param(model, mode, marks=marks, id=f"{model}, {mode}")


@pytest.mark.parametrize(("model", "mode"), [*cases(is_slow=False), *cases(is_slow=True)])
def test_greedy_tokens_equal_transformers(references: References, model: str, mode: str) -> None:
    """In order, shuffled, and once more on a warm cache."""
    reference = references[model]
    order = np.random.default_rng(1).permutation(len(reference.prompts)).tolist()
    with open_llm(reference.folder, **MODES[mode]) as llm:
        check_answers(reference, generate(llm, reference.prompts))
        num_cold = llm.stats().num_cached_tokens
        shuffled = generate(llm, [reference.prompts[i] for i in order])
        check_answers(reference, [shuffled[order.index(i)] for i in range(len(order))])
        stats = llm.stats()
    if "tight pool" in mode:
        # Some 13 a case with the prefix cache and 6 without: over CI's cases more than 50, over
        # all of them more than 150.
        assert stats.num_preemptions >= (5 if "no prefix cache" in mode else 10)
    if "no prefix cache" in mode:
        assert stats.num_cached_tokens == 0
    elif "tight" not in mode:
        assert stats.num_cached_tokens - num_cold > num_cold > 0
    assert stats.num_free_kvcache_blocks == stats.num_kvcache_blocks


@pytest.mark.parametrize("model", models())
def test_outputs_vary_and_depend_on_attention(references: References, model: str) -> None:
    """So that equal tokens mean something."""
    reference = references[model]
    num_constant = sum(len(set(tokens)) == 1 for tokens in reference.answers)
    assert num_constant < 0.1 * len(reference.answers)
    with open_llm(reference.folder) as llm:
        for layer in llm.llm_engine._runner.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        without_attention = generate(llm, reference.prompts)
    pairs = zip(without_attention, reference.answers, strict=True)
    assert sum(ours != right for ours, right in pairs) >= 0.9 * len(reference.answers)


class LogitsRecorder:
    """Keeps the logits behind every token of every sequence of an engine's steps."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: dict[int, list[torch.Tensor]] = {}  # by running number of the request
        engine = llm.llm_engine
        self._schedule, self._run_model = engine.scheduler.schedule, engine._runner.run_model
        monkeypatch.setattr(engine.scheduler, "schedule", self.schedule)
        monkeypatch.setattr(engine._runner, "run_model", self.run_model)

    def schedule(self, **options: bool) -> object:
        self._step = self._schedule(**options)
        return self._step

    def run_model(self, inputs: object) -> torch.Tensor:
        logits = self._run_model(inputs)
        for seq, row in zip(self._step.sequences, logits, strict=True):
            if seq is not None:
                self.logits.setdefault(seq.seq_id, []).append(row.clone())
        return logits


@pytest.mark.parametrize(
    "mode", ["blocks of 256", "64 tokens a step", "tight pool, prompts beside running sequences"]
)
@pytest.mark.parametrize("model", models())
def test_logits_equal_transformers(
    references: References, model: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1e-4: float32, two orders of additions, logits of some units."""
    reference = references[model]
    with open_llm(reference.folder, **MODES[mode]) as llm:
        recorder = LogitsRecorder(llm, monkeypatch)
        answers = generate(llm, reference.prompts)
    for i, (prompt, tokens) in enumerate(zip(reference.prompts, answers, strict=True)):
        ours = torch.stack(recorder.logits[i])
        torch.testing.assert_close(
            ours, teacher_forced(reference.model, prompt, tokens), atol=1e-4, rtol=0
        )
