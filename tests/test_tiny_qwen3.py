"""The bundled model answers problems it never saw, through our engine; its training stream is
what it claims to be."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_qwen3.problems import TASKS, Problem, held_out_problems, held_out_rows, is_held_out
from tiny_qwen3.stream import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    NOT_GRADED,
    USER,
    ListShape,
    Rows,
    lookup_rows,
    reverse_rows,
    sum_rows,
)
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams

FOLDER = Path(__file__).resolve().parent / "tiny_qwen3"
NUM_PROBLEMS = {"sum": 400, "reverse": 400, "lookup": 200}
FRESH_SEED = 7  # training evaluates itself on seed 1
SHORT_LISTS, LONG_LISTS = ListShape(60, 192, 4, 12), ListShape(6, 1152, 100, 225)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(FOLDER)) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def training_rows() -> list[tuple[list[int], list[int]]]:
    """Ids (padding cut) and labels of some hundred training rows; held-out ones are blank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        parts = [sum_rows(120, CPU), reverse_rows(120, CPU)]
        parts += [lookup_rows(lists, CPU) for lists in (SHORT_LISTS, LONG_LISTS)]
    return [_unpadded(part, row) for part in parts for row in range(len(part.ids))]


@pytest.mark.parametrize("task", TASKS)
def test_bundled_model_answers_at_least_99_percent_of_fresh_problems(
    llm: LLM, tokenizer: Tokenizer, task: str
) -> None:
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
        lists = [problem.prompt.split("\n")[0] for problem in problems]
        assert all(600 <= len(tokenizer.encode(listing).ids) <= 900 for listing in lists)


def test_bundled_model_is_at_most_5_mb() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) <= 5_000_000


def test_held_out_problems_repeat_for_a_seed_and_differ_between_seeds() -> None:
    for task in TASKS:
        assert held_out_problems(task, 20, 1) == held_out_problems(task, 20, 1)
        assert held_out_problems(task, 20, 1) != held_out_problems(task, 20, 2)
    with pytest.raises(ValueError, match="unknown task 'product'"):
        held_out_problems("product", 1, 1)


def test_held_out_rows_agree_with_single_lines_whatever_the_padding() -> None:
    lines = [b"123+456=?", b"reverse abcdef", b"AB=YZ AC=XY", *(b"%d" % n for n in range(300))]
    padded = torch.full((len(lines), 20), 77)
    for row, line in enumerate(lines):
        padded[row, : len(line)] = torch.tensor(list(line))
    held_out = held_out_rows(padded, torch.tensor([len(line) for line in lines])).tolist()
    assert held_out == [is_held_out(line) for line in lines]
    assert 5 <= sum(held_out) <= 40  # one in 16


def test_training_rows_are_what_the_chat_template_makes(
    training_rows: list[tuple[list[int], list[int]]],
) -> None:
    """Decoded, read as a conversation, and rendered again, every row gives the same ids."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    for ids, _ in filter(lambda row: row[0], training_rows):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        rendered = tokenizer.apply_chat_template(_messages(text), tokenize=False)
        assert rendered.rstrip("\n") == text.rstrip("\n")
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_training_rows_are_answered_rightly_and_graded_on_answers_alone(
    tokenizer: Tokenizer, training_rows: list[tuple[list[int], list[int]]]
) -> None:
    first_characters = set()
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
        if messages:
            first_characters.add(messages[0]["content"][0])
    assert len(first_characters) > 15  # digits, the r of reverse, capitals


def test_training_rows_hold_no_held_out_problem(
    tokenizer: Tokenizer, training_rows: list[tuple[list[int], list[int]]]
) -> None:
    num_blank = 0
    for ids, labels in training_rows:
        if not ids:
            num_blank += 1
            assert set(labels) == {NOT_GRADED}
            continue
        first_turn = tokenizer.decode(ids[3 : ids.index(IM_END)])
        assert not is_held_out(first_turn.split("\n")[0].encode())
    assert 5 <= num_blank <= 40  # one in 16


def test_bundled_tokenizer_round_trips_text_and_special_tokens(tokenizer: Tokenizer) -> None:
    auto = AutoTokenizer.from_pretrained(FOLDER)
    text = "<|im_start|>user\nnaïve 🙂\t\x00 ABCDE aB user\nuser<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert ids == auto.encode(text)
    assert auto.eos_token_id == IM_END
    assert ids[:3] == [IM_START, USER, ord("\n")]
    assert ids.count(USER) == 1  # elsewhere the word is bytes
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert auto.decode(ids, skip_special_tokens=False) == text


def test_bundled_tokenizer_cuts_capitals_into_the_same_pairs_everywhere(
    tokenizer: Tokenizer,
) -> None:
    alone = tokenizer.encode("AB").ids
    assert len(alone) == 1
    for text in ("AB=YZ", "YZ AB", "AB?", "ABCD", "1AB", "\nAB\n"):
        assert alone[0] in tokenizer.encode(text).ids


def _ask(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.prompt}]


def _unpadded(rows: Rows, row: int) -> tuple[list[int], list[int]]:
    num_tokens = int((rows.ids[row] != END_OF_TEXT).sum())
    assert (rows.ids[row, num_tokens:] == END_OF_TEXT).all()
    return rows.ids[row, :num_tokens].tolist(), rows.labels[row].tolist()


def _messages(text: str) -> list[dict[str, str]]:
    turns = text.replace("<|im_end|>", "").split("<|im_start|>")[1:]
    pairs = [turn.removesuffix("\n").split("\n", 1) for turn in turns]
    return [{"role": role, "content": content} for role, content in pairs]


def _right_answers(questions: list[str]) -> list[str]:
    if not questions:
        return []
    if questions[0].startswith("reverse "):
        return [questions[0].removeprefix("reverse ")[::-1]]
    if "+" in questions[0]:
        a, b = questions[0].removesuffix("=?").split("+")
        return [str(int(a) + int(b))]
    listing, questions[0] = questions[0].split("\n")
    values = dict(entry.split("=") for entry in listing.split(" "))
    keys = [question.removesuffix("?") for question in questions]
    return [values[key] for key in keys]
