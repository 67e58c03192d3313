"""Tokens/s of a batch file against the same requests from memory, on one GPU.

python tests/gpu/bench_batch_file.py [REQUESTS]; random weights of the 0.6B shape, ids in and ids
out. Prompts of 100 to 512 tokens, outputs of 32 to 256. The run from memory is timed after a full
warm-up pass, the one from a file has none, and ends with the last answer on disk.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import bench  # noqa: E402


def write_requests(path: Path, num_requests: int) -> None:
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for i in range(num_requests):
            request = {
                "id": i,
                "prompt_token_ids": [rng.randint(0, 10000) for _ in range(rng.randint(100, 512))],
                "max_tokens": rng.randint(32, 256),
                "temperature": 0.6,
                "ignore_eos": True,
            }
            file.write(json.dumps(request) + "\n")


def output_of(*arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment, cwd=ROOT, text=True, check=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    return result.stdout


def main() -> None:
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        requests, answers = folder / "in.jsonl", folder / "out.jsonl"
        bench.write_shape(bench.SHAPES["0.6B"], folder)
        write_requests(requests, num_requests)
        memory = output_of("bench.py", "--shape", "0.6B", "--requests", requests, "--repeats", 3)
        print("\n".join(line for line in memory.splitlines() if line.startswith("repeat")))
        for _ in range(3):
            answers.unlink(missing_ok=True)
            options = ["--load-format", "dummy", "--skip-tokenizer-init", "--no-progress"]
            options += ["--model", folder, "--max-model-len", 4096]
            file = output_of("-m", "nanovllm", requests, answers, *options)
            assert len(answers.read_text().splitlines()) == num_requests
            print(file.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
