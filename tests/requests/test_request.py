"""Tests of requests: construction, lengths, versions, serialisation."""

from __future__ import annotations

import dataclasses
import math

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidRequestError, SerializationError
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.requests.request import (
    DynamicInferenceRequest,
    InferenceRequest,
    VLMInferenceRequest,
    deserialize_tensor,
    serialize_tensor,
)
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status

KINDS = [InferenceRequest, DynamicInferenceRequest, VLMInferenceRequest]
TOKENS = st.lists(st.integers(-200, 200_000), max_size=12)
LOG_PROBS = st.lists(st.floats(width=32), max_size=12)
TOP_N = st.lists(st.lists(st.tuples(st.integers(0, 99), st.floats()), max_size=3), max_size=5)


@st.composite
def requests(draw, kind=DynamicInferenceRequest):
    prompt, generated = draw(TOKENS), draw(TOKENS)
    fields = {
        "request_id": draw(st.integers(0, 2**63 - 1)),
        "prompt": draw(st.none() | st.text()),
        "sampling_params": SamplingParams(stop=draw(st.lists(st.text(min_size=1), max_size=2)), logit_bias={3: 1.5}),
        "prompt_tokens": prompt,
        "arrival_time": draw(st.floats(0, 2e9)),
        "status": draw(st.sampled_from(Status)),
        "encoder_prompt": draw(st.none() | st.text()),
        "generated_text": draw(st.none() | st.text()),
        "segments": draw(st.none() | st.lists(st.text(), max_size=2)),
        "generated_segments": draw(st.none() | st.lists(st.text(), max_size=2)),
        "generated_sequence_lengths": draw(st.none() | st.lists(st.integers(0, 9), max_size=2)),
        "generated_tokens": generated,
        "prompt_log_probs": draw(st.none() | LOG_PROBS),
        "generated_log_probs": draw(LOG_PROBS),
        "prompt_top_n_logprobs": draw(st.none() | TOP_N),
        "generated_top_n_logprobs": draw(TOP_N),
        "tpot": draw(LOG_PROBS),
    }
    if issubclass(kind, DynamicInferenceRequest):
        total = len(prompt) + len(generated)
        fields |= {
            "sample_index": draw(st.integers(0, 63)),
            "priority": draw(st.integers(-5, 5)),
            "seed": draw(st.none() | st.integers(0, 2**63 - 1)),
            "rng_offset": draw(st.integers(0, 99)),
            "original_prompt_length": draw(st.integers(0, len(prompt))),
            "stream_offset": draw(st.integers(0, 99)),
            "metadata": draw(st.none() | st.dictionaries(st.text(), st.lists(st.integers(0, 9)), max_size=2)),
            "policy_version": 9,
            "policy_spans": VersionSpans([(1, draw(st.integers(0, total)))]),
            "kv_spans": VersionSpans([(2, draw(st.integers(0, total)))]),
            "finished_chunk_token_count": draw(st.integers(0, len(prompt))),
            "num_cached_tokens": draw(st.integers(0, len(prompt))),
            "block_size_tokens": draw(st.none() | st.integers(1, 4)),
            "enable_prefix_caching": draw(st.booleans()),
            "stop_word_ids": draw(st.none() | st.lists(TOKENS, max_size=2)),
            "routing_indices": draw(st.none() | st.just(np.arange(12, dtype=np.int16).reshape(3, 2, 2))),
            "finish_reason": draw(st.none() | st.sampled_from(FinishReason)),
            "stop_reason": draw(st.none() | st.text() | st.integers(0, 99)),
            "error": draw(st.none() | st.text()),
            "latency": draw(st.none() | st.floats(0, 9)),
            "ttft": draw(st.none() | st.floats(0, 9)),
        }
    if kind is VLMInferenceRequest:
        fields |= {
            "num_img_embeddings_per_tile": draw(st.integers(0, 9)),
            "imgs": draw(st.none() | st.just(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))),
            "num_tiles": draw(st.lists(st.integers(1, 4), max_size=3)),
            "decoder_seq_length": draw(st.none() | st.integers(0, 99)),
        }
    request = kind(**fields)
    if issubclass(kind, DynamicInferenceRequest):
        request.add_event_add_engine(timestamp=1.0)
        request.add_event_generated_token(4, blocks_total=1, timestamp=2.0)
        request.add_event_error_transient(ValueError("x"), timestamp=3.0)
    return request


