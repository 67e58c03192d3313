"""Shapes that steps are captured at hold what the scheduler makes, and few of it runs eagerly."""

import random
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.worlds import Loop, World, random_orders

import bench
from nanovllm.config import Config
from nanovllm.engine.batch import MAX_MIXED_PREFILLS, num_mixed_prompt_tokens
from nanovllm.engine.cuda_graph import StepGraphs, decode_shapes, mixed_shapes
from nanovllm.engine.scheduler import Step
from nanovllm.engine.settings import resolve_settings
from nanovllm.kernels.row_state import StepShape

_RANDOM = random.Random(0)
LIMITS = [(seqs, tokens) for seqs in range(1, 24) for tokens in range(1, 40)]
LIMITS += [(_RANDOM.randint(1, 600), _RANDOM.randint(1, 1024)) for _ in range(300)]


def capture(monkeypatch: pytest.MonkeyPatch, shapes: list[StepShape]) -> StepGraphs:
    """Graphs of these shapes, without anything in them."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
    monkeypatch.setattr(StepGraphs, "_capture", lambda self, run: None)
    return StepGraphs(shapes, lambda shape: None)


def test_every_mixed_step_has_a_shape() -> None:
    for max_num_seqs, max_num_mixed_tokens in LIMITS:
        shapes = mixed_shapes(max_num_seqs, max_num_mixed_tokens)
        sizes = [shape.num_decodes for shape in shapes]
        assert sizes == sorted(set(sizes))
        for num_decodes in range(1, max_num_seqs + 1):
            shape = shapes[bisect_left(sizes, num_decodes)]
            num_tokens = num_mixed_prompt_tokens(num_decodes, max_num_mixed_tokens)
            limits = f"{num_decodes} of {max_num_seqs} lanes, {max_num_mixed_tokens} tokens"
            assert shape.num_prefill_tokens >= num_tokens, limits


def test_mixed_steps_are_captured_at_few_shapes() -> None:
    for max_num_seqs, max_num_mixed_tokens in LIMITS:
        num_shapes = len(mixed_shapes(max_num_seqs, max_num_mixed_tokens))
        assert num_shapes <= 32 + len(decode_shapes(max_num_seqs))


@pytest.mark.parametrize(
    ("shape", "options", "num_tokens"),
    [
        ("0.6B", {}, 512),
        ("8B", {}, 256),
        ("8B", {"tensor_parallel_size": 2}, 256),
        ("8B", {"tensor_parallel_size": 4}, 512),  # 3.2 GiB of layers a rank
        ("4B", {"dtype": "bfloat16"}, 256),
        ("1.7B", {"dtype": "bfloat16"}, 512),
        ("1.7B", {"dtype": "float32"}, 256),
        ("8B", {"enforce_eager": True}, 0),  # hundreds of launches outlast what the GPU saves
        ("8B", {"device": "cpu"}, 0),
        ("8B", {"max_num_mixed_tokens": 64}, 64),
    ],
)
def test_mixed_steps_are_longer_where_a_rank_holds_few_weights(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    shape: str,
    options: dict[str, object],
    num_tokens: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    bench.write_shape(bench.SHAPES[shape], tmp_path)
    settings = resolve_settings(Config(model=str(tmp_path), **options))
    assert settings.max_num_mixed_tokens == num_tokens


def test_shape_of_a_scheduled_step_is_the_smallest_that_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step that decodes has one; prompts alone, of the whole budget, may have none."""
    num_mixed = 0
    for seed in range(150):
        world = mixed_world(seed)
        shapes = decode_shapes(world.max_num_seqs)
        shapes += mixed_shapes(world.max_num_seqs, world.max_num_mixed_tokens)
        graphs = capture(monkeypatch, shapes)

        class Watched(Loop):
            def _count(self, step: Step, shapes=shapes, graphs=graphs) -> None:
                super()._count(step)
                check_shape(step, shapes, graphs.shape_for(step.batch))

        num_mixed += Watched(world).run()["mixed steps"]
    assert num_mixed >= 1000


def mixed_world(seed: int) -> World:
    """More sequences than a captured mixed step has room for prompts, and short prompts."""
    rng = random.Random(seed)
    orders = [o for _ in range(3) for o in random_orders(rng, num_slots=96)]
    return World(
        block_size=2,
        num_blocks=rng.choice((48, 400)),
        max_num_seqs=rng.randint(1, 40),
        max_num_batched_tokens=rng.choice((rng.randint(2, 64), 256)),
        max_num_mixed_tokens=rng.choice((rng.randint(1, 16), rng.randint(16, 100))),
        orders=tuple(replace(order, number=i) for i, order in enumerate(orders)),
    )


def check_shape(step: Step, shapes: list[StepShape], shape: StepShape | None) -> None:
    batch = step.batch
    assert not batch.num_decodes or batch.num_prefills <= MAX_MIXED_PREFILLS
    fitting = [
        other
        for other in shapes
        if bool(other.num_prefills) == bool(batch.num_prefills)
        and other.num_prefills >= batch.num_prefills
        and other.num_prefill_tokens >= len(batch.prompt_tokens)
        and other.num_decodes >= batch.num_decodes
    ]
    if batch.num_decodes or fitting:
        assert shape == min(fitting, key=lambda other: other.num_decodes)
    else:
        assert shape is None
