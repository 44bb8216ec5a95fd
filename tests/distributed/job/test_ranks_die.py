"""Tests of real ranks that are killed, stopped, paused and updated at random: no loss, no duplicate, the right tokens."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.coordinator.launch import launch_coordinator
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.configs import coordinator_config
from tests.distributed.job.nursery import PATIENCE_S, Nursery
from tests.distributed.job.rank_jobs import serves, serving_engine
from tests.engines import at_random, finish, greedily, token_ids

pytestmark = pytest.mark.distributed

SIZE, EVENTS, OPEN_AT_ONCE = 3, 12, 32
SILENT_S = 2.5
"""Silence after which a rank counts as dead."""
TOLERANCE = 1e-5
"""Between log-probs of two engines with equal weights in fp32."""


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    params: SamplingParams


def asks(count: int) -> list[Ask]:
    """Groups of one to four, greedy and at random, some with a prompt that begins like another's."""
    rng = random.Random(SIZE)
    made = []
    for number in range(count):
        beginning = token_ids(32, rng.randrange(4)) if number % 3 else []
        options = {"n": rng.randint(1, 4), "seed": rng.randrange(2**40)}
        length = rng.randint(20, 60)
        params = greedily(length, **options) if number % 2 else at_random(length, **options)
        if number % 5 == 0:
            params = params.replace(temperature=0.8, top_p=0.9, repetition_penalty=1.1)
        made.append(Ask([*beginning, *token_ids(rng.randint(3, 40), rng.randrange(2**32))], params))
    return made


def undisturbed(asked: Sequence[Ask]) -> list[list[DynamicInferenceRequest]]:
    alone = serving_engine()
    for ask in asked:
        alone.add_request(ask.prompt, ask.params)
    ended = finish(alone)
    return [[ended[number, index] for index in range(ask.params.n)] for number, ask in enumerate(asked)]


def assert_same(results: Sequence[DynamicInferenceRequest], expected: Sequence[DynamicInferenceRequest]) -> None:
    """Token for token what an undisturbed engine makes, and as likely."""
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        assert result.error is None
        assert (result.sample_index, result.finish_reason) == (other.sample_index, other.finish_reason)
        assert result.generated_tokens == other.generated_tokens
        np.testing.assert_allclose(result.generated_log_probs, other.generated_log_probs, atol=TOLERANCE)


@dataclass(frozen=True)
class Answer:
    """A group as it came, and the job's policy version when it was asked for and when it had ended."""

    number: int
    results: Sequence[DynamicInferenceRequest]
    asked_under: int
    ended_under: int


async def settled(client: InferenceClient) -> dict[str, Any]:
    """The status, once every rank is there and nothing is left of any request."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        table = await client.status()
        ranks = [each["ready"] and not each["assigned_samples"] for each in table["ranks"]]
        if ranks == [True] * SIZE and not table["queued_samples"]:
            return table
        assert time.monotonic() < deadline, table
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_whatever_happens_to_ranks_every_result_is_that_of_an_undisturbed_engine(nursery: Nursery) -> None:
    asked = asks(40)
    expected = undisturbed(asked)
    answers: list[Answer] = []
    dice = random.Random(SIZE)
    numbers, enough = cycle(range(len(asked))), asyncio.Event()

    async def ask_over_and_over(client: InferenceClient) -> None:
        while not enough.is_set():
            number, version = next(numbers), client.policy_version or 0
            results = await client.add_request(asked[number].prompt, asked[number].params)
            answers.append(Answer(number, results, version, client.policy_version or 0))

    async def disturb(client: InferenceClient, ranks: dict[str, Any], address: str) -> None:
        for event in range(EVENTS):
            await asyncio.sleep(dice.uniform(0, 0.3))
            name = dice.choice(sorted(ranks))
            if event % 4 == 3:
                await client.pause_engines()
                mode = dice.choice([None, "offload", "recompute"])
                if mode is not None:
                    await client.suspend_engines(mode)
                await client.set_policy_version((client.policy_version or 0) + 1)
                if mode is not None:
                    await client.resume_engines()
                await client.unpause_engines()
            elif event == 4:
                # When it continues, it reports tokens that others have computed again.
                ranks[name].signal(signal.SIGSTOP)
                await asyncio.sleep(2 * SILENT_S)
                ranks[name].signal(signal.SIGCONT)
            else:
                await asyncio.to_thread(ranks[name].kill)
                # With and without a time in which nobody has that name.
                await asyncio.sleep(dice.choice([0, dice.uniform(0, 0.4)]))
                ranks[name] = await asyncio.to_thread(nursery.child, serves, name=name, address=address)

    async def play() -> dict[str, Any]:
        handle = launch_coordinator(
            coordinator_config(data_parallel_size=SIZE, heartbeat_timeout_s=SILENT_S, progress_interval=4)
        )
        ranks: dict[str, Any] = {}
        try:
            for number in range(SIZE):
                ranks[f"rank-{number}"] = nursery.child(serves, name=f"rank-{number}", address=handle.address)
            async with asyncio.timeout(PATIENCE_S), InferenceClient(handle.address) as client:
                await settled(client)
                asking = [asyncio.create_task(ask_over_and_over(client)) for _ in range(OPEN_AT_ONCE)]
                await disturb(client, ranks, handle.address)
                enough.set()
                await asyncio.gather(*asking)
                return await settled(client)
        finally:
            handle.kill()
            for child in ranks.values():
                child.kill()

    table = asyncio.run(play())
    assert [each["open_requests"] for each in table["clients"]] == [0]
    assert {answer.number for answer in answers} == set(range(len(asked)))
    for answer in answers:
        assert_same(answer.results, expected[answer.number])
        for result in answer.results:
            versions = result.policy_spans.dense()[len(result.prompt_tokens) :].tolist()
            assert len(versions) == len(result.generated_tokens)
            assert versions == sorted(versions)
            # A new version is known to ranks before their caller hears that all have it.
            assert answer.asked_under <= versions[0]
            assert versions[-1] <= answer.ended_under + 1
