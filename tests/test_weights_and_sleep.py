"""Weights replaced between calls, and the KV cache's memory given back between calls (C18)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MakeCheckpoint
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams

VOCAB = 300
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(10, 47)), [5, 6, 7], list(range(10, 30))]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folders(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    fields = {"vocab_size": VOCAB, "tie_word_embeddings": request.param, "eos_token_id": None}
    return make_checkpoint(seed=1, **fields), make_checkpoint(seed=2, **fields)


@pytest.fixture
def llm(folders: tuple[Path, Path]) -> Iterator[LLM]:
    with open_llm(folders[0]) as opened:
        yield opened


def open_llm(folder: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "kvcache_block_size": 4,
        "num_kvcache_blocks": 100,
    }
    return LLM(str(folder), **(defaults | options))


def answers_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("form", ["dict", "list", "generator"])
def test_new_weights_answer_as_a_new_engine_does(llm, folders, form):
    with open_llm(folders[1]) as other:
        expected = answers_of(other)
    old = answers_of(llm)
    assert old != expected
    weights = weights_of(folders[1])
    forms = {"dict": weights, "list": list(weights.items()), "generator": iter(weights.items())}
    llm.load_weights(forms[form])
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == expected
    assert outputs[0].num_cached_tokens == 0, "keys and values of the old weights"
    llm.load_weights(weights_of(folders[0]))
    assert answers_of(llm) == old


def test_weights_may_come_in_pieces(llm, folders):
    with open_llm(folders[1]) as other:
        expected = answers_of(other)
    for item in weights_of(folders[1]).items():
        llm.load_weights([item])
    assert answers_of(llm) == expected


def test_both_names_of_a_tied_head_mean_one_weight(llm, folders):
    """A tied model took lm_head.weight, of whatever shape, and dropped it."""
    name = "lm_head.weight"
    model = llm.llm_engine._runner.model
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    new = torch.randn(model.lm_head.weight.shape)
    llm.load_weights({name: new})
    assert torch.equal(model.lm_head.weight, new)
    assert torch.equal(model.model.embed_tokens.weight, new) == is_tied
    with pytest.raises(ValueError, match="shape"):
        llm.load_weights({name: torch.zeros(3, 3)})


def test_parameters_keep_their_addresses_and_dtypes(llm, folders):
    def addresses() -> list[tuple[int, torch.dtype]]:
        params = llm.llm_engine._runner.model.parameters()
        return [(param.data_ptr(), param.dtype) for param in params]

    before = addresses()
    llm.load_weights({name: value.bfloat16() for name, value in weights_of(folders[1]).items()})
    assert addresses() == before


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("model.nothing.weight", torch.zeros(3), ValueError, "nothing.weight has no parameter"),
        ("model.norm.weight", torch.zeros(63), ValueError, "norm.weight: its shape is"),
        ("model.layers.0.self_attn.q_proj.weight", torch.zeros(2, 2), ValueError, "q_proj.weight"),
        ("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(2, 2), ValueError, "no parameter"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int32), TypeError, "floating point"),
        ("model.norm.weight", torch.zeros(64, device="meta"), TypeError, "norm.weight .* dense"),
        ("model.norm.weight", torch.zeros(64).to_sparse(), TypeError, "norm.weight .* dense"),
        ("model.norm.weight", [1.0], TypeError, "norm.weight must be a torch.Tensor, not list"),
        (3, torch.zeros(3), TypeError, "pairs of a name and a tensor"),
    ],
)
def test_a_wrong_weight_is_named_before_anything_is_written(
    llm, folders, name, value, error, match
):
    before = answers_of(llm)
    with pytest.raises(error, match=match):
        llm.load_weights([*weights_of(folders[1]).items(), (name, value)])
    assert answers_of(llm) == before


def test_what_holds_no_weights_is_an_error(llm, folders):
    file = folders[1] / "model.safetensors"
    for value in (file, str(file), None, 5, llm.llm_engine._runner.model):
        with pytest.raises(TypeError, match=r"mapping or an iterable of .*load_file.*state_dict"):
            llm.load_weights(value)
    with pytest.raises(TypeError, match="norm.weight must be a torch.Tensor, not ndarray"):
        llm.load_weights({"model.norm.weight": np.ones(64)})
    used_up = iter(weights_of(folders[1]).items())
    llm.load_weights(used_up)
    before = answers_of(llm)
    for empty in ({}, [], used_up):
        with pytest.raises(ValueError, match="no weights were given"):
            llm.load_weights(empty)
    assert answers_of(llm) == before


def test_a_wrong_weight_of_a_generator_says_how_many_came_before(llm, folders):
    items = list(weights_of(folders[1]).items())
    with pytest.raises(ValueError, match=r"\(3 tensors before it are written\)"):
        llm.load_weights(iter([*items[:3], ("x.weight", torch.zeros(1))]))
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize("verb", ["load_weights", "sleep", "reset_prefix_cache"])
def test_nothing_is_replaced_while_requests_run(llm, folders, verb):
    engine = llm.llm_engine
    request_id = engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(3):
        arguments = (weights_of(folders[0]),) if verb == "load_weights" else ()
        with pytest.raises(RuntimeError, match="abort them"):
            getattr(llm, verb)(*arguments)
        with pytest.raises(RuntimeError, match="abort them"):
            getattr(engine, verb)(*arguments)
        engine.step()
    engine.abort(request_id)
    getattr(llm, verb)(*arguments)


def test_sleep_gives_the_cache_back_and_wake_up_takes_it_again(llm):
    before = answers_of(llm)
    assert llm.stats().kvcache_bytes > 0
    llm.sleep()
    assert llm.stats().kvcache_bytes == 0
    assert llm.llm_engine._runner.kv_cache is None
    for call in (
        lambda: llm.generate(PROMPTS, GREEDY),
        lambda: list(llm.stream(PROMPTS, GREEDY)),
        lambda: llm.llm_engine.add_request(PROMPTS[0], GREEDY),
        lambda: llm.llm_engine.step(),
        lambda: llm.load_weights([]),
        lambda: llm.reset_prefix_cache(),
    ):
        with pytest.raises(RuntimeError, match="wake_up"):
            call()
    llm.wake_up()
    llm.wake_up()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == before
    assert outputs[0].num_cached_tokens == 0
    assert llm.stats().kvcache_bytes > 0


def test_a_second_sleep_changes_nothing(llm):
    before = answers_of(llm)
    for verb in (llm.sleep, llm.llm_engine.sleep, llm.sleep):
        verb()
        assert llm.stats().kvcache_bytes == 0
    llm.wake_up()
    assert answers_of(llm) == before


def test_a_second_sleep_finishes_one_that_was_interrupted(llm, monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    runner = llm.llm_engine._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_release_pool", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.sleep()
    assert runner.kv_cache is not None
    llm.sleep()
    assert runner.kv_cache is None


def test_a_sleeping_engine_can_be_closed(folders):
    llm = open_llm(folders[0])
    llm.sleep()
    llm.exit()
    llm.exit()
    for verb in (llm.wake_up, llm.sleep):
        with pytest.raises(RuntimeError, match="closed"):
            verb()


@pytest.mark.usefixtures("hard_timeout", "quick_start")
def test_several_ranks_take_new_weights_and_sleep(llm, folders):
    old = answers_of(llm)
    with open_llm(folders[1]) as other:
        new = answers_of(other)
    with open_llm(folders[0], tensor_parallel_size=2) as ranks:
        assert answers_of(ranks) == old
        with pytest.raises(ValueError, match="norm.weight: its shape is"):
            ranks.load_weights([("model.norm.weight", torch.zeros(63))])
        assert answers_of(ranks) == old, "a mistake of the caller leaves the ranks as they are"
        ranks.load_weights({name: value.double() for name, value in weights_of(folders[1]).items()})
        assert answers_of(ranks) == new
        ranks.sleep()
        ranks.sleep()
        with pytest.raises(RuntimeError, match="wake_up"):
            ranks.generate(PROMPTS, GREEDY)
        ranks.wake_up()
        assert answers_of(ranks) == new


@pytest.mark.gpu
def test_sleep_frees_memory_of_the_gpu(folders):
    options = {"device": "cuda", "num_kvcache_blocks": 20_000, "kvcache_block_size": 16}
    with open_llm(folders[0], **options) as llm:
        before, awake = answers_of(llm), torch.cuda.memory_allocated()
        num_bytes = llm.stats().kvcache_bytes
        llm.sleep()
        # Of this process: what is free on the device also depends on what other tests left.
        assert torch.cuda.memory_allocated() <= awake - num_bytes
        llm.wake_up()
        assert answers_of(llm) == before
        assert torch.cuda.mem_get_info()[0] >= awake - (64 << 20)
