"""Several ranks answer like one: token for token in float32, whatever the schedule."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import rank_pids, shared_memory_names

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.sampling import combine_shards, sample_torch

pytestmark = pytest.mark.usefixtures("hard_timeout", "quick_start")

REPEATS = [*range(3), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 20))]

# Enough for the prompts below; the small block size makes them span blocks.
ROOMY = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kvcache_block_size": 8,
}
# Fewer blocks than the batch needs, and steps shorter than the longest prompt.
TIGHT = {**ROOMY, "num_kvcache_blocks": 24, "max_num_batched_tokens": 32}


def some_prompts(num_prompts: int, vocab_size: int = 1000) -> list[list[int]]:
    """Prompts of 1 to 60 tokens; every other one begins like the first."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab_size, 40).tolist()
    prompts = []
    for i in range(num_prompts):
        own = rng.integers(0, vocab_size, int(rng.integers(1, 20))).tolist()
        prompts.append(shared + own if i % 2 == 0 else own)
    return prompts


def some_params(num_prompts: int) -> list[SamplingParams]:
    """Greedy, drawn, drawn with a seed, and drawn through filters, by turns."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.2, "seed": 7},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    ]
    return [
        SamplingParams(max_tokens=10 + 3 * i, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(num_prompts)
    ]


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (4, {}),  # two KV heads: each is held by two ranks
        (2, {"vocab_size": 1001, "tie_word_embeddings": True, "attention_bias": True}),
        pytest.param(
            8,
            {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1001},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_answer_like_one(make_checkpoint, size: int, changes: dict[str, object]) -> None:
    """Roomy, then tight: chunked prompts, preemptions (C16), prefixes found and evicted."""
    folder = str(make_checkpoint(**changes))
    prompts, params = some_prompts(8), some_params(8)
    with LLM(folder, **ROOMY) as llm:
        expected = tokens_of(llm, prompts, params)
    with LLM(folder, **TIGHT, tensor_parallel_size=size) as llm:
        assert tokens_of(llm, prompts, params) == expected
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert stats.num_cached_tokens > 0
        assert stats.device == ", ".join(["cpu"] * size)
    assert rank_pids() == {}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_shards_of_a_vocabulary_draw_what_the_whole_would(num_rows: int, size: int) -> None:
    """C45: an odd vocabulary, split as the head splits it."""
    vocab_size = 1001
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    temperatures = torch.tensor([0.0, 0.7, 1.3] * 3)[:num_rows]
    seeds = torch.arange(num_rows) * 1000003
    positions = torch.arange(num_rows, dtype=torch.int32) + 5
    whole = sample_torch(logits, temperatures, seeds, positions, 0)
    shard_size = -(-vocab_size // size)
    shards = [
        sample_torch(shard, temperatures, seeds, positions, i * shard_size)
        for i, shard in enumerate(logits.split(shard_size, dim=1))
    ]
    combined = combine_shards(
        torch.stack([shard.values for shard in shards]),
        torch.stack([shard.token_ids for shard in shards]),
    )
    assert combined.token_ids.tolist() == whole.token_ids.tolist()


@pytest.mark.parametrize("num_prompts", [1, 2, 7])
def test_ranks_agree_on_tokens_of_an_odd_vocabulary(make_checkpoint, num_prompts: int) -> None:
    """C45: were the ranks to disagree once, they would embed different tokens from then on."""
    folder = str(make_checkpoint(vocab_size=1001))
    prompts = some_prompts(num_prompts)
    params = [SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)] * num_prompts
    with LLM(folder, **ROOMY) as llm:
        expected = tokens_of(llm, prompts, params)
    with LLM(folder, **ROOMY, tensor_parallel_size=2) as llm:
        assert tokens_of(llm, prompts, params) == expected


def test_logprobs_of_ranks_equal_those_of_one(make_checkpoint) -> None:
    folder = str(make_checkpoint(vocab_size=1001))
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    outputs = []
    for size in (1, 2):
        with LLM(folder, **ROOMY, tensor_parallel_size=size) as llm:
            outputs.append(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0])
    one, two = outputs
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    pairs = list(zip(one.outputs[0].logprobs, two.outputs[0].logprobs, strict=True))
    pairs += zip(one.prompt_logprobs[1:], two.prompt_logprobs[1:], strict=True)
    for expected, found in pairs:
        assert list(found) == list(expected)
        for token_id, logprob in expected.items():
            assert found[token_id].rank == logprob.rank
            # Sums over ranks round differently from sums over a whole row.
            assert found[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-4)


def test_failed_call_leaves_the_ranks_usable(make_checkpoint) -> None:
    with LLM(str(make_checkpoint()), **ROOMY, tensor_parallel_size=2) as llm:
        expected = tokens_of(llm, some_prompts(3), some_params(3))
        stream = llm.stream(some_prompts(3), SamplingParams(max_tokens=30), deltas=True)
        next(stream)
        stream.close()  # with a step in flight
        llm.reset_prefix_cache()
        assert [len(tokens) for tokens in expected] == [10, 13, 16]
        assert tokens_of(llm, some_prompts(1), some_params(1)) == expected[:1]


def test_two_engines_of_ranks_side_by_side(make_checkpoint) -> None:
    folders = [str(make_checkpoint()), str(make_checkpoint(seed=1))]
    prompts, params = some_prompts(4), some_params(4)
    expected = []
    for folder in folders:
        with LLM(folder, **ROOMY) as llm:
            expected.append(tokens_of(llm, prompts, params))
    llms = [LLM(folder, **ROOMY, tensor_parallel_size=2) for folder in folders]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda llm: tokens_of(llm, prompts, params), llms)
        assert list(found) == expected
    for llm in llms:
        llm.exit()


@pytest.mark.parametrize("num_engines", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_engines_that_start_at_once_do_not_collide(make_checkpoint, num_engines: int) -> None:
    """C29: no port and no name to collide on."""
    folder, names = str(make_checkpoint()), shared_memory_names()
    with ThreadPoolExecutor(num_engines) as pool:
        starts = [
            pool.submit(LLM, folder, **ROOMY, tensor_parallel_size=2) for _ in range(num_engines)
        ]
        llms = [start.result() for start in starts]
    prompts, params = some_prompts(2), some_params(2)
    assert len({str(tokens_of(llm, prompts, params)) for llm in llms}) == 1
    for llm in llms:
        llm.exit()
    assert rank_pids() == {}
    assert shared_memory_names() == names


# when a rank fails


@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_while_decoding_raises_and_closes(
    make_checkpoint, rank: int, repeat: int
) -> None:
    """C31: its peer waits for it in a collective, and is ended too."""
    llm = LLM(str(make_checkpoint()), **ROOMY, tensor_parallel_size=2)
    pid = rank_pids()[f"nanovllm rank {rank}"]
    stream = llm.stream(some_prompts(4), SamplingParams(max_tokens=200, ignore_eos=True), True)
    for _ in range(8 + repeat):
        next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"^rank {rank} was killed by SIGKILL"):
        list(stream)
    assert rank_pids() == {}
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], use_tqdm=False)
    llm.exit()


@pytest.mark.parametrize("repeat", REPEATS)
def test_rank_killed_while_it_starts_raises(make_checkpoint, repeat: int) -> None:
    """C31: from before its first line of Python to the middle of loading."""
    folder = str(make_checkpoint())
    killed = threading.Event()

    def kill_soon() -> None:
        while not (pid := rank_pids().get("nanovllm rank 1")):
            killed.wait(0.001)
        killed.wait(0.02 * repeat)
        os.kill(pid, signal.SIGKILL)
        killed.set()

    threading.Thread(target=kill_soon, daemon=True).start()
    with pytest.raises(RuntimeError, match="^rank 1 was killed by SIGKILL"):
        tokens_of(LLM(folder, **ROOMY, tensor_parallel_size=2), [[1]] * 500, some_params(4) * 125)
    assert killed.is_set()
    assert rank_pids() == {}


def test_damaged_checkpoint_is_the_same_error_as_on_one_rank(
    make_checkpoint, tmp_path: Path
) -> None:
    """What the checkpoint lacks is found by the ranks, and still is a ValueError here."""
    source = make_checkpoint(tie_word_embeddings=True)
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    config = (source / "config.json").read_text()
    fixed = config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (tmp_path / "config.json").write_text(fixed)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        LLM(str(tmp_path), **ROOMY, tensor_parallel_size=2)
    assert rank_pids() == {}


def test_sizes_that_cannot_be_split_start_nothing(make_checkpoint) -> None:
    with pytest.raises(ValueError, match="num_attention_heads is 4, no multiple"):
        LLM(str(make_checkpoint()), **ROOMY, tensor_parallel_size=3)
    assert rank_pids() == {}


def test_one_rank_makes_no_process_group(make_checkpoint) -> None:
    """C28: a trainer's default group is not disturbed, and no process is started."""
    with LLM(str(make_checkpoint()), **ROOMY) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert not torch.distributed.is_initialized()
        assert rank_pids() == {}
