"""`stream` yields what `generate` returns, as it comes; leaving it early leaves nothing behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_tokenizer import EOS, VOCAB_SIZE, copy_with_tokenizer
from conftest import MakeCheckpoint

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = ["a", "a longer prompt", "of three", "and a fourth"]
LENGTHS = [9, 2, 6, 4]
WISHES = [GREEDY.replace(max_tokens=n) for n in LENGTHS]


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = make_checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    return copy_with_tokenizer(checkpoint, tmp_path_factory.mktemp("stream") / "model")


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(
        str(folder),
        device="cpu",
        max_model_len=128,
        kvcache_block_size=16,
        max_num_seqs=16,
        async_scheduling=request.param,
    ) as opened:
        yield opened


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert llm.llm_engine.is_finished()
    assert stats.num_free_kvcache_blocks == stats.num_kvcache_blocks
    assert (stats.num_waiting, stats.num_running) == (0, 0)
    llm.llm_engine.scheduler.check_invariants()


def test_outputs_come_as_they_finish_and_equal_those_of_generate(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, WISHES, use_tqdm=False)
    outputs = list(llm.stream(PROMPTS, WISHES))
    order = [output.prompt_index for output in outputs]
    assert order == sorted(range(4), key=LENGTHS.__getitem__)
    for output in outputs:
        same = expected[output.prompt_index]
        assert (output.token_ids, output.text) == (same.token_ids, same.text)
        assert output.finished
    assert_idle(llm)


def test_deltas_joined_are_the_whole(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, WISHES, use_tqdm=False)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    texts, num_last = [""] * 4, [0] * 4
    for output in llm.stream(PROMPTS, WISHES, deltas=True):
        (sample,) = output.outputs
        assert not num_last[output.prompt_index], "a delta after the last one"
        tokens[output.prompt_index] += sample.token_ids
        texts[output.prompt_index] += sample.text
        num_last[output.prompt_index] += output.finished
        assert output.finished == sample.finished()
        assert (sample.finish_reason == "length") == output.finished
    assert tokens == [output.token_ids for output in expected]
    assert texts == [output.text for output in expected]
    assert num_last == [1] * 4
    assert_idle(llm)


def test_deltas_of_several_samples_say_whose_they_are(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=6, n=3, seed=1, ignore_eos=True)
    (whole,) = llm.generate("three samples", params, use_tqdm=False)
    parts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    outputs = list(llm.stream("three samples", params, deltas=True))
    for output in outputs:
        for sample in output.outputs:
            parts[sample.index] += sample.token_ids
    assert list(parts.values()) == [sample.token_ids for sample in whole.outputs]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("num_taken", [1, 2, 5])
@pytest.mark.parametrize("deltas", [True, False])
def test_closing_early_aborts_the_rest(llm: LLM, num_taken: int, deltas: bool) -> None:
    expected = llm.generate(PROMPTS, WISHES, use_tqdm=False)
    stream = llm.stream(PROMPTS, WISHES, deltas=deltas)
    for _ in range(num_taken):
        next(stream, None)
    stream.close()
    assert_idle(llm)
    again = llm.generate(PROMPTS, WISHES, use_tqdm=False)
    assert [output.token_ids for output in again] == [output.token_ids for output in expected]


def test_request_aborted_in_a_stream_is_not_yielded(llm: LLM) -> None:
    seen = set()
    for output in llm.stream(PROMPTS, WISHES, deltas=True):
        seen.add(output.request_id)
        if len(seen) == 4:
            break
    assert_idle(llm)
    stream = llm.stream(PROMPTS, WISHES)
    first = next(stream)
    others = [r for r in llm.llm_engine._requests if r != first.request_id]
    for request_id in others:
        llm.llm_engine.abort(request_id)
    assert list(stream) == []
    assert_idle(llm)


def test_nothing_happens_before_the_first_advance(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, WISHES)
    assert len(llm.generate(PROMPTS, WISHES, use_tqdm=False)) == 4
    stream.close()
    bad = llm.stream(["fine", ""], GREEDY)
    with pytest.raises(ValueError, match="prompt 1: .*empty"):
        next(bad)
    assert_idle(llm)


def test_two_streams_cannot_be_mixed(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, WISHES)
    next(stream)
    with pytest.raises(RuntimeError, match="is running on this LLM"):
        next(llm.stream(PROMPTS))
    assert len(list(stream)) == 3
    assert_idle(llm)
