"""Tests of requests: admission, order, events, and requests that raise an error."""

from __future__ import annotations

import dataclasses
import warnings
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.errors import ConfigError, EngineStateError, InvalidRequestError
from rollout.requests.events import DynamicInferenceEventType
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest, VLMInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.engines import (
    BLOCK,
    assert_greedy,
    at_random,
    expected,
    finish,
    greedily,
    make_engine,
    pass_suspended,
    shared_model,
    steps,
    token_ids,
)
from tests.models import VOCAB, make_tokenizer

both = pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
"""Through the fused forward; through the module."""


# --- refused at admission ---------------------------------------------------------------------------------------------


def test_a_budget_beyond_the_maximum_length_is_clamped_with_a_warning() -> None:
    engine = make_engine("qwen3", max_sequence_length=12)
    with pytest.warns(UserWarning, match=r"max_tokens=20 is clamped to 7.*max_sequence_length=12"):
        engine.add_request(token_ids(5), greedily(20, min_tokens=9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.add_request(token_ids(5, 1), greedily(7))
    clamped, fitting = finish(engine).values()
    assert len(clamped.generated_tokens) == len(fitting.generated_tokens) == 7
    assert clamped.generated_tokens[:5] == expected("qwen3", clamped.prompt_tokens, 5)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], greedily(3), InvalidRequestError, "prompt is empty"),
        ([5, VOCAB], greedily(3), InvalidRequestError, rf"prompt token {VOCAB}: must be in \[0, {VOCAB}\)"),
        ([5, -1], greedily(3), InvalidRequestError, "prompt token -1"),
        (token_ids(40), greedily(3), InvalidRequestError, "prompt of 40 tokens.*max_sequence_length=40"),
        (token_ids(41), greedily(0), InvalidRequestError, "prompt of 41 tokens.*max_sequence_length=40"),
        (token_ids(5), greedily(3, n=9), InvalidRequestError, "n=9 samples exceed max_requests=8"),
        (token_ids(20), greedily(14), InvalidRequestError, "34 tokens need 9 KV blocks and the pool has 8"),
        (token_ids(33), greedily(0), InvalidRequestError, "33 tokens need 9 KV blocks and the pool has 8"),
        (token_ids(5), greedily(3, logit_bias={VOCAB: 1.0}), InvalidRequestError, f"logit_bias of token {VOCAB}"),
        ([5], greedily(3, stop_token_ids=[3, VOCAB]), InvalidRequestError, f"stop_token_ids of token {VOCAB}: must be in"),
        ("text", greedily(3), ValueError, "a text prompt needs a tokenizer"),
        ([{"role": "user", "content": "text"}], greedily(3), ValueError, "chat messages needs a tokenizer"),
        (token_ids(5), greedily(3, stop=["x"]), ValueError, r"stop=\['x'\] needs a tokenizer"),
        ([1.5, 2.0], greedily(3), TypeError, r"prompt\[0\]=1.5"),
        ([5, True], greedily(3), TypeError, r"prompt\[1\]=True"),
        ([5, "x"], greedily(3), TypeError, r"prompt\[1\]='x'"),
        (7, greedily(3), TypeError, "prompt of type int"),
        (b"bytes", greedily(3), TypeError, "prompt of type bytes"),
    ],
)  # fmt: skip
def test_what_can_never_be_served_is_refused_by_name_and_harms_nobody(
    prompt: Any, params: SamplingParams, error: type[Exception], message: str
) -> None:
    engine = make_engine("qwen3", max_sequence_length=40, kv_cache_blocks=8)
    engine.add_request(token_ids(6), greedily(6))
    steps(engine, 2)
    before = engine.stats()
    with pytest.raises(error, match=message):
        engine.check_request(prompt, params)
    with pytest.raises(error, match=message) as caught:
        engine.add_request(prompt, params)
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.request_id == 1
    assert engine.stats() == before
    assert engine.add_request(token_ids(6, 2), greedily(6)) == 1
    for request in finish(engine).values():
        assert_greedy("qwen3", request)


def test_a_prompt_that_just_fits_the_pool_is_served() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=8)
    for length, budget in ((32, 0), (32, 1), (20, 13), (1, 32)):
        (request,) = engine.generate([token_ids(length, length)], greedily(budget))
        assert len(request.generated_tokens) == budget
        assert engine.context.allocator.num_used == 0


