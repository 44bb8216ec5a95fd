"""Tests of `JobLLM` against a coordinator made of a ROUTER socket: what a reader sees when it is lost and replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.client.futures import RequestStream
from rollout.distributed.client.text_stream import TextDelta
from rollout.distributed.protocol.messages import Refused, Submit
from rollout.errors import RequestTimeoutError
from rollout.llm.job_llm import JobLLM
from rollout.sampling_params import SamplingParams
from tests.distributed.client.test_client import PROMPT, part
from tests.distributed.fake_coordinator import FakeCoordinator
from tests.engines import make_engine
from tests.models import make_tokenizer

PATIENCE_S = 100.0
GONE = Refused("unknown_peer", "no session at this coordinator", over=True)
"""What a coordinator says that has taken the place, and the port, of one that died."""


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


def test_a_stream_goes_on_after_what_it_has_said_when_the_coordinator_is_replaced(
    job: Job, fake: FakeCoordinator
) -> None:
    async def play(llm: JobLLM) -> tuple[list[TextDelta], RequestStream]:
        stream = llm.stream(PROMPT, SamplingParams(n=2, max_tokens=6, ignore_eos=True), timeout_s=1000)
        deltas = aiter(stream)
        number = submitted(fake).request_id
        fake.say(fake.peers[0], part(number, 2, 0, [10, 11], last=False))
        seen = await read(deltas, 4)
        # Sample 1 ends; sample 0 is in the middle of its completion.
        ended = part(number, 2, 2, [12, 13], last=True)
        ended.stretches = [ended.stretches[0].only([1])]
        fake.say(fake.peers[0], ended)
        seen += await read(deltas, 2)
        fake.say(fake.peers[0], GONE)
        again = submitted(fake)
        assert again.wanted == [0]
        assert again.timeout_s is not None
        assert 0 < again.timeout_s < 1000
        assert [(row.indices, row.starts, row.counts) for row in again.known] == [([0], [0], [2])]
        fake.say(fake.peers[1], part(again.request_id, 1, 2, [14, 15], last=True))
        return seen + [delta async for delta in deltas], stream

    with JobLLM(job) as llm:  # type: ignore[arg-type]
        seen, stream = asyncio.run(asyncio.wait_for(play(llm), PATIENCE_S))
    assert not any(delta.restarted for delta in seen)
    for index, tokens in enumerate(([10, 11, 14, 15], [10, 11, 12, 13])):
        mine = [delta for delta in seen if delta.sample_index == index]
        assert [token for delta in mine for token in delta.token_ids] == tokens
        assert stream.results[index].generated_tokens == tokens
        assert "".join(delta.text for delta in mine) == job.tokenizer.decode(tokens)
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == ["length"]


def test_a_request_whose_time_is_over_does_not_wait_for_the_next_coordinator(job: Job, fake: FakeCoordinator) -> None:
    with JobLLM(job) as llm:  # type: ignore[arg-type]
        asked = llm.submit(PROMPT, SamplingParams(max_tokens=4), timeout_s=0.1)
        submitted(fake)
        fake._greet = False
        fake.say(fake.peers[0], GONE)
        with pytest.raises(RequestTimeoutError, match="its timeout_s has passed while the coordinator was replaced"):
            asked.result(PATIENCE_S)
        # Nor does one that is submitted meanwhile.
        with pytest.raises(RequestTimeoutError, match="its timeout_s has passed while the coordinator was replaced"):
            llm.submit(PROMPT, SamplingParams(max_tokens=4), timeout_s=0.1).result(PATIENCE_S)
        assert llm.num_open == 0
