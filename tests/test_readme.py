"""README.md says what is so: its tree, its tables, its commands and the errors it promises."""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^#+ (.+?)\n(.*?)(?=^#+ |\Z)", README, flags=re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def llm(make_checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(str(make_checkpoint()), skip_tokenizer_init=True, max_model_len=64) as llm:
        yield llm


def code_blocks(language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [code for its_language, code in blocks if its_language == language]


def rows(section: str) -> list[list[str]]:
    """Cells of the tables' rows in a section, without their heads."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [i for i, row in enumerate(cells) if set("".join(row)) <= set("-: ")]
    return [row for i, row in enumerate(cells) if i not in rules and i + 1 not in rules]


def names_in(cell: str) -> list[str]:
    """Names in code type, or listed inside it, without what follows a parenthesis."""
    return re.findall(r"\w+", re.sub(r"\(.*?\)", "", " ".join(re.findall(r"`(.*?)`", cell))))


def paths_in(start: str) -> list[str]:
    """Files of the tree that begins with `start`."""
    (tree,) = (block for block in code_blocks("") if block.startswith(start))
    paths, folders = [], [""] * 8
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0].rstrip(",")
        folders[depth] = name
        if not name.endswith("/"):
            paths.append("".join(folders[: depth + 1]))
    return paths


def test_tree_lists_every_file_of_the_package() -> None:
    package = ROOT / "nanovllm"
    listed = paths_in("nanovllm/")
    files = [path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")]
    assert sorted(listed) == sorted(files)


def test_tree_of_everything_else_lists_what_there_is() -> None:
    missing = [path for path in paths_in("example.py") if not list(ROOT.glob(path))]
    assert not missing


def test_quick_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    bundled = str(ROOT / "tests" / "tiny_qwen3")
    exec(code_blocks("python")[0].replace('"Qwen3-0.6B"', repr(bundled)), {})
    assert capsys.readouterr().out.count("->") >= 2


def test_options_are_all_listed_with_their_defaults() -> None:
    (table,) = ([row for row in rows("LLM(model, **options)") if len(row) == 3],)
    listed = {names_in(name)[0]: default.strip("`") for name, default, _ in table}
    fields = {field.name: field.default for field in dataclasses.fields(Config)}
    assert list(listed) == list(fields)
    for name, default in listed.items():
        if name != "model":
            assert ast.literal_eval(default) == fields[name], name


def test_methods_are_all_listed() -> None:
    table = [row for row in rows("LLM(model, **options)") if len(row) == 2]
    listed = {name for row in table for name in names_in(row[0])} - {"with", "LLM", "as", "llm"}
    methods = {name for name in vars(LLM) if not name.startswith("_")}
    assert listed == methods


def test_sampling_params_are_all_listed_with_their_defaults() -> None:
    listed = {}
    for name, default, _ in rows("SamplingParams"):
        defaults = re.findall(r"`(.*?)`", default)
        fields = names_in(name)
        defaults *= len(fields) // len(defaults)  # one default may stand for all of a row
        listed |= dict(zip(fields, map(ast.literal_eval, defaults), strict=True))
    made = {field.name: None for field in dataclasses.fields(SamplingParams)}
    assert set(listed) == set(made)
    assert SamplingParams(**listed) == SamplingParams()


def test_outputs_are_all_listed() -> None:
    listed = {names_in(row[0])[0]: row[1] for row in rows("Outputs")}
    for kind in (RequestOutput, CompletionOutput, Logprob):
        fields = [field.name for field in dataclasses.fields(kind)]
        assert names_in(listed[kind.__name__])[: len(fields)] == fields


def test_public_names_are_all_listed() -> None:
    assert set(nanovllm.__all__) <= set(names_in(SECTIONS["API"]))


def test_ci_runs_the_test_command() -> None:
    commands = [block for block in code_blocks("sh") if "pytest" in block]
    assert commands[0].rstrip().endswith("&& python -m pytest")
    assert re.search(r"^step .* python -m pytest$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_code_calls_what_there_is() -> None:
    for block in code_blocks("python"):
        calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
        attributes = [call.func for call in calls if isinstance(call.func, ast.Attribute)]
        called = [f.attr for f in attributes if getattr(f.value, "id", None) == "llm"]
        assert called
        assert all(hasattr(LLM, name) for name in called)


UNSUPPORTED: dict[str, tuple[type[Exception], str, Callable[[LLM], object]]] = {
    "lora option": (TypeError, "unknown option", lambda llm: LLM("model", enable_lora=True)),
    "lora request": (
        TypeError,
        "unexpected keyword",
        lambda llm: llm.generate([[1]], lora_request=1),  # type: ignore[call-arg]
    ),
    "structured output": (
        TypeError,
        "unexpected keyword",
        lambda llm: SamplingParams(structured_outputs={}),  # type: ignore[call-arg]
    ),
    "beam search": (
        AttributeError,
        "beam_search",
        lambda llm: llm.beam_search([[1]]),  # type: ignore[attr-defined]
    ),
    "beam search params": (
        TypeError,
        "unexpected keyword",
        lambda llm: SamplingParams(use_beam_search=True),  # type: ignore[call-arg]
    ),
    "embeddings": (
        AttributeError,
        "embed",
        lambda llm: llm.embed("text"),  # type: ignore[attr-defined]
    ),
    "pooling": (TypeError, "unknown option", lambda llm: LLM("model", runner="pooling")),
    "multimodal prompt": (
        ValueError,
        "multi_modal_data",
        lambda llm: llm.generate({"prompt_token_ids": [1], "multi_modal_data": {}}),
    ),
    "tools": (
        TypeError,
        "unexpected keyword",
        lambda llm: llm.chat([{"role": "user", "content": "x"}], tools=[]),  # type: ignore[call-arg]
    ),
}


@pytest.mark.parametrize("wish", UNSUPPORTED)
def test_what_is_not_supported_raises(wish: str, llm: LLM) -> None:
    kind, text, ask = UNSUPPORTED[wish]
    with pytest.raises(kind, match=text):
        ask(llm)


def test_message_parts_other_than_text_are_refused() -> None:
    from nanovllm.llm import as_conversation_list

    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]
    (conversation,) = as_conversation_list([{"role": "user", "content": parts}])
    assert conversation == [{"role": "user", "content": "What is\nthis?"}]
    with pytest.raises(ValueError, match="'image_url' is not supported"):
        as_conversation_list([{"role": "user", "content": [{"type": "image_url"}]}])


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        LLM(str(tmp_path))
