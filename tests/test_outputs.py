"""Outputs: vLLM's attributes and nano-vllm's mapping are two views of one value."""

import copy
import dataclasses
import pickle

import pytest

from nanovllm.outputs import (
    CompletionOutput,
    EngineStats,
    Logprob,
    RequestMetrics,
    RequestOutput,
    logprob_entry,
)


def answer(*texts: str) -> RequestOutput:
    outputs = [
        CompletionOutput(index, text, list(range(len(text))), finish_reason="length")
        for index, text in enumerate(texts)
    ]
    return RequestOutput("7", "hello", [1, 2, 3], outputs, finished=True, num_cached_tokens=2)


def test_output_reads_as_vllms_attributes():
    output = answer("abc")
    sample = output.outputs[0]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("7", "hello", [1, 2, 3])
    assert (output.finished, output.prompt_logprobs, output.num_cached_tokens) == (True, None, 2)
    assert (sample.index, sample.text, sample.token_ids) == (0, "abc", [0, 1, 2])
    assert (sample.finish_reason, sample.stop_reason) == ("length", None)
    assert (sample.logprobs, sample.cumulative_logprob) == (None, None)
    assert sample.finished()
    assert not CompletionOutput(0, "", []).finished()


def test_output_reads_as_nano_vllms_dict():
    output = answer("abc", "xy")
    assert output["text"] == "abc"
    assert output["token_ids"] == [0, 1, 2]
    assert list(output.keys()) == list(output) == ["text", "token_ids"]
    assert "text" in output
    assert "prompt" not in output
    assert output.get("prompt", "none") == "none"
    assert dict(output) == {**output} == {"text": "abc", "token_ids": [0, 1, 2]}
    with pytest.raises(KeyError, match="logprobs"):
        output["logprobs"]


def test_both_views_are_one_value():
    output = answer("abc", "xy")
    assert output["token_ids"] is output.outputs[0].token_ids is output.token_ids
    assert output["text"] is output.outputs[0].text is output.text
    fields = {field.name for field in dataclasses.fields(output)}
    assert not fields & {"text", "token_ids"}


def test_output_is_frozen_truthy_and_picklable():
    output = answer("")
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.finished = False
    assert output
    assert dict(pickle.loads(pickle.dumps(output))) == dict(copy.deepcopy(output)) == dict(output)


def test_output_counts_its_usage():
    output = answer("abc", "xy")
    assert (output.num_prompt_tokens, output.num_cached_tokens) == (3, 2)
    assert output.num_generated_tokens == 5


def test_metrics_measure_from_arrival():
    metrics = RequestMetrics(10.0, 10.5, 11.0, None)
    assert (metrics.time_in_queue, metrics.time_to_first_token) == (0.5, 1.0)
    assert metrics.total_time is None


def test_logprob_entry_puts_the_sampled_token_first_and_counts_it_once():
    outside = logprob_entry(9, Logprob(-3.0, 5), [4, 2], [-0.5, -1.0], str)
    assert list(outside.items()) == [
        (9, Logprob(-3.0, 5, "9")),
        (4, Logprob(-0.5, 1, "4")),
        (2, Logprob(-1.0, 2, "2")),
    ]
    inside = logprob_entry(2, Logprob(-1.0, 2), [4, 2], [-0.5, -1.0])
    assert inside == {2: Logprob(-1.0, 2, None), 4: Logprob(-0.5, 1, None)}
    assert logprob_entry(2, Logprob(-1.0, 2), [], []) == {2: Logprob(-1.0, 2, None)}


def test_engine_stats_are_frozen():
    stats = EngineStats(num_preemptions=1)
    assert stats.num_generated_tokens == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.num_preemptions = 2
