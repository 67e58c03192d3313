"""The bundled model answers problems it never saw, through our engine; its training stream is
what it claims to be."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_qwen3.problems import TASKS, Problem, held_out_problems, is_held_out
from tiny_qwen3.stream import (
    END_OF_TEXT,
    IM_END,
    LONG_LENGTH,
    NOT_GRADED,
    Group,
    Mix,
    Rows,
    batches,
)
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams

FOLDER = Path(__file__).resolve().parent / "tiny_qwen3"
NUM_PROBLEMS = {"sum": 400, "reverse": 400, "lookup": 200}
FRESH_SEED = 7  # training evaluates itself on seed 1
SMALL_MIX = Mix(60, 6, (Group(2, 4, 12), Group(2, 40, 90), Group(1, 86, 125)))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(FOLDER)) as opened:
        yield opened


@pytest.fixture(scope="module")
def training_rows() -> list[tuple[list[int], list[int]]]:
    """Ids (padding cut) and labels of some hundred training rows."""
    stream = batches(SMALL_MIX, seed=(5, 0))
    rows = [rows for _ in range(4) for rows in next(stream)]
    return [_unpadded(part, row) for part in rows for row in range(len(part.ids))]


@pytest.mark.parametrize("task", TASKS)
def test_bundled_model_answers_at_least_99_percent_of_fresh_problems(llm: LLM, task: str) -> None:
    problems = held_out_problems(task, NUM_PROBLEMS[task], FRESH_SEED)
    assert len({problem.prompt for problem in problems}) == NUM_PROBLEMS[task]
    assert all(problem.held_out for problem in problems)

    outputs = llm.chat([_ask(p) for p in problems], SamplingParams(temperature=0, max_tokens=16))

    samples = [output.outputs[0] for output in outputs]
    right = [
        sample.text == problem.answer and sample.finish_reason == "stop"
        for sample, problem in zip(samples, problems, strict=True)
    ]
    assert sum(right) >= 0.99 * len(right)
    assert all(s.token_ids[-1] == IM_END for s, good in zip(samples, right, strict=True) if good)
    if task == "lookup":
        assert all(600 <= len(output.prompt_token_ids) <= 900 for output in outputs)


def test_bundled_model_is_at_most_5_mb() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) <= 5_000_000


def test_held_out_problems_repeat_for_a_seed_and_differ_between_seeds() -> None:
    for task in TASKS:
        assert held_out_problems(task, 20, 1) == held_out_problems(task, 20, 1)
        assert held_out_problems(task, 20, 1) != held_out_problems(task, 20, 2)
    with pytest.raises(ValueError, match="unknown task 'product'"):
        held_out_problems("product", 1, 1)


def test_training_rows_are_what_the_chat_template_makes(
    training_rows: list[tuple[list[int], list[int]]],
) -> None:
    """Decoded, read as a conversation, and rendered again, every row gives the same ids."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    for ids, _ in training_rows:
        text = tokenizer.decode(ids, skip_special_tokens=False)
        rendered = tokenizer.apply_chat_template(_messages(text), tokenize=False)
        assert rendered.rstrip("\n") == text.rstrip("\n")
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_training_rows_are_answered_rightly_and_graded_on_answers_alone(
    training_rows: list[tuple[list[int], list[int]]],
) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tasks = set()
    for ids, labels in training_rows:
        messages = _messages(tokenizer.decode(ids, skip_special_tokens=False))
        answers = _right_answers([m["content"] for m in messages if m["role"] == "user"])
        assert answers == [m["content"] for m in messages if m["role"] == "assistant"]
        graded = [token for token in labels if token != NOT_GRADED]
        expected = "".join(f"{answer}<|im_end|>" for answer in answers)
        assert tokenizer.decode(graded, skip_special_tokens=False) == expected
        assert all(
            label in (NOT_GRADED, following)
            for label, following in zip(labels, ids[1:], strict=False)
        )
        tasks.add(messages[0]["content"][0].isdigit() + 2 * (len(answers) > 1))
    assert tasks == {0, 1, 2}  # reversals, sums, look-ups


def test_training_rows_hold_no_held_out_problem(
    training_rows: list[tuple[list[int], list[int]]],
) -> None:
    for ids, _ in training_rows:
        first_line = bytes(ids[6 : ids.index(IM_END)]).split(b"\n")[0]
        assert not is_held_out(first_line)


def test_lookup_rows_are_redrawn_when_all_lists_are_held_out() -> None:
    """With one list a group, one draw in 16 leaves nothing to train on."""
    stream = batches(Mix(20, 4, (Group(1, 4, 5),)), seed=(6, 0))
    for _ in range(100):
        _, long = next(stream)
        assert long.ids.shape == (1, LONG_LENGTH)
        ids = long.ids[0].tolist()
        assert not is_held_out(bytes(ids[6 : ids.index(IM_END)]).split(b"\n")[0])


def test_bundled_tokenizer_round_trips_text_and_special_tokens() -> None:
    fast = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(FOLDER)
    text = "<|im_start|>user\nnaïve 🙂\t\x00 ab=1<|im_end|>\n"
    ids = fast.encode(text).ids
    assert ids == auto.encode(text)
    assert auto.eos_token_id == IM_END
    assert ids[1:6] == list(b"user\n")
    assert fast.decode(ids, skip_special_tokens=False) == text
    assert auto.decode(ids, skip_special_tokens=False) == text


def _ask(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.prompt}]


def _unpadded(rows: Rows, row: int) -> tuple[list[int], list[int]]:
    num_tokens = int(np.count_nonzero(rows.ids[row] != END_OF_TEXT))
    assert (rows.ids[row, num_tokens:] == END_OF_TEXT).all()
    return rows.ids[row, :num_tokens].tolist(), rows.labels[row].tolist()


def _messages(text: str) -> list[dict[str, str]]:
    turns = text.replace("<|im_end|>", "").split("<|im_start|>")[1:]
    pairs = [turn.removesuffix("\n").split("\n", 1) for turn in turns]
    return [{"role": role, "content": content} for role, content in pairs]


def _right_answers(questions: list[str]) -> list[str]:
    if questions[0].startswith("reverse "):
        return [questions[0].removeprefix("reverse ")[::-1]]
    if "+" in questions[0]:
        a, b = questions[0].removesuffix("=?").split("+")
        return [str(int(a) + int(b))]
    listing, questions[0] = questions[0].split("\n")
    values = dict(entry.split("=") for entry in listing.split(" "))
    keys = [question.removesuffix("?") for question in questions]
    return [f"{key}={values[key]}" for key in keys]
