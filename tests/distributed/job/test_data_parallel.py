"""Tests of managers on several ranks with real models: together they produce what a single one would."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import zmq

from rollout.config import Advanced, CoordinatorConfig, InferenceConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.job_coordinator import JobCoordinator
from rollout.distributed.job.world import World
from rollout.errors import ConfigError, ConnectionLostError, DeadlineError, EngineStateError
from rollout.manager.backend import LocalBackend
from rollout.manager.manager import RolloutManager
from rollout.observe.timeline import read
from rollout.sampling_params import SamplingParams
from tests.distributed.job import rank_jobs
from tests.distributed.job.nursery import Nursery
from tests.distributed.job.rank_jobs import WORK, Ask, Sample, asks, generate, samples, share_of, the_model
from tests.engines import make_engine
from tests.models import make_tokenizer
from tests.ranks import run_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TOLERANCE = 1e-5
"""Between log-probs of engines with equal weights in fp32."""


@cache
def alone(wanted: tuple[Ask, ...]) -> list[Sample]:
    config = InferenceConfig(
        kv_cache_blocks=2048,
        max_requests=64,
        max_tokens_per_step=256,
        advanced=Advanced(block_size_tokens=4, verify_model=False),
    )
    with RolloutManager(the_model(), make_tokenizer(), config) as rollout:
        assert isinstance(rollout._rounds.backend, LocalBackend)
        return samples(generate(rollout, wanted))


def assert_as_alone(answered: Sequence[Sample], wanted: Sequence[Ask]) -> None:
    """Token for token, log-prob for log-prob, in the same order."""
    reference = alone(tuple(wanted))
    assert len(answered) == len(reference)
    for mine, theirs in zip(answered, reference, strict=True):
        assert (mine.prompt, mine.tokens, mine.text, mine.metadata) == (
            theirs.prompt, theirs.tokens, theirs.text, theirs.metadata,
        )  # fmt: skip
        np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=TOLERANCE)
        assert (mine.events[:2], mine.events[-1]) == (["ADD_ENGINE", "ADD_CONTEXT"], "FINISH")


def test_every_rank_gets_what_it_would_make_alone_and_the_work_is_shared(nursery: Nursery) -> None:
    size = 3
    answers = run_together(nursery, size, rank_jobs.generates_twice)
    for rank, answer in enumerate(answers):
        assert_as_alone(answer["first"], share_of(rank, size))
        assert_as_alone(answer["second"], share_of(size - 1 - rank, size))
    asked = [sum(len(sample.tokens) for sample in answer["first"]) for answer in answers]
    computed = [answer["computed"] for answer in answers]
    assert sum(computed) == sum(asked)
    assert asked[-1] == 0
    assert computed[-1] > 0
    assert max(computed) / np.mean(computed) < 0.7 * max(asked) / np.mean(asked)
    for answer in answers:
        assert answer["metrics"]["rollout/requests_waiting"] == 0
        assert answer["metrics"]["rollout/requests_finished"] == len(answer["first"])
        assert ("rollout/queue_s_max" in answer["metrics"]) == bool(answer["first"])


def test_an_http_server_stands_in_front_of_all_ranks_of_a_training_job(nursery: Nursery) -> None:
    answered, _ = run_together(nursery, 2, rank_jobs.answers_over_http)
    assert answered["tokens"] == [sample.tokens for sample in alone(tuple(WORK[0]))]
    assert "ServerConfig.admin=True in front of a training job" in answered["refused"]


def test_on_one_rank_a_client_is_refused_with_the_cure() -> None:
    with RolloutManager(
        the_model(), config=InferenceConfig(kv_cache_blocks=8, advanced=Advanced(verify_model=False))
    ) as rollout:
        assert (rollout.coordinator_address, rollout.coordinator_keys) == (None, None)
        with pytest.raises(EngineStateError, match=r"no coordinator.*on one rank build LLM\(model\)"):
            rollout.client()


@pytest.mark.parametrize("after", [12, None], ids=["in a step", "between"])
def test_a_killed_coordinator_costs_nobody_anything(nursery: Nursery, after: int | None) -> None:
    for rank, (first, second) in enumerate(run_together(nursery, 2, rank_jobs.loses_its_coordinator, after=after)):
        assert_as_alone(first, WORK[rank])
        assert_as_alone(second, WORK[1 - rank])


def test_a_rank_that_does_not_hear_of_the_end_learns_it_from_the_others(nursery: Nursery) -> None:
    for rank, answer in enumerate(run_together(nursery, 2, rank_jobs.is_cut_off_at_the_end)):
        assert_as_alone(answer, [*WORK[rank], *WORK[rank]])


@pytest.mark.parametrize("what", ["worker", "coordinator"])
def test_whatever_is_cut_off_begins_anew_and_loses_nothing(nursery: Nursery, what: str) -> None:
    for rank, answer in enumerate(run_together(nursery, 2, rank_jobs.is_cut, what=what)):
        assert_as_alone(answer, [*WORK[rank], *WORK[rank]])


def test_a_rank_that_dies_takes_nothing_of_the_others_with_it(nursery: Nursery) -> None:
    answers = run_together(nursery, 2, rank_jobs.dies)
    assert answers[1] is None
    assert_as_alone(answers[0], WORK[0])


def test_a_rank_that_stalls_while_the_others_update_catches_up_with_tokens_of_its_own_versions(
    nursery: Nursery,
) -> None:
    answers = run_together(nursery, 2, rank_jobs.stalls_while_the_others_update, rounds=4)
    assert answers == [[[number] for number in range(4)]] * 2


def test_versions_count_optimizer_steps_everywhere_and_every_token_knows_its_own(nursery: Nursery) -> None:
    answers = run_together(nursery, 2, rank_jobs.trains, rounds=3)
    steps = len(answers[0]["versions"]) - 1
    assert steps >= 3
    assert [answer["versions"] for answer in answers] == [[*range(1, steps + 1), steps]] * 2
    assert max(answer["error"] for answer in answers) <= 1e-4


def test_nothing_is_thrown_away_for_its_age_when_the_ranks_pace_themselves(nursery: Nursery) -> None:
    assert run_together(nursery, 2, rank_jobs.paces) == [0, 0]


def test_a_trace_of_the_job_is_one_file_with_every_ranks_tracks(nursery, tmp_path):
    run_together(nursery, 2, rank_jobs.is_traced, folder=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.rank0.json", "step.json"]
    trace = read(tmp_path / "step.json")
    assert [engine.name for engine in trace.engines] == ["rank 0", "rank 1"]
    wanted = {(ask.n, ask.max_tokens) for rank in range(2) for ask in share_of(rank, 2)}
    assert {sample.tokens for engine in trace.engines for sample in engine.samples} == {length for _, length in wanted}
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    # Rank 1 asked for nothing and computed for rank 0, at the same time by the clock of the file.
    ranks = sorted({event["pid"] for event in events})
    first, second = ([each for each in events if (each["pid"], each.get("cat")) == (rank, "step")] for rank in ranks)
    assert first[0]["ts"] < second[-1]["ts"]
    assert second[0]["ts"] < first[-1]["ts"]
    assigned = {event["pid"] for event in events if event.get("cat") == "coordinator" and "assign" in event["name"]}
    assert len(assigned) == 2


def test_as_completed_ends_together_also_where_the_loop_is_left_early(nursery: Nursery) -> None:
    answers = run_together(nursery, 2, rank_jobs.takes_groups_as_they_end)
    for rank, answer in enumerate(answers):
        assert_as_alone(answer["all"], asks(2 + 3 * rank, 2, 20, seed=30 + rank))
    assert [answer["left"] for answer in answers] == [3, 0]
    assert [answer["rest"] for answer in answers] == [6, 0]
    assert [answer["filled"] for answer in answers] == [[3, 7, 11], [0, 1, 2]]


def test_an_abort_or_a_failure_on_one_rank_is_its_own_affair(nursery: Nursery) -> None:
    answers = run_together(nursery, 2, rank_jobs.fails_and_aborts)
    for rank, answer in enumerate(answers):
        wanted = asks(3, 2, 20, seed=50 + rank)
        assert_as_alone(answer["kept"], wanted[1:])
        assert_as_alone(answer["last"], wanted[:1])
    assert "2 of 6 samples failed" in answers[0]["broken"]
    assert "this one cannot be sent" in answers[0]["broken"]
    assert [len(sample.tokens) for sample in answers[0]["again"][2:4]] == [0, 0]
    assert answers[1]["broken"] is None
    assert_as_alone(answers[1]["again"], asks(3, 2, 20, seed=51))


def test_a_generate_that_raises_on_one_rank_goes_on_there_and_the_others_wait(nursery: Nursery) -> None:
    answers = run_together(nursery, 2, rank_jobs.raises_before_the_end)
    assert "prompts[0]" in answers[0]["said"][0]
    assert "timeout_s=0.001" in answers[0]["said"][1]
    for rank, answer in enumerate(answers):
        assert_as_alone(answer["samples"], asks(4, 2, 40, seed=60 + rank))


def test_a_rank_that_does_not_do_the_same_is_named(nursery: Nursery) -> None:
    first, second = run_together(nursery, 2, rank_jobs.does_not_come)
    assert "rank-1" in first["generate"]
    assert "control_timeout_s" in first["generate"]
    assert "rank-0 did not do the same within 2.0 s" in second["pause"]
    assert all("unpause" in said["paused"] for said in (first, second))


def test_ranks_of_different_versions_or_calls_are_told_so_all_at_once(nursery: Nursery) -> None:
    for versions, calls in run_together(nursery, 2, rank_jobs.differs):
        assert "rank-0: generate() at policy version 1" in versions
        assert "rank-1: generate() at policy version 0" in versions
        assert "hook" in versions
        assert "rank-0: generate() at policy version 1; rank-1: resume() at policy version 1" in calls


def test_what_is_paused_from_outside_while_it_trains_waits_until_it_is_let_go(nursery: Nursery) -> None:
    for rank, answer in enumerate(run_together(nursery, 2, rank_jobs.is_held_while_it_trains)):
        assert_as_alone(answer, WORK[rank])
        assert all(set(each.versions) == {1} for each in answer)


def test_each_rank_saves_its_own_groups_and_goes_on_with_them(nursery: Nursery) -> None:
    for rank, answer in enumerate(run_together(nursery, 2, rank_jobs.is_saved_and_goes_on)):
        assert_as_alone(answer, asks(5, 2, 40, seed=80 + rank))


def test_a_rank_that_cannot_join_is_named_on_the_others_with_the_reason(nursery: Nursery) -> None:
    first, second = run_together(nursery, 2, rank_jobs.cannot_join)
    assert first.startswith("ConfigError: rank 0: rank 1 could not join: UnsupportedModelError: ")
    assert second.startswith("UnsupportedModelError: ")


# --- without processes ---------------------------------------------------------------------------------------------------


def test_a_rank_that_is_not_published_is_missed_by_name() -> None:
    world = World(1, 2, dist.HashStore(), "rollout/0", one_host=True)
    with pytest.raises(DeadlineError, match=r"rank 1: rollout/0/coordinator/0 was not published within 0\.1 s"):
        world.wait_for("coordinator/0", 0.1)
    assert world.calls_ended() == 0
    world.publish_calls_ended(3)
    assert world.calls_ended() == 3


def test_why_rank_0_cannot_start_the_coordinator_is_said_on_every_rank() -> None:
    store = dist.HashStore()
    engine = make_engine("qwen3")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = CoordinatorConfig(inference_coordinator_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="another process listens there"):
            JobCoordinator(config, engine, World(0, 2, store, "rollout/0", one_host=True)).launch_or_learn()
    with pytest.raises(ConfigError, match=r"rank 1: rank 0 could not join: ConfigError: .*another process listens"):
        JobCoordinator(config, engine, World(1, 2, store, "rollout/0", one_host=True)).launch_or_learn()


@pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")
def test_off_loopback_the_other_ranks_learn_keys_that_admit_them() -> None:
    engine, store = make_engine("qwen3"), dist.HashStore()
    first, second = (
        JobCoordinator(CoordinatorConfig(host="0.0.0.0"), engine, World(rank, 2, store, "rollout/0", one_host=True))
        for rank in range(2)
    )
    first.launch_or_learn()
    assert first.handle is not None
    try:
        second.launch_or_learn()
        assert first.keys is not None
        assert (second.address, second.keys) == (first.address, first.keys.client_side())

        async def visit() -> None:
            async with second.client("friend", 60.0) as friend:
                assert (await friend.status())["state"] == "running"
            with pytest.raises(DeadlineError):
                await InferenceClient(first.address).start(1.0)

        asyncio.run(visit())
    finally:
        first.handle.stop(60.0)


def test_a_store_that_has_gone_is_no_deadline() -> None:
    class Gone(dist.HashStore):
        def wait(self, keys: list[str], timeout: Any) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(ConnectionLostError, match=r"the store of the process group is gone .*its own error says why"):
        World(1, 2, Gone(), "rollout/0", one_host=True).wait_for("coordinator/0", 120.0)


def test_one_rank_refuses_the_schedule_that_nobody_would_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schedule_output_path=.*there is one rank, and nothing to route"):
        RolloutManager(
            the_model(), None, InferenceConfig(kv_cache_blocks=64, advanced=Advanced(verify_model=False)),
            coordinator=CoordinatorConfig(schedule_output_path=str(tmp_path / "schedule.json")),
        )  # fmt: skip


def test_listening_everywhere_others_are_told_where(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 2, dist.HashStore(), "rollout/0", one_host=True)
    assert world.reachable("tcp://0.0.0.0:5000") == "tcp://127.0.0.1:5000"
    assert world.reachable("tcp://10.0.0.1:5000") == "tcp://10.0.0.1:5000"
    apart = World(0, 2, dist.HashStore(), "rollout/0", one_host=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR='localhost'.*CoordinatorConfig"):
        apart.reachable("tcp://0.0.0.0:5000")


def test_alone_there_is_no_process_no_thread_and_no_socket() -> None:
    threads = set(threading.enumerate())
    files = set(os.listdir("/proc/self/fd"))
    with RolloutManager(
        the_model(), None, InferenceConfig(kv_cache_blocks=64, advanced=Advanced(verify_model=False))
    ) as rollout:
        assert isinstance(rollout._rounds.backend, LocalBackend)
        rollout.generate([[5, 6, 7]], SamplingParams(max_tokens=4), progress=False)
        begun = {thread.name for thread in set(threading.enumerate()) - threads}
        assert not any(name.startswith("rollout") for name in begun), begun
        opened = set(os.listdir("/proc/self/fd")) - files
        for descriptor in opened:
            with suppress(FileNotFoundError):
                assert "socket" not in os.readlink(f"/proc/self/fd/{descriptor}")


def test_ranks_play_their_episodes_together_and_each_gets_its_own(nursery) -> None:
    busy, helping = run_together(nursery, 2, rank_jobs.plays)
    assert busy["rewards"] == [1.0] * 12
    assert helping["rewards"] == []
    assert busy["sampled"] == 12 * 3 * 4
    assert helping["steps"] > 0
    for answer in (busy, helping):
        assert answer["error"] < 1e-4
        assert answer["versions"] == [1]
