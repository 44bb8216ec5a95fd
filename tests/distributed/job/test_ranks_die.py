"""Tests with ranks, clients and coordinators killed, stopped and continued as real processes: no loss, no duplicates."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import pytest

from rollout.distributed.client.client import InferenceClient
from rollout.errors import ConnectionLostError
from rollout.requests.request import DynamicInferenceRequest
from tests.distributed.job.job_ranks import (
    SOON_SILENT,
    Ask,
    Ranks,
    Watched,
    all_of,
    asks,
    assert_same,
    completion_versions,
    coordinator,
    eventually,
    grown,
    job,
    nothing_is_open,
    ready,
    undisturbed,
)
from tests.distributed.job.nursery import PATIENCE_S, Nursery
from tests.engines import greedily, token_ids

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning:transformers")]

OPEN_AT_ONCE = 32
"""Groups that a client waits for."""


@dataclass(frozen=True)
class Answer:
    """A group as it came, and the job's policy version when it was asked for and when it had ended."""

    number: int
    results: Sequence[DynamicInferenceRequest]
    asked_under: int
    ended_under: int


class Asking:
    """A client that waits for many groups at once, and asks the same ones over and over until it is told to stop."""

    def __init__(self, client: InferenceClient, asked: Sequence[Ask]) -> None:
        self.answers: list[Answer] = []
        self._client = client
        self._asked = asked
        self._numbers = cycle(range(len(asked)))
        self._enough = False
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(OPEN_AT_ONCE)]

    async def _ask(self) -> None:
        while not self._enough:
            number = next(self._numbers)
            ask, version = self._asked[number], self._client.policy_version or 0
            results = await self._client.add_request(list(ask.prompt), ask.params)
            self.answers.append(Answer(number, results, version, self._client.policy_version or 0))

    async def all_answered(self) -> None:
        """Ask no more, and wait for what is open."""
        self._enough = True
        await asyncio.gather(*self._tasks)