def sent(plain):
    return msgpack.unpackb(msgpack.packb(plain, use_bin_type=True))


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor | np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Exception):
        return type(left) is type(right) and str(left) == str(right)
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    return type(left) is type(right) and left == right


def request_of(prompt: int, generated: int = 0, **fields) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        request_id=1, prompt_tokens=range(prompt), generated_tokens=range(100, 100 + generated), **fields
    )


# --- the wire


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_deserialize_is_the_exact_inverse_of_serialize_through_msgpack(kind, data):
    request = data.draw(requests(kind))
    back = kind.deserialize(sent(request.serialize()))
    assert type(back) is kind
    assert same(request, back)
    assert back.serialize() == request.serialize()


GOOD = VLMInferenceRequest(
    request_id=1,
    prompt_tokens=[1, 2],
    generated_tokens=[3],
    generated_top_n_logprobs=[[(3, -0.5)]],
    routing_indices=np.zeros((2, 1), np.int32),
    imgs=torch.zeros(2),
).serialize()
ROUTING = GOOD["routing_indices"]
DAMAGE = {
    "request_id": [None, "1", True],
    "prompt": [1],
    "sampling_params": [None, {"temperature": -1.0}, {"no_such": 1}],
    "prompt_tokens": [None, [1, 2], b"\x00"],
    "arrival_time": ["x"],
    "status": [0, "COMPLETED", True],
    "segments": ["ab", [1]],
    "generated_log_probs": [[0.5]],
    "generated_top_n_logprobs": [
        None,
        {"counts": b"", "token_ids": b""},
        {"counts": np.array([2]).tobytes(), "token_ids": np.array([1]).tobytes(), "log_probs": np.zeros(1).tobytes()},
        {"counts": np.array([-1, 1]).tobytes(), "token_ids": b"", "log_probs": b""},
    ],
    "policy_spans": [None, [0], [0, -1], [0, 4]],
    "original_prompt_length": [3, 1.0],
    "routing_indices": [
        "x",
        ["|O8", [1], b"\x00" * 8],
        ["<i4", [2, 1], b"\x00" * 7],
        ["<i4", [-2, -1], b"\x00" * 8],
        [*ROUTING[:2], [0, 0]],
    ],
    "imgs": [["float32", [2], b"\x00"], ["load", [2], b""], [1, [2], b""]],
    "finish_reason": ["no_such"],
    "stop_reason": [1.5],
    "events": [None, [{"type": "PAUSE"}]],
    "enable_prefix_caching": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in DAMAGE.items() for value in values])
def test_a_malformed_field_is_a_serialization_error_that_names_it(name, value):
    with pytest.raises(SerializationError, match=name):
        VLMInferenceRequest.deserialize(GOOD | {name: value})


def test_an_unknown_or_missing_field_or_something_other_than_a_dict_is_refused():
    with pytest.raises(SerializationError, match=r"VLMInferenceRequest\.prompt: missing"):
        VLMInferenceRequest.deserialize({name: value for name, value in GOOD.items() if name != "prompt"})
    with pytest.raises(SerializationError, match="colour: unknown"):
        VLMInferenceRequest.deserialize(GOOD | {"colour": 1})
    with pytest.raises(SerializationError, match="a dict of fields"):
        VLMInferenceRequest.deserialize([GOOD])


