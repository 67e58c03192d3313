"""Train the bundled Qwen3 on sums, reversals and look-ups: about five minutes on one H200.

    python tests/tiny_qwen3/train.py [--out FOLDER] [--seconds 300] [--seed 0]

Writes a complete checkpoint (config, bf16 weights, byte-level tokenizer with a chat template) each
time an evaluation on held-out problems beats the best one so far, so a run that is cut off leaves
a model. What is evaluated and saved is a moving average of the weights, rounded to bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_qwen3.problems import TASKS, Problem, held_out_problems
from tiny_qwen3.stream import END_OF_TEXT, IM_END, NOT_GRADED, Group, Mix, batches

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# rope_theta and torch_dtype serve transformers 4, rope_parameters and dtype serve transformers 5.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": END_OF_TEXT,
    "dtype": "bfloat16",
    "eos_token_id": IM_END,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 448,
    "max_position_embeddings": 2048,
    "max_window_layers": 4,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": END_OF_TEXT,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 264,  # 259 tokens, padded to a multiple of 8
}
GENERATION_CONFIG = {
    "bos_token_id": END_OF_TEXT,
    "do_sample": False,
    "eos_token_id": [IM_END, END_OF_TEXT],
    "pad_token_id": END_OF_TEXT,
}

# Short lists teach matching within the first minute; without them long ones are not learned.
GPU_MIX = Mix(768, 110, (Group(12, 4, 12), Group(12, 8, 40), Group(12, 30, 90), Group(16, 86, 125)))
CPU_MIX = Mix(64, 10, (Group(1, 4, 12), Group(1, 8, 40), Group(1, 30, 90), Group(1, 86, 125)))
PEAK_LR = 2e-3
WARMUP_STEPS = 200
AVERAGE_DECAY = 0.999
# Rows are padded on the right and attention is causal. Under torch.compile transformers would
# build a full mask all the same, which rules out the fast attention kernels.
NO_MASK = {"full_attention": None}
EVALUATION_EVERY_S = 20.0
NUM_EVALUATED = {"sum": 1000, "reverse": 1000, "lookup": 400}
EVALUATION_SEED = 1  # tests and example.py draw with others
GOOD_ENOUGH = 0.999


def main() -> None:
    started = time.monotonic()
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(arguments.out)
    write_json(arguments.out / "config.json", CONFIG)
    write_json(arguments.out / "generation_config.json", GENERATION_CONFIG)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    train(arguments.out, device, arguments.seed, started + arguments.seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--seconds", type=float, default=300.0, help="limit, start-up included")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train(folder: Path, device: torch.device, seed: int, deadline: float) -> None:
    """Train until every task is good enough at two evaluations in a row, or time is up."""
    stream = training_stream(CPU_MIX if device.type == "cpu" else GPU_MIX, seed, device)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).to(device=device, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    average = [parameter.detach().clone() for parameter in model.parameters()]
    evaluator = Evaluator.build(folder, device)
    step_loss = compiled_loss(model, next(stream), device)
    begun = evaluated = time.monotonic()
    best, good, losses = -1.0, 0, torch.zeros(2, device=device)
    print(f"{device}, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    print("seconds   step  loss(short) loss(long)  " + "  ".join(f"{t:>7}" for t in TASKS))
    for step, batch in enumerate(stream, 1):
        now = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, (now - begun) / (deadline - begun))
        loss = step_loss(batch)
        loss.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        decay = min(AVERAGE_DECAY, step / (step + 20))
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 1 - decay)
        losses.lerp_(loss.detach(), 0.02 if step > 50 else 1 / step)
        out_of_time = now > deadline - 3
        if now - evaluated < EVALUATION_EVERY_S and not out_of_time:
            continue
        rates = evaluator.evaluate(average)
        short, long = losses.tolist()
        table = "  ".join(f"{rates[task]:7.2%}" for task in TASKS)
        print(f"{now - begun:7.0f} {step:6d}  {short:11.4f} {long:10.4f}  {table}", flush=True)
        # The mean breaks ties of the worst task, and of all three at zero.
        score = min(rates.values()) + sum(rates.values()) / 1000
        if score >= best:
            best = score
            save_weights(evaluator.model, folder)
        good = good + 1 if min(rates.values()) >= GOOD_ENOUGH else 0
        if good == 2 or out_of_time:
            break
        evaluated = time.monotonic()


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up by steps, then a cosine by elapsed time down to a hundredth of the peak."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, progress))
    return PEAK_LR * min(1.0, step / WARMUP_STEPS) * max(0.01, cosine)


@dataclass(frozen=True, slots=True)
class TrainingStream(IterableDataset):
    """`stream.batches` for a loader; every loader process has a stream of its own."""

    mix: Mix
    seed: int

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        worker = get_worker_info()
        for short, long in batches(self.mix, (self.seed, worker.id if worker else 0)):
            yield [short.ids, short.labels, long.ids, long.labels]


def training_stream(mix: Mix, seed: int, device: torch.device) -> Iterator[list[np.ndarray]]:
    """Start the loader processes; each batch is short ids, short labels, long ids, long labels."""
    num_workers = min(8, max(1, (os.cpu_count() or 2) - 2)) if device.type == "cuda" else 0
    # Arrays through a pipe, not tensors through shared memory, which containers keep small.
    loader = DataLoader(
        TrainingStream(mix, seed), batch_size=None, num_workers=num_workers, collate_fn=list
    )
    return iter(loader)


class StepLoss:
    """The loss of short and of long rows, so that neither drowns the other."""

    def __init__(self, model: Qwen3ForCausalLM, device: torch.device, compiled: bool) -> None:
        self._model = model
        self._device = device
        self._rows_loss = torch.compile(self._loss, dynamic=False) if compiled else self._loss

    def __call__(self, batch: list[np.ndarray]) -> torch.Tensor:
        """Return the (short, long) losses, shape (2,)."""
        parts = [self._to_device(part) for part in batch]
        return torch.stack([self._rows_loss(*parts[:2]), self._rows_loss(*parts[2:])])

    def _to_device(self, rows: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(rows)
        if self._device.type == "cuda":
            # From pageable memory the copy would wait for the step before it.
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.long()

    def _loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # bf16 only where it is fast: on a CPU it is slower and learns no better.
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            output = self._model(input_ids=ids, attention_mask=NO_MASK, use_cache=False)
        flat = output.logits.float().flatten(0, 1)  # (rows * tokens, vocab)
        return F.cross_entropy(flat, labels.flatten(), ignore_index=NOT_GRADED)


def compiled_loss(
    model: Qwen3ForCausalLM, batch: list[np.ndarray], device: torch.device
) -> StepLoss:
    """Compile where there is a GPU; if that fails there, train without: three times slower."""
    if device.type == "cuda":
        try:
            step_loss = StepLoss(model, device, compiled=True)
            step_loss(batch).sum().backward()
            model.zero_grad(set_to_none=True)
            return step_loss
        except Exception as error:  # whatever a missing compiler or an unsupported operation raises
            print(f"torch.compile failed, training without it: {error}"[:2000], flush=True)
            model.zero_grad(set_to_none=True)
            torch._dynamo.reset()
    return StepLoss(model, device, compiled=False)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Held-out problems as padded rows, and the bf16 model that answers them."""

    model: Qwen3ForCausalLM
    rows: dict[str, tuple[torch.Tensor, torch.Tensor]]  # task -> ids, labels: (problems, tokens)

    @classmethod
    def build(cls, folder: Path, device: torch.device) -> Evaluator:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = {}
        for task, count in NUM_EVALUATED.items():
            # A CPU run is a smoke test: a tenth of the problems will do.
            count = count if device.type == "cuda" else count // 10
            problems = held_out_problems(task, count, EVALUATION_SEED)
            ids, labels = evaluation_rows(tokenizer, problems)
            rows[task] = (ids.to(device), labels.to(device))
        model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).to(device=device, dtype=torch.bfloat16)
        return cls(model.eval(), rows)

    @torch.inference_mode()
    def evaluate(self, parameters: list[torch.Tensor]) -> dict[str, float]:
        """Share of problems that greedy decoding would answer exactly, <|im_end|> included.

        If every answer token is the best one after the right ones before it, greedy decoding
        gives the right answer; so one forward pass serves instead of a generation.
        """
        for own, given in zip(self.model.parameters(), parameters, strict=True):
            own.copy_(given)
        return {task: self._rate(*rows) for task, rows in self.rows.items()}

    def _rate(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        num_right = 0
        for some_ids, some_labels in zip(ids.split(100), labels.split(100), strict=True):
            best = self.model(input_ids=some_ids, use_cache=False).logits.argmax(-1)
            right = (best == some_labels) | (some_labels == NOT_GRADED)  # (problems, tokens)
            num_right += int(right.all(-1).sum())
        return num_right / len(ids)


def evaluation_rows(
    tokenizer: AutoTokenizer, problems: list[Problem]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts through the chat template, then the answers: ids, labels (problems, tokens)."""
    pairs = []
    for problem in problems:
        user = [{"role": "user", "content": problem.prompt}]
        text = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
        answer = [*tokenizer.encode(problem.answer, add_special_tokens=False), IM_END]
        pairs.append((tokenizer.encode(text, add_special_tokens=False), answer))
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), length), END_OF_TEXT)
    labels = torch.full((len(pairs), length), NOT_GRADED)
    for row, (prompt, answer) in enumerate(pairs):
        used = len(prompt) + len(answer)
        ids[row, :used] = torch.tensor(prompt + answer)
        labels[row, len(prompt) - 1 : used - 1] = torch.tensor(answer)
    return ids, labels


def save_weights(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write model.safetensors, the tied head left out; never half a file under its final name."""
    weights = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer: a token for each byte, no merges, three special tokens."""
    # ByteLevel's printable stand-ins, by the byte they stand for.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    symbols |= {byte: chr(256 + order) for order, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({symbols[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
