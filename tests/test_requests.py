"""What `generate` takes, what it refuses and how its outputs come back.

The tests named `..._is_refused` also run under `python -O` (see test_errors_without_asserts): they
use `pytest.raises` and `check`, never a bare assert.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import EOS, VOCAB_SIZE, copy_with_tokenizer
from conftest import MakeCheckpoint

from nanovllm import LLM, SamplingParams

TESTS = Path(__file__).resolve().parent
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BLOCK = 16


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = make_checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    return copy_with_tokenizer(checkpoint, tmp_path_factory.mktemp("requests") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """32 blocks of 16 tokens, at most 512 tokens a request."""
    with open_llm(folder) as opened:
        yield opened


def open_llm(folder: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "device": "cpu",
        "max_model_len": 512,
        "kvcache_block_size": BLOCK,
        "num_kvcache_blocks": 32,
        "max_num_batched_tokens": 1024,
    }
    return LLM(str(folder), **{**defaults, **options})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def tokens_of(llm: LLM, prompts: object, params: object = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def check(condition: bool, message: str = "") -> None:
    """`assert` that also holds under `python -O`."""
    if not condition:
        pytest.fail(message)


def check_idle(llm: LLM) -> None:
    """Nothing is queued, every block is free, and a request runs."""
    stats = llm.stats()
    check(llm.llm_engine.is_finished() and not stats.num_waiting and not stats.num_running)
    check(stats.num_free_kvcache_blocks == stats.num_kvcache_blocks, "blocks are held")
    llm.llm_engine.scheduler.check_invariants()
    check(len(tokens_of(llm, [1, 2, 3])[0]) == 8)


# refused

GOOD = [5, 6, 7]
REFUSED = {
    # name: (prompts, error, what its text must say)
    "an empty text": (["fine", ""], ValueError, "prompt 1: .*empty.*at least one token"),
    "no tokens": ([GOOD, GOOD, []], ValueError, "prompt 2: .*empty"),
    "no tokens, alone": ([[]], ValueError, "prompt 0: .*empty"),
    "an empty tuple": ([GOOD, ()], ValueError, "prompt 1: .*empty"),
    "an empty array": (np.array([], dtype=np.int64), ValueError, "prompt 0: .*empty"),
    "an empty text, alone": ("", ValueError, "prompt 0: .*empty"),
    "an empty dict": ([{}], ValueError, "prompt 0: .*'prompt' or 'prompt_token_ids'"),
    "a dict without tokens": ([{"prompt_token_ids": []}], ValueError, "prompt 0: .*empty"),
    "a dict without text": ([{"prompt": ""}], ValueError, "prompt 0: .*empty"),
    "an unknown key": (
        [{"prompt": "a", "multi_modal_data": 1}],
        ValueError,
        "prompt 0: .*multi_modal_data.*prompt_token_ids",
    ),
    "too long": ([GOOD, prompt_of(3000)], ValueError, "prompt 1: .*3000 tokens.*512.*shorten"),
    "as long as the model": (prompt_of(512), ValueError, "512 tokens.*512.*raise max_model_len"),
    "a text too long": (["x" * 600], ValueError, "prompt 0: .*600 tokens.*512"),
    "an id below 0": ([GOOD, [1, -1]], ValueError, "prompt 1: .*-1 .*0..263"),
    "an id too high": ([GOOD, [1, 264]], ValueError, "prompt 1: .*264 .*0..263"),
    "an id beyond 64 bits": ([[2**70, 1]], ValueError, f"prompt 0: .*{2**70}.*0..263"),
    "an id in a dict too high": ([{"prompt_token_ids": [999]}], ValueError, "999 .*0..263"),
    "an array with an id too high": (np.array([1, 2, 300]), ValueError, "300 .*0..263"),
    "floats": ([[1.0, 2.0]], TypeError, "prompt 0: .*flat list of ints"),
    "bools": ([[True, False]], TypeError, "prompt 0: .*flat list of ints"),
    "None among ids": ([[1, None]], TypeError, "prompt 0: .*flat list of ints"),
    "texts among ids": ([["a", "b"]], TypeError, "prompt 0: .*not of str"),
    "a lone surrogate": (["\ud800"], ValueError, "prompt 0: .*no valid Unicode"),
    "nested ids": ([[[1, 2]]], TypeError, "prompt 0: .*flat list of ints"),
    "ragged ids": ([[[1], [2, 3]]], TypeError, "prompt 0: .*flat list of ints"),
    "an array of floats": ([np.array([1.5])], TypeError, "prompt 0: .*flat list of ints"),
    "bytes": ([b"abc"], TypeError, "prompt 0: .*not a bytes"),
    "bytes, alone": (bytearray(b"abc"), TypeError, "prompt 0: .*not a bytearray"),
    "None": ([GOOD, None], TypeError, "prompt 1: .*NoneType"),
    "a number": (7, TypeError, "int"),
    "a set": ({1, 2}, TypeError, "set"),
    "ids and texts mixed": ([1, "two"], TypeError, "prompt 0: .*int"),
    "text that isn't one": ([{"prompt": 5}], TypeError, "prompt 0: .*'prompt' must be a str"),
    "a str for token ids": ([{"prompt_token_ids": "ab"}], TypeError, "prompt 0: .*list of ints"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_prompt_is_refused(llm: LLM, case: str) -> None:
    prompts, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    check_idle(llm)


@pytest.mark.parametrize("case", ["too long", "an id too high", "no tokens"])
def test_bad_prompt_in_stream_is_refused(llm: LLM, case: str) -> None:
    prompts, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        next(llm.stream(prompts, GREEDY))
    check_idle(llm)


def test_bad_prompt_of_add_request_is_refused(llm: LLM) -> None:
    engine = llm.llm_engine
    first = engine.add_request(GOOD, GREEDY)
    for prompt, error in (([], ValueError), ([264], ValueError), (prompt_of(512), ValueError)):
        with pytest.raises(error, match="prompt 0: "):
            engine.add_request(prompt, GREEDY)
    check(llm.stats().num_waiting == 1, "the good request waits alone")
    engine.abort(first)
    check_idle(llm)


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ([GREEDY], ValueError, "2 prompts.* 1 sampling_params"),
        ([GREEDY] * 3, ValueError, "2 prompts.* 3 sampling_params"),
        ([GREEDY, None], TypeError, "must be SamplingParams, not None"),
        ({"temperature": 0}, TypeError, "must be SamplingParams"),
        ([GREEDY, {"max_tokens": 3}], TypeError, "must be SamplingParams"),
        (7, TypeError, "must be SamplingParams or a list, not 7"),
    ],
)
def test_bad_sampling_params_is_refused(
    llm: LLM, params: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        llm.generate([GOOD, GOOD], params, use_tqdm=False)
    check_idle(llm)


def test_request_larger_than_the_pool_is_refused(folder: Path) -> None:
    """Its prompt, or its prompt and max_tokens: decided at the call, from the counts."""
    with open_llm(folder, num_kvcache_blocks=4) as llm:
        knobs = "lower max_tokens or raise num_kvcache_blocks"
        with pytest.raises(ValueError, match=f"prompt 1: .*need 5 .*has 4.*{knobs}"):
            llm.generate([GOOD, prompt_of(65)], GREEDY.replace(max_tokens=1), use_tqdm=False)
        with pytest.raises(ValueError, match=f"prompt 0: 66 tokens .*need 5 .*has 4.*{knobs}"):
            llm.generate([prompt_of(60)], GREEDY.replace(max_tokens=6), use_tqdm=False)
        check_idle(llm)


def test_text_without_tokenizer_is_refused(folder: Path) -> None:
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        with pytest.raises(ValueError, match="prompt 1 is text.*skip_tokenizer_init.*token ids"):
            llm.generate([GOOD, "text"], GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="prompt 0: .*stop.*tokenizer"):
            llm.generate([GOOD], GREEDY.replace(stop="x"), use_tqdm=False)
        with pytest.raises(ValueError, match="tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(ValueError, match="tokenizer"):
            llm.get_tokenizer()
        check_idle(llm)


def test_tokenizer_with_more_ids_than_the_model_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """On a GPU such an id would end the process."""
    checkpoint = make_checkpoint(vocab_size=100, eos_token_id=1)
    with open_llm(copy_with_tokenizer(checkpoint, tmp_path / "model")) as llm:
        with pytest.raises(ValueError, match="prompt 1: .*id 122 .*0..99"):
            llm.generate(["AB", "Az"], GREEDY, use_tqdm=False)
        check_idle(llm)


@pytest.mark.parametrize("messages", ["hello", 5, [["no mapping"]], [5], [None], ["hello"]])
def test_bad_messages_is_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(TypeError, match="must be a"):
        llm.chat(messages, GREEDY, use_tqdm=False)
    check_idle(llm)


CONVERSATION = [{"role": "user", "content": "hi"}]
BAD_CONVERSATIONS = {
    "no list": ("hello", TypeError, "a conversation must be a list of messages"),
    "no message": ([5], TypeError, "a message must be a dict with role and content"),
    "no role": ([{"content": "hi"}], TypeError, "a message must be a dict with role and content"),
    "a role of another kind": ([{"role": 5, "content": "hi"}], TypeError, "a message must be"),
    "no content": ([{"role": "user"}], ValueError, "the chat template can't .*'content'"),
    "content of another kind": ([{"role": "user", "content": 5}], ValueError, "template.*int"),
    "an image": ([{"role": "user", "content": [{"type": "image_url"}]}], ValueError, "image_url"),
    "a text part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        TypeError,
        "text of a content part must be a str, not None",
    ),
    "no messages": ([], ValueError, "the chat template can't .*empty conversation"),
    "a lone surrogate": ([{"role": "user", "content": "\ud800"}], ValueError, "no valid Unicode"),
}


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [({"tokenize": True}, ValueError), ({"add_generation_prompt": False}, ValueError),
     ([1], TypeError), ({1: 2}, TypeError)],
)  # fmt: skip
def test_bad_template_arguments_are_refused(llm: LLM, kwargs: object, error: type) -> None:
    with pytest.raises(error, match="chat_template_kwargs"):
        llm.chat(CONVERSATION, GREEDY, use_tqdm=False, chat_template_kwargs=kwargs)
    check_idle(llm)


@pytest.mark.parametrize("case", BAD_CONVERSATIONS)
def test_bad_conversation_of_several_is_refused_by_its_index(llm: LLM, case: str) -> None:
    conversation, error, text = BAD_CONVERSATIONS[case]
    with pytest.raises(error, match=f"^conversation 2: .*{text}"):
        llm.chat([CONVERSATION, CONVERSATION, conversation], GREEDY, use_tqdm=False)
    with pytest.raises(error, match=f"^(?!conversation).*{text}"):
        llm.chat([conversation], GREEDY, use_tqdm=False)
    check_idle(llm)


def test_errors_without_asserts() -> None:
    """Every refusal is an exception of its own, not an assert that -O takes away."""
    files = ["requests", "config", "model_config", "loader"]
    command = [
        sys.executable,
        "-O",
        "-m",
        "pytest",
        "-q",
        "-k",
        "refused",
        "-p",
        "no:cacheprovider",
    ]
    command += [str(TESTS / f"test_{name}.py") for name in files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > len(REFUSED)


# forms of prompts


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []
    assert llm.generate((), GREEDY, use_tqdm=False) == []
    assert list(llm.stream([])) == []


def test_all_forms_of_one_prompt_are_one_prompt(llm: LLM) -> None:
    text, ids = "hello", list(b"hello")
    forms: list[object] = [
        text,
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, dtype=np.int32),
        [np.int64(i) for i in ids],
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids)},
        {"prompt": text, "prompt_token_ids": ids},
    ]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert [len(output) for output in outputs] == [1] * len(forms)
    assert {tuple(output[0].token_ids) for output in outputs} == {tuple(outputs[0][0].token_ids)}
    assert all(output[0].prompt_token_ids == ids for output in outputs)
    assert all(type(token) is int for token in outputs[3][0].prompt_token_ids)
    together = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in together] == [outputs[0][0].token_ids] * len(forms)
    texts = [output.prompt for output in together]
    assert texts == [text] + [None] * 5 + [text, None, None, text]


def test_two_dimensional_array_is_a_list_of_prompts(llm: LLM) -> None:
    array = np.array([[1, 2, 3], [4, 5, 6]])
    assert tokens_of(llm, array) == tokens_of(llm, array.tolist())


def test_views_of_an_output_agree(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert output["text"] == output.outputs[0].text
    assert output["token_ids"] == output.outputs[0].token_ids
    assert len(output["token_ids"]) == 8
    assert output.finished
    assert output.outputs[0].finish_reason == "length"


def test_params_have_defaults_and_stay_as_they_were(llm: LLM) -> None:
    (output,) = llm.generate([GOOD], use_tqdm=False)
    assert 1 <= len(output.token_ids) <= SamplingParams().max_tokens
    shared = SamplingParams(temperature=0.7, max_tokens=5, seed=3, ignore_eos=True)
    before = repr(shared)
    outputs = llm.generate([GOOD, GOOD, GOOD], shared, use_tqdm=False)
    assert repr(shared) == before
    assert len({tuple(output.token_ids) for output in outputs}) == 1


# lengths and order


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_new"),
    [(500, 40, 12), (500, 12, 12), (500, 11, 11), (511, 1, 1), (511, 40, 1), (510, None, 2)],
)
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_max_model_len_ends_an_answer_exactly(
    folder: Path, prompt_len: int, max_tokens: int | None, num_new: int, async_scheduling: bool
) -> None:
    params = GREEDY.replace(max_tokens=max_tokens)
    with open_llm(folder, async_scheduling=async_scheduling) as llm:
        (output,) = llm.generate([prompt_of(prompt_len)], params, use_tqdm=False)
    assert len(output.token_ids) == num_new
    assert output.outputs[0].finish_reason == "length"


def test_pool_may_be_filled_to_the_last_slot(folder: Path) -> None:
    """The last token is never stored, so 64 slots hold a prompt of 60 and 5 new tokens."""
    with open_llm(folder, num_kvcache_blocks=4) as llm:
        assert len(tokens_of(llm, [prompt_of(60)], GREEDY.replace(max_tokens=5))[0]) == 5
        assert len(tokens_of(llm, [prompt_of(64)], GREEDY.replace(max_tokens=1))[0]) == 1
        # Without max_tokens: up to what fits.
        assert len(tokens_of(llm, [prompt_of(60)], GREEDY.replace(max_tokens=None))[0]) == 5


def test_outputs_answer_their_prompts_when_they_finish_out_of_order(llm: LLM) -> None:
    rng = np.random.default_rng(2)
    prompts = [prompt_of(int(n), seed=i) for i, n in enumerate(rng.integers(1, 40, 24))]
    wishes = [GREEDY.replace(max_tokens=int(n)) for n in rng.permutation(24) + 1]
    alone = [tokens_of(llm, [p], w)[0] for p, w in zip(prompts, wishes, strict=True)]
    for _ in range(2):
        outputs = llm.generate(prompts, wishes, use_tqdm=False)
        assert [output.token_ids for output in outputs] == alone
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert [output.prompt_index for output in outputs] == list(range(24))


@pytest.mark.parametrize("budget", [16, 32, 48, 64])
def test_budget_that_ends_at_a_prompt_border_loses_no_prompt(folder: Path, budget: int) -> None:
    prompts = [prompt_of(n, seed=n) for n in (16, 32, 16, 16, 48, 16, 64, 1, 15, 16)]
    with open_llm(folder, max_num_batched_tokens=1024) as llm:
        expected = tokens_of(llm, prompts)
    with open_llm(folder, max_num_batched_tokens=budget) as llm:
        assert tokens_of(llm, prompts) == expected


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_few_rows_serve_many_requests(folder: Path, max_num_seqs: int) -> None:
    prompts = [prompt_of(10 + n, seed=n) for n in range(7)]
    with open_llm(folder) as llm:
        expected = tokens_of(llm, prompts)
    with open_llm(folder, max_num_seqs=max_num_seqs) as llm:
        assert tokens_of(llm, prompts) == expected


# steps and aborts


def test_step_on_an_empty_engine_does_nothing(llm: LLM) -> None:
    before = llm.stats()
    assert llm.llm_engine.step() == []
    assert llm.llm_engine.is_finished()
    assert llm.stats() == before


def test_requests_added_one_by_one_come_back_by_id(llm: LLM) -> None:
    engine = llm.llm_engine
    prompts = [prompt_of(20, seed=i) for i in range(3)]
    expected = tokens_of(llm, prompts)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    assert len(set(ids)) == 3
    finished = {}
    while not engine.is_finished():
        finished.update({output.request_id: output for output in engine.step()})
    assert [finished[i].token_ids for i in ids] == expected
    assert engine.step() == []


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 8])
def test_abort_frees_blocks_and_leaves_the_others_alone(
    folder: Path, num_steps: int, async_scheduling: bool
) -> None:
    """After 0 steps it waits, after 1 to 3 it is half prefilled, after 5 it runs."""
    prompts = [prompt_of(20, 1), prompt_of(200, 2), prompt_of(30, 3)]
    options = {"max_num_batched_tokens": 64, "async_scheduling": async_scheduling}
    with open_llm(folder, **options) as llm:
        engine = llm.llm_engine
        params = GREEDY.replace(max_tokens=12)
        expected = tokens_of(llm, prompts, params)
        llm.reset_prefix_cache()
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        for _ in range(num_steps):
            assert engine.step() == []
        engine.abort(ids[1])
        engine.abort(ids[1])  # again, and an unknown one: nothing happens
        engine.abort("no such request")
        with pytest.raises(TypeError, match="id is a str, not 1"):
            engine.abort(1)  # it did nothing, in silence
        engine.scheduler.check_invariants()
        finished = {}
        while not engine.is_finished():
            finished.update({output.request_id: output for output in engine.step()})
        assert finished.keys() == {ids[0], ids[2]}
        assert finished[ids[0]].token_ids == expected[0]
        assert finished[ids[2]].token_ids == expected[2]
        check_idle(llm)


def test_queued_requests_keep_generate_out(llm: LLM) -> None:
    engine = llm.llm_engine
    request_id = engine.add_request(GOOD, GREEDY)
    for call in (lambda: llm.generate([GOOD]), lambda: next(llm.stream([GOOD]))):
        with pytest.raises(RuntimeError, match="queued.*step.*abort"):
            call()
    with pytest.raises(RuntimeError, match="finish or abort"):
        llm.reset_prefix_cache()
    engine.abort(request_id)
    check_idle(llm)


# prefix cache


@pytest.mark.parametrize("length", [16, 32, 128, 256])
def test_fully_cached_prompt_runs_its_last_token(llm: LLM, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    llm.reset_prefix_cache()
    cold = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    warm = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, length - BLOCK)
    assert warm.token_ids == cold.token_ids
    llm.reset_prefix_cache()
    both = llm.generate([prompt, prompt], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in both] == [0, length - BLOCK]
    assert [output.token_ids for output in both] == [cold.token_ids] * 2


def test_answers_of_one_call_are_the_next_ones_prefix(llm: LLM) -> None:
    prompt = prompt_of(40, seed=9)
    answer = tokens_of(llm, [prompt], GREEDY.replace(max_tokens=30))[0]
    (again,) = llm.generate([prompt + answer[:25]], GREEDY.replace(max_tokens=5), use_tqdm=False)
    assert again.num_cached_tokens == 64
    assert again.token_ids == answer[25:]


def test_evicted_prompt_is_computed_again(folder: Path) -> None:
    """A fills the pool, B takes its blocks: asked again, A never reads what B left there."""
    first, second = prompt_of(120, 1), prompt_of(120, 2)
    with open_llm(folder, num_kvcache_blocks=8) as llm:
        expected = tokens_of(llm, [first])
        other = tokens_of(llm, [second])
        for _ in range(2):
            (again,) = llm.generate([first], GREEDY, use_tqdm=False)
            assert again.num_cached_tokens == 0
            assert [again.token_ids] == expected
            assert tokens_of(llm, [second]) == other


def test_reset_prefix_cache_forgets_keys_of_old_weights(folder: Path) -> None:
    prompt = prompt_of(100)
    with open_llm(folder) as llm:
        before = tokens_of(llm, [prompt])
        for layer in llm.llm_engine._runner.model.model.layers:
            layer.self_attn.qkv_proj.weight.neg_()
            layer.mlp.down_proj.weight.mul_(0.5)
        llm.reset_prefix_cache()
        (after,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert after.num_cached_tokens == 0
        cold = tokens_of(llm, [prompt[:50]] * 2 + [prompt])
    assert [after.token_ids] != before
    assert cold[2] == after.token_ids
    stream_llm = open_llm(folder)
    stream = stream_llm.stream([prompt, prompt[:3]], GREEDY.replace(max_tokens=3), deltas=True)
    next(stream)
    with pytest.raises(RuntimeError, match="while requests run"):
        stream_llm.reset_prefix_cache()
    stream.close()
    stream_llm.reset_prefix_cache()
    stream_llm.exit()


def test_progress_bar_shows_both_speeds(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([GOOD, GOOD], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "Prefill" in shown
    assert "Decode" in shown
    assert re.search(r"\d+tok/s", shown)
    llm.generate([GOOD], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_last_step_is_the_one_that_took_the_time(llm: LLM) -> None:
    """On a CPU that is the one just launched: prompts counted as run in no time."""
    engine = llm.llm_engine
    engine.add_request(GOOD, GREEDY.replace(max_tokens=3))
    counts = []
    while not engine.is_finished():
        engine.step()
        counts.append(tuple(engine.last_step))
    assert counts == [(len(GOOD), 0), (0, 1), (0, 1), (0, 0)]


def test_environment_of_errors_is_this_python() -> None:
    """test_errors_without_asserts means something only where asserts run here."""
    assert os.environ.get("PYTHONOPTIMIZE", "") in ("", "0")