# --- tensors


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_dtype_shape_and_values_of_a_tensor_survive(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    plain = serialize_tensor(tensor)
    assert isinstance(plain, list)
    back = deserialize_tensor(sent(plain))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert serialize_tensor(back) == plain
    assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))


# --- construction


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.int32), torch.tensor([1, 2, 3])], ids=type
)
def test_any_sequence_of_integers_is_a_prompt(tokens):
    request = InferenceRequest(request_id=1, prompt_tokens=tokens)
    assert request.prompt_tokens == [1, 2, 3]
    assert all(type(token) is int for token in request.prompt_tokens)


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [[1]], [[1], [2, 3]], [None], [2**70], "abc"], ids=repr)
def test_what_is_no_row_of_integers_is_an_invalid_request_that_names_it(tokens):
    with pytest.raises(InvalidRequestError, match="request 7: prompt_tokens") as caught:
        InferenceRequest(request_id=7, prompt_tokens=tokens)
    assert caught.value.request_id == 7


def test_inference_parameters_is_sampling_params_by_an_older_name():
    request = InferenceRequest(request_id=1)
    assert request.inference_parameters is request.sampling_params
    request.inference_parameters = SamplingParams(n=3)
    assert request.sampling_params.n == 3


def test_block_hashes_are_computed_for_complete_blocks_where_caching_is_on():
    expected = compute_block_hashes_batched(range(10), 4)
    assert request_of(10, block_size_tokens=4, enable_prefix_caching=True).precomputed_block_hashes == expected
    assert len(expected) == 2
    assert request_of(10, block_size_tokens=4).precomputed_block_hashes == []
    assert request_of(10, enable_prefix_caching=True).precomputed_block_hashes == []


def test_succeeded_and_failed_follow_the_status():
    assert [request_of(1, status=status).succeeded() for status in Status] == [False, False, False, True, False]
    assert [request_of(1, status=status).failed() for status in Status] == [False, False, False, False, True]


# --- lengths


def test_lengths_while_a_prompt_is_prefilled_in_chunks_and_decoded():
    request = request_of(5)
    assert (request.remaining_prompt_length, request.kv_length, request.total_length) == (5, 0, 5)
    request.finished_chunk_token_count = 3
    assert request.remaining_prompt_tokens == [3, 4]
    assert (request.remaining_prompt_length, request.kv_length) == (2, 3)
    request.finished_chunk_token_count = 5
    assert (request.finished_chunk_token_count, request.kv_length) == (5, 5)
    request.generated_tokens += [7]
    assert (request.kv_length, request.total_length, request.generated_length) == (5, 6, 1)
    request.generated_tokens += [8]
    assert (request.kv_length, request.total_length, request.generated_length) == (6, 7, 2)


# --- versions


def test_the_same_version_again_changes_no_age_and_an_older_one_is_refused():
    request = request_of(1, 1, policy_version=3)
    request.advance_version(3)
    assert request.policy_staleness.tolist() == [0, 0]
    with pytest.raises(ValueError, match="version=2 must be at least policy_version=3"):
        request.advance_version(2)


# --- what the device mirrors


def test_metadata_types_name_each_tracked_value_and_its_dtype():
    params = SamplingParams(temperature=0.5, top_k=7, logprobs_mode="tempered", logit_bias={3: 1.0, 5: -1.0})
    types, tracked = (
        DynamicInferenceRequest.get_metadata_types(),
        request_of(1, sampling_params=params, seed=11).tracked_metadata,
    )
    assert list(tracked) == [name for name, _, _ in types]
    expected = {"temperature": 0.5, "top_k": 7, "seed": 11, "logprobs": -1, "logprobs_mode": 2, "logit_bias": 2}
    assert {name: tracked[name] for name in expected} == expected
    for name, dtype, on_device in types:
        assert isinstance(on_device, bool)
        assert torch.tensor(tracked[name], dtype=dtype).item() == tracked[name]
