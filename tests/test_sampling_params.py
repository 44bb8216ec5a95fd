"""Tests of sampling parameters: accepted values, refusals and their messages."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import InferenceConfig
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.errors import ConfigError, SerializationError
from rollout.manager.batch.scores import _of_set
from rollout.manager.episodes.batch import _distribution
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import FILTERS, MIN_TEMPERATURE, SamplingParams
from rollout.server.openai.schema import CompletionRequest

TOKENS = st.integers(0, 2**31 - 1)


@st.composite
def params(draw):
    max_tokens = draw(st.integers(0, 10_000))
    return SamplingParams(
        n=draw(st.integers(1, 64)),
        temperature=draw(st.one_of(st.just(0.0), st.floats(MIN_TEMPERATURE, 10))),
        top_k=draw(TOKENS),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(1e-3, 10)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.none() | st.dictionaries(TOKENS, st.floats(-1e9, 100), max_size=4)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop=draw(st.lists(st.text(min_size=1), max_size=3)),
        stop_token_ids=draw(st.lists(TOKENS, max_size=3)),
        ignore_eos=draw(st.booleans()),
        include_stop_str_in_output=draw(st.booleans()),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        logprobs_mode=draw(st.sampled_from(["processed", "raw", "tempered"])),
    )


@given(params())
def test_deserialize_is_the_inverse_of_serialize_through_msgpack(original):
    wire = msgpack.unpackb(msgpack.packb(original.serialize(), use_bin_type=True))
    assert SamplingParams.deserialize(wire) == original


def test_zero_is_a_value_and_not_unset():
    none, plain = SamplingParams(temperature=0, max_tokens=0), SamplingParams()
    assert (none.greedy, none.temperature, none.max_tokens) == (True, 0, 0)
    assert (plain.greedy, plain.max_tokens) == (False, 256)


NAN, INF = math.nan, math.inf
REFUSED = {
    "structured": [1, "a", []],
    "cache_salt": [1, b"a", "x" * 1025, "\ud800"],
    "adapter": [1, "", "a b", "a=b", "a\0", "x" * 257],
    "n": [0, -1, 1.0, "1", None, True, 2**31],
    "temperature": [-1, -1e-9, NAN, INF, "1", None, True, 1e-9, 10**400, 1e39],
    "top_k": [-1, 1.5, None, True],
    "top_p": [0, -0.1, 1.1, NAN, None, True],
    "min_p": [-0.1, 1.1, NAN, None],
    "repetition_penalty": [0, -1, NAN, INF, None, 1e-300, 1e39],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "logit_bias": [
        {-1: 1.0},
        {1: NAN},
        {1: INF},
        {1: -1e39},
        {1.5: 1.0},
        {"1": 1.0},
        {1: "x"},
        {True: 1.0},
        [1, 2],
        3,
        "ab",
    ],
    "max_tokens": [-1, None, 1.0, True],
    "min_tokens": [-1, 257, None],
    "stop": ["", ["a", ""], [1], 1, b"a", True],
    "stop_token_ids": [[-1], [1.0], ["a"], 5, "12", [True]],
    "ignore_eos": [1, 0, None, "yes"],
    "include_stop_str_in_output": [1, None],
    "seed": [-1, 2**63, 1.0, True, "1"],
    "logprobs": [-1, 1.0, True],
    "prompt_logprobs": [-1, 1.0, True],
    "logprobs_mode": ["other", None, 1, []],
    "return_kept_tokens": [1, None, "yes"],
}


def test_every_field_has_values_that_are_refused():
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_a_value_out_of_range_is_a_value_error_that_names_field_value_and_rule(name, value):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert message.startswith(f"SamplingParams.{name}={value!r}: must be ")


def test_an_unknown_field_is_refused_by_name():
    for attempt in (SamplingParams, SamplingParams().replace, lambda **given: SamplingParams.deserialize(given)):
        with pytest.raises(ConfigError, match=r"^SamplingParams.temprature: .*did you mean temperature\?$"):
            attempt(temprature=1.0)
    with pytest.raises(ConfigError, match=r"^InferenceConfig.zzz: .*the options are kv_cache_blocks, ") as refused:
        InferenceConfig(zzz=1)
    assert str(refused.value).endswith(", advanced")
    assert copy.deepcopy(SamplingParams(n=2)) == pickle.loads(pickle.dumps(SamplingParams(n=2)))


def test_something_other_than_a_dict_is_a_serialization_error():
    with pytest.raises(SerializationError, match="a list arrived"):
        SamplingParams.deserialize([])


def test_numpy_numbers_are_taken_and_stored_as_pythons():
    given_numpy = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_k=np.int32(3),
        seed=np.int64(4),
        ignore_eos=np.bool_(True),
        logit_bias={np.int64(5): np.float32(0.25)},
        stop_token_ids=np.array([6, 7]),
    )
    assert given_numpy == SamplingParams(
        n=2, temperature=0.5, top_k=3, seed=4, ignore_eos=True, logit_bias={5: 0.25}, stop_token_ids=[6, 7]
    )
    assert msgpack.packb(given_numpy.serialize())


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == SamplingParams(stop=["END"]).stop == ("END",)
    assert SamplingParams(stop=None).stop == SamplingParams(stop_token_ids=None).stop_token_ids == ()


def test_later_changes_of_what_was_given_do_not_reach_in():
    bias, stop = {1: 1.0}, ["a"]
    built = SamplingParams(logit_bias=bias, stop=stop)
    bias[2], stop[0] = 2.0, "b"
    assert built.logit_bias == {1: 1.0}
    assert built.stop == ("a",)


def test_replace_checks_again_and_leaves_the_original():
    built = SamplingParams(max_tokens=10, min_tokens=5)
    assert built.replace(max_tokens=20).max_tokens == 20
    assert built.max_tokens == 10
    with pytest.raises(ConfigError, match=r"min_tokens=5: must be at most max_tokens=4"):
        built.replace(max_tokens=4)


def test_parameters_can_be_dictionary_keys_and_cannot_be_changed():
    assert len({SamplingParams(logit_bias={1: 1.0}), SamplingParams(logit_bias={1: 1.0})}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2


VALUES = {"top_k": 2, "top_p": 0.5, "min_p": 0.5}
"""A value of each filter that cuts most tokens off."""


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_reaches_all_that_depends_on_the_distribution(name: str) -> None:
    """One table names the filters: the draw, kept tokens, scores, rows of episodes and HTTP follow it."""
    params = SamplingParams(**{name: VALUES[name]})
    assert params.truncated
    assert params.shaping() == [f"{name}={VALUES[name]!r}"]
    assert SamplingParams(**{name: VALUES[name]}, return_kept_tokens=True).return_kept_tokens
    table = SamplingTable("cpu")
    table.set(0, params, 1)
    table.set(1, SamplingParams(temperature=0, **{name: VALUES[name]}), 1)
    assert table.select(np.array([0])).filters == {name}
    assert not table.select(np.array([1])).filters
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", name: VALUES[name]})
    assert getattr(body.sampling_params(max_tokens=1), name) == VALUES[name]
    request = DynamicInferenceRequest(request_id=1, prompt_tokens=[1, 2], sampling_params=params)
    plain = DynamicInferenceRequest(request_id=1, prompt_tokens=[1, 2], sampling_params=SamplingParams())
    assert _distribution(request) != _distribution(plain)
    with pytest.raises(ConfigError, match=name):
        _of_set(request)
