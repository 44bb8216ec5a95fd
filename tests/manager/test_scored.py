"""Tests of batches that are filled with scored groups."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter

import pytest
import torch

from rollout import ConfigError, InvalidRequestError, PromptTask, RolloutFailedError, SamplingParams
from tests.rollouts import Every, FailingForward, assert_nothing_leaked, make_rollout, tokens, update

PAIR = tokens(3, n=2)


def numbered(count: int | None = None, params: SamplingParams | None = None):
    """Tasks whose prompt and metadata are their number; without end for None."""
    numbers = itertools.count() if count is None else range(count)
    return (PromptTask([3 + number % 80, 4 + number // 80], number, params) for number in numbers)


def odd_ones_differ(group):
    """Rewards of which groups with an odd number can be learnt from, and no other."""
    return [float(request.metadata % 2 and request.sample_index) for request in group]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_reward_may_run_the_policy_and_a_copy_of_it(model, autocast):
    rollout = make_rollout(model, fused_forward=False, autocast_dtype=None if autocast is None else "bfloat16")
    model.train()
    ids = torch.tensor([[0, 0, 5, 7, 9], [3, 4, 5, 6, 7]])
    padded = {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def log_prob(policy):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return policy(**padded).logits.float().log_softmax(-1).sum()

    expected = log_prob(model)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    seen = []

    def reward(group):
        for policy in (copy.deepcopy(model), model):
            (found := log_prob(policy)).backward()
            seen.append((policy.training, found, [parameter.grad for parameter in policy.parameters()]))
            policy.zero_grad()
        return [float(request.sample_index) for request in group]

    rollout.generate_scored(numbered(), reward, PAIR, groups=1)
    for training, found, grads in seen:
        assert training
        assert torch.equal(found, expected)
        assert all(map(torch.equal, grads, gradients))


# --- full batches -----------------------------------------------------------------------------------------------------


def test_groups_of_equal_rewards_are_replaced_until_the_batch_is_full_and_counted(rollout):
    tasks = numbered()
    rollout.metrics()
    batch = rollout.generate_scored(tasks, odd_ones_differ, PAIR, groups=4)
    assert batch.metadata == [1, 1, 3, 3, 5, 5, 7, 7]
    assert batch.rewards.tolist() == [0, 1] * 4
    assert batch.discarded_rewards.tolist() == [0, 0] * 4
    assert rollout.metrics()["rollout/groups_discarded"] == 4
    assert next(tasks).metadata == 8
    assert_nothing_leaked(rollout)


def test_the_bound_on_discarded_groups_fills_the_batch_with_what_comes(rollout):
    batch = rollout.generate_scored(numbered(), lambda group: [1.0] * len(group), PAIR, groups=3, max_discarded=2)
    assert batch.metadata == [2, 2, 3, 3, 4, 4]
    assert len(batch.discarded_rewards) == 4
    by_default = rollout.generate_scored(numbered(), lambda group: [1.0] * len(group), PAIR, groups=2)
    assert len(by_default.discarded_rewards) == 2 * 4 * 2


@pytest.mark.parametrize("seed", range(4))
def test_no_sample_is_lost_or_handed_out_twice_and_groups_are_whole(model, seed):
    rng = random.Random(seed)
    limits = {"kv_cache_blocks": 40, "max_requests": 6} if seed % 2 else {}
    rollout = make_rollout(
        model, max_staleness=rng.choice([None, 2]), staleness_policy="mask", max_sequence_length=64, **limits
    )
    size = {number: rng.randint(1, 4) for number in range(60)}
    tasks = (
        PromptTask([rng.randint(3, 90), 4], number, tokens(rng.choice([1, 3, 9, 25]), n=size[number]))
        for number in size
    )
    rewards = {(number, index): float(rng.random() < 0.5) for number in size for index in range(size[number])}
    returned, discarded, asked = [], Counter(), Counter()

    def reward(group):
        (number,) = {request.metadata for request in group}
        assert [request.sample_index for request in group] == list(range(size[number]))
        asked[number] += 1
        return [rewards[number, request.sample_index] for request in group]

    def keep(group):
        number = group[0].request.metadata
        if len({sample.reward for sample in group}) > 1 or rng.random() < 0.2:
            return True
        discarded[number] += 1
        return False

    while True:
        groups = rng.randint(1, 5)
        batch = rollout.generate_scored(
            tasks, reward, groups=groups, max_groups=groups + rng.randint(0, 6), keep=keep, max_discarded=1000
        )
        for _, rows in batch.groups():
            number = batch.metadata[rows.start]
            returned.append(number)
            assert batch.sample_indices[rows].tolist() == list(range(size[number]))
            assert batch.rewards[rows].tolist() == [rewards[number, index] for index in range(size[number])]
        if len(batch) == 0:
            break
        assert batch.num_groups == groups or rollout.groups_in_flight == 0
        with rollout.suspended(rng.choice([None, "persist", "recompute"])):
            update(model, rollout, seed=seed)
        if rng.random() < 0.3:
            update(model, rollout, seed=seed)
    assert sorted([*returned, *discarded]) == list(size)
    assert set(asked.values()) == set(discarded.values()) == {1}
    assert_nothing_leaked(rollout)


def test_groups_beyond_the_batch_stay_in_flight_whole_and_begin_the_next_one(rollout):
    lengths = [2, 30, 3, 40]
    tasks = [PromptTask([5 + number, 6], number, tokens(length, n=2)) for number, length in enumerate(lengths)]
    first = rollout.generate_scored(iter(tasks), odd_ones_differ, groups=2, max_groups=4, keep=None)
    assert first.metadata == [0, 0, 2, 2]
    assert rollout.groups_in_flight == 2
    rollout.weights_updated()
    second = rollout.generate_scored([], odd_ones_differ, groups=2, keep=None)
    assert second.metadata == [1, 1, 3, 3]
    assert second.response_lengths.tolist() == [30, 30, 40, 40]
    assert second.policy_staleness.max() == 1


def test_groups_that_ended_beside_a_full_batch_are_scored_once_and_survive_a_restart(model):
    rollout = make_rollout(model)
    asked = Counter()

    def reward(group):
        asked[group[0].metadata] += 1
        return odd_ones_differ(group)

    first = rollout.generate_scored(numbered(6), reward, PAIR, groups=2, max_groups=6, keep=None)
    assert first.metadata == [0, 0, 1, 1]
    assert rollout.groups_in_flight == 4
    state = rollout.state_dict()
    assert rollout.generate_scored([], reward, groups=4, keep=None).metadata == [2, 2, 3, 3, 4, 4, 5, 5]
    assert set(asked.values()) == {1}
    fresh = make_rollout(model)
    fresh.load_state_dict(state)
    batch = fresh.generate_scored([], reward, groups=4)
    assert batch.metadata == [3, 3, 5, 5]
    assert batch.rewards.tolist() == [0, 1, 0, 1]


def test_rewards_known_of_groups_that_were_handed_out_are_not_those_of_a_checkpoints_groups(model):
    rollout = make_rollout(model)
    rollout.generate_scored(numbered(4), odd_ones_differ, PAIR, groups=1, max_groups=4, keep=None)
    state = rollout.state_dict()
    assert rollout.generate([], min_groups=3).num_groups == 3
    rollout.load_state_dict(state)
    batch = rollout.generate_scored([], lambda group: [7.0] * len(group), groups=3, keep=None)
    assert batch.rewards.tolist() == [7.0] * 6


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1.0], "1 values for the 2 samples"),
        ([1.0, float("nan")], "sample 1: must be finite"),
        (0.5, "returned 0.5 for the 2 samples of group 0: return a list"),
        (["good", "bad"], "return a list of numbers"),
    ],
)
def test_a_reward_that_is_none_is_an_error_and_nothing_is_lost(rollout, given, words):
    with pytest.raises(ValueError, match=words):
        rollout.generate_scored(numbered(2), lambda group: given, PAIR, groups=2)
    assert rollout.groups_in_flight == 2
    assert rollout.generate_scored([], odd_ones_differ, groups=2, keep=None).metadata == [0, 0, 1, 1]


def test_a_task_that_can_never_be_served_is_named_and_harms_no_other(rollout):
    tasks = [PromptTask([5, 6], 0), PromptTask([], "the bad one"), PromptTask([7, 8], 1)]
    with pytest.raises(InvalidRequestError) as raised:
        rollout.generate_scored(iter(tasks), odd_ones_differ, PAIR, groups=3, keep=None)
    assert "the bad one" in "".join(raised.value.__notes__)
    assert rollout.generate_scored([], odd_ones_differ, groups=3, keep=None).metadata == [0, 0, 1, 1]


def test_a_group_with_a_failed_sample_is_not_discarded_unseen(rollout, frozen):
    failing = FailingForward(frozen, lambda: ValueError("broken"), forwards=Every())
    with failing, pytest.raises(RolloutFailedError, match="broken") as raised:
        rollout.generate_scored(numbered(1), odd_ones_differ, PAIR, groups=1)
    assert raised.value.batch.rewards.isnan().all()
    assert_nothing_leaked(rollout)


def test_ctrl_c_gives_up_what_the_call_has_begun(rollout):
    def interrupted(group):
        raise KeyboardInterrupt

    rollout.submit([[9, 9]], tokens(60))
    with pytest.raises(KeyboardInterrupt):
        rollout.generate_scored(numbered(3), interrupted, PAIR, groups=4)
    assert rollout.groups_in_flight == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 0}, "groups=0"),
        ({"max_groups": 1}, "max_groups=1: must be None or an integer of at least 2"),
        ({"max_discarded": -1}, "max_discarded=-1"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_by_name(rollout, options, words):
    with pytest.raises(ConfigError, match=words):
        rollout.generate_scored(**({"tasks": [], "reward": odd_ones_differ, "groups": 2} | options))
    with pytest.raises(TypeError, match="one str"):
        rollout.generate_scored("a prompt", odd_ones_differ, groups=2)
