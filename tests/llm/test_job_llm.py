"""Tests of `JobLLM` against a coordinator made of a ROUTER socket: what a reader sees when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.client.text_stream import TextDelta
from rollout.distributed.protocol.messages import Refused, Submit
from rollout.errors import ConnectionLostError, EngineStateError
from rollout.llm.job_llm import JobLLM
from rollout.sampling_params import SamplingParams
from tests.distributed.client.test_client import PROMPT, part
from tests.distributed.fake_coordinator import FakeCoordinator
from tests.engines import PATIENCE_S, make_engine
from tests.models import make_tokenizer

GONE = Refused("unknown_peer", "no session at this coordinator", over=True)
"""The reply of a coordinator without a session of this client."""


class Job:
    """The part of a manager that a `JobLLM` uses."""

    def __init__(self) -> None:
        self.engine = make_engine("qwen3", make_tokenizer())
        self.model, self.config = self.engine.model, self.engine.config
        self.tokenizer = self.engine.controller.tokenizer
        self.address = ""

    def client(self, name: str = "agent") -> InferenceClient:
        return InferenceClient(self.address, name=name)


@pytest.fixture(scope="module")
def job() -> Job:
    return Job()


@pytest.fixture
def fake(job: Job) -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as made:
        job.address = made.address
        yield made


def submitted(fake: FakeCoordinator) -> Submit:
    message = fake.hear(Submit)
    assert isinstance(message, Submit)
    return message


async def read(deltas: AsyncIterator[TextDelta], tokens: int) -> list[TextDelta]:
    """Read until so many tokens have come."""
    seen: list[TextDelta] = []
    while sum(len(delta.token_ids) for delta in seen) < tokens:
        seen.append(await anext(deltas))
    return seen


def test_a_lost_coordinator_ends_open_requests_after_what_has_come_and_refuses_new_ones(
    job: Job, fake: FakeCoordinator
) -> None:
    async def play(llm: JobLLM) -> list[TextDelta]:
        deltas = aiter(llm.stream(PROMPT, SamplingParams(n=2, max_tokens=6, ignore_eos=True)))
        number = submitted(fake).request_id
        fake.say(fake.peers[0], part(number, 2, 0, [10, 11], last=False))
        seen = await read(deltas, 4)
        # Sample 1 ends; sample 0 is in the middle of its completion.
        ended = part(number, 2, 2, [12, 13], last=True)
        ended.stretches = [ended.stretches[0].only([1])]
        fake.say(fake.peers[0], ended)
        seen += await read(deltas, 2)
        fake.say(fake.peers[0], GONE)
        with pytest.raises(ConnectionLostError, match="no session at this coordinator"):
            await anext(deltas)
        return seen

    with JobLLM(job) as llm:  # type: ignore[arg-type]
        seen = asyncio.run(asyncio.wait_for(play(llm), PATIENCE_S))
        assert llm.num_open == 0
        with pytest.raises(ConnectionLostError, match="no session at this coordinator"):
            llm.submit(PROMPT, max_tokens=4)
    llm.close()
    with pytest.raises(EngineStateError, match="was closed"):
        llm.submit(PROMPT, max_tokens=4)
    for index, tokens in enumerate(([10, 11], [10, 11, 12, 13])):
        mine = [delta for delta in seen if delta.sample_index == index]
        assert [token for delta in mine for token in delta.token_ids] == tokens
        assert "".join(delta.text for delta in mine) == job.tokenizer.decode(tokens)
    assert [delta.finish_reason for delta in seen if delta.finish_reason] == ["length"]
