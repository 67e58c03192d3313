"""Train the bundled Qwen3 on sums, reversals and look-ups: under three minutes on one H200.

    python tests/tiny_qwen3/train.py [--out FOLDER] [--seconds 160] [--seed 0]

Writes a complete checkpoint (config, bf16 weights, byte-level tokenizer with a chat template) each
time an evaluation on held-out problems beats the best one so far, so a run that is cut off leaves
a model. What is evaluated and saved is a moving average of the weights, rounded to bf16.

Three things make look-ups learnable in so little time: lists grow only when those of the present
length are mastered, two layers start as a circuit that looks things up (see
`start_by_looking_up`), and a CUDA graph holds the whole step, drawing the problems included, so
that the host is never waited for.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_qwen3.problems import PAIRS, TASKS, Problem, held_out_problems
from tiny_qwen3.stream import (
    END_OF_TEXT,
    FIRST_PAIR,
    IM_END,
    NOT_GRADED,
    NUM_TOKENS,
    ROLES,
    SPECIAL_TOKENS,
    ListShape,
    Rows,
    lookup_rows,
    reverse_rows,
    stacked,
    sum_rows,
)

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
    "intermediate_size": 416,
    "max_position_embeddings": 2048,
    "max_window_layers": 4,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": END_OF_TEXT,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": -(-NUM_TOKENS // 16) * 16,
}
GENERATION_CONFIG = {
    "bos_token_id": END_OF_TEXT,
    "do_sample": False,
    "eos_token_id": [IM_END, END_OF_TEXT],
    "pad_token_id": END_OF_TEXT,
}

# Some 14,000 tokens a step; after its list a row has room for 16 questions and more.
STAGES = (
    ListShape(num_rows=40, row_length=352, fewest_entries=4, most_entries=32),
    ListShape(num_rows=12, row_length=1152, fewest_entries=60, most_entries=225),
)
MASTERED = 0.97  # running share of right look-up tokens that opens the next stage
LONGEST_STAGE = 0.15  # share of the time after which it opens in any case
NUM_SUMS, NUM_REVERSALS = 192, 192  # in every step, so that neither is forgotten

# How the model starts (see `start_by_looking_up`): chosen by the attention that the right one of
# 200 values gets, and so that what is copied outweighs what was there before.
DISTANCES = (2, 6, 1, 3)  # of the heads of layer 0: key to value, key asked for to answer, others
LOOKING_BACK, MATCHING = 2.2, 2.5  # gains of query and key norms: how sharp attention is
FETCHING, COPYING = 0.5, 4.0  # gains of the output projections
EMBEDDING = 4.0  # times initializer_range

PEAK_LR = 2e-3
WARMUP_STEPS = 200
AVERAGE_DECAY = 0.998
# Rows are padded on the right and attention is causal; transformers must not build a mask, which
# would rule out the fast attention kernels.
NO_MASK = {"full_attention": None}
EVALUATION_EVERY_S = 20.0
NUM_EVALUATED = {"sum": 1000, "reverse": 1000, "lookup": 400}
EVALUATION_SEED = 1  # tests and example.py draw with others
LENGTH_BOUNDS = (600, 700, 800, 900)  # tokens of the lists that look-ups are reported by
GOOD_ENOUGH = 0.999


def main() -> None:
    started = time.monotonic()
    arguments = parse_arguments()
    torch.set_num_threads(min(4, torch.get_num_threads()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(arguments.out)
    write_json(arguments.out / "config.json", CONFIG)
    write_json(arguments.out / "generation_config.json", GENERATION_CONFIG)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train(arguments.out, device, arguments.seed, started + arguments.seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--seconds", type=float, default=160.0, help="limit, start-up included")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train(folder: Path, device: torch.device, seed: int, deadline: float) -> None:
    """Train until every task is good enough at two evaluations in a row, or time is up."""
    trainer = Trainer(device, seed)
    evaluator = Evaluator.build(folder, device)
    steps_per_look = 50 if device.type == "cuda" else 1
    begun = evaluated = time.monotonic()
    best, num_good, stage, num_steps = -1.0, 0, 0, 0
    step = trainer.step_function(STAGES[0])
    print(f"{device}, {trainer.num_parameters:,} parameters", flush=True)
    while num_good < 2 and time.monotonic() < deadline - 3:
        for _ in range(steps_per_look):
            num_steps += 1
            progress = (time.monotonic() - begun) / (deadline - 3 - begun)
            trainer.lr.fill_(learning_rate(num_steps, progress))
            step()
        running = trainer.running()  # waits for the device
        overdue = progress > LONGEST_STAGE * (stage + 1)
        if stage < len(STAGES) - 1 and (running.lookup_right > MASTERED or overdue):
            stage += 1
            print(f"{time.monotonic() - begun:5.0f} s, step {num_steps}: {STAGES[stage]}")
            step = trainer.step_function(STAGES[stage])
        now = time.monotonic()
        if now - evaluated < EVALUATION_EVERY_S and now < deadline - 3:
            continue
        evaluated = now
        rates = evaluator.evaluate(trainer.average)
        print(f"{now - begun:5.0f} s, step {num_steps}, stage {stage}: {running}")
        print(
            "       " + ", ".join(f"{name} {rate:.2%}" for name, rate in rates.items()), flush=True
        )
        worst = min(rates[task] for task in TASKS)
        # The mean breaks ties of the worst task, and of all three at zero.
        score = worst + sum(rates[task] for task in TASKS) / 1000
        if score >= best:
            best = score
            save_weights(evaluator.model, folder)
        num_good = num_good + 1 if worst >= GOOD_ENOUGH else 0


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up by steps, then a cosine by elapsed time down to zero."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, progress))
    return PEAK_LR * min(1.0, step / WARMUP_STEPS) * cosine


@dataclass(frozen=True, slots=True)
class Running:
    """Moving averages over the last fifty steps or so."""

    short_loss: float  # sums and reversals
    lookup_loss: float
    lookup_right: float  # share of graded look-up tokens

    def __str__(self) -> str:
        losses = f"loss {self.short_loss:.4f} short, {self.lookup_loss:.4f} look-ups"
        return f"{losses}, {self.lookup_right:.2%} of look-up tokens right"


class Trainer:
    """float32 weights, and the copy in the device's fast type that computes their gradients.

    A step reads nothing from the host and tells it nothing, so that a CUDA graph can replay it.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self._device = device
        self._model = new_model(device)
        start_by_looking_up(self._model)
        fuse_norms(self._model)
        self._weights = [parameter.detach().clone() for parameter in self._model.parameters()]
        for weight in self._weights:
            weight.grad = torch.zeros_like(weight)
        self.average = [weight.clone() for weight in self._weights]
        if device.type == "cuda":
            to_bf16(self._model)
        self.lr = torch.zeros((), device=device)
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=self.lr,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=True,
            capturable=device.type == "cuda",
        )
        self._running = torch.zeros(3, device=device)  # the fields of Running

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._weights)

    def running(self) -> Running:
        return Running(*self._running.tolist())

    def step_function(self, lists: ListShape) -> Callable[[], None]:
        """Return what trains one step on lists of this shape: on a GPU, a CUDA graph of it."""
        self._running[2] = 0.0

        def step() -> None:
            self._step(lists)

        if self._device.type != "cuda":
            return step
        try:
            return captured(step)
        except RuntimeError as error:  # whatever an operation that can't be captured raises
            print(f"CUDA graph failed, training without it: {error}"[:2000], flush=True)
            return step

    def _step(self, lists: ListShape) -> None:
        short = stacked(
            [sum_rows(NUM_SUMS, self._device), reverse_rows(NUM_REVERSALS, self._device)]
        )
        self._model.zero_grad(set_to_none=True)
        short_loss, _ = graded(self._model, short)
        lookup_loss, right = graded(self._model, lookup_rows(lists, self._device))
        # Each has a loss of its own, so that neither drowns the other.
        (short_loss + lookup_loss).backward()
        parameters = [parameter.detach() for parameter in self._model.parameters()]
        gradients = [parameter.grad for parameter in self._model.parameters()]
        torch._foreach_copy_([weight.grad for weight in self._weights], gradients)
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        torch._foreach_copy_(parameters, self._weights)
        torch._foreach_lerp_(self.average, self._weights, 1 - AVERAGE_DECAY)
        self._running.lerp_(torch.stack([short_loss.detach(), lookup_loss.detach(), right]), 0.05)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Run `step` three times to warm up, then record it; the result replays the record."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def graded(model: Qwen3ForCausalLM, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over the graded tokens, and the share of them that the model would choose."""
    output = model(input_ids=rows.ids, attention_mask=NO_MASK, use_cache=False)
    logits = output.logits.flatten(0, 1)  # (rows * tokens, vocab)
    labels = rows.labels.flatten()
    count = (labels != NOT_GRADED).sum().clamp(min=1)
    total = F.cross_entropy(logits.float(), labels, ignore_index=NOT_GRADED, reduction="sum")
    with torch.no_grad():
        right = (logits.argmax(1) == labels).sum() / count
    return total / count, right


