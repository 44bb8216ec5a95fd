"""Tests of batches that are filled with scored groups, and of the order that puts long prompts together."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter

import pytest
import torch

from rollout import ConfigError, InvalidRequestError, LongRounds, PromptTask, RolloutFailedError, SamplingParams
from rollout.manager.lengths import LengthBook
from rollout.manager.scoring.goal import rewards_of
from rollout.requests.request import DynamicInferenceRequest
from tests.benchmarks import long_rounds
from tests.rollouts import Every, FailingForward, assert_nothing_leaked, completions, make_rollout, tokens, update

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


def test_a_batch_is_as_full_as_tasks_last_and_empty_behind_their_end(rollout):
    tasks = numbered(5)
    assert rollout.generate_scored(tasks, odd_ones_differ, PAIR, groups=4).metadata == [1, 1, 3, 3]
    batch = rollout.generate_scored(tasks, odd_ones_differ, PAIR, groups=4)
    assert (len(batch), batch.rewards.tolist(), batch.discarded_rewards.tolist()) == (0, [], [])


def test_prompts_of_any_kind_are_tasks_and_a_tensor_is_a_reward(rollout):
    batch = rollout.generate_scored(
        iter(["a b", [5, 6, 7]]), lambda group: torch.arange(len(group)), PAIR, groups=2, keep=None
    )
    assert batch[2].prompt_tokens == [5, 6, 7]
    assert batch.to("cpu").rewards.tolist() == [0, 1, 0, 1]


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
        ({"max_groups": 1}, "max_groups=1: must be None or an integer of at least groups=2"),
        ({"max_discarded": -1}, "max_discarded=-1"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_by_name(rollout, options, words):
    with pytest.raises(ConfigError, match=words):
        rollout.generate_scored(**({"tasks": [], "reward": odd_ones_differ, "groups": 2} | options))
    with pytest.raises(TypeError, match="one str"):
        rollout.generate_scored("a prompt", odd_ones_differ, groups=2)


def test_failed_samples_are_not_scored():
    group = [DynamicInferenceRequest(request_id=3, sample_index=index, prompt_tokens=[5]) for index in range(3)]
    group[1].error = "ValueError: broken"
    assert rewards_of(group, lambda sound: [each.sample_index for each in sound]) == [0.0, None, 2.0]


# --- long rounds ------------------------------------------------------------------------------------------------------


def book_of(lengths: dict[int, int]) -> LengthBook:
    book = LengthBook()
    for prompt, length in lengths.items():
        book.observe(hash((prompt,)), length)
    return book


def test_prompts_known_to_run_long_fill_a_round_of_their_own():
    long = {number for number in range(40) if number % 5 == 0}
    book = book_of({number: 100 if number in long else 10 for number in range(40)})
    rounds = LongRounds(([number] for number in range(40)), book, share=0.25, patience=16)
    taken, kinds = [], []
    while tasks := rounds.take(8):
        taken.append(tasks)
        kinds.append(rounds.long)
    assert sorted(number for tasks in taken for (number,) in tasks) == list(range(40))
    assert [sum(number in long for (number,) in tasks) for tasks in taken] == [0, 0, 0, 0, 8]
    assert kinds == [False] * 4 + [True]


@pytest.mark.parametrize("seed", range(6))
def test_every_task_is_drawn_once_and_few_are_put_off(seed):
    rng = random.Random(seed)
    book = book_of({number: rng.choice([5, 50, 500]) for number in rng.sample(range(300), rng.randint(0, 300))})
    rounds = LongRounds(([number] for number in range(300)), book, rng.uniform(0.05, 0.9), rng.randint(1, 9))
    seen = []
    while tasks := rounds.take(size := rng.randint(1, 12)):
        seen += [number for (number,) in tasks]
        seen += [number for (number,) in itertools.islice(rounds, rng.randint(0, 4))]
        assert len(rounds.put_off) <= 2 * size + 24
    assert sorted(seen) == list(range(300))
    assert rounds.put_off == []


def test_a_task_waits_for_as_many_rounds_as_patience_says_at_most():
    book = book_of({0: 100} | dict.fromkeys(range(1, 99), 10))
    rounds = LongRounds(([number] for number in range(1000)), book, share=0.1, patience=3)
    taken = [rounds.take(2) for _ in range(5)]
    assert [0] in taken[4]
    assert [0] not in [task for tasks in taken[:4] for task in tasks]


def test_where_all_lengths_are_alike_or_unknown_the_order_stays():
    for book in (LengthBook(), book_of(dict.fromkeys(range(30), 7))):
        rounds = LongRounds(([number] for number in range(30)), book, share=0.5, patience=4)
        assert [number for (number,) in itertools.chain(*(rounds.take(7) for _ in range(5)))] == list(range(30))


@pytest.mark.parametrize("options", [{"share": 0}, {"share": 1.0}, {"patience": 0}, {"patience": 1.5}])
def test_options_of_long_rounds_are_refused_by_name(rollout, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        rollout.long_rounds([], **options)
    with pytest.raises(ConfigError, match="groups=0"):
        rollout.long_rounds([]).take(0)


def test_long_rounds_reorder_and_change_no_sample(model):
    """Two epochs of the same prompts in both orders, sampled with seeds of their own."""
    lengths = [2, 20, 2, 20, 2, 2]

    def tasks():
        return [
            PromptTask([5 + number], number, tokens(length, n=2, seed=number)) for number, length in enumerate(lengths)
        ]

    rollout = make_rollout(model)
    plain = rollout.generate_scored(tasks(), odd_ones_differ, groups=6, keep=None)
    rounds = rollout.long_rounds(tasks(), share=0.5)
    batches = [rollout.generate_scored(rounds, odd_ones_differ, groups=2, keep=None) for _ in range(3)]
    assert [sorted(set(batch.metadata)) for batch in batches] == [[0, 2], [4, 5], [1, 3]]
    again = [sample for batch in batches for sample in zip(batch.metadata, completions(batch), strict=True)]
    assert sorted(again) == sorted(zip(plain.metadata, completions(plain), strict=True))


def test_the_benchmark_compares_the_ways_on_the_same_samples():
    flags = ["--size", "tiny", "--prompts", "6", "--groups", "2", "--samples", "2", "--median", "4", "--longest", "9"]
    figures = long_rounds.measure(long_rounds.parse_options([*flags, "--rounds", "1"]))
    assert set(figures) == set(long_rounds.WAYS)
    assert all(0 < each.slots[0] <= 1 for each in figures.values())
