"""Tests of checkpoints: requests in flight continue from a saved state."""

from __future__ import annotations

import copy
import io
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from transformers import PreTrainedModel

from rollout.errors import ConfigError, EngineStateError, InvalidRequestError, SerializationError
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from tests.models import greedy, make_model, make_tokenizer
from tests.rollouts import (
    assert_nothing_leaked,
    completions,
    group_ids,
    logprob_error,
    make_rollout,
    trainer_logprobs_of,
    update,
)

State = dict[str, Any]


def inside(state: State) -> dict[str, Any]:
    """The fields of a state."""
    return msgpack.unpackb(state["data"])


PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(seed=5, n=2, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(n=3, max_tokens=35, top_p=0.95, repetition_penalty=1.1, ignore_eos=True),
    SamplingParams(max_tokens=40, stop=["ab", "c"], min_tokens=3, n=2),
    SamplingParams(temperature=0, max_tokens=2, n=2, prompt_logprobs=1),
]


def a_run_that_is_interrupted() -> tuple[PreTrainedModel, RolloutManager]:
    """Two updates in, with groups that wait, run, have samples back, and are complete but not handed out.

    Every update gives up the KV, so that the KV is of the present version here as it is after a restart.
    """
    model = make_model("qwen3", num_hidden_layers=2)
    rollout = make_rollout(model, make_tokenizer(), max_requests=8, kv_cache_management_mode="recompute")
    prompts = [f"prompt {number}" for number in range(10)]
    rollout.submit(prompts, PARAMS * 2, metadata=[{"answer": number} for number in range(10)])
    for turn in range(2):
        rollout.generate(["now"], SamplingParams(temperature=0, max_tokens=5), min_groups=1)
        with rollout.suspended():
            update(model, rollout, seed=turn, size=0.005)
    rollout.generate(["evaluation"], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    rollout.submit(["late", "later"], PARAMS[1:3])
    return model, rollout


def the_rest_of_it(rollout: RolloutManager) -> RolloutBatch:
    """Everything in flight, and two prompts more."""
    rollout.submit(["new", "newer"], [SamplingParams(max_tokens=9, n=2), SamplingParams(max_tokens=9, seed=1)])
    return rollout.generate([], min_groups=rollout.groups_in_flight)


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[PreTrainedModel, State, set[int], RolloutBatch]:
    """The model, the state on the way, the groups in flight there, and how it ended."""
    model, rollout = a_run_that_is_interrupted()
    state = rollout.state_dict()
    in_flight = set(rollout._rounds.groups)
    complete, unfinished = set(rollout._rounds.groups.complete()), rollout._rounds.groups.unfinished
    scheduler = rollout.engine.context.scheduler
    assert all((complete, unfinished, scheduler.waiting, scheduler.decoding))
    return model, state, in_flight, the_rest_of_it(rollout)


def by_torch(state: State) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


LOAD: dict[str, Callable[[State], Any]] = {
    "msgpack": lambda state: msgpack.unpackb(msgpack.packb(state, use_bin_type=True)),
    "torch": by_torch,
}


@pytest.mark.parametrize("how", LOAD)
def test_everything_goes_on_as_if_uninterrupted(uninterrupted, how):
    model, state, in_flight, expected = uninterrupted
    rollout = make_rollout(model, make_tokenizer(), max_requests=8)
    rollout.load_state_dict(LOAD[how](state))
    assert rollout.policy_version == 2
    assert set(rollout._rounds.groups) == in_flight
    batch = the_rest_of_it(rollout)
    assert completions(batch) == completions(expected)
    assert torch.allclose(batch.logprobs, expected.logprobs, atol=1e-5)
    for name in ("input_ids", "group_ids", "sample_indices", "response_mask", "policy_versions", "policy_staleness"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    for name in ("finish_reasons", "texts", "metadata", "errors"):
        assert getattr(batch, name) == getattr(expected, name), name
    assert batch.policy_versions.unique().tolist() == [-1, 0, 1, 2]
    for ours, theirs in zip(batch, expected, strict=True):
        assert ours.sampling_params == theirs.sampling_params
        assert [[token for token, _ in row] for row in ours.generated_top_n_logprobs] == [
            [token for token, _ in row] for row in theirs.generated_top_n_logprobs
        ]
    assert_nothing_leaked(rollout)


def test_saving_does_not_change_the_run(uninterrupted):
    _, _, _, expected = uninterrupted
    _, rollout = a_run_that_is_interrupted()
    for _ in range(3):
        rollout.state_dict()
    with rollout.suspended("offload"):
        fields = inside(rollout.state_dict())
    assert len(fields["unfinished"]) + len(fields["finished"]) == sum(size for _, size in fields["groups"])
    batch = the_rest_of_it(rollout)
    assert completions(batch) == completions(expected)


def test_new_requests_take_no_id_that_was_ever_given_out():
    model = make_model("qwen3", num_hidden_layers=1)
    rollout = make_rollout(model)
    first = rollout.generate([[5], [6]], SamplingParams(max_tokens=4, n=2))
    fresh = make_rollout(model)
    fresh.load_state_dict(rollout.state_dict())
    again = fresh.generate([[5], [6]], SamplingParams(max_tokens=4, n=2))
    assert group_ids([first, again]) == [0, 1, 2, 3]
    # An id also seeds the random stream: starting at 0 again would repeat the samples of the first prompts.
    assert completions(again) == completions(rollout.generate([[5], [6]], SamplingParams(max_tokens=4, n=2)))
    assert completions(again) != completions(first)


def test_a_sample_that_an_update_has_just_ended_is_saved():
    """It was in neither list between the update and the next step, and its group could never complete."""
    model = make_model("qwen3", num_hidden_layers=1)
    rollout = make_rollout(model, max_staleness=0)
    rollout.submit([[5, 6]], SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(3):
        rollout.engine.step()
    with rollout.suspended():
        rollout.weights_updated()
        state = rollout.state_dict()
    assert [len(inside(state)[name]) for name in ("finished", "unfinished")] == [1, 0]
    fresh = make_rollout(model, max_staleness=0)
    fresh.load_state_dict(state)
    batch = fresh.generate([], min_groups=1)
    assert (batch.finish_reasons, batch.response_lengths.tolist()) == (["stale"], [3])


def test_blocks_cached_before_the_load_are_not_used_after_it():
    model = make_model("qwen3", num_hidden_layers=1)
    rollout = make_rollout(model)
    state = rollout.state_dict()
    prompt = list(range(10, 30))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    rollout.generate([prompt], params)
    update(model, seed=3)
    rollout.load_state_dict(state)
    batch = rollout.generate([prompt], params)
    assert completions(batch) == [greedy(model, prompt, 5)]
    assert logprob_error(model, batch) <= 1e-5


def test_the_updates_of_a_round_are_remembered():
    model = make_model("qwen3", num_hidden_layers=1)
    rollout = make_rollout(model, max_staleness=1)
    for _ in range(2):
        rollout.generate([[5]], SamplingParams(max_tokens=2), min_groups=1)
        for _ in range(2):
            rollout.weights_updated()
    rollout.generate([], min_groups=0)
    fresh = make_rollout(model, max_staleness=1)
    fresh.load_state_dict(rollout.state_dict())
    # Two updates a round, and a limit of one: nothing may be left in flight.
    assert fresh.generate([[5], [6]], SamplingParams(max_tokens=7, ignore_eos=True), min_groups=0).num_groups == 2


# --- what is refused ------------------------------------------------------------------------------------------------


def changed(**fields: Any) -> Callable[[State], Any]:
    return altered(lambda plain: {**plain, **fields})


def altered(change: Callable[[dict[str, Any]], Any]) -> Callable[[State], Any]:
    return lambda state: sealed(state, msgpack.packb(change(inside(state))))


def sealed(state: State, data: bytes) -> State:
    return {**state, "data": data, "checksum": zlib.crc32(data)}


MALFORMED: list[tuple[Callable[[State], Any], str]] = [
    (lambda state: None, "state: None arrived where a dict"),
    (lambda state: {}, r"state\.format: None arrived where 8"),
    (lambda state: {**state, "format": 1}, r"state\.format: 1 arrived where 8, the format that this version reads"),
    (lambda state: {"format": 8, "checksum": 1}, r"state\.data: missing"),
    (lambda state: {**state, "data": state["data"][:-9]}, r"state\.checksum: .* a byte was damaged"),
    (lambda state: {**state, "data": b"\xff" + state["data"][1:]}, r"state\.checksum: \d+ arrived where"),
    (lambda state: {**state, "data": "text"}, r"state\.checksum: "),
    (lambda state: {**state, "more": 1}, r"state\.more: unknown"),
    (changed(policy_version="2"), r"state\.data\.policy_version: .*'2' arrived where an integer"),
    (changed(extra=1), r"state\.data\.extra: unknown"),
    (changed(unfinished=[{"segments": []}]), r"data\.unfinished: "),
    (changed(finished=["x"]), r"data\.finished: .*'x' arrived"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED)
def test_a_malformed_state_is_refused_by_name_and_nothing_is_loaded(uninterrupted, change, message):
    model, state, *_ = uninterrupted
    rollout = make_rollout(model, make_tokenizer())
    with pytest.raises(SerializationError, match=message):
        rollout.load_state_dict(change(copy.deepcopy(state)))
    assert rollout.policy_version == 0
    assert_nothing_leaked(rollout)
    rollout.load_state_dict(state)
    assert rollout.policy_version == 2


def test_a_pool_too_small_for_a_request_loads_nothing(uninterrupted):
    model, state, *_ = uninterrupted
    rollout = make_rollout(model, make_tokenizer(), kv_cache_blocks=11)
    with pytest.raises(InvalidRequestError, match="raise kv_cache_blocks"):
        rollout.load_state_dict(state)
    assert_nothing_leaked(rollout)
    assert len(rollout.generate(["a"], SamplingParams(max_tokens=2))) == 1


def test_a_state_of_another_model_is_refused_and_both_are_named(uninterrupted):
    _, state, *_ = uninterrupted
    rollout = make_rollout(make_model("llama", num_hidden_layers=1), make_tokenizer())
    named = r"a qwen3 of 2 layers, a width of 48 and 97 tokens, and this rollout of a llama of 1 layers"
    with pytest.raises(ConfigError, match=named):
        rollout.load_state_dict(state)
    assert_nothing_leaked(rollout)


def test_a_rollout_that_is_further_on_does_not_go_back(uninterrupted):
    model, state, *_ = uninterrupted
    rollout = make_rollout(model, make_tokenizer())
    for _ in range(3):
        rollout.weights_updated()
    with pytest.raises(ConfigError, match="the policy version is 3 and only rises"):
        rollout.load_state_dict(state)
    assert_nothing_leaked(rollout)


def test_metadata_that_no_checkpoint_can_hold_is_refused_when_it_comes(uninterrupted):
    model, *_ = uninterrupted
    rollout = make_rollout(model, make_tokenizer())
    with pytest.raises(TypeError, match=r"metadata\[1\]=\{3\}: must be made of None, bool"):
        rollout.submit(["a", "b"], metadata=[{"any": [1, b"2", {3: None}]}, {3}])
    assert_nothing_leaked(rollout)
    rollout.submit(["a"], SamplingParams(max_tokens=2), metadata=[{"any": [1, b"", {3: None}]}])
    fresh = make_rollout(model, make_tokenizer())
    fresh.load_state_dict(rollout.state_dict())
    assert fresh.generate([], min_groups=1).metadata == [{"any": [1, b"", {3: None}]}]


def test_a_state_is_for_a_rollout_with_nothing_in_flight(uninterrupted):
    model, state, *_ = uninterrupted
    rollout = make_rollout(model, make_tokenizer())
    ids = rollout.submit(["a"])
    with pytest.raises(EngineStateError, match=r"load_state_dict\(\) with 1 groups in flight"):
        rollout.load_state_dict(state)
    rollout.abort(ids)
    rollout.load_state_dict(state)
    assert rollout.groups_in_flight == len(inside(state)["groups"])


# --- KV after a restart -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["offload", "persist", "recompute"])
def test_a_restored_run_computes_its_kv_under_the_present_weights_and_the_labels_say_so(mode: str) -> None:
    model = make_model("qwen3")
    rollout = make_rollout(model, kv_cache_management_mode=mode, max_requests=4)
    rollout.submit([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    rollout.generate([[6, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), min_groups=1)
    with rollout.suspended():
        update(model, rollout, size=0.005)
    state = rollout.state_dict()
    restored = make_rollout(copy.deepcopy(model), kv_cache_management_mode=mode, max_requests=4)
    restored.load_state_dict(state)
    ends = [each.generate([], min_groups=each.groups_in_flight) for each in (rollout, restored)]
    for batch in ends:
        assert {*batch.policy_versions[batch.response_mask.bool()].tolist()} == {0, 1}, "who sampled each token"
    with torch.no_grad():
        difference = (trainer_logprobs_of(restored.model, ends[1]) - ends[1].logprobs).abs()
    assert difference[ends[1].policy_versions == 1].max() < 1e-4
    kept, computed_again = ({*batch.kv_versions[0].tolist()} for batch in ends)
    assert computed_again == {1}
    assert kept == ({1} if mode == "recompute" else {0, 1})
