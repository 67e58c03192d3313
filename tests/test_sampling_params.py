"""SamplingParams: the contract's fields and defaults, and every bad value refused by its name."""

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest

from nanovllm.sampling_params import MAX_SEED, SamplingParams

CONTRACT = {
    "temperature": 1.0,
    "max_tokens": 64,
    "ignore_eos": False,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "n": 1,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "bad_words": None,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "detokenize": True,
}


def test_signature_is_the_contract():
    parameters = inspect.signature(SamplingParams).parameters
    assert {name: p.default for name, p in parameters.items()} == CONTRACT
    assert [f.name for f in dataclasses.fields(SamplingParams)] == list(CONTRACT)


def test_params_are_frozen_hashable_and_picklable():
    params = SamplingParams(stop="a", logit_bias={7: 1.5}, stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert hash(params) == hash(params.replace())


def test_containers_become_tuples_and_the_callers_lists_are_not_kept():
    stop, ids = ["a", "b"], [3, 4]
    params = SamplingParams(
        stop=stop, stop_token_ids=ids, bad_words=["x"], logit_bias={5: 1, 2: -3}
    )
    stop.append("c")
    ids.append(5)
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3, 4)
    assert params.bad_words == ("x",)
    assert params.logit_bias == ((2, -3.0), (5, 1.0))
    assert SamplingParams(stop="###").stop == ("###",)
    assert SamplingParams().stop == SamplingParams().stop_token_ids == ()


def test_numpy_scalars_become_python_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.int32(7),
        stop_token_ids=np.arange(2),
    )
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 7)
    assert (type(params.temperature), type(params.top_k)) == (float, int)
    assert params.stop_token_ids == (0, 1)
    assert type(SamplingParams(temperature=1).temperature) is float


def test_replace_checks_as_the_constructor_does_and_leaves_the_original():
    params = SamplingParams(temperature=0.5, stop=["a"])
    changed = params.replace(max_tokens=None, n=3)
    assert (changed.max_tokens, changed.n, changed.stop) == (None, 3, ("a",))
    assert (params.max_tokens, params.n) == (64, 1)
    with pytest.raises(ValueError, match="top_p"):
        params.replace(top_p=0)
    with pytest.raises(TypeError, match="beam_width"):
        params.replace(beam_width=4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e39},  # no float32: with filters the first token was always drawn
        {"temperature": 10**400},
        {"min_tokens": 2**63, "max_tokens": None},
        {"temperature": np.float32("nan")},
        {"top_p": 0},
        {"top_p": 1.2},
        {"top_p": -0.5},
        {"top_k": -2},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"n": 0},
        {"n": 16385},
        {"seed": -1},
        {"seed": MAX_SEED + 1},
        {"stop": [""]},
        {"stop": ""},
        {"stop_token_ids": [-1]},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"bad_words": [""]},
        {"n": 2, "temperature": 0.0},
        {"stop": ["a"], "detokenize": False},
    ],
)
def test_value_out_of_range_is_a_value_error_naming_the_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "0.7"},
        {"temperature": True},
        {"temperature": None},
        {"top_k": 0.5},
        {"top_k": 5.0},
        {"top_k": True},
        {"n": True},
        {"seed": 1.0},
        {"max_tokens": "8"},
        {"ignore_eos": 1},
        {"detokenize": None},
        {"stop": 3},
        {"stop": [3]},
        {"stop": b"a"},
        {"stop_token_ids": 3},
        {"stop_token_ids": "12"},
        {"stop_token_ids": [True]},
        {"logprobs": True},
        {"logprobs": 1.5},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: "1"}},
        {"logit_bias": [5]},
        {"bad_words": "abc"},
    ],
)
def test_value_of_the_wrong_kind_is_a_type_error_naming_the_field(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_error_names_value_and_limit():
    with pytest.raises(ValueError, match=r"top_p must be .*at most 1, got 1\.2"):
        SamplingParams(top_p=1.2)
    with pytest.raises(ValueError, match="min_tokens is 65, more than max_tokens 64"):
        SamplingParams(min_tokens=65)


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="use_beam_search"):
        SamplingParams(use_beam_search=True)


@pytest.mark.parametrize(
    "edge",
    [
        {"top_k": -1},
        {"top_p": 1},
        {"min_p": 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"min_tokens": 64},
        {"seed": MAX_SEED},
        {"logprobs": -1},
        {"logprobs": 0},
        {"temperature": 0},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 0.01},
        {"stop": []},
        {"logit_bias": {}},
    ],
)
def test_value_at_its_limit_is_accepted(edge):
    SamplingParams(**edge)


def test_tiny_temperature_is_greedy():
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, False),
        ({"top_k": 3}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"top_k": 3, "temperature": 0}, False),
        ({"repetition_penalty": 1.1, "temperature": 0}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"logit_bias": {1: 1.0}}, True),
        ({"logit_bias": {}}, False),
        ({"bad_words": ["x"]}, True),
        ({"min_tokens": 1}, False),
        ({"min_tokens": 2}, True),
        ({"logprobs": 0}, False),
        ({"prompt_logprobs": 1}, False),
        ({"stop": "x", "seed": 1, "stop_token_ids": [1]}, False),
    ],
)
def test_only_rows_that_need_it_are_sampled_again(fields, expected):
    assert SamplingParams(**fields).changes_draw is expected
