"""Random workloads of fixed seeds answer as alone; `python -m tests.fuzz` runs any number of them.

The second half plants mistakes: a fuzzer that none can fail proves nothing.
"""

import pytest
import torch
from fuzz import FOLDER, Fuzzer, random_workload
from soak import main as soak

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.logprobs import LogprobLog
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence
from nanovllm.layers import sampler

NUM_SEEDS, SEEDS_A_TEST = 30, 5
MOST_SEEDS_TO_A_MISTAKE = 40


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, SEEDS_A_TEST))
def test_random_workloads_answer_as_alone(fuzzer: Fuzzer, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + SEEDS_A_TEST):
        fuzzer.run_seed(seed, num_ranks=1)


@pytest.mark.usefixtures("hard_timeout", "quick_start")
def test_random_workload_of_two_ranks_answers_as_alone(fuzzer: Fuzzer) -> None:
    fuzzer.run_seed(NUM_SEEDS, num_ranks=2)


def test_workload_is_a_function_of_its_seed(fuzzer: Fuzzer) -> None:
    first, again, other = (repr(random_workload(s, fuzzer.tokenizer)) for s in (5, 5, 6))
    assert first == again != other


def test_soak_runs_on_a_laptop() -> None:
    options = ["--device=cpu", "--minutes=0.05", "--num-seqs=12", "--max-model-len=128"]
    result = soak([f"--model={FOLDER}", *options])
    assert result["preemptions"] > 0
    assert result["equal to a lone run"] > 0


# planted mistakes


def swap_first_two(self: Scheduler, step: Step, token_ids: list[int]) -> list[Sequence]:
    """Two sequences get each other's token."""
    if len(token_ids) > 1 and None not in step.sequences[:2]:
        token_ids = [token_ids[1], token_ids[0], *token_ids[2:]]
    return postprocess(self, step, token_ids)


def draw_by_lane(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, *args: object
) -> object:
    """The noise depends on who else is in the batch."""
    return sample_torch(logits, temperatures, seeds + torch.arange(len(seeds)), *args)


def drop_a_character(self: Detokenizer) -> str:
    return take_delta(self)[:-1]


postprocess, take_delta = Scheduler.postprocess, Detokenizer.take_delta
sample_torch = sampler.sample_torch

MISTAKES = {
    "tokens are swapped": (Scheduler, "postprocess", swap_first_two),
    "noise depends on the lane": (sampler, "sample_torch", draw_by_lane),
    "text is lost": (Detokenizer, "take_delta", drop_a_character),
    "any block matches": (Block, "holds", lambda *args: True),
    "nothing is dropped after an error": (LLMEngine, "_recover", lambda self: None),
    "a logprob is lost": (LogprobLog, "entries", lambda self: self._entries),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_found(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    owner, name, wrong = MISTAKES[mistake]
    run_alone = fuzzer._alone

    def alone_without_it(*args: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, right)
            return run_alone(*args)

    right = getattr(owner, name)
    monkeypatch.setattr(fuzzer, "_alone", alone_without_it)
    monkeypatch.setattr(owner, name, wrong)
    if owner is Block:
        monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda *args: 1))

    def run_seeds() -> None:
        for seed in range(MOST_SEEDS_TO_A_MISTAKE):
            fuzzer.run(random_workload(seed, fuzzer.tokenizer, num_ranks=1))

    with pytest.raises((AssertionError, RuntimeError, ValueError, KeyError)):
        run_seeds()