def test_an_id_in_use_is_refused_and_free_again_when_its_request_has_ended() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(5), greedily(3), request_id=4)
    with pytest.raises(InvalidRequestError, match="request_id=4 is in use"):
        engine.add_request(token_ids(5), greedily(3), request_id=4)
    (record,) = engine.snapshot()
    with pytest.raises(InvalidRequestError, match="request 4 sample 0 is here already"):
        engine.add_record(record)
    assert engine.add_request(token_ids(5), greedily(3)) == 5
    assert len(finish(engine)) == 2
    assert engine.add_request(token_ids(5), greedily(3), request_id=4) == 4
    assert len(finish(engine)) == 1


def test_a_record_that_does_not_fit_here_is_refused_or_clamped_as_a_request_is() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(10), greedily(30))
    steps(engine, 5)
    (record,) = engine.snapshot()
    with pytest.raises(InvalidRequestError, match=r"40 tokens need 10 KV blocks"):
        make_engine("qwen3", kv_cache_blocks=9).add_record(record)
    (record,) = engine.snapshot()
    with pytest.raises(InvalidRequestError, match=r"prompt of 15 tokens"):
        make_engine("qwen3", max_sequence_length=12).add_record(record)
    (record,) = engine.snapshot()
    shorter = make_engine("qwen3", max_sequence_length=20)
    with pytest.warns(UserWarning, match="max_tokens=25 is clamped to 5"):
        shorter.add_record(record)
    (request,) = finish(shorter).values()
    assert request.generated_tokens == expected("qwen3", token_ids(10), 10)


def test_a_generate_call_with_one_bad_prompt_queues_nothing() -> None:
    engine = make_engine("qwen3")
    with pytest.raises(InvalidRequestError):
        engine.generate([token_ids(5), []], greedily(3))
    assert not engine.has_unfinished
    engine.pause()
    with pytest.raises(EngineStateError):
        engine.generate([token_ids(5)], greedily(3))
    assert not engine.has_unfinished


# --- order ------------------------------------------------------------------------------------------------------------


def admissions(requests: list[DynamicInferenceRequest]) -> list[int]:
    def first(request: DynamicInferenceRequest) -> float:
        kind = DynamicInferenceEventType.ADD_CONTEXT
        return next(event.timestamp for event in request.events if event.type is kind)

    return [request.request_id for request in sorted(requests, key=first)]


def test_requests_are_admitted_in_order_of_arrival_and_of_priority_before_that() -> None:
    engine = make_engine("qwen3", max_requests=2)
    priorities = [0, 0, 0, 5, -1, 5, 0]
    for seed, priority in enumerate(priorities):
        engine.add_request(token_ids(12 - seed, seed), greedily(3), priority=priority)
    requests = list(finish(engine).values())
    assert admissions(requests) == [3, 5, 0, 1, 2, 6, 4]
    for request in requests:
        assert_greedy("qwen3", request)
        assert request.priority == priorities[request.request_id]


def test_a_big_request_at_the_head_is_not_overtaken_by_small_ones() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=12)
    engine.add_request(token_ids(20, 0), greedily(12))
    steps(engine, 1)
    engine.add_request(token_ids(40, 1), greedily(2))
    for seed in range(2, 5):
        engine.add_request(token_ids(2, seed), greedily(2))
    assert admissions(list(finish(engine).values())) == [0, 1, 2, 3, 4]


def test_who_waits_for_anothers_prefix_lets_others_pass_and_keeps_its_slot() -> None:
    engine = make_engine("qwen3", max_requests=3, max_tokens_per_step=40)
    prompt = token_ids(12, 0)
    engine.add_request(prompt, greedily(4))
    engine.add_request([*prompt, 5], greedily(4))
    engine.add_request(token_ids(6, 1), greedily(4))
    engine.add_request(token_ids(6, 2), greedily(4))
    ended = steps(engine, 1)
    assert [sample.record.request_id for sample in engine.context.scheduler.active()] == [0, 2]
    ended += steps(engine, 1)
    assert [sample.record.request_id for sample in engine.context.scheduler.active()] == [0, 1, 2]
    done = finish(engine, ended)
    assert done[1, 0].num_cached_tokens == 12
    for request in done.values():
        assert_greedy("qwen3", request)


