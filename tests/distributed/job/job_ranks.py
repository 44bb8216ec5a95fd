"""Processes of the job tests: ranks with a real engine, a client in a loop.

All ranks have equal weights, so that their joint results can be compared with one undisturbed engine.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import select
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.coordinator.launch import CoordinatorHandle, launch_coordinator
from rollout.distributed.worker.worker import EngineWorker
from rollout.engine.engine import DynamicInferenceEngine
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.configs import coordinator_config
from tests.distributed.job.nursery import PATIENCE_S, Child, Nursery, answer
from tests.engines import at_random, finish, gated, greedily, make_engine, token_ids
from tests.models import make_model

BLOCK_SIZE = 16
LONGEST = 8192
"""Tokens of a sequence."""
PACE_S = 0.02
"""Between two looks at another process."""
TOLERANCE = 1e-5
"""Between log-probs of two engines with equal weights in fp32."""

HEARTBEATS = {"heartbeat_timeout_s": 20.0}
SOON_SILENT = {"heartbeat_timeout_s": 2.5}
"""For tests that wait for it; on a machine with much else to do, others would be taken for dead."""


# --- in a child -------------------------------------------------------------------------------------------------------


@cache
def model() -> PreTrainedModel:
    return make_model("llama", num_hidden_layers=2, max_position_embeddings=LONGEST)


def engine(**options: Any) -> DynamicInferenceEngine:
    room = {"block_size_tokens": BLOCK_SIZE, "kv_cache_blocks": 4096, "max_requests": 16, "max_tokens_per_step": 128}
    return make_engine(model(), **(room | options))


def rank(pipe: Connection, name: str, address: str, forks: bool = False) -> None:
    """A training process without its training loop; it answers every question with how its engine stands, also the one
    whether it may make so many tokens and no more.

    Args:
        forks: begin with a child that outlives it, up to the end of the test.
    """
    torch.set_num_threads(1)
    mine, losses = engine(), []
    worker = EngineWorker(mine, address, name=name, on_lost=lambda reason: losses.append(str(reason)))

    with gated(mine, math.inf) as gate:

        def look(tokens: float | None) -> dict[str, Any]:
            gate.tokens = gate.tokens if tokens is None else tokens
            with mine.locked():
                return mine.stats() | {"state": mine.state.value, "unfinished": mine.has_unfinished, "losses": losses}

        answer(pipe, look)
        worker.start()
        if forks and not os.fork():
            hangup = select.poll()
            hangup.register(pipe, 0)
            hangup.poll()
            os._exit(0)
        worker.run()


def asks_for_ever(pipe: Connection, address: str) -> None:
    """A client whose requests do not end while a test lasts; it says when the first tokens have come."""

    async def ask() -> None:
        async with InferenceClient(address, name="asks-for-ever") as client:
            streams = [client.add_request_streaming(token_ids(20, seed), greedily(8000, n=4)) for seed in range(5)]
            async for _ in streams[0]:
                pipe.send("served")
                await asyncio.sleep(PATIENCE_S)

    asyncio.run(ask())


# --- in the test ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """What is asked of the ranks, and of an engine that nobody disturbs."""

    prompt: tuple[int, ...]
    params: SamplingParams


def asks(count: int, seed: int) -> list[Ask]:
    """Groups of one to four, greedy and at random, some with a prompt that begins like another's."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        beginning = token_ids(32, rng.randrange(4)) if number % 3 else []
        options = {"n": rng.randint(1, 4), "seed": rng.randrange(2**40)}
        length = rng.randint(20, 60)
        params = greedily(length, **options) if number % 2 else at_random(length, **options)
        if number % 5 == 0:
            params = params.replace(temperature=0.8, top_p=0.9, repetition_penalty=1.1)
        made.append(Ask((*beginning, *token_ids(rng.randint(3, 40), rng.randrange(2**32))), params))
    return made


def undisturbed(asked: Sequence[Ask], **options: Any) -> list[list[DynamicInferenceRequest]]:
    """What one engine makes of them, their numbers in order."""
    alone = engine(**options)
    for ask in asked:
        alone.add_request(list(ask.prompt), ask.params)
    ended: dict[tuple[int, int], DynamicInferenceRequest] = {}
    while alone.has_unfinished:
        ended |= {(record.request_id, record.sample_index): record.merge() for record in alone.step()}
    assert not finish(alone)
    return [[ended[number, index] for index in range(ask.params.n)] for number, ask in enumerate(asked)]


def assert_same(results: Sequence[DynamicInferenceRequest], expected: Sequence[DynamicInferenceRequest]) -> None:
    """Token for token what an undisturbed engine makes, and as likely."""
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        assert result.error is None
        assert (result.sample_index, result.finish_reason) == (other.sample_index, other.finish_reason)
        assert result.generated_tokens == other.generated_tokens
        assert len(result.generated_log_probs) == len(other.generated_log_probs)
        distance = np.abs(np.array(result.generated_log_probs) - np.array(other.generated_log_probs)).max()
        assert distance <= TOLERANCE


