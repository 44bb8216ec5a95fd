"""Tests of records: the history of an interrupted sample equals that of an uninterrupted one."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import SerializationError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest, VLMInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status


def request_of(prompt: int, kind=DynamicInferenceRequest, /, **fields) -> DynamicInferenceRequest:
    return kind(request_id=1, prompt_tokens=range(prompt), **fields)


def record_of(prompt: int, kind=DynamicInferenceRequest, /, **fields) -> DynamicInferenceRequestRecord:
    return DynamicInferenceRequestRecord.from_request(request_of(prompt, kind, **fields))


def prefill(record) -> None:
    record[-1].finished_chunk_token_count = len(record[-1].prompt_tokens)


def generate(record, *tokens: int) -> None:
    """Add tokens to a record as an engine does; token t has log-prob -t."""
    live = record[-1]
    prefill(record)
    for token in tokens:
        live.generated_tokens.append(token)
        live.generated_log_probs.append(-float(token))
        live.generated_top_n_logprobs.append([(token, -float(token))])
        live.tpot.append(token / 1000)
        live.add_event_generated_token(token, timestamp=float(token))


def sent(record) -> DynamicInferenceRequestRecord:
    wire = msgpack.unpackb(msgpack.packb(record.serialize(), use_bin_type=True))
    return DynamicInferenceRequestRecord.deserialize(wire)


# --- the reference case of the specification: prompt of P, versions 0→1 after 3 tokens, 1→2 after 3 more, 2 more tokens


@pytest.mark.parametrize("prompt", [1, 5])
@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_the_reference_case_of_staleness(mode, prompt):
    record = record_of(prompt)
    generate(record, 1, 2, 3)
    record.increment_staleness()
    generate(record, 4, 5, 6)
    if mode == "recompute":
        record.checkpoint()
        record.increment_staleness(policy_only=True)
    else:
        record.increment_staleness()
    generate(record, 7, 8)
    for read in (record[-1], record.merge(), sent(record).merge()):
        policy = [2] * (prompt + 3) + [1] * 3 + [0] * 2
        kv = [0] * (prompt + 8) if mode == "recompute" else [2] * (prompt + 2) + [1] * 3 + [0] * 3
        assert read.policy_staleness.tolist() == policy
        assert read.kv_cache_staleness.tolist() == kv
        assert read.policy_staleness.dtype == read.kv_cache_staleness.dtype == torch.int32


# --- random histories against a dense ledger


@dataclass
class Ledger:
    """One version per position, kept the slow way; None is not there yet."""

    prompt: int
    version: int = 0
    tokens: list[int] = field(default_factory=list)
    policy: list[int | None] = field(default_factory=list)
    kv: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = [None] * self.prompt
        self.kv = [None] * self.prompt

    @property
    def holds_kv(self) -> bool:
        return self.kv[0] is not None

    def compute(self, count: int) -> None:
        """KV of the first `count` positions is there from now on; a prompt's tokens count from its admission."""
        self.kv[:count] = [self.version if each is None else each for each in self.kv[:count]]
        self.policy = [self.version if each is None else each for each in self.policy]

    def sample(self, token: int) -> None:
        self.compute(len(self.kv))
        self.tokens.append(token)
        self.policy.append(self.version)
        self.kv.append(None)

    def drop_kv(self) -> None:
        self.kv = [None] * len(self.kv)
        if not self.tokens:
            self.policy = [None] * len(self.policy)

    def current(self, versions: list[int | None]) -> list[int]:
        return [self.version if each is None else each for each in versions]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("chunk"), st.integers(1, 3)),
        st.tuples(st.just("generate"), st.integers(1, 4)),
        st.tuples(st.just("update"), st.integers(1, 2)),
        st.tuples(st.just("checkpoint"), st.just(0)),
        st.tuples(st.just("send"), st.just(0)),
    ),
    max_size=25,
)


