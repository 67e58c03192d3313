"""Captured steps, padded to their shapes and run late, answer as requests run alone.

The second half plants mistakes in what only captured steps use.
"""

import itertools

import numpy as np
import pytest
from fuzz import FOLDER, Fuzzer, random_workload
from late_device import captured_on_cpu

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.cuda_graph import StepGraphs
from nanovllm.engine.model_runner import ModelRunner, PendingTokens
from nanovllm.kernels.row_state import StepShape
from nanovllm.utils import pinned

NUM_SEEDS = 9
MOST_SEEDS_TO_A_MISTAKE = 12


def test_random_workloads_on_a_late_device_answer_as_alone(fuzzer: Fuzzer) -> None:
    with captured_on_cpu() as device:
        for seed in range(NUM_SEEDS):
            fuzzer.run_seed(seed, num_ranks=1, is_mixed=seed % 4 > 0)
    num_mixed = sum(shape.num_prefills > 0 for shape in device.replays)
    assert num_mixed >= 50
    assert len(device.replays) - num_mixed >= 500
    assert fuzzer.counts["faults raised"] >= 3


# launches that break off

BREAKS = ((pinned.StepSlots, "fill"), (StepGraphs, "replay"), (pinned.StepSlots, "launched"))
PROMPTS = [[5, 6, 7], [8, 9], list(range(20, 45)), [11]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def break_off(llm: LLM, owner: type, name: str, count: int, is_late: bool) -> None:
    """Ctrl-C as a method of `owner` is called for the `count`-th time, or as it returns."""
    method, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args: object) -> object:
        is_due = next(calls) == count
        if is_due and not is_late:
            raise KeyboardInterrupt
        value = method(*args)
        if is_due:
            raise KeyboardInterrupt
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens_of(llm)


def check_breaks(counts: range) -> None:
    """Break off launches one after another, and ask again after each."""
    with captured_on_cpu(), LLM(str(FOLDER), device="cpu", max_num_mixed_tokens=16) as llm:
        right = tokens_of(llm)
        for (owner, name), count, is_late in itertools.product(BREAKS, counts, (False, True)):
            break_off(llm, owner, name, count, is_late)
            assert tokens_of(llm) == right, f"{name} broke off at {count}"


def test_engine_goes_on_wherever_a_launch_breaks_off() -> None:
    check_breaks(range(1, 6))


def test_engine_goes_on_when_a_second_ctrl_c_breaks_off_the_recovery() -> None:
    """The device was then a slot ahead of the host, and steps ran the wires of others."""

    def interrupted(runner: ModelRunner) -> None:
        raise KeyboardInterrupt

    with captured_on_cpu(), LLM(str(FOLDER), device="cpu", max_num_mixed_tokens=16) as llm:
        right = tokens_of(llm)
        for (owner, name), is_late in itertools.product(BREAKS, (False, True)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ModelRunner, "synchronize", interrupted)
                break_off(llm, owner, name, 3, is_late)
            assert tokens_of(llm) == right, f"{name} broke off"


def test_turns_that_are_not_resynchronised_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned.StepSlots, "resync", lambda self: None)
    with pytest.raises((AssertionError, RuntimeError)):
        check_breaks(range(1, 6))


# planted mistakes


def overwrite_the_one_before(
    self: ModelRunner, batch: ScheduledBatch, shape: StepShape, wire: np.ndarray
) -> PendingTokens:
    """The wire of a step in flight is lost."""
    slots = self.slots
    slots._slots[slots._next - 1].wire[: len(wire)] = wire
    return replay(self, batch, shape, wire)


def forget_prompt_tokens(self: StepGraphs, batch: ScheduledBatch) -> StepShape | None:
    """The shape has room for the lanes, whatever their tokens."""
    shapes = self._mixed if batch.num_prefills else self._decodes
    fits = (shape for shape in shapes[::-1] if shape.num_lanes >= batch.num_lanes)
    return next(fits, None)


replay = ModelRunner._replay

MISTAKES = {
    "a wire is overwritten": (ModelRunner, "_replay", overwrite_the_one_before),
    "nobody waits for a slot": (pinned.Slot, "synchronize", lambda self: None),
    "a shape is too small": (StepGraphs, "shape_for", forget_prompt_tokens),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_found(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    def run_seeds() -> None:
        for seed in range(MOST_SEEDS_TO_A_MISTAKE):
            fuzzer.run(random_workload(seed, fuzzer.tokenizer, num_ranks=1, is_mixed=True))

    monkeypatch.setattr(*MISTAKES[mistake])
    with captured_on_cpu(), pytest.raises((AssertionError, RuntimeError)):
        run_seeds()