def completion_versions(request: DynamicInferenceRequest) -> list[int]:
    versions: list[int] = request.policy_spans.dense().tolist()
    return versions[len(request.prompt_tokens) :]


class Ranks:
    def __init__(self, nursery: Nursery, family: list[Child], address: str) -> None:
        self.address = address
        self._nursery = nursery
        self._family = family
        self._by_name: dict[str, Child] = {}

    def begin(self, name: str, **options: Any) -> None:
        """A process of that name, in the place of an earlier one that was killed; `options` of `rank`."""
        born = self._nursery.child(rank, name=name, address=self.address, **options)
        self._family.append(born)
        self._by_name[name] = born

    def __getitem__(self, name: str) -> Child:
        return self._by_name[name]

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    def look(self, name: str) -> dict[str, Any]:
        """How a rank's engine stands, between two steps."""
        seen: dict[str, Any] = self._by_name[name].ask(None)
        return seen

    def let_make(self, tokens: float, *names: str) -> None:
        """No step is made by these ranks, or all, once they have made so many tokens, whatever is open."""
        for name in names or self.names:
            self._by_name[name].ask(tokens)

    def look_at_all(self) -> list[dict[str, Any]]:
        return [self.look(name) for name in self.names]

    def are_idle(self) -> bool:
        return not any(seen["unfinished"] or seen["kv_blocks_used"] for seen in self.look_at_all())


@contextmanager
def coordinator(**options: Any) -> Iterator[CoordinatorHandle]:
    """A coordinator's process; nothing is left of it in the end."""
    config = coordinator_config(**({"progress_interval": 4} | HEARTBEATS | options))
    handle = launch_coordinator(config)
    try:
        yield handle
    finally:
        handle.kill()


@asynccontextmanager
async def job(nursery: Nursery, size: int, **options: Any) -> AsyncIterator[tuple[Ranks, InferenceClient]]:
    """Coordinator, ranks `rank-0` … and a client; all that happens inside has a deadline."""
    with coordinator(data_parallel_size=size, **options) as handle, nursery.children() as family:
        ranks = Ranks(nursery, family, handle.address)
        for number in range(size):
            ranks.begin(f"rank-{number}")
        async with asyncio.timeout(PATIENCE_S), InferenceClient(handle.address) as client:
            await ready(client, *ranks.names)
            yield ranks, client


async def eventually(holds: Callable[[], bool]) -> None:
    """Look until it holds; meanwhile the client goes on."""
    deadline = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < deadline, "it has never come true"
        await asyncio.sleep(PACE_S)


async def ready(client: InferenceClient, *names: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        table = await client.status()
        if [each["name"] for each in table["ranks"] if each["ready"]] == sorted(names):
            return
        assert time.monotonic() < deadline, table
        await asyncio.sleep(PACE_S)


async def all_of(client: InferenceClient, asked: Sequence[Ask]) -> list[Sequence[DynamicInferenceRequest]]:
    return await asyncio.gather(*(client.add_request(list(ask.prompt), ask.params) for ask in asked))


async def nothing_is_open(client: InferenceClient, ranks: Ranks) -> None:
    """All ranks are there, and neither at the coordinator nor at one of them is anything left."""
    await ready(client, *ranks.names)
    table = await client.status()
    assert table["queued_samples"] == 0
    assert not any(each["assigned_samples"] for each in table["ranks"])
    assert [each["open_requests"] for each in table["clients"]] == [0]
    await eventually(ranks.are_idle)
    assert client.lost is None


class Watched:
    """A request whose tokens are counted as they come."""

    def __init__(self, client: InferenceClient, ask: Ask, interval: int = 4) -> None:
        self.ask = ask
        self.counts = [0] * ask.params.n
        self.group = client.open_group(list(ask.prompt), ask.params, interval=interval)
        self._ended = asyncio.Event()
        self.group.on_update = self._take
        self.group.on_done = lambda _: self._ended.set()

    def _take(self, _: Any, stretch: Any) -> None:
        for delta in stretch.deltas():
            assert delta.start == self.counts[delta.sample_index], "tokens came twice, or some are missing"
            self.counts[delta.sample_index] += delta.count

    async def result(self) -> Sequence[DynamicInferenceRequest]:
        await self._ended.wait()
        return self.group.result()


async def grown(watched: Sequence[Watched], tokens: int) -> None:
    """Wait until every sample has that many tokens more than now, or its group has ended."""
    wanted = [[count + tokens for count in each.counts] for each in watched]
    await eventually(
        lambda: all(
            group.group.done or all(count >= goal for count, goal in zip(group.counts, goals, strict=True))
            for group, goals in zip(watched, wanted, strict=True)
        )
    )