def test_who_passes_takes_no_blocks_that_the_one_it_passes_needs() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=9, max_tokens_per_step=60)
    prompt = token_ids(12, 0)
    engine.add_request(prompt, greedily(2))
    engine.add_request([*prompt, 5], greedily(2))
    engine.add_request(token_ids(16, 1), greedily(2))
    assert admissions(list(finish(engine).values())) == [0, 1, 2]


def test_a_group_that_can_never_run_is_refused_before_its_samples_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen3")
    monkeypatch.setattr(engine.parts.intake, "group", None)
    with pytest.raises(InvalidRequestError, match="n=2147483647 samples exceed max_requests=8"):
        engine.add_request(token_ids(4), greedily(2, n=2**31 - 1))
    assert not engine.has_unfinished


def test_every_sample_that_gives_up_its_kv_or_is_paused_says_so() -> None:
    engine = make_engine("qwen3", max_requests=2, max_tokens_per_step=BLOCK)
    engine.add_request(token_ids(6, 1), greedily(3, n=2))
    ended = steps(engine, 1)
    engine.pause()
    pass_suspended(engine, "recompute")
    for request in finish(engine, ended).values():
        kinds = [event.type.name for event in request.events]
        assert kinds == ["ADD_ENGINE", "ADD_CONTEXT", "PAUSE", "EVICT", "ADD_CONTEXT", "FINISH"]
        assert_greedy("qwen3", request)


def test_an_interrupted_step_is_a_transient_error_of_its_requests() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(5, 1), greedily(3))

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = shared_model("qwen3").register_forward_pre_hook(press)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    handle.remove()
    (request,) = finish(engine).values()
    (event,) = [event for event in request.events if event.type.name == "ERROR_TRANSIENT"]
    assert isinstance(event.payload, KeyboardInterrupt)
    assert DynamicInferenceRequest.deserialize(request.serialize()).events[2].type is event.type
    assert_greedy("qwen3", request)


@pytest.mark.parametrize("track", [False, True])
def test_events_come_in_order_and_once(track: bool) -> None:
    engine = make_engine("qwen3", track_generated_token_events=track)
    engine.add_request(token_ids(5, 1), greedily(3, n=2))
    for request in finish(engine).values():
        kinds = [event.type.name for event in request.events]
        assert kinds == ["ADD_ENGINE", "ADD_CONTEXT", *["GENERATED_TOKEN"] * (3 * track), "FINISH"]
        stamps = [event.timestamp for event in request.events]
        assert stamps == sorted(stamps)
        if track:
            payloads = [event.payload for event in request.events[2:5]]
            assert [payload["token_id"] for payload in payloads] == request.generated_tokens
            last = payloads[-1]
            assert last["blocks_total"] == 64
            assert last["blocks_hashed_total"] == last["blocks_hashed_active"] == 1, "the prompt's only complete block"
            assert 3 <= last["blocks_ref_count"] <= 4, "of both samples: it is shared"


def test_times_are_kept_and_count_from_the_arrival_that_was_given() -> None:
    ticks = count(100, 0.25)
    engine = make_engine("qwen3", clock=lambda: next(ticks))
    engine.add_request(token_ids(5, 1), greedily(4), arrival_time=40.0)
    (request,) = finish(engine).values()
    assert request.arrival_time == 40.0
    assert request.ttft is not None
    assert request.ttft > 60
    assert len(request.tpot) == 3
    assert all(gap > 0 for gap in request.tpot)
    assert request.latency is not None
    assert request.latency >= request.ttft + sum(request.tpot)


def test_metadata_comes_back_untouched() -> None:
    engine = make_engine("qwen3")
    extra = {"answer": 42, "path": ["a", None]}
    engine.add_request(token_ids(5, 1), greedily(4, n=2), metadata=extra)
    steps(engine, 1)
    pass_suspended(engine, "recompute")
    assert [request.metadata for request in finish(engine).values()] == [extra, extra]


def test_results_of_generate_stand_in_the_order_of_the_prompts_and_other_requests_are_kept() -> None:
    engine = make_engine("qwen3", max_requests=3)
    other = engine.add_request(token_ids(3, 9), greedily(2))
    prompts = [token_ids(14 - 3 * seed, seed) for seed in range(4)]
    results = engine.generate(prompts, at_random(4, n=2))
    assert [result.prompt_tokens for result in results] == [prompt for prompt in prompts for _ in range(2)]
    assert [result.sample_index for result in results] == [0, 1] * 4
    assert list(finish(engine)) == [(other, 0)]
    assert engine.generate([], greedily(3)) == []


