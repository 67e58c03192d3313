"""bench.py: the workload that others' figures are of, the floor, and a whole run."""

import json
import random

import pytest

import bench
from nanovllm.model_config import ModelConfig, read_config

TINY_SHAPE = bench.Shape(layers=1, hidden=64, heads=2, kv_heads=1, intermediate=64, is_tied=True)
PROMISED_KEYS = {"tok_s", "tok_s_median", "seconds", "kv_blocks", "load_s", "versions", "settings"}


@pytest.fixture
def run_bench(monkeypatch, capsys):
    """Run bench.py on a tiny shape and return the JSON of its last line."""
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY_SHAPE)
    tiny = "--shape tiny --device cpu --num-seqs 4 --max-model-len 256 --kvcache-block-size 16"

    def run(flags: str) -> dict:
        bench.main(f"{tiny} --num-kvcache-blocks 64 {flags}".split())
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def args_of(flags: str = ""):
    return bench.parse_args(f"--shape 0.6B {flags}".split())


def model_of(shape: str, folder) -> ModelConfig:
    return ModelConfig.from_dict(read_config(bench.write_shape(bench.SHAPES[shape], folder)))


def test_workload_repeats_draw_nano_vllms_random_stream():
    rng = random.Random(0)
    workloads = [bench.draw(args_of(), rng, bench.MAX_TOKEN_ID) for _ in range(3)]
    assert [sum(w.output_lens) for w in workloads] == [133_966, 141_430, 142_809]
    assert sum(len(prompt) for prompt in workloads[0].prompts) == 142_827
    assert max(workloads[0].output_lens) == 1024


def test_workload_first_repeat_equals_nano_vllms_own_code():
    random.seed(0)  # the global generator, as nano-vllm's script seeds it
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)
    ]
    output_lens = [random.randint(100, 1024) for _ in range(256)]
    workload = bench.draw(args_of(), random.Random(0), bench.MAX_TOKEN_ID)
    assert workload == (prompts, output_lens)


def test_workload_takes_exact_lengths_and_a_shared_prefix():
    flags = "--num-seqs 3 --prefix-len 20 --input-len 5 --output-len 7"
    workload = bench.draw(args_of(flags), random.Random(0), bench.MAX_TOKEN_ID)
    assert [len(prompt) for prompt in workload.prompts] == [25, 25, 25]
    assert len({tuple(prompt[:20]) for prompt in workload.prompts}) == 1
    assert len({tuple(prompt[20:]) for prompt in workload.prompts}) == 3
    assert workload.output_lens == [7, 7, 7]


@pytest.mark.parametrize(
    ("shape", "tok_s"),
    [("0.6B", 35_769), ("1.7B", 28_616), ("4B", 17_515), ("8B", 12_549), ("14B", 8_001)],
)
def test_floor_matches_an_independent_calculation(shape, tok_s, tmp_path):
    """Within 1%: the other calculation runs prefill attention at 60% of peak, ours at all of it."""
    args = args_of()
    workload = bench.draw(args, random.Random(0), bench.MAX_TOKEN_ID)
    seconds = bench.floor_seconds(args, model_of(shape, tmp_path), "bfloat16", workload)
    assert sum(workload.output_lens) / seconds == pytest.approx(tok_s, rel=0.01)


def test_floor_halves_on_two_gpus(tmp_path):
    model = model_of("8B", tmp_path)
    workload = bench.draw(args_of(), random.Random(0), bench.MAX_TOKEN_ID)
    one, two = (
        bench.floor_seconds(args_of(f"--tp {tp}"), model, "bfloat16", workload) for tp in (1, 2)
    )
    assert two == pytest.approx(one / 2)


def test_plan_steps_prefills_whole_prompts_first():
    steps = list(bench.plan_steps([5, 4, 3], [3, 1, 2], max_num_seqs=8, max_num_batched_tokens=9))
    assert steps == [
        ([], [(0, 5), (0, 4)]),  # 9 tokens fit; the second prompt is done with its one token
        ([], [(0, 3)]),
        ([6, 4], []),
        ([7], []),
    ]


