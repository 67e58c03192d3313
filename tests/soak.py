"""Mixed traffic for minutes under a tight KV pool: what comes of it, and what it does to memory.

    python -m tests.soak                          # random weights of 0.6B, 5 minutes, one GPU
    python -m tests.soak --model FOLDER --ranks 2 # a checkpoint, over two GPUs
    python -m tests.soak --model tests/tiny_qwen3 --minutes 0.1 --num-seqs 8   # a laptop

Requests of all lengths come as fast as the engine takes them, many with a shared beginning; they
are greedy, drawn, filtered, penalised, with logprobs; some are aborted. Now and then a call fails
on purpose. The pool holds a third of what the running sequences would fill, so they preempt each
other all the time. At the end every 100th plain answer is run again, alone: its tokens must be the
same up to where the two best scores are closer than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.input_processor import derive_seed
from nanovllm.engine.scheduler import Scheduler
from nanovllm.kernels.sampling import LOG2_E, sample_torch

CHECK_EVERY = 100  # plain answers
MOST_CHECKED = 200
CLOSE = 1e-3  # float32; a trained network magnifies what is rounded differently
CLOSE_HALF = 0.25  # bf16 and fp16: logits around 10 are steps of 1/16 apart, and layers add up
WARM_UP_SHARE = 0.1  # of the time, before memory is measured


@dataclass(frozen=True)
class Answer:
    """What is run again."""

    prompt: list[int]
    params: SamplingParams
    token_ids: list[int]


class Traffic:
    """Random requests for one engine, and what became of them."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self._rng = random.Random(seed)
        self._longest = self._engine.max_model_len // 2
        self._families = [self._ids(self._longest) for _ in range(8)]
        self._asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self._num_plain = 0
        self.counts: Counter[str] = Counter()
        self.kept: list[Answer] = []

    def run(self, seconds: float) -> None:
        """Keep twice as many requests queued as can run, for so long; then let them finish."""
        deadline = time.monotonic() + seconds
        most = 2 * self._engine.config.max_num_seqs
        while time.monotonic() < deadline or self._asked:
            while len(self._asked) < most and time.monotonic() < deadline:
                self._ask()
            if self._asked and self._rng.random() < 0.01:
                self._abort()
            if self._rng.random() < 0.0005:
                self._fail_on_purpose()
            for output in self._engine.step():
                self._take(output)
        self._engine.scheduler.check_invariants()

    def _ask(self) -> None:
        rng = self._rng
        shared = rng.choice(self._families)[: rng.randrange(self._longest)]
        prompt = (shared if rng.random() < 0.5 else []) + self._ids(rng.randint(1, 64))
        prompt = prompt[: self._longest]
        params = self._params(rng.choice((1, 8, 64, self._longest - 1)))
        self._asked[self._engine.add_request(prompt, params)] = prompt, params
        self.counts["requests"] += 1

    def _params(self, most_tokens: int) -> SamplingParams:
        rng = self._rng
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.6, 1.0)),
            seed=rng.randrange(2**63),
            max_tokens=rng.randint(1, most_tokens),
            ignore_eos=True,
        )
        kind = rng.randrange(6)
        if kind == 0:
            return params.replace(top_p=0.9, top_k=50)
        if kind == 1:
            return params.replace(repetition_penalty=1.2, min_tokens=1)
        if kind == 2:
            return params.replace(logprobs=3, prompt_logprobs=rng.choice((None, 1)))
        return params

    def _ids(self, length: int) -> list[int]:
        vocab_size = self._engine.model_config.vocab_size
        return [self._rng.randrange(vocab_size) for _ in range(length)]

    def _abort(self) -> None:
        request_id = self._rng.choice(list(self._asked))
        self._engine.abort(request_id)
        del self._asked[request_id]
        self.counts["aborts"] += 1

    def _fail_on_purpose(self) -> None:
        """Whatever a step raises, all its requests are dropped and the engine goes on."""
        original = Scheduler.postprocess

        def fail(*args: object) -> list[object]:
            raise ZeroDivisionError("on purpose")

        Scheduler.postprocess = fail  # type: ignore[method-assign,assignment]
        try:
            while not self._engine.is_finished():
                self._engine.step()
        except ZeroDivisionError:
            self.counts["errors on purpose"] += 1
            self.counts["requests dropped by them"] += len(self._asked)
            self._asked.clear()
        finally:
            Scheduler.postprocess = original  # type: ignore[method-assign]

    def _take(self, output: RequestOutput) -> None:
        prompt, params = self._asked.pop(output.request_id)
        token_ids = output.token_ids
        assert output.prompt_token_ids == prompt, "an answer to another prompt"
        assert len(token_ids) == params.max_tokens, f"{len(token_ids)} tokens of {params}"
        self.counts["answers"] += 1
        self.counts["tokens"] += len(token_ids)
        if params.is_special:
            return
        self._num_plain += 1
        if self._num_plain % CHECK_EVERY == 1:
            self.kept.append(Answer(prompt, params, token_ids))


