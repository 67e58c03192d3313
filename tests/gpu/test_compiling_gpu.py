"""A start with an empty cache compiles everything in one go: no kernel is left for later."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bench

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
# Triton's cache hook is called whenever a kernel isn't in memory, whether the disk has it or not.
SCRIPT = """
import json, sys, threading
import triton
from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import ModelRunner

late = []
compile_kernels = ModelRunner.compile_kernels

def compile_then_watch(runner):
    compile_kernels(runner)
    assert not [t for t in threading.enumerate() if t.name.startswith("compile")]
    triton.knobs.runtime.jit_cache_hook = lambda *, repr, **options: late.append(repr)

def run(**options):
    wishes = ({}, {"top_p": 0.9}, {"repetition_penalty": 1.2}, {"logprobs": 2, "min_p": 0.1})
    lengths = (1, 2, 3, 16, 17, 40, 700, 1500)
    prompts = [[7 + i] * length for i, length in enumerate(lengths)]
    with LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=2048,
             max_num_batched_tokens=1024, num_kvcache_blocks=64, **options) as llm:
        for length in lengths:
            llm.generate([[9] * length], SamplingParams(max_tokens=3, ignore_eos=True),
                         use_tqdm=False)
        params = [SamplingParams(max_tokens=4 + i, ignore_eos=True, **wishes[i % 4])
                  for i in range(len(prompts))]
        llm.generate(prompts, params, use_tqdm=False)
        return dict(llm.stats().startup_s)["kernels"]

if __name__ == "__main__":
    ModelRunner.compile_kernels = compile_then_watch
    seconds = run(max_num_seqs=40, max_num_mixed_tokens=512)
    triton.knobs.runtime.jit_cache_hook = None
    run(max_num_seqs=3, enforce_eager=True)
    print(json.dumps({"late": late, "seconds": seconds}))
"""


def test_no_kernel_compiles_after_the_start_compiled_them(tmp_path: Path) -> None:
    model, script, cache = tmp_path / "model", tmp_path / "script.py", tmp_path / "cache"
    model.mkdir()
    bench.write_shape(replace(bench.SHAPES["0.6B"], layers=2), model)
    script.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), str(model)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["late"] == []
    assert found["seconds"] > 0
    assert any(cache.iterdir())
