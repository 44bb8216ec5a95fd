"""Tests of weights sharded over two ranks: samples equal one process's, and training continues unchanged."""

from __future__ import annotations

import pytest
import torch

from tests.engine.weights import weights_jobs
from tests.ranks import run_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_steps_of_training_sample_what_one_process_samples_and_leave_no_byte_behind(nursery):
    for answer in run_together(nursery, 2, weights_jobs.trains_five_steps):
        assert answer["after"] == {answer["before"]}
        assert answer["version"] == 5


def test_an_exception_inside_a_forward_leaves_every_rank_sharded_and_nobody_hanging(nursery):
    first, second = run_together(nursery, 2, weights_jobs.is_interrupted)
    assert "no such number" in first["ArithmeticError"] + second["ArithmeticError"]
    assert first["KeyboardInterrupt"] == "DeadlineError"
    assert second["KeyboardInterrupt"] == "KeyboardInterrupt"


@pytest.mark.parametrize("coordinator", [True, False])
def test_a_rank_that_raises_before_the_gathering_is_named_to_the_others(nursery, coordinator):
    waited, raised = run_together(nursery, 2, weights_jobs.does_not_come, coordinator=coordinator)
    assert "DeadlineError" in waited["first"]
    assert "rank-1" in waited["first"].replace(" 1", "-1")
    assert "every rank must" in waited["first"]
    assert "prompts[0]" in raised["first"]
    assert "spread over the ranks" in waited["step"]
    assert "engine.guard.whole()" in waited["step"]


@pytest.mark.parametrize("job", [
    weights_jobs.samples_out_of_ddp, weights_jobs.trains_inside_a_loop, weights_jobs.accumulates,
    weights_jobs.samples_with_a_copy,
])  # fmt: skip
def test_on_both_ranks_all_assertions_of_a_job_hold(nursery, job):
    run_together(nursery, 2, job)


def test_a_mixed_precision_policy_holds_for_rollouts_too(nursery):
    for kv_dtype, difference in run_together(nursery, 2, weights_jobs.samples_in_the_policys_dtype):
        assert kv_dtype == torch.bfloat16
        assert difference < 0.03


def test_a_shard_that_changed_behind_our_back_is_named_by_its_rank(nursery):
    assert run_together(nursery, 2, weights_jobs.changes_one_shard) == [[], ["model.layers.1.mlp.up_proj.weight"]]


def test_weights_that_fsdp2_shards_after_the_rollout_was_built_are_gathered_from_then_on(nursery):
    for answer in run_together(nursery, 2, weights_jobs.is_sharded_later):
        assert answer["version"] == 2
        assert answer["generated"] > 0


def test_what_is_sharded_into_another_dtype_later_has_its_cache_in_that(nursery):
    assert set(run_together(nursery, 2, weights_jobs.is_sharded_later_into_another_dtype)) == {torch.bfloat16}


def test_fsdp1_is_refused_at_once_before_and_after_the_rollout_was_built(nursery):
    for said in run_together(nursery, 2, weights_jobs.is_sharded_too_late):
        assert "was sharded after the rollout was built" in said
        assert "accelerator.prepare" in said
        assert "fsdp_version=2" in said


def test_an_llm_evaluates_sharded_weights_between_their_updates(nursery):
    for answer in run_together(nursery, 2, weights_jobs.is_evaluated):
        refused = answer.pop("refused")
        assert answer == {"same": [True, True], "sharded": True, "version": 2}
        assert "weights of FSDPLlamaForCausalLM are spread over the ranks" in refused
