"""Tests of expert parallelism: two processes with half of the experts each sample what one process samples."""

from __future__ import annotations

import inspect

import pytest
import transformers
from transformers.distributed import DistributedConfig

from tests.manager import expert_parallel_jobs as jobs
from tests.manager import tensor_parallel_jobs
from tests.manager.test_tensor_parallel import assert_same, saved, whole
from tests.models import scale_weights
from tests.ranks import run_together
from tests.rollouts import make_rollout

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(
        "ep_size" not in inspect.signature(DistributedConfig).parameters,
        reason=f"transformers {transformers.__version__} splits no experts over ranks: 5.21 does",
    ),
]

SHARED = {"tp_size": 2, "ep_size": 2}
"""The ranks share every batch."""
EXCHANGED = {"fsdp_size": 2, "ep_size": 2}
"""Each rank has batches of its own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def test_a_group_with_split_experts_samples_what_one_process_samples(nursery, tmp_path):
    names = ["qwen3_moe", "mixtral"]
    alone = []
    for name in names:
        with make_rollout(whole(name), record_routes=True) as rollout:
            batch = rollout.generate(jobs.PROMPTS, jobs.GREEDY)
            alone.append((jobs.shown(batch), jobs.routes_of(batch)))
    folders = [saved(name, tmp_path / name) for name in names]
    for answers in run_together(nursery, 2, jobs.shares_every_batch, folders=folders):
        for answer, (like, routes) in zip(answers, alone, strict=True):
            assert answer["local experts"] == 2
            assert_same(answer["told"], like)
            assert answer["routes"] == routes
            assert max(answer["errors"]) < 1e-5


def test_ranks_that_exchange_tokens_sample_their_own_prompts(nursery, folder):
    model = whole("qwen3_moe")
    answers = run_together(nursery, 2, jobs.exchanges, folder=folder)
    with make_rollout(model, record_routes=True) as rollout:
        own = [rollout.generate(jobs.of_rank(rank), jobs.GREEDY) for rank in (0, 1)]
        everything = jobs.shown(rollout.generate(jobs.PROMPTS, jobs.GREEDY))
        scale_weights(model, 1.02)
        rollout.weights_updated()
        updated = [jobs.shown(rollout.generate(jobs.of_rank(rank), jobs.GREEDY)) for rank in (0, 1)]
    for rank, answer in enumerate(answers):
        assert_same(answer["own"], jobs.shown(own[rank]))
        assert answer["routes"] == jobs.routes_of(own[rank])
        assert_same(answer["updated"], updated[rank])
        assert answer["error"] < 1e-5
        assert "split over the expert-parallel ranks 0, 1" in answer["explained"]
        assert answer["rest"] == [True, 0]
    assert_same(answers[0]["one rank's"], everything)
    assert not answers[1]["one rank's"]["tokens"]


def test_a_rank_that_fails_outside_of_its_experts_leaves_the_others_unharmed(nursery, folder):
    answers = run_together(nursery, 2, jobs.fails, folder=folder)
    with make_rollout(whole("qwen3_moe")) as rollout:
        alone = [jobs.shown(rollout.generate(jobs.of_rank(rank), jobs.GREEDY)) for rank in (0, 1)]
    name = "the expert-parallel group of ranks 0, 1"
    for rank, told in enumerate(answers):
        assert told["step"].startswith(f"EngineStateError: step() in {name}")
        assert told["score"].startswith("UnsupportedModelError: score: ")
        assert told["as_completed"].startswith(f"EngineStateError: as_completed() in {name}")
        assert told["run"].startswith(f"EngineStateError: run() in {name}")
        assert told["llm"].startswith("ConfigError: LLM of FSDPQwen3MoeForCausalLM")
        assert_same(told["after it"], alone[rank])
        assert told["in flight"] == len(jobs.of_rank(rank))
    assert answers[0]["failed"] == ["None"]
    assert_same(answers[0]["beside it"], alone[0])
    assert all("ArithmeticError: no such number" in each for each in answers[1]["failed"])
    assert answers[0]["late"].startswith("DeadlineError: generate() passed timeout_s=0.0")
    assert answers[1]["late"].startswith(f"EngineStateError: a rank of {name} has left generate()")


@pytest.mark.parametrize("sizes", [SHARED, EXCHANGED], ids=["shared", "exchanged"])
def test_training_steps_are_what_they_are_without_rollouts(nursery, folder, sizes):
    ranks = sizes.get("tp_size", 1) * sizes.get("fsdp_size", 1)
    for answer in run_together(nursery, ranks, tensor_parallel_jobs.trains, folder=folder, **sizes):
        assert answer["same"], "not a bit of the weights may differ"
        assert [version for *_, version in answer["told"]] == [0, 1]
        assert max(error for _, error, _ in answer["told"]) < 1e-5


def test_a_member_that_dies_ends_the_group_by_name(nursery, folder):
    answers = run_together(nursery, 2, tensor_parallel_jobs.dies, folder=folder, victim=1, forward=3, **EXCHANGED)
    assert answers[1] is None
    first, again = answers[0].split("\n")
    name = "the expert-parallel group of ranks 0, 1"
    assert first.startswith(f"EngineDeadError: {name} has ended on rank 0: rank 1 has ended")
    assert again.startswith("EngineDeadError")