def score_gap(llm: LLM, answer: Answer, alone: list[int], place: int) -> float:
    """How far apart the scores of two tokens are, as logits: the lone run's, less the other's.

    Each token's logprob is read with the common beginning given, so that nothing else differs.
    """
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    temperature = answer.params.temperature or 1.0
    seed = torch.tensor([derive_seed(1, answer.params.seed or 0, 0)])
    start = answer.prompt + alone[:place]
    scores = []
    for token_id in (alone[place], answer.token_ids[place]):
        (output,) = llm.generate([[*start, token_id]], params, use_tqdm=False)
        assert output.prompt_logprobs is not None, "asked for"
        logprob = (output.prompt_logprobs[-1] or {})[token_id].logprob
        if answer.params.is_greedy:
            scores.append(logprob)
            continue
        logits = torch.full((1, llm.llm_engine.model_config.vocab_size), -torch.inf)
        logits[0, token_id] = logprob
        drawn = sample_torch(logits, torch.tensor([temperature]), seed, torch.tensor([len(start)]))
        scores.append(float(drawn.values) / LOG2_E * temperature)
    return scores[0] - scores[1]


def check(llm: LLM, answers: Sequence[Answer], tolerance: float) -> Counter[str]:
    """Run answers again, each alone, and compare."""
    found: Counter[str] = Counter()
    for answer in answers:
        llm.reset_prefix_cache()
        (output,) = llm.generate([answer.prompt], answer.params, use_tqdm=False)
        pairs = zip(output.token_ids, answer.token_ids, strict=True)
        place = next((i for i, (alone, batched) in enumerate(pairs) if alone != batched), None)
        if place is None:
            found["equal to a lone run"] += 1
            continue
        gap = score_gap(llm, answer, output.token_ids, place)
        kind = "parted at a near tie" if abs(gap) <= tolerance else "WRONG"
        found[kind] += 1
        found["largest gap, in thousandths"] = max(
            found["largest gap, in thousandths"], round(abs(gap) * 1000)
        )
    return found


def memory_mb() -> dict[str, int]:
    """Of this process: resident on the host, allocated and reserved on its GPU."""
    resident = 0
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        resident = int(status.partition("VmRSS:")[2].split()[0]) >> 10
    if not torch.cuda.is_initialized():
        return {"host": resident}
    return {
        "host": resident,
        "GPU": torch.cuda.memory_allocated() >> 20,
        "GPU reserved": torch.cuda.memory_reserved() >> 20,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, object]:
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        llm = open_llm(args, Path(scratch))
    with llm:
        traffic = Traffic(llm, args.seed)
        traffic.run(60 * args.minutes * WARM_UP_SHARE)
        before = memory_mb()
        traffic.run(60 * args.minutes * (1 - WARM_UP_SHARE))
        after, stats = memory_mb(), llm.stats()
        assert stats.num_free_kvcache_blocks == stats.num_kvcache_blocks, "blocks were lost"
        tolerance = args.tolerance or (CLOSE if stats.dtype == "float32" else CLOSE_HALF)
        checked = check(llm, traffic.kept[-MOST_CHECKED:], tolerance)
    result: dict[str, object] = {
        **traffic.counts,
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "prompt tokens found in the cache": stats.num_cached_tokens,
        "prompt tokens": stats.num_prompt_tokens,
        "KV blocks": stats.num_kvcache_blocks,
        "MB at the start": before,
        "MB at the end": after,
        "tolerance": tolerance,
        **checked,
    }
    print(json.dumps(result, indent=1))
    if checked["WRONG"]:
        sys.exit(1)
    return result


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; without, random weights")
    parser.add_argument("--shape", default="0.6B", help="of random weights, as in bench.py")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-seqs", type=int, default=256, help="that run at once")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--tolerance", type=float, help="default: by dtype")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def open_llm(args: argparse.Namespace, scratch: Path) -> LLM:
    """An engine whose pool holds a third of what its sequences would fill."""
    folder, load_format = args.model, "auto"
    if folder is None:
        from bench import SHAPES, write_shape

        folder, load_format = str(write_shape(SHAPES[args.shape], scratch)), "dummy"
    block_size = 256 if args.max_model_len >= 1024 else 16
    tokens_of_a_sequence = args.max_model_len // 2
    num_blocks = args.num_seqs * tokens_of_a_sequence // 3 // block_size
    return LLM(
        folder,
        load_format=load_format,
        skip_tokenizer_init=True,
        tensor_parallel_size=args.ranks,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.num_seqs,
        kvcache_block_size=block_size,
        num_kvcache_blocks=max(num_blocks, -(-args.max_model_len // block_size)),
    )


if __name__ == "__main__":
    main()
