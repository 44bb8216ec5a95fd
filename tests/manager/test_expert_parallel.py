"""Tests of expert parallelism: two processes with half of the experts each sample what one process samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.job.nursery import Nursery
from tests.manager import expert_parallel_jobs as jobs
from tests.manager.test_tensor_parallel import assert_same, saved
from tests.models import make_model
from tests.ranks import run_together
from tests.rollouts import make_rollout

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHARED = {"tp_size": 2, "ep_size": 2}
"""The ranks share every batch."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    try:
        yield nursery
    finally:
        nursery.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def test_a_group_with_split_experts_samples_what_one_process_samples(nursery, tmp_path):
    names = ["qwen3_moe", "mixtral"]
    alone = []
    for name in names:
        with make_rollout(make_model(name, tie_word_embeddings=False), record_routes=True) as rollout:
            batch = rollout.generate(jobs.PROMPTS, jobs.GREEDY)
            alone.append((jobs.shown(batch), jobs.routes_of(batch)))
    folders = [saved(name, tmp_path / name) for name in names]
    for answers in run_together(nursery, 2, jobs.shares_every_batch, folders=folders):
        for answer, (like, routes) in zip(answers, alone, strict=True):
            assert answer["local experts"] == 2
            assert_same(answer["told"], like)
            assert answer["routes"] == routes
            assert max(answer["errors"]) < 1e-5


@pytest.mark.parametrize("sizes", [SHARED, SHARED | {"fsdp_size": 2}], ids=["shared", "shared and fsdp2"])
def test_training_steps_are_what_they_are_without_rollouts(nursery, folder, sizes):
    for answer in run_together(nursery, 2 * sizes.get("fsdp_size", 1), jobs.trains, folder=folder, **sizes):
        assert answer["same"], "not a bit of the weights may differ"
        assert [version for _, version in answer["told"]] == [0, 1]
        assert max(error for error, _ in answer["told"]) < 1e-5


def test_a_member_that_dies_ends_the_group_by_name(nursery, folder):
    answers = run_together(nursery, 2, jobs.dies, folder=folder, victim=1, **SHARED)
    assert answers[1] is None
    first, again = answers[0].split("\n")
    assert first.startswith(
        "EngineDeadError: the tensor-parallel group of ranks 0, 1 has ended on rank 0: rank 1 has ended"
    )
    assert again.startswith("EngineDeadError")
