"""Text, stop strings and streams of a whole engine whose model says what a test tells it to.

The model's place is taken by a script of token ids for each prompt; scheduling, overlap, stopping,
detokenisation and outputs are the engine's own.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import MakeCheckpoint

from nanovllm import LLM, CompletionOutput, SamplingParams
from nanovllm.engine.batch import ScheduledBatch
from nanovllm.utils.tokenizer import Tokenizer

TESTS = Path(__file__).resolve().parent
TEXTS = {
    "chinese": "今天天气很好,我们去公园散步。然后回家吃饭!###明天见。",
    "emoji": "Family: 👨‍👩‍👧‍👦 flags 🇩🇪🇯🇵 hands 👋🏽 end",
    "combining": "e\u0301te\u0301 n\u0303 a\u0308\u0323 क्षि ตั้ง — done",
    "code": "def f(x):\n    return x ** 2  # square\n\nprint(f('é'))\n```\nbye",
    "mixed": "naïve ###\n\nUser: 你好\n\nAssistant: 👍 ok ### more",
}
STOPS = ["###", "。", "👧", "\u0301", "\n\n", "x ** 2", "好,我", "🇯🇵", "👋🏽 end", "é", "absent"]


class Scripted:
    """A runner that answers the prompt [i] with the i-th script, token by token."""

    runs_at_launch = True

    def __init__(self, scripts: list[list[int]]) -> None:
        self.scripts = scripts
        self.is_lost = False
        self._script_of_row: dict[int, list[int]] = {}

    def launch(self, batch: ScheduledBatch) -> "Tokens":
        for lane in range(batch.num_prefills):  # prompts of one token each
            script = self.scripts[int(batch.prompt_tokens[lane])]
            self._script_of_row[int(batch.rows[lane])] = script
        places = zip(batch.rows.tolist(), batch.starts.tolist(), strict=True)
        # Behind a script's end come late tokens, which nobody may see.
        return Tokens([(*self._script_of_row[row][start:], 0)[0] for row, start in places])

    def synchronize(self) -> None: ...
    def exit(self) -> None: ...


class Tokens(NamedTuple):
    """What `Scripted` launched."""

    token_ids: list[int]

    def wait(self) -> list[int]:
        return self.token_ids

    def wait_logprobs(self) -> None:
        return None


@pytest.fixture(scope="module", params=["bundled", "qwen3"])
def tokenizer_folder(request: pytest.FixtureRequest) -> Path:
    if request.param == "bundled":
        return TESTS / "tiny_qwen3"
    folder = os.environ.get("NANOVLLM_TOKENIZER")
    if not folder:
        pytest.skip("NANOVLLM_TOKENIZER names no folder with Qwen3's tokenizer")
    return Path(folder)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder)


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "serial"])
def llm(
    request: pytest.FixtureRequest, tokenizer_folder: Path, make_checkpoint: MakeCheckpoint
) -> Iterator[LLM]:
    vocab_size = max(1000, Tokenizer.from_folder(tokenizer_folder).vocab_size)
    folder = make_checkpoint(vocab_size=vocab_size, hidden_size=16, eos_token_id=None)
    with LLM(
        str(folder),
        device="cpu",
        tokenizer=str(tokenizer_folder),
        max_model_len=512,
        async_scheduling=request.param,
    ) as opened:
        opened.llm_engine._runner.exit()
        yield opened


def answer(llm: LLM, scripts: list[list[int]], params: object) -> list[CompletionOutput]:
    llm.llm_engine._runner = Scripted(scripts)
    prompts = [[i] for i in range(len(scripts))]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def settled(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The text of all whole characters."""
    return tokenizer.decode(token_ids).rstrip("\ufffd")


class Expected(NamedTuple):
    num_tokens: int
    text: str
    stop: str | None


def brute_force(
    tokenizer: Tokenizer, script: list[int], stops: list[str], keeps_stop: bool, min_tokens: int = 0
) -> Expected:
    """The text of ever more tokens, searched from the start each time."""
    before = ""
    for num_tokens in range(1, len(script) + 1):
        text = settled(tokenizer, script[:num_tokens])
        if num_tokens >= min_tokens:
            hits = [(start, stop) for stop in stops for start in new_hits(text, before, stop)]
            if hits:
                start, stop = min(hits, key=lambda hit: hit[0])
                end = start + len(stop) * keeps_stop
                return Expected(num_tokens, text[:end], stop)
        before = text
    return Expected(len(script), tokenizer.decode(script), None)