def test_plan_steps_keeps_to_max_num_seqs_and_skips_cached_tokens():
    steps = list(
        bench.plan_steps(
            [6, 6, 6], [2, 2, 2], max_num_seqs=2, max_num_batched_tokens=100, num_cached=4
        )
    )
    assert steps == [
        ([], [(0, 6), (4, 6)]),
        ([7, 7], []),
        ([], [(4, 6)]),
        ([7], []),
    ]


def test_union_length_counts_overlaps_once():
    kernels = [bench.Kernel("", *span) for span in ((0, 4), (1, 2), (3, 3), (10, 1), (10.5, 1))]
    assert bench.union_length(kernels) == 6 + 1.5


def test_gpu_report_sets_kernels_against_the_wall_time_without_a_profiler():
    kernels = [
        bench.Kernel("decode_attention_kernel", 100.0, 60.0),
        bench.Kernel("linear_kernel", 170.0, 20.0),
        bench.Kernel("sample_kernel", 180.0, 20.0),
    ]
    steps = [bench.HostStep(num_lanes=4, seconds=50e-6) for _ in range(2)]
    assert bench.gpu_report(kernels, steps) == {
        "busy": 0.9,
        "busy_recorded": 0.9,
        "kernels_per_step": 1.5,
        "us_per_step": {"attention": 30.0, "GEMM": 10.0, "sampler": 10.0},
    }


def test_read_kernels_takes_what_the_gpu_did_from_the_trace():
    class Profiler:
        def export_chrome_trace(self, path: str) -> None:
            events = [
                {"cat": "kernel", "name": "linear_kernel", "ts": 5.5, "dur": 2},
                {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 3},
                {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 4, "dur": 1},
                {"name": "process_name", "ph": "M"},
            ]
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"traceEvents": events}, file)

    assert bench.read_kernels(Profiler()) == [
        bench.Kernel("linear_kernel", 5.5, 2.0),
        bench.Kernel("Memcpy HtoD", 4.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decode_attention_kernel", "attention"),
        ("plan_decode_kernel", "attention"),
        ("void flash::FlashAttnFwdSm90<...>", "attention"),
        ("nvjet_tst_64x64_64x16_4x1_v_bz_TNT", "GEMM"),
        ("linear_kernel", "GEMM"),
        ("gemv_kernel", "GEMM"),
        ("reduce_kernel", "GEMM"),
        ("void at::native::reduce_kernel<512, 1, ...>", "other"),
        ("qk_norm_rope_store_kernel", "norm/rope/store"),
        ("silu_and_mul_kernel", "norm/rope/store"),
        ("sample_kernel", "sampler"),
        ("combine_kernel", "sampler"),
        ("step_inputs_kernel", "other"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
    ],
)
def test_kernel_kinds(name, kind):
    assert bench.kind_of(name) == kind


def test_run_ends_with_json_of_what_was_measured(run_bench):
    result = run_bench("--repeats 2 --min-len 4 --max-input-len 30 --max-output-len 8 --profile")
    assert set(result) >= PROMISED_KEYS
    assert len(result["tok_s"]) == len(result["seconds"]) == 2
    assert result["cached_tokens"] == [0, 0]
    assert result["settings"]["detokenize"] is False
    host = result["profile"]["host"]["full_batch"]
    assert host["sequences"] == 4
    assert set(host["us_per_step"]) >= {"schedule", "launch", "wait", "postprocess"}
    assert all(0 < share < 1 for share in result["profile"]["floor"]["share"])


def test_run_counts_the_tokens_of_a_shared_prefix(run_bench):
    result = run_bench("--repeats 1 --prefix-len 40 --input-len 5 --output-len 3")
    assert result["cached_tokens"] == [3 * 32]  # two full blocks of 16, in all but the first prompt
    assert result["tokens"] == [4 * 3]
