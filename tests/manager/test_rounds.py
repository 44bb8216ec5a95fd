"""Tests of rounds with groups left in flight: some now, the rest later, and what may not grow too old."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import PreTrainedModel

from rollout.manager.groups import GroupLedger
from rollout.manager.manager import RolloutManager
from rollout.manager.rounds import StalenessPacer
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from tests.invariants import check_scheduler
from tests.rollouts import (
    GREEDY,
    DenseLedger,
    assert_nothing_leaked,
    group_ids,
    logprob_error,
    make_rollout,
    tokens,
    update,
)

# --- some now, the rest later -----------------------------------------------------------------------------------------


def test_an_evaluation_returns_exactly_its_prompts_while_training_goes_on(rollout, tokenizer):
    first = rollout.generate([f"train {n}" for n in range(6)], [tokens(4 + 8 * n) for n in range(6)], min_groups=2)
    assert rollout.groups_in_flight == 6 - first.num_groups > 0
    evaluation = rollout.generate(["eval a", "eval b"], GREEDY)
    assert [tokenizer.decode(request.prompt_tokens) for request in evaluation] == ["eval a", "eval b"]
    rest = rollout.generate([], min_groups=6)
    assert sorted(group_ids([first, rest])) == list(range(6))
    assert_nothing_leaked(rollout)


@pytest.mark.parametrize("mode", ["offload", "persist"])
def test_min_groups_returns_early_and_every_token_knows_its_version(model, mode):
    rollout = make_rollout(model, kv_cache_management_mode=mode, enable_prefix_caching=False)
    ledger = DenseLedger(rollout)
    lengths = [2, 5, 9, 14, 22, 31]
    batches = []
    for turn in range(5):
        prompts = [[3 + turn, 4 + n] for n in range(len(lengths))]
        batch = rollout.generate(prompts, [tokens(length, n=2) for length in lengths], min_groups=4)
        assert batch.num_groups >= 4
        batches.append(batch)
        for _ in range(1 + turn % 2):
            with rollout.suspended():
                update(model, rollout, seed=turn)
    batches.append(rollout.generate([], min_groups=rollout.groups_in_flight))
    mixed = 0
    for batch in batches:
        for row, request in enumerate(batch):
            prompt = len(request.prompt_tokens)
            sampled, total = ledger.policy_versions(request), request.total_length
            mixed += len(set(sampled.tolist())) > 1
            assert batch.policy_versions[row, prompt:total].tolist() == sampled.tolist()
            assert set(batch.policy_versions[row, :prompt].tolist()) == {sampled[0]}
            assert batch.kv_versions[row, : total - 1].tolist() == ledger.kv_versions(request).tolist()
            assert torch.equal(
                batch.policy_staleness[row, :total], batch.policy_version - batch.policy_versions[row, :total]
            )
    assert mixed > 4
    assert sorted(group_ids(batches)) == list(range(30))
    assert_nothing_leaked(rollout)


def test_groups_come_as_they_complete_those_submitted_meanwhile_too(rollout):
    first = rollout.submit(["a", "b"], [tokens(9), tokens(3)])
    seen = []
    for batch in rollout.as_completed():
        seen += group_ids([batch])
        if len(seen) == 1:
            late = rollout.submit(["c"], tokens(2))
    assert seen == [first[1], late[0], first[0]]


def test_chosen_groups_come_alone(rollout):
    ids = rollout.submit(["a", "b", "c"], tokens(4))
    assert group_ids(rollout.as_completed([ids[2], ids[0]])) == [ids[0], ids[2]]
    assert rollout.groups_in_flight == 1
    with pytest.raises(KeyError, match="returned already"):
        rollout.as_completed([ids[0]])


def test_a_group_that_is_taken_away_between_two_that_complete_is_not_missed(rollout):
    """It was a KeyError: the loop looked at its own list of what had been complete."""
    ids = rollout.submit(["a", "b", "c", "d"], tokens(4))
    completed = rollout.as_completed()
    assert group_ids([next(completed)]) == [ids[0]]
    rollout.abort([ids[1]])
    assert group_ids([rollout.generate([], min_groups=1)]) == ids[2:]
    assert list(completed) == []
    assert_nothing_leaked(rollout)


def test_aborted_groups_are_gone_at_once_and_unknown_ones_ignored(rollout):
    rollout.generate(["a", "b"], tokens(20), min_groups=0)
    ids = rollout.submit(["c"], tokens(5))
    rollout.abort([0, 99])
    rollout.abort(ids)
    assert group_ids([rollout.generate([], min_groups=9)]) == [1]
    metrics = rollout.metrics()
    assert metrics["rollout/requests_aborted"] == 2
    assert (metrics["rollout/requests_running"], metrics["rollout/requests_waiting"]) == (0, 0)
    assert_nothing_leaked(rollout)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_handed_out_twice_or_lost_in_random_rounds(model, seed):
    rng = random.Random(seed)
    limits = {"kv_cache_blocks": 40, "max_requests": 8} if seed % 2 else {}
    rollout = make_rollout(model, max_staleness=rng.choice([None, 1, 3]), staleness_policy=rng.choice(
        ["partial", "requeue", "mask"]), max_sequence_length=64, **limits)  # fmt: skip
    submitted: dict[int, int] = {}
    aborted: set[int] = set()
    batches = []

    def submit(count: int) -> list[int]:
        params = [tokens(rng.choice([0, 1, 2, 4, 8, 30]), n=rng.randint(1, 3)) for _ in range(count)]
        ids = rollout.submit([[rng.randint(3, 90) for _ in range(rng.randint(1, 9))] for _ in params], params)
        submitted.update(zip(ids, (each.n for each in params), strict=True))
        return ids

    for turn in range(20):
        match rng.choice(["all", "some", "some", "completed", "abort", "update", "update", "suspend"]):
            case "all":
                ids = submit(rng.randint(0, 3))
                batches.append(rollout.generate([[5]], tokens(2, n=2)))
                submitted[group_ids(batches[-1:])[0]] = 2
                assert batches[-1].num_groups == 1
            case "some":
                submit(rng.randint(0, 5))
                goal = rng.randint(0, 4)
                available = rollout.groups_in_flight
                batches.append(rollout.generate([], min_groups=goal))
                assert batches[-1].num_groups >= min(goal, available)
            case "completed":
                ids = submit(rng.randint(1, 3))
                loop = rollout.as_completed(ids if rng.random() < 0.5 else None)
                batches += itertools.islice(loop, rng.randint(1, 3))
            case "abort":
                left = set(submitted) - aborted - set(group_ids(batches))
                gone = set(rng.sample(sorted(left), min(2, len(left))))
                rollout.abort(gone)
                aborted |= gone
            case "update":
                with rollout.suspended(rng.choice([None, "persist", "recompute"])):
                    update(model, rollout, seed=turn)
            case "suspend":
                rollout.suspend(rng.choice(["persist", "offload", "recompute"]))
                rollout.resume()
        check_scheduler(rollout.engine.context.scheduler)
        expected = len(submitted) - len(aborted) - len(group_ids(batches))
        assert rollout.groups_in_flight == expected
    batches.append(rollout.generate([], min_groups=rollout.groups_in_flight))
    seen = group_ids(batches)
    assert len(seen) == len(set(seen))
    assert set(seen) == set(submitted) - aborted
    for batch in batches:
        assert batch.errors == [None] * len(batch)
        for group, rows in batch.groups():
            assert batch.sample_indices[rows].tolist() == list(range(submitted[group]))
    assert_nothing_leaked(rollout)


# --- staleness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["partial", "requeue", "mask"])
@pytest.mark.parametrize(("limit", "updates"), [(1, 1), (2, 1), (4, 2), (1, 2)])
def test_in_steady_state_nothing_is_too_old_and_nothing_thrown_away(model, policy, limit, updates):
    rng = random.Random(limit)
    rollout = make_rollout(model, max_staleness=limit, staleness_policy=policy)
    ledger = DenseLedger(rollout)
    stale = 0
    for turn in range(16):
        # Long-tailed, and the samples of a group end at different times.
        fresh = 10 if turn == 0 else 5
        params = [tokens(min(60, int(3 * rng.paretovariate(0.8))), n=2, stop_token_ids=[5, 6]) for _ in range(fresh)]
        batch = rollout.generate([[3 + turn, 7 + n] for n in range(fresh)], params, min_groups=5)
        assert batch.policy_staleness[batch.response_mask].max() <= limit
        for row, request in enumerate(batch):
            # The last attempt counts of a sample that was requeued before the steady state.
            sampled = ledger.policy_versions(request)[-len(request.generated_tokens) :]
            ages = batch.policy_staleness[row, len(request.prompt_tokens) : request.total_length]
            assert ages.tolist() == (rollout.policy_version - sampled).tolist()
        if turn > 1:
            assert batch.policy_staleness.max() <= limit
            metrics = rollout.metrics()
            assert (metrics["rollout/requests_stale"], metrics["rollout/requests_requeued"]) == (0, 0)
            assert batch.response_mask.sum() == batch.response_lengths.sum()
            stale += int(batch.policy_staleness.max() > 0)
        elif turn == 1:
            rollout.metrics()
        for each in range(updates):
            with rollout.suspended():
                update(model, rollout, seed=16 * turn + each, size=0.002)
    assert (stale > 0) is (limit >= updates)


def one_in_flight(model: PreTrainedModel, policy: str, started: int = 5) -> RolloutManager:
    """A request of 40 tokens, `started` of them sampled under version 0."""
    rollout = make_rollout(model, max_staleness=1, staleness_policy=policy)
    rollout.submit([[5, 6, 7]], tokens(40))
    for _ in range(started):
        rollout.engine.step()
    return rollout


def test_partial_ends_what_is_too_old_and_a_loss_sees_only_what_is_not(model):
    rollout = one_in_flight(model, "partial")
    rollout.weights_updated()
    for _ in range(3):
        rollout.engine.step()
    rollout.weights_updated()
    batch = rollout.generate([], min_groups=0)
    assert (batch.finish_reasons, batch.response_lengths.tolist()) == (["stale"], [8])
    assert batch.policy_staleness[0, 3:].tolist() == [2] * 5 + [1] * 3
    assert batch.response_mask[0, 3:].tolist() == [False] * 5 + [True] * 3
    assert rollout.metrics()["rollout/requests_stale"] == 1


def test_requeue_starts_again_from_the_prompt(model):
    rollout = one_in_flight(model, "requeue")
    for _ in range(2):
        update(model, rollout)
    batch = rollout.generate([], min_groups=1)
    assert batch.response_lengths.tolist() == [40]
    assert batch.policy_staleness.max() == 0
    metrics = rollout.metrics()
    assert (metrics["rollout/requests_requeued"], metrics["rollout/requests_stale"]) == (1, 0)
    assert logprob_error(model, batch) <= 1e-5


def test_mask_goes_on_and_takes_old_tokens_out_of_the_loss(model):
    rollout = one_in_flight(model, "mask")
    for _ in range(2):
        rollout.weights_updated()
    batch = rollout.generate([], min_groups=1)
    assert batch.finish_reasons == ["length"]
    assert batch.response_mask[0, 3:].tolist() == [False] * 5 + [True] * 35
    assert batch.policy_staleness[0, 3:].tolist() == [2] * 5 + [0] * 35
    metrics = rollout.metrics()
    assert metrics["rollout/policy_staleness_mean"] == 2 * 5 / 40
    assert metrics["rollout/policy_staleness_nonzero_share"] == 5 / 40


def test_a_group_that_ended_before_the_update_ages_until_it_is_handed_out(model):
    rollout = make_rollout(model, max_staleness=1)
    rollout.submit([[5, 6]], tokens(4))
    rollout.generate([[7]], tokens(8))
    for _ in range(2):
        rollout.weights_updated()
    batch = rollout.generate([], min_groups=1)
    assert batch.policy_staleness.max() == 2
    assert batch.response_mask.sum() == 0


def test_the_pacer_counts_samples_that_have_come_back_and_learns_the_updates_of_a_round():
    groups = GroupLedger()
    for group_id in (1, 2, 3):
        groups.add(group_id, 2)
    pacer = StalenessPacer(3)
    pacer.begin_round(10)
    assert pacer.too_old(groups, [(1, 3), (2, 2), (9, 9)], 10) == {1}
    pacer.begin_round(10)
    assert pacer.updates_per_round == 1
    pacer.begin_round(12)
    assert pacer.too_old(groups, [(1, 3), (2, 2), (3, 1)], 12) == {1, 2}
    early = {"request_id": 3, "prompt_tokens": [5], "generated_tokens": [6, 7]}
    assert groups.take(DynamicInferenceRequest(**early, sample_index=1, policy_spans=VersionSpans([(9, 2), (10, 1)])))
    assert pacer.too_old(groups, [], 10) == set()
    assert pacer.too_old(groups, [], 11) == {3}
    assert StalenessPacer(None).too_old(groups, [(1, 99)], 12) == set()
    assert StalenessPacer(0).too_old(groups, [], 12) == {1, 2, 3}
