"""Two GPUs and more: ranks answer like one, with graphs and over peer memory, and never hang."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import rank_pids, shared_memory_names, wait_until_ended

from nanovllm import LLM, SamplingParams

pytestmark = [pytest.mark.gpu2, pytest.mark.usefixtures("hard_timeout", "quick_start")]

REPEATS = [*range(3), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 20))]
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "num_kvcache_blocks": 64,
    "kvcache_block_size": 16,
}
# Head size and widths that every kernel takes; two layers are enough to go wrong.
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,  # two of eight ranks hold the same
}
SCRIPT_LIMIT_S = 120


def some_prompts(num_prompts: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 999, int(rng.integers(1, 60))).tolist() for _ in range(num_prompts)]


def some_params(num_prompts: int) -> list[SamplingParams]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.9, "top_p": 0.8, "seed": 3},
    ]
    return [
        SamplingParams(max_tokens=20 + i, ignore_eos=True, **kinds[i % 3])
        for i in range(num_prompts)
    ]


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(some_prompts(8), some_params(8), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_ranks_answer_like_one_in_float32(make_checkpoint, enforce_eager: bool, size: int) -> None:
    """C44: graphs that contain the all-reduces, too; TF32 is off unless somebody turns it on."""
    folder = str(make_checkpoint(**MODEL))
    options = {**OPTIONS, "dtype": "float32", "enforce_eager": enforce_eager}
    with LLM(folder, **options) as llm:
        expected = tokens_of(llm)
    with LLM(folder, **options, tensor_parallel_size=size) as llm:
        stats = llm.stats()
        assert bool(stats.graph_batch_sizes) is not enforce_eager
        assert "nccl" in stats.all_reduce
        assert tokens_of(llm) == expected
        assert tokens_of(llm) != [], "a second call on the same ranks"


def test_ranks_score_like_one_in_bfloat16(make_checkpoint, size: int) -> None:
    """Teacher-forced: every token's logprob, apart from what bfloat16 rounds differently."""
    folder = str(make_checkpoint(**MODEL))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scores = []
    for num_ranks in (1, size):
        options = {**OPTIONS, "dtype": "bfloat16", "tensor_parallel_size": num_ranks}
        with LLM(folder, **options) as llm:
            outputs = llm.generate(some_prompts(8), params, use_tqdm=False)
        scores.append(
            [
                entry[token_id].logprob
                for output in outputs
                for token_id, entry in zip(
                    output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                )
            ]
        )
    one, several = (torch.tensor(score) for score in scores)
    # Eight bits of mantissa at logits of some ten: single scores differ by 0.1, not by 1.
    assert (one - several).abs().mean() < 0.1
    assert (one - several).abs().max() < 1.0


@pytest.mark.parametrize("repeat", REPEATS)
def test_rank_killed_while_decoding_raises_and_closes(
    make_checkpoint, repeat: int, size: int
) -> None:
    """C31: the others spin in a kernel that waits for their peer, and are ended all the same."""
    names = shared_memory_names()
    llm = LLM(str(make_checkpoint(**MODEL)), **OPTIONS, tensor_parallel_size=size)
    rank = repeat % size
    pids = rank_pids()
    stream = llm.stream(some_prompts(4), SamplingParams(max_tokens=400, ignore_eos=True), True)
    for _ in range(20 + repeat):
        next(stream)
    os.kill(pids[f"nanovllm rank {rank}"], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"^rank {rank} was killed by SIGKILL"):
        list(stream)
    assert rank_pids() == {}
    assert wait_until_ended(pids.values()) == []
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], use_tqdm=False)
    llm.exit()
    assert shared_memory_names() == names


@pytest.mark.parametrize("delay_s", [0.1, 1.5, 4.0])
def test_rank_killed_while_it_starts_raises(make_checkpoint, delay_s: float) -> None:
    """C31: while it joins the group, loads, measures its memory or captures graphs."""
    folder = str(make_checkpoint(**MODEL))

    def kill_soon() -> None:
        while not (pid := rank_pids().get("nanovllm rank 1")):
            threading.Event().wait(0.001)
        threading.Event().wait(delay_s)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill_soon, daemon=True).start()
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    with pytest.raises(RuntimeError, match="^rank 1 was killed by SIGKILL"):
        LLM(folder, **OPTIONS, tensor_parallel_size=2).generate([[1]] * 2000, params, False)
    assert rank_pids() == {}


def run_script(folder: Path, body: str) -> "subprocess.Popen[str]":
    path = folder / "script.py"
    path.write_text(textwrap.dedent(body))
    tests = Path(__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])},
    )


SCRIPT = """
    import torch
    from processes import rank_pids
    from nanovllm import LLM, SamplingParams

    if __name__ == "__main__":
        llm = LLM({folder!r}, tensor_parallel_size=2, **{options!r})
        assert not torch.cuda.is_initialized(), "the caller has a CUDA context"
        print(*rank_pids().values(), flush=True)
        for _ in range({num_calls}):
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            llm.generate([[1, 2, 3]] * 8, params, use_tqdm=False)
"""


@pytest.mark.parametrize("sent", [None, signal.SIGINT, signal.SIGKILL])
def test_script_ends_with_its_ranks(
    make_checkpoint, tmp_path: Path, sent: signal.Signals | None
) -> None:
    """C30: by itself without exit(), by Ctrl-C, or killed: nothing stays behind."""
    names = shared_memory_names()
    folder, num_calls = str(make_checkpoint(**MODEL)), 1000 if sent else 1
    script = run_script(
        tmp_path, SCRIPT.format(folder=folder, options=OPTIONS, num_calls=num_calls)
    )
    assert script.stdout is not None
    pids = [int(word) for word in script.stdout.readline().split()]
    assert len(pids) == 2, script.communicate(timeout=SCRIPT_LIMIT_S)
    if sent is signal.SIGINT:
        os.killpg(script.pid, sent)
    elif sent is not None:
        script.send_signal(sent)
    _, errors = script.communicate(timeout=SCRIPT_LIMIT_S)
    assert script.returncode == (-sent if sent else 0), errors
    assert "resource_tracker" not in errors
    assert wait_until_ended(pids) == []
    assert shared_memory_names() == names