@given(st.integers(1, 5), STEPS)
def test_any_history_covers_the_completion_with_no_gap_or_overlap_and_the_right_versions(prompt, steps):
    budget = SamplingParams(max_tokens=40, min_tokens=11, logprobs=1)
    record, ledger = record_of(prompt, sampling_params=budget), Ledger(prompt)
    for name, count in steps:
        live = record[-1]
        if name == "chunk":
            live.finished_chunk_token_count = min(len(live.prompt_tokens), live.finished_chunk_token_count + count)
            if not live.generated_tokens:
                ledger.compute(live.finished_chunk_token_count)
        elif name == "generate":
            for _ in range(count):
                ledger.sample(1000 + len(ledger.tokens))
                generate(record, ledger.tokens[-1])
        elif name == "update":
            ledger.version += count
            record.advance_version(ledger.version, policy_only=not ledger.holds_kv)
        elif name == "checkpoint":
            assert record.checkpoint() is record[-1]
            ledger.drop_kv()
        else:
            record = sent(record)

        live, merged = record[-1], record.merge()
        assert [token for segment in record for token in segment.generated_tokens] == ledger.tokens
        assert live.completion_tokens == merged.completion_tokens == merged.generated_tokens == ledger.tokens
        assert live.prompt_tokens + live.generated_tokens == merged.prompt_tokens + merged.generated_tokens
        assert live.rng_offset + live.generated_length == len(ledger.tokens)
        assert live.sampling_params.max_tokens == max(0, 40 - live.rng_offset)
        assert live.sampling_params.min_tokens == max(0, 11 - live.rng_offset)
        assert merged.generated_log_probs == [-float(token) for token in ledger.tokens]
        for read in (live, merged):
            assert read.policy_version == ledger.version
            assert read.policy_versions.tolist() == ledger.current(ledger.policy)
            assert read.kv_versions.tolist() == ledger.current(ledger.kv)
            assert (read.policy_staleness.numpy() == ledger.version - read.policy_versions).all()
            assert (read.kv_cache_staleness.numpy() == ledger.version - read.kv_versions).all()
    assert sent(record).serialize() == record.serialize()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.booleans())
def test_a_merged_record_equals_one_that_was_never_interrupted(pieces, cached):
    fields = {
        "sampling_params": SamplingParams(max_tokens=64, min_tokens=8, stop=["END"], logprobs=1, prompt_logprobs=0),
        "prompt": "text",
        "arrival_time": 5.0,
        "seed": 3,
        "block_size_tokens": 2,
        "enable_prefix_caching": cached,
        "metadata": {"problem": 4},
    }
    cut, whole = record_of(3, **fields), record_of(3, **fields)
    token = 0
    for record in (cut, whole):
        record[-1].add_event_add_engine(timestamp=5.0)
    for index, count in enumerate(pieces):
        if index:
            cut.checkpoint()
        for record in (cut, whole):
            generate(record, *range(token, token + count))
            if index == 0:
                record[-1].prompt_log_probs = [-1.0, -2.0]
                record[-1].prompt_top_n_logprobs = [[], []]
        token += count
    for record in (cut, whole):
        record[-1].status, record[-1].finish_reason = Status.COMPLETED, FinishReason.STOP
        record[-1].stop_reason = "END"
        record[0].ttft = 0.5
        record.latency = 2.0
        record.completion_text = "the text"
    left, right = cut.merge().serialize(), whole.merge().serialize()
    # closed up to the last checkpoint in one, open in the other: the versions read the same
    left.pop("policy_spans"), right.pop("policy_spans")
    assert left == right
    assert cut.merge().policy_versions.tolist() == whole.merge().policy_versions.tolist()


# --- checkpoint


def test_what_belongs_to_the_whole_request_survives_a_checkpoint():
    record = record_of(
        2,
        sample_index=3,
        sampling_params=SamplingParams(n=8, stop=["END"], stop_token_ids=[9], seed=5, temperature=0.5),
        priority=2,
        seed=5,
        stream_offset=1,
        stop_word_ids=[[1, 2]],
        metadata={"a": 1},
        arrival_time=7.0,
        policy_version=4,
    )
    record[0].add_event_add_engine(timestamp=7.0)
    generate(record, 10, 11)
    segment = record.checkpoint()
    assert (segment.request_id, segment.sample_index) == (record.request_id, record.sample_index) == (1, 3)
    assert segment.sampling_params == record[0].sampling_params.replace(max_tokens=254)
    assert (segment.priority, segment.seed, segment.rng_offset, segment.stream_offset) == (2, 5, 2, 1)
    assert (segment.stop_word_ids, segment.metadata, segment.arrival_time) == ([[1, 2]], {"a": 1}, 7.0)
    assert segment.event_add_engine is record[0].event_add_engine
    assert segment.original_prompt_length == 2
    assert segment.policy_version == 4