# --- accepted is served, and what is not is refused by name -----------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"imgs": torch.zeros(1, 3, 2, 2), "num_tiles": [1]},
            r"Qwen3ForCausalLM \(qwen3\) is not .* send the text alone",
        ),
        ({"num_tiles": [2]}, r"VLMInferenceRequest\.num_tiles: there is no image"),
        ({"routing_indices": np.zeros((3, 3, 2), np.int16)}, r"InferenceConfig\(record_routes=True\)"),
        ({"encoder_prompt": "text"}, "encoder_prompt: only decoder models are supported"),
        ({"stop_word_ids": [[5, 6]]}, "stop_word_ids: give SamplingParams.stop"),
    ],
)
def test_a_record_that_asks_for_what_nobody_here_does_is_refused_by_the_fields_name(fields, words) -> None:
    engine = make_engine("qwen3")
    kind = VLMInferenceRequest if "num_tiles" in fields else DynamicInferenceRequest
    record = DynamicInferenceRequestRecord.from_request(kind(request_id=4, prompt_tokens=token_ids(5), **fields))
    for take in (engine.add_record, engine.parts.intake.check_record):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            take(record)
        assert caught.value.request_id == 4
    assert not engine.has_unfinished


def test_a_request_of_the_other_kind_that_brings_no_image_is_served() -> None:
    engine = make_engine("qwen3")
    request = VLMInferenceRequest(request_id=4, prompt_tokens=token_ids(5), sampling_params=greedily(3))
    engine.add_record(DynamicInferenceRequestRecord.from_request(request))
    assert_greedy("qwen3", finish(engine)[4, 0])


def test_a_request_has_its_text_token_by_token_once_somebody_asks() -> None:
    engine = make_engine("qwen3", make_tokenizer())
    (request,) = engine.generate(["a b"], at_random(9))
    assert (request.segments, request.generated_segments, request.generated_sequence_lengths) == (None, None, None)
    engine.controller.fill_segments(request)
    assert request.segments == ["a", " ", "b"]
    assert (len(request.generated_segments), request.generated_sequence_lengths) == (9, [9])
    assert "".join(request.generated_segments) == request.generated_text
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        make_engine("qwen3").controller.fill_segments(request)


class ReadParams(SamplingParams):
    """Sampling parameters that note which of their options are read."""

    def __getattribute__(self, name: str) -> Any:
        READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


def test_the_metadata_types_are_the_options_that_the_samplers_table_reads_with_its_dtypes() -> None:
    table = SamplingTable("cpu")
    params = ReadParams(temperature=0.5, top_k=7, top_p=0.5)
    READ.clear()
    table.set(0, params, key=1)
    types = DynamicInferenceRequest.get_metadata_types()
    options = {field.name for field in dataclasses.fields(SamplingParams)}
    assert READ & options <= {name for name, _, _ in types}
    rows, attributes = table.select(np.zeros(1, np.int64)), {"seed": "key", "return_kept_tokens": "keeps"}
    for name, dtype, on_device in types:
        # A mode is two flags on the device.
        if on_device and name != "logprobs_mode":
            stored = rows.value[name] if dtype == torch.float32 else getattr(rows, attributes.get(name, name))
            assert stored.dtype == dtype, name
    assert {name for name, _, on_device in types if on_device} - {"seed"} <= READ


def test_cached_kv_is_reused_among_requests_of_one_salt_only() -> None:
    """Also that of the completion, and of a sample that was restarted."""
    engine = make_engine("llama", kv_cache_blocks=64)
    prompt = token_ids(17)

    def ask(tokens: list[int], salt: str | None) -> DynamicInferenceRequest:
        (sample,) = engine.generate([tokens], SamplingParams(max_tokens=8, temperature=0, cache_salt=salt))
        return sample

    first = ask(prompt, "a")
    longer = [*prompt, *first.generated_tokens]
    assert [first.num_cached_tokens, ask(prompt, "b").num_cached_tokens, ask(prompt, None).num_cached_tokens] == [0] * 3
    assert ask(prompt, "a").num_cached_tokens == 16
    assert ask(longer, "a").num_cached_tokens == 24
    assert first.generated_tokens == ask(prompt, None).generated_tokens
    assert ask([*longer, 7], "c").num_cached_tokens == 0
    assert len({tuple(ask(prompt, salt).precomputed_block_hashes) for salt in ("a", "b", None)}) == 3