def new_hits(text: str, before: str, stop: str) -> list[int]:
    """Where `stop` first begins in `text`, if it ends behind what was there before."""
    start = text.find(stop, max(0, len(before) - len(stop) + 1))
    return [start] if start >= 0 else []


def scripts_of(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in TEXTS.values()]


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_text_ends_at_the_earliest_stop_string(llm, tokenizer, keeps_stop):
    """C40: split over tokens, at the very first token, several stops, next to multi-byte text."""
    scripts = scripts_of(tokenizer)
    for stops in [[stop] for stop in STOPS] + [STOPS, ["###", "##"], ["##", "###"]]:
        params = [
            SamplingParams(stop=stops, max_tokens=len(s), include_stop_str_in_output=keeps_stop)
            for s in scripts
        ]
        for script, output in zip(scripts, answer(llm, scripts, params), strict=True):
            expected = brute_force(tokenizer, script, stops, keeps_stop)
            assert output.text == expected.text
            assert output.token_ids == script[: expected.num_tokens]
            assert output.stop_reason == expected.stop
            assert output.finish_reason == ("length" if expected.stop is None else "stop")


def test_a_stop_string_may_be_the_first_token(llm, tokenizer):
    (output,) = answer(llm, [tokenizer.encode("###")], SamplingParams(stop="#", max_tokens=3))
    assert (output.text, output.stop_reason, len(output.token_ids)) == ("", "#", 1)


@pytest.mark.parametrize("min_tokens", [2, 7])
def test_no_stop_string_is_seen_before_min_tokens(llm, tokenizer, min_tokens):
    scripts = [tokenizer.encode(text) for text in ("a b a b a b a b a b", "!a!a!a!a!a!a!a!a!a")]
    params = SamplingParams(stop=["a", "!"], max_tokens=8, min_tokens=min_tokens)
    for script, output in zip(scripts, answer(llm, scripts, params), strict=True):
        expected = brute_force(tokenizer, script[:8], ["a", "!"], False, min_tokens)
        assert output.token_ids == script[: expected.num_tokens]
        assert output.text == expected.text


def test_streamed_deltas_joined_are_the_final_text(llm, tokenizer):
    scripts = scripts_of(tokenizer)
    for stops in ([], ["###"], ["\n\n", "👧", "\u0301"]):
        params = [SamplingParams(stop=stops, max_tokens=len(script)) for script in scripts]
        whole = answer(llm, scripts, params)
        llm.llm_engine._runner = Scripted(scripts)
        texts, token_ids = [""] * len(scripts), [[] for _ in scripts]
        finished = set()
        prompts = [[i] for i in range(len(scripts))]
        for output in llm.stream(prompts, params, deltas=True):
            assert output.prompt_index not in finished, "a delta behind the last one"
            delta = output.outputs[0]
            assert output.finished or not delta.text.endswith("\ufffd"), "half a character shown"
            texts[output.prompt_index] += delta.text
            token_ids[output.prompt_index] += delta.token_ids
            if output.finished:
                finished.add(output.prompt_index)
        assert texts == [output.text for output in whole]
        assert token_ids == [output.token_ids for output in whole]
        assert finished == set(range(len(scripts)))


def test_text_equals_decoding_all_tokens_at_once(llm, tokenizer):
    rng = np.random.default_rng(0)
    scripts = [rng.integers(0, tokenizer.vocab_size, 60).tolist() for _ in range(20)]
    scripts += [rng.integers(128, 256, 60).tolist() for _ in range(4)]  # mostly broken bytes
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for script, output in zip(scripts, answer(llm, scripts, params), strict=True):
        assert output.token_ids == script
        assert output.text == tokenizer.decode(script)
    shown = params.replace(skip_special_tokens=False)
    for script, output in zip(scripts, answer(llm, scripts, shown), strict=True):
        assert output.text == tokenizer.decode(script, skip_special_tokens=False)
    silent = params.replace(detokenize=False)
    for script, output in zip(scripts, answer(llm, scripts, silent), strict=True):
        assert (output.token_ids, output.text) == (script, "")


def test_the_eos_id_is_kept_and_its_text_is_not(llm, tokenizer):
    (eos,) = tokenizer.eos_token_ids
    script = [*tokenizer.encode("好 fine"), eos, *tokenizer.encode("late")]
    (output,) = answer(llm, [script], SamplingParams(max_tokens=20, skip_special_tokens=False))
    assert output.text == "好 fine"
    assert output.token_ids == script[: script.index(eos) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    stop_id = script[-1]
    by_id = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop_id])
    (output,) = answer(llm, [script[: len(script) - 1] + [stop_id]], by_id)
    assert output.token_ids[-1] == output.stop_reason == stop_id