def test_a_checkpoint_gives_an_add_engine_event_to_who_has_none():
    record = record_of(2, arrival_time=7.0)
    segment = record.checkpoint()
    assert segment.event_add_engine is record[0].event_add_engine is not None
    assert segment.event_add_engine.timestamp == 7.0
    assert [event.type.name for event in record.merge().events] == ["ADD_ENGINE"]


def test_fields_of_images_survive_a_checkpoint_a_merge_and_the_wire():
    imgs = torch.rand(2, 3)
    record = record_of(2, VLMInferenceRequest, imgs=imgs, num_tiles=[2], num_img_embeddings_per_tile=4)
    record[0].decoder_seq_length = 9
    generate(record, 10)
    record.checkpoint()
    for read in (record[-1], record.merge(), sent(record)[-1], sent(record).merge()):
        assert isinstance(read, VLMInferenceRequest)
        assert torch.equal(read.imgs, imgs)
        assert (read.num_tiles, read.num_img_embeddings_per_tile, read.decoder_seq_length) == ([2], 4, 9)


# --- merge


def test_the_text_of_a_merged_record():
    record = record_of(1)
    generate(record, 5)
    record[-1].generated_text = "foo"
    record.checkpoint()
    generate(record, 6)
    assert record.merge().generated_text is None
    record[-1].generated_text = "bar"
    assert record.merge().generated_text == "foobar"
    record.completion_text = "whole"
    assert record.merge().generated_text == sent(record).merge().generated_text == "whole"


def test_what_an_early_eviction_left_empty_comes_from_the_segment_that_has_it():
    """Taken from the first segment alone, a request evicted before its first token reported no ttft."""
    record = record_of(3)
    record[-1].prompt_log_probs = [-1.0]
    record.checkpoint()
    generate(record, 5)
    record[-1].ttft = 0.25
    record[-1].prompt_log_probs = [-1.0, -2.0]
    record.checkpoint()
    record[-1].prompt_log_probs = [-1.0, -2.0, -3.0]
    merged = record.merge()
    assert merged.ttft == 0.25
    assert merged.prompt_log_probs == [-1.0, -2.0]
    assert merged.prompt_top_n_logprobs is None


def test_merging_changes_nothing_and_shares_nothing():
    record = record_of(2)
    generate(record, 5)
    record.checkpoint()
    generate(record, 6)
    before = record.serialize()
    merged = record.merge()
    merged.increment_staleness()
    merged.generated_tokens.append(7)
    merged.generated_log_probs.append(0.0)
    merged.add_event_finish(timestamp=0.0)
    assert record.serialize() == before


def test_log_probs_out_of_step_with_the_tokens_are_refused_and_not_joined():
    record = record_of(2)
    generate(record, 5, 6)
    record[-1].generated_log_probs.pop()
    record.checkpoint()
    generate(record, 7)
    with pytest.raises(ValueError, match=r"generated_log_probs of \[1, 1\] entries .* \[2, 1\], or none at all"):
        record.merge()


# --- the record itself


def test_segments_that_do_not_follow_each_other_are_refused():
    record = record_of(2)
    generate(record, 5)
    record.checkpoint()
    plain = record.serialize()
    first, second = plain["segments"]
    for name, value, message in [
        ("request_id", 2, "must be of sample"),
        ("sample_index", 2, "must be of sample"),
        ("prompt_tokens", np.array([0, 1, 6], "<i8").tobytes(), "must be the prompt and output"),
        ("prompt_tokens", np.array([0, 1, 5, 5], "<i8").tobytes(), "must be the prompt and output"),
    ]:
        damaged = second | {name: value}
        with pytest.raises(SerializationError, match=message):
            DynamicInferenceRequestRecord.deserialize(plain | {"segments": [first, damaged]})


@pytest.mark.parametrize(
    "damage",
    [
        {"segments": []},
        {"segments": None},
        {"segments": [1]},
        {"segments": [{"request_id": 1}]},
        {"latency": "long"},
        {"completion_text": b"x"},
        {"colour": 1},
    ],
)
def test_a_malformed_record_is_a_serialization_error_that_names_the_field(damage):
    with pytest.raises(SerializationError, match=next(iter(damage))):
        DynamicInferenceRequestRecord.deserialize(record_of(2).serialize() | damage)


# --- names of other engines' records


def test_older_callers_pass_a_tokenizer_and_read_requests():
    record = record_of(3)
    generate(record, 5, 6)
    assert record.checkpoint(object()) is record.requests[-1]
    assert record.requests is record.segments
    assert record.merge(tokenizer=object()).generated_tokens == [5, 6]