def new_model(device: torch.device) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**CONFIG)).to(device)


def fuse_norms(model: Qwen3ForCausalLM) -> None:
    """Compute each RMSNorm with one kernel: transformers' eight are half of a step's kernels."""
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = partial(
                F.rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )


def to_bf16(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Round the parameters alone: rotary frequencies stay float32, as in every inference engine."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@torch.no_grad()
def start_by_looking_up(model: Qwen3ForCausalLM) -> None:
    """Start the first two layers off as the two halves of an induction circuit.

    Layer 0 fetches tokens from fixed distances: for a value its key, for the start of an answer
    the key asked for. Layer 1 compares what was fetched, wherever it stands, and copies the value
    of the match. Everything else starts at random, and training is free to change all of it.
    Untrained, the circuit points at the right value in lists of any length but answers few
    questions; some dozen steps make it answer nearly all. From random projections alone it takes
    thousands of steps to appear.

    Source: the circuit is that of "In-context Learning and Induction Heads" (Olsson et al., 2022,
    arXiv:2209.11895); structured starts for attention, "Mimetic Initialization of Self-Attention
    Layers" (Trockman and Kolter, 2023, arXiv:2305.09828).
    """
    embeddings = model.model.embed_tokens.weight
    fetching, matching = (layer.self_attn for layer in model.model.layers[:2])
    dim = fetching.head_dim
    # Orthogonal subspaces, so that neither half reads what is not meant for it.
    space = torch.nn.init.orthogonal_(torch.empty_like(fetching.q_proj.weight))  # (hidden, hidden)
    fetched, asked, copied, rest = space.split(dim)
    common = rest[0]
    # What all tokens share lets a head look at a distance, whatever the tokens are.
    embeddings.mul_(EMBEDDING)
    embeddings.add_(common * embeddings.norm(dim=1).mean())
    look_back(fetching, common)
    values = torch.nn.init.orthogonal_(fetching.v_proj.weight)
    values -= torch.outer(values @ common, common)  # fetch what tells tokens apart
    fetching.o_proj.weight[:, :dim] = fetched.T * FETCHING
    fetching.o_proj.weight[:, dim : 2 * dim] = asked.T * FETCHING
    # Heads 0 and 1 share a key and a value head.
    matching.k_proj.weight[:dim] = fetched
    matching.q_proj.weight[: 2 * dim] = asked.repeat(2, 1)
    matching.v_proj.weight[:dim] = copied
    matching.o_proj.weight[:, : 2 * dim] = copied.T.repeat(1, 2) * COPYING
    # Fast rotations would make a match depend on the distance.
    slow = torch.arange(dim // 2, device=common.device).repeat(2) >= dim // 4
    for norm in (matching.q_norm, matching.k_norm):
        norm.weight.copy_(torch.where(slow, MATCHING, 0.3))


def look_back(attention: torch.nn.Module, common: torch.Tensor) -> None:
    """Make each head attend to the token at its one of DISTANCES before.

    Query and key are the same vector whatever the token, the query rotated by as many positions:
    the rotary embedding makes their product greatest at just that distance.
    """
    dim = attention.head_dim
    pairs = torch.arange(dim // 2, device=common.device)
    angles = CONFIG["rope_theta"] ** (-2.0 * pairs / dim)
    fast = (pairs < dim // 8).float()  # neighbours differ most in these
    queries = [
        torch.cat([fast * torch.cos(angles * distance), -fast * torch.sin(angles * distance)])
        for distance in DISTANCES
    ]
    num_kv_heads = attention.k_proj.out_features // dim
    keys = torch.cat([fast, torch.zeros_like(fast)]).repeat(num_kv_heads)
    attention.q_proj.weight.copy_(torch.outer(torch.cat(queries), common))
    attention.k_proj.weight.copy_(torch.outer(keys, common))
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(LOOKING_BACK)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Held-out problems as padded rows, and the bf16 model that answers them."""

    model: Qwen3ForCausalLM
    rows: dict[str, Rows]  # by task

    @classmethod
    def build(cls, folder: Path, device: torch.device) -> Evaluator:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = {}
        for task, count in NUM_EVALUATED.items():
            # A CPU run is a smoke test: a tenth of the problems will do.
            count = count if device.type == "cuda" else count // 10
            problems = held_out_problems(task, count, EVALUATION_SEED)
            rows[task] = evaluation_rows(tokenizer, problems, device)
        return cls(to_bf16(new_model(device)).eval(), rows)

    @torch.inference_mode()
    def evaluate(self, weights: list[torch.Tensor]) -> dict[str, float]:
        """Share of problems that greedy decoding would answer exactly, <|im_end|> included.

        By task, and for look-ups by tokens of the list too. If every answer token is the best one
        after the right ones before it, greedy decoding gives the right answer; so one forward pass
        serves instead of a generation.
        """
        for own, given in zip(self.model.parameters(), weights, strict=True):
            own.copy_(given)
        right = {task: self._right(rows) for task, rows in self.rows.items()}
        rates = {task: float(of_task.float().mean()) for task, of_task in right.items()}
        num_tokens = (self.rows["lookup"].ids != END_OF_TEXT).sum(1)
        for low, high in zip(LENGTH_BOUNDS, LENGTH_BOUNDS[1:], strict=False):
            within = (num_tokens >= low) & (num_tokens < high + 30)
            rates[f"lists of {low}"] = float(right["lookup"][within].float().mean())
        return rates

    def _right(self, rows: Rows) -> torch.Tensor:
        """(problems,) bool."""
        parts = []
        for ids, labels in zip(rows.ids.split(100), rows.labels.split(100), strict=True):
            output = self.model(input_ids=ids, attention_mask=NO_MASK, use_cache=False)
            parts.append(((output.logits.argmax(-1) == labels) | (labels == NOT_GRADED)).all(-1))
        return torch.cat(parts)


def evaluation_rows(
    tokenizer: AutoTokenizer, problems: list[Problem], device: torch.device
) -> Rows:
    """Prompts through the chat template, then the answers, padded on the right."""
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
    return Rows(ids.to(device), labels.to(device))


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
    """Write a byte-level tokenizer that also has a token for each pair of capitals and each role.

    Capitals are cut into pairs before anything else, and a role word is only one when a turn
    begins with it, so that a text gives the same tokens wherever it stands.
    """
    # ByteLevel's printable stand-ins, by the byte they stand for.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    symbols |= {byte: chr(256 + order) for order, byte in enumerate(others)}
    tokens = [*(symbols[byte] for byte in range(FIRST_PAIR)), *PAIRS, *ROLES]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    role = rf"\A(?:{'|'.join(ROLES)})(?=\n)"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"{role}|[A-Z]{{2}}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
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
