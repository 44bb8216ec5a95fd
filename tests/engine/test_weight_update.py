"""Tests of weight updates under running requests: which KV is read, and the version of each token and position."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError, InvalidRequestError
from rollout.requests.events import DynamicInferenceEventType
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.state import FinishReason, KVCacheManagementMode, Status
from tests.engines import (
    BLOCK,
    Key,
    assert_greedy,
    at_random,
    finish,
    greedily,
    logprob_error,
    make_engine,
    pass_suspended,
    steps,
    suspended,
    token_ids,
)
from tests.invariants import check_scheduler
from tests.models import make_model

both = pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
modes = pytest.mark.parametrize("mode", [mode.value for mode in KVCacheManagementMode])


def change_weights(model: PreTrainedModel, seed: int = 1) -> None:
    """An optimizer step: in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator) * parameter.std().nan_to_num(0.0))


def update(engine: DynamicInferenceEngine, seed: int = 1) -> None:
    change_weights(engine.model, seed)
    engine.weights_updated()


def go_on_with_old_kv(before: PreTrainedModel, after: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens after `tokens`, whose KV (all but the last one's) `before` computed and `after` reads."""
    made: list[int] = []
    with torch.no_grad():
        past = before.eval()(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
        for _ in range(count):
            last = torch.tensor([[([*tokens, *made])[-1]]])
            output = after.eval()(last, past_key_values=past, use_cache=True)
            past = output.past_key_values
            made.append(int(output.logits[0, -1].argmax()))
    return made


# --- new requests meet only new KV ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("mode", [None, "persist", "offload", "recompute"])
@pytest.mark.parametrize("keep_prefix_cache", [True, False])
def test_a_cached_prompt_gives_after_an_update_what_a_fresh_engine_gives(
    name: str, mode: str | None, keep_prefix_cache: bool
) -> None:
    model = make_model(name)
    prompt = token_ids(14, 1)
    engine = make_engine(model)
    (old,) = engine.generate([prompt], greedily(8, prompt_logprobs=0))
    engine.generate([prompt], greedily(8))
    saved = engine.stats()["prefill_tokens_saved"]
    assert saved == 12
    with suspended(engine, mode, keep_prefix_cache=keep_prefix_cache) if mode else nullcontext():
        update(engine)
    (new,) = engine.generate([prompt], greedily(8))
    (fresh,) = make_engine(model).generate([prompt], greedily(8))
    assert_greedy(model, new)
    assert new.generated_tokens == fresh.generated_tokens
    assert new.generated_log_probs == fresh.generated_log_probs, "not a bit of old KV was read"
    assert new.generated_tokens != old.generated_tokens, "the update must be one that shows"
    assert engine.stats()["prefill_tokens_saved"] == saved
    dropped = mode == "recompute" or (mode is not None and not keep_prefix_cache)
    assert engine.stats()["prefix_hits_refused_version"] == (0 if dropped else 3)
    (again,) = engine.generate([prompt], greedily(8))
    assert engine.stats()["prefill_tokens_saved"] == saved + 12, "the new version has a cache of its own"
    assert_greedy(model, again)


@both
def test_a_running_request_with_old_kv_lends_none_of_it_to_a_new_one(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    prompt = token_ids(12, 2)
    engine.add_request(prompt, greedily(24))
    steps(engine, 4)
    update(engine)
    engine.add_request(prompt, greedily(10))
    ended = steps(engine, 30)
    # The old one has completed blocks meanwhile, over KV of the old version: they must not be found either.
    total = ended[0].merge() if ended[0].request_id == 0 else ended[1].merge()
    engine.add_request(prompt + total.generated_tokens[:16], greedily(6))
    done = finish(engine, ended)
    assert_greedy(model, done[1, 0])
    assert_greedy(model, done[2, 0])
    assert len(done[0, 0].generated_tokens) == 24


@both
@pytest.mark.parametrize("mode", [None, "persist", "offload"])
@pytest.mark.parametrize("chunk", [3, 10], ids=["less than a block", "some blocks"])
def test_a_prompt_half_computed_before_an_update_lends_nothing_either(name: str, mode: str | None, chunk: int) -> None:
    model = make_model(name)
    engine = make_engine(model, max_tokens_per_step=chunk, max_requests=3)
    prompt = token_ids(26, 2)
    engine.add_request(prompt, greedily(4))
    steps(engine, 1)
    if mode is not None:
        pass_suspended(engine, mode)
    update(engine)
    engine.add_request(prompt, greedily(8))
    ended = steps(engine, 12)
    engine.add_request([*prompt, 5], greedily(8))
    done = finish(engine, ended)
    assert done[0, 0].kv_versions.tolist() == [0] * chunk + [1] * (30 - chunk)
    assert done[0, 0].policy_versions.tolist() == [0] * 26 + [1] * 4
    assert_greedy(model, done[1, 0])
    assert_greedy(model, done[2, 0])


@both
def test_a_request_evicted_before_an_update_comes_back_under_the_new_weights(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model, kv_cache_blocks=9, max_requests=3)
    for seed in range(3):
        engine.add_request(token_ids(6, seed), greedily(16))
    ended = []
    while not engine.stats()["preemptions"]:
        ended += steps(engine, 1)
    waiting = {record.request_id: record for record in engine.snapshot() if not record[-1].kv_length}
    assert waiting
    update(engine)
    done = finish(engine, ended)
    for number, record in waiting.items():
        made = record[0].total_length
        assert (done[number, 0].kv_versions[:made] == 1).all()
        assert (done[number, 0].policy_versions[:made] == 0).all()


# --- running requests -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("mode", [None, "persist", "offload"])
def test_a_running_request_keeps_its_old_kv(name: str, mode: str | None) -> None:
    before = make_model(name)
    after = copy.deepcopy(before)
    engine = make_engine(after)
    prompt = token_ids(11, 3)
    engine.add_request(prompt, greedily(12))
    steps(engine, 5)
    if mode is not None:
        pass_suspended(engine, mode)
    update(engine)
    (request,) = finish(engine).values()
    tokens = prompt + request.generated_tokens[:5]
    assert request.generated_tokens[5:] == go_on_with_old_kv(before, after, tokens, 7)


@both
def test_after_recompute_a_running_request_is_what_the_new_weights_make_of_it(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    prompt = token_ids(11, 3)
    engine.add_request(prompt, greedily(12))
    steps(engine, 5)
    with suspended(engine, "recompute"):
        update(engine)
    (request,) = finish(engine).values()
    (fresh,) = make_engine(model).generate([prompt + request.generated_tokens[:5]], greedily(7))
    assert request.generated_tokens[5:] == fresh.generated_tokens
    assert request.generated_log_probs[5:] == fresh.generated_log_probs
    assert_greedy(model, fresh)


# --- versions ---------------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("samples", [1, 3])
def test_the_reference_case_of_staleness(mode: str, samples: int) -> None:
    length = 6
    model = make_model("qwen3")
    engine = make_engine(model)
    engine.add_request(token_ids(length, 4), at_random(8, n=samples))
    steps(engine, 3)
    pass_suspended(engine, "persist")
    update(engine, 1)
    steps(engine, 3)
    with suspended(engine, mode):
        update(engine, 2)
    for request in finish(engine).values():
        assert request.policy_staleness.tolist() == [2] * (length + 3) + [1] * 3 + [0] * 2
        assert request.policy_staleness.dtype == torch.int32
        kept = [2] * (length + 2) + [1] * 3 + [0] * 3
        assert request.kv_cache_staleness.tolist() == ([0] * (length + 8) if mode == "recompute" else kept)


@dataclass
class Ledger:
    """The expected versions of one sample, one entry per position, derived from its lengths alone."""

    admissions: int = 0
    prompt_kv: list[int] = field(default_factory=list)
    policy: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)

    def watch(self, record: DynamicInferenceRequestRecord, version: int, leader: Ledger) -> None:
        live = record[-1]
        kinds = [event.type for segment in record for event in segment.events]
        admissions = kinds.count(DynamicInferenceEventType.ADD_CONTEXT)
        waits = live.status is Status.WAITING_IN_QUEUE
        if admissions != self.admissions or waits:
            self.admissions, self.kv = admissions, []
            if not live.completion_tokens:
                self.policy = []
        if live.kv_spans and not self.kv and live.kv_length >= len(leader.prompt_kv) and not live.rng_offset:
            # It has forked: the prompt's KV is its leader's.
            self.kv = leader.prompt_kv[: len(live.kv_spans)]
        self.kv += [version] * (len(live.kv_spans) - len(self.kv))
        if not live.rng_offset:
            self.prompt_kv = self.kv[: len(live.prompt_tokens)]
        if not waits or live.completion_tokens:
            self.policy += [version] * (live.total_length - len(self.policy))

    def check(self, record: DynamicInferenceRequestRecord, version: int) -> None:
        merged = record.merge()
        total = merged.total_length
        assert merged.policy_versions.tolist() == self.policy + [version] * (total - len(self.policy))
        assert merged.kv_versions.tolist() == self.kv + [version] * (total - len(self.kv))


@pytest.mark.parametrize("seed", range(10))
def test_versions_equal_a_dense_ledger_under_random_updates_evictions_and_suspends(seed: int) -> None:
    choose = random.Random(seed)
    engine = make_engine("qwen3", kv_cache_blocks=choose.choice([12, 40]), max_requests=6,
                         max_tokens_per_step=choose.choice([6, 9, 32]))  # fmt: skip
    ledgers: dict[Key, Ledger] = {}
    alive: set[Key] = set()

    def watch(records: list[DynamicInferenceRequestRecord]) -> None:
        for record in records:
            key = (record.request_id, record.sample_index)
            ledgers[key].watch(record, engine.policy_version, ledgers[record.request_id, 0])
            ledgers[key].check(record, engine.policy_version)

    for number in range(10):
        samples = choose.choice([1, 1, 3])
        prompt = token_ids(choose.randint(1, 14), choose.choice([number, 0]))
        engine.add_request(prompt, at_random(choose.randint(1, 14), n=samples, seed=number))
        alive |= {(number, index) for index in range(samples)}
        ledgers |= {key: Ledger() for key in alive - set(ledgers)}
    while engine.has_unfinished:
        ended = engine.step()
        watch(ended)
        alive -= {(record.request_id, record.sample_index) for record in ended}
        watch(engine.snapshot())
        event = choose.random()
        if event < 0.25:
            # The weights stay: only the bookkeeping is on trial.
            engine.weights_updated()
        elif event < 0.4:
            pass_suspended(engine, choose.choice(["persist", "offload", "recompute"]))
        elif event < 0.45:
            with suspended(engine, "recompute"):
                engine.weights_updated()
        watch(engine.snapshot())
        check_scheduler(engine.context.scheduler)
    assert not alive
    assert engine.policy_version > 2


def test_versions_survive_a_snapshot_into_an_engine_that_is_further_on() -> None:
    engine = make_engine("qwen3", max_tokens_per_step=8)
    engine.weights_updated(3)
    engine.add_request(token_ids(6, 1), greedily(6))
    engine.add_request(token_ids(11, 2), greedily(4))
    steps(engine, 2)
    halfway, barely = engine.snapshot()
    assert halfway[-1].generated_length == 2
    assert 0 < barely[-1].kv_length < 11
    later = make_engine("qwen3")
    later.weights_updated(5)
    for record in (halfway, barely):
        later.add_record(record)
    done = finish(later)
    assert done[0, 0].policy_versions.tolist() == [3] * 8 + [5] * 4
    assert done[1, 0].policy_versions.tolist() == [5] * 15, "it had no token yet: admitted under 5"
    for request in done.values():
        assert request.kv_versions.tolist() == [5] * request.total_length
        assert_greedy("qwen3", request)


def test_a_record_of_a_later_version_is_refused_by_name() -> None:
    engine = make_engine("qwen3")
    engine.weights_updated(4)
    engine.add_request(token_ids(6, 1), greedily(6))
    steps(engine, 2)
    (record,) = engine.snapshot()
    with pytest.raises(ValueError, match=r"policy version 4 .* weights_updated\(4\)"):
        make_engine("qwen3").add_record(record)


@both
def test_other_weights_under_the_same_number_meet_no_kv_of_the_ones_before(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    prompt = token_ids(14, 1)
    engine.generate([prompt], greedily(4))
    engine.add_request(prompt, greedily(20))
    ended = steps(engine, 2)
    change_weights(model)
    assert engine.weights_updated(0) == 0
    (new,) = (request for request in engine.generate([prompt], greedily(6)))
    assert_greedy(model, new)
    done = finish(engine, ended)
    # It has completed blocks over KV of the old weights meanwhile.
    grown = done[1, 0].prompt_tokens + done[1, 0].generated_tokens
    (again,) = engine.generate([grown], greedily(4))
    assert_greedy(model, again)


def test_a_version_is_an_integer_that_staleness_can_count_to() -> None:
    engine = make_engine("qwen3")
    for bad in (2**31, 2**64 - 1, 1.0, True, "2"):
        with pytest.raises(ConfigError, match="must be an integer of at most 2147483647"):
            engine.weights_updated(bad)  # type: ignore[arg-type]
    assert engine.policy_version == 0


def moved_to(engine: DynamicInferenceEngine, **options: Any) -> DynamicInferenceEngine:
    """Return an engine of another configuration that continues the unfinished requests."""
    fresh = make_engine(engine.model, max_staleness=0, staleness_policy="requeue", **options)  # type: ignore[arg-type]
    for record in engine.snapshot():
        fresh.add_record(DynamicInferenceRequestRecord.deserialize(record.serialize()))
    return fresh


@pytest.mark.parametrize("block", [1, 3, 5])
def test_after_a_restart_with_another_block_size_what_is_too_stale_starts_again_from_its_prompt(block: int) -> None:
    engine = make_engine("qwen3", track_generated_token_events=True)
    for seed in range(2):
        engine.add_request(token_ids(9, seed), greedily(6))
    steps(engine, 3)
    engine = moved_to(engine, block_size_tokens=block)
    ended = steps(engine, 2)
    engine.weights_updated()
    engine.add_request(token_ids(7, 5), greedily(2))
    done = finish(engine, ended)
    for request in done.values():
        assert_greedy("qwen3", request)
    first = done[0, 0]
    assert first.block_size_tokens == block
    kinds = [event.type.name for event in first.events]
    assert kinds.count("ADD_ENGINE") == 1, "its earlier life is told"
    assert kinds.count("GENERATED_TOKEN") > 2
    assert kinds[-2:] == ["ADD_CONTEXT", "FINISH"]
    assert "EVICT" in kinds
    stamps = [event.timestamp for event in first.events]
    assert stamps == sorted(stamps)


def test_after_a_restart_with_a_shorter_maximum_length_a_fresh_start_keeps_to_it() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(9, 0), greedily(60))
    steps(engine, 3)
    with pytest.warns(UserWarning, match="clamped"):
        engine = moved_to(engine, max_sequence_length=24)
    steps(engine, 2)
    engine.weights_updated()
    (request,) = finish(engine).values()
    assert request.total_length == 24
    assert request.policy_versions.tolist() == [1] * 24


def test_what_can_not_start_again_ends_by_name_and_the_update_is_none_the_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("qwen3", max_staleness=0, staleness_policy="requeue", max_requests=3)
    for seed in range(3):
        engine.add_request(token_ids(5, seed), greedily(6))
    ended = steps(engine, 2)
    from_prompt = engine.parts.intake.from_prompt

    def refusing(record: DynamicInferenceRequestRecord, *rest: Any) -> Any:
        if record.request_id == 1:
            raise InvalidRequestError("its prompt does not fit any more")
        return from_prompt(record, *rest)

    monkeypatch.setattr(engine.parts.intake, "from_prompt", refusing)
    assert engine.weights_updated() == 1
    assert engine.stats()["requests_requeued"] == 2
    done = finish(engine, ended)
    assert sorted(done) == [(0, 0), (1, 0), (2, 0)]
    lost = done[1, 0]
    assert lost.finish_reason is FinishReason.ERROR
    assert lost.error is not None
    assert "request 1 sample 0 is too stale and cannot start again from its prompt: InvalidRequestError" in lost.error
    assert lost.generated_tokens, "what it had is there"
    assert_greedy("qwen3", done[0, 0])


def test_the_version_only_rises() -> None:
    engine = make_engine("qwen3")
    assert engine.weights_updated() == 1
    assert engine.weights_updated(7) == 7
    assert engine.weights_updated(7) == 7
    with pytest.raises(ConfigError, match=r"weights_updated\(6\).* 7 "):
        engine.weights_updated(6)
    assert engine.policy_version == 7


# --- max_staleness ----------------------------------------------------------------------------------------------------


def test_a_request_too_stale_ends_as_partial_with_the_tokens_it_has() -> None:
    engine = make_engine("qwen3", max_staleness=1)
    for seed in range(2):
        engine.add_request(token_ids(5, seed), greedily(10))
    steps(engine, 3)
    engine.weights_updated()
    engine.add_request(token_ids(5, 2), greedily(10))
    assert steps(engine, 2) == []
    engine.weights_updated()
    assert engine.stats()["requests_stale"] == 2
    assert engine.context.scheduler.num_active == 1
    done = finish(engine)
    for number in range(2):
        request = done[number, 0]
        assert request.finish_reason is FinishReason.STALE
        assert request.error is None
        assert len(request.generated_tokens) == len(request.generated_log_probs) == 5
        assert request.policy_staleness.max() == 2
        assert logprob_error("qwen3", request) <= 1e-5
    assert_greedy("qwen3", done[2, 0])


@pytest.mark.parametrize("meanwhile", [False, True], ids=["running", "suspended"])
def test_a_request_too_stale_is_requeued_from_its_prompt(meanwhile: bool) -> None:
    model = make_model("qwen3")
    engine = make_engine(model, max_staleness=0, staleness_policy="requeue", max_requests=2)
    for seed in range(3):
        engine.add_request(token_ids(5, seed), greedily(6))
    steps(engine, 3)
    with suspended(engine, "offload") if meanwhile else nullcontext():
        update(engine)
        assert engine.stats()["requests_requeued"] == 2
        assert [sample.key for sample in engine.context.scheduler.waiting] == [(0, 0), (1, 0), (2, 0)]
    for request in finish(engine).values():
        assert_greedy(model, request)
        assert request.policy_staleness.tolist() == [0] * 11


def test_requeued_samples_of_a_group_draw_the_same_random_stream_again() -> None:
    engine = make_engine("qwen3", max_staleness=0, staleness_policy="requeue")
    engine.add_request(token_ids(5, 1), at_random(6, n=3))
    steps(engine, 2)
    engine.weights_updated()
    again = finish(engine)
    engine = make_engine("qwen3")
    engine.add_request(token_ids(5, 1), at_random(6, n=3))
    for key, request in finish(engine).items():
        assert again[key].generated_tokens == request.generated_tokens


def test_a_request_too_stale_goes_on_when_its_tokens_are_to_be_masked() -> None:
    engine = make_engine("qwen3", max_staleness=0, staleness_policy="mask")
    engine.add_request(token_ids(5, 1), greedily(6))
    steps(engine, 2)
    engine.weights_updated()
    assert engine.inspection.staleness() == {0: 1}
    (request,) = finish(engine).values()
    assert_greedy("qwen3", request)
    assert request.policy_staleness.tolist() == [1] * 7 + [0] * 4


@pytest.mark.parametrize("policy", ["partial", "requeue", "mask"])
def test_who_waits_without_a_token_does_not_age(policy: str) -> None:
    engine = make_engine("qwen3", max_staleness=2, staleness_policy=policy, max_requests=1, max_tokens_per_step=BLOCK)
    engine.add_request(token_ids(9, 0), greedily(2))
    engine.add_request(token_ids(9, 1), greedily(2))
    ended = steps(engine, 1)
    for _ in range(5):
        engine.weights_updated()
    waiting = engine.snapshot()[1]
    assert waiting[-1].policy_staleness.tolist() == [0] * 9
    assert waiting[-1].kv_cache_staleness.tolist() == [0] * 9
    done = finish(engine, ended)
    assert done[0, 0].policy_staleness.tolist() == [5] * 9 + [0] * 2, "its prompt was admitted five versions ago"
    assert done[0, 0].kv_cache_staleness.tolist() == [5] * 4 + [0] * 7
    assert done[1, 0].policy_staleness.tolist() == [0] * 11
    assert done[1, 0].kv_cache_staleness.tolist() == [0] * 11
    for request in done.values():
        assert_greedy("qwen3", request)


@both
def test_tokens_of_one_completion_under_many_versions_each_have_the_logprobs_of_their_own_weights(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    prompt = token_ids(7, 6)
    engine.add_request(prompt, at_random(10))
    reference: list[float] = []
    while engine.has_unfinished:
        pass_suspended(engine, "recompute")
        made = [*engine.snapshot()[0].merge().generated_tokens]
        ended = engine.step()
        record = ended[0] if ended else engine.snapshot()[0]
        tokens = prompt + record.merge().generated_tokens
        assert len(tokens) == len(prompt) + len(made) + 1
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -1]
        reference.append(float(logits.log_softmax(-1)[tokens[-1]]))
        if engine.has_unfinished:
            update(engine, len(made))
    merged = record.merge()
    assert np.allclose(merged.generated_log_probs, reference, atol=1e-5)
    assert merged.policy_versions.tolist() == [0] * 7 + list(range(10))


class Lane:
    """A stream, and an event on it, that notes what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def record_event(self) -> Lane:
        self._log.append(f"mark {self._name}")
        return self

    def wait_event(self, event: Lane) -> None:
        self._log.append(f"{self._name} after {event._name}")


def test_a_forward_waits_once_for_an_update_on_another_stream() -> None:
    engine = make_engine("qwen3")
    log: list[str] = []
    lanes = {name: Lane(name, log) for name in ("optimizer", "rollout")}
    current = ["rollout"]
    engine.controller.runner.order.stream = lambda: lanes[current[0]]
    engine.add_request(token_ids(5), greedily(6))
    steps(engine, 2)
    assert log == []
    current[0] = "optimizer"
    engine.weights_updated()
    current[0] = "rollout"
    steps(engine, 2)
    assert log == ["mark optimizer", "rollout after optimizer"]