@pytest.mark.slow
def test_ranks_are_killed_at_random_and_every_result_is_that_of_an_undisturbed_engine(nursery: Nursery) -> None:
    size, kills = 3, 10
    asked = asks(60, seed=size)
    expected = undisturbed(asked)
    dice = random.Random(size)

    async def play() -> list[Answer]:
        async with job(nursery, size) as (ranks, client):
            asking = Asking(client, asked)
            for kill in range(kills):
                await asyncio.sleep(dice.uniform(0, 0.3))
                name = f"rank-{dice.randrange(size)}"
                await asyncio.to_thread(ranks[name].kill)
                # With and without a time in which nobody has that name.
                await asyncio.sleep(dice.choice([0, dice.uniform(0, 0.4)]))
                await asyncio.to_thread(ranks.begin, name)
                if kill % 5 == 4:
                    await client.set_policy_version(1 + kill // 5)
            await asking.all_answered()
            await nothing_is_open(client, ranks)
        return asking.answers

    answers = asyncio.run(play())
    assert {answer.number for answer in answers} == set(range(len(asked)))
    for answer in answers:
        assert_same(answer.results, expected[answer.number])
        for result in answer.results:
            versions = completion_versions(result)
            assert len(versions) == len(result.generated_tokens)
            assert versions == sorted(versions)
            # A new version is known to ranks before their caller hears that all have it.
            assert answer.asked_under <= versions[0]
            assert versions[-1] <= answer.ended_under + 1


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_and_what_it_says_when_it_wakes_is_refused(nursery: Nursery) -> None:
    asked = [Ask(tuple(token_ids(20, seed)), greedily(800)) for seed in range(4)]
    few = asks(24, seed=6)
    expected, expected_of_few = undisturbed(asked), undisturbed(few)

    async def play() -> None:
        async with job(nursery, 2, **SOON_SILENT) as (ranks, client):
            ranks.let_make(400)
            watched = [Watched(client, ask) for ask in asked]
            await grown(watched, 50)
            assert all(seen["requests_running"] == 2 for seen in ranks.look_at_all())
            ranks["rank-1"].signal(signal.SIGSTOP)
            await ready(client, "rank-0")
            ranks.let_make(math.inf, "rank-0")
            await grown(watched, 50)
            # It goes on with what others have by now, until it reads that it may not.
            ranks["rank-1"].signal(signal.SIGCONT)
            ranks.let_make(math.inf)
            for each, others in zip(watched, expected, strict=True):
                assert_same(await each.result(), others)
            await nothing_is_open(client, ranks)
            zombie = ranks.look("rank-1")
            assert "the coordinator has ended the session" in zombie["losses"][0]
            for results, others in zip(await all_of(client, few), expected_of_few, strict=True):
                assert_same(results, others)
            assert ranks.look("rank-1")["generated_tokens"] > zombie["generated_tokens"]
            await nothing_is_open(client, ranks)

    asyncio.run(play())


def test_a_coordinator_ends_and_everybody_notices_and_ranks_come_back_to_the_next_one(nursery: Nursery) -> None:
    asked = asks(20, seed=7)
    expected = undisturbed(asked)

    async def play() -> None:
        with coordinator(**SOON_SILENT) as first, nursery.children() as family:
            ranks = Ranks(nursery, family, first.address)
            for name in ("rank-0", "rank-1"):
                ranks.begin(name)
            async with asyncio.timeout(PATIENCE_S):
                client = InferenceClient(first.address)
                await client.start()
                await ready(client, *ranks.names)
                ranks.let_make(400)
                futures = [client.add_request(token_ids(20, seed), greedily(8000)) for seed in range(8)]
                await eventually(lambda: all(seen["generated_tokens"] for seen in ranks.look_at_all()))
                first.kill()
                for outcome in await asyncio.gather(*futures, return_exceptions=True):
                    assert isinstance(outcome, ConnectionLostError)
                with pytest.raises(ConnectionLostError):
                    client.add_request([1, 2, 3])
                await eventually(lambda: all(seen["losses"] for seen in ranks.look_at_all()))
                ranks.let_make(math.inf)
                assert ranks.are_idle()
                port = int(first.address.rpartition(":")[2])
                with coordinator(inference_coordinator_port=port) as second:
                    assert second.address == first.address
                    async with InferenceClient(second.address) as other:
                        await ready(other, *ranks.names)
                        for results, others in zip(await all_of(other, asked), expected, strict=True):
                            assert_same(results, others)
                        await nothing_is_open(other, ranks)

    asyncio.run(play())


def test_a_killed_rank_is_noticed_at_once_although_a_child_that_it_has_forked_lives_on(nursery: Nursery) -> None:
    asked = asks(8, seed=11)
    expected = undisturbed(asked)

    async def play() -> None:
        async with job(nursery, 1, heartbeat_timeout_s=60.0) as (ranks, client):
            ranks.begin("rank-1", forks=True)
            await ready(client, "rank-0", "rank-1")
            ranks.let_make(20)
            asking = [client.add_request(list(ask.prompt), ask.params) for ask in asked]
            await eventually(lambda: ranks.look("rank-1")["unfinished"])
            pipe = ranks["rank-1"].pipe.fileno()
            with os.fdopen(os.dup(pipe), "rb"):
                ranks["rank-1"].kill()
                await ready(client, "rank-0")
            ranks.let_make(math.inf, "rank-0")
            for results, others in zip(await asyncio.gather(*asking), expected, strict=True):
                assert_same(results, others)

    asyncio.run(play())


@pytest.mark.slow
def test_ranks_are_paused_suspended_resumed_and_told_versions_while_requests_run(nursery: Nursery) -> None:
    asked = [Ask(tuple(token_ids(10 + seed, seed)), greedily(450, n=1 + seed % 2)) for seed in range(8)]
    expected = undisturbed(asked)
    lengths: list[list[list[int]]] = []
    """Per new version, the tokens that each sample had when it came."""

    async def play() -> list[Sequence[DynamicInferenceRequest]]:
        async with job(nursery, 2) as (ranks, client):
            watched = [Watched(client, ask) for ask in asked]

            async def stands_still() -> None:
                known = sum(sum(each.counts) for each in watched)
                # What was made before a pause was said before it was acknowledged.
                assert sum(seen["generated_tokens"] for seen in ranks.look_at_all()) == known

            for version, mode in enumerate((None, "offload", "recompute", None, "offload", "recompute"), start=1):
                await grown(watched, 40)
                await client.pause_engines()
                await stands_still()
                if mode is not None:
                    await client.suspend_engines(mode)
                    assert {seen["state"] for seen in ranks.look_at_all()} == {"suspended"}
                await client.set_policy_version(version)
                lengths.append([list(each.counts) for each in watched])
                if mode is not None:
                    await client.resume_engines()
                await asyncio.sleep(0.1)
                await stands_still()
                await client.unpause_engines()
            results = [await each.result() for each in watched]
            await nothing_is_open(client, ranks)
        return results

    for number, results in enumerate(asyncio.run(play())):
        assert_same(results, expected[number])
        for result in results:
            marks = [counts[number][result.sample_index] for counts in lengths]
            assert completion_versions(result) == [sum(mark <= place for mark in marks) for place in range(450)]
