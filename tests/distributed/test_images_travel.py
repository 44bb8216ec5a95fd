"""Tests of images between ranks: a prompt's images go from a client through the coordinator to the rank that computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.distributed.client.session import ClientSession
from rollout.distributed.protocol.frames import MAX_REQUEST_BYTES
from rollout.distributed.protocol.messages import Assign, Decline, Message, Progress, RegisterAck, Update
from rollout.distributed.worker.session import RankSession
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import InvalidRequestError
from rollout.requests.images import ImagePrompt, processed_prompt
from rollout.requests.request import VLMInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.distributed.coordinator.job import BLOCK, Job, Line
from tests.engines import finish, greedily, make_engine
from tests.vision_models import NO_MARKS, picture_prompt, shared_vision_model

NAME = "qwen2_5_vl"
PARTS = (3, "a", 5, "b", 4)
LIKELIEST = greedily(8, n=2, logit_bias=NO_MARKS)


class Rank:
    """An engine of a vision model behind a coordinator's core."""

    def __init__(self, job: Job, name: str) -> None:
        self.line: Line = job.rank(name)
        self.engine: DynamicInferenceEngine = make_engine(shared_vision_model(NAME), block_size_tokens=BLOCK)
        self.session = RankSession(self.engine, self._say, idle=lambda: False)
        self.engine.track_prefix_cache(self.session.changes)
        assert isinstance(self.line.told, RegisterAck)
        self.session.receive(self.line.told)

    def _say(self, message: Message) -> None:
        if isinstance(message, Progress | Decline):
            self.line.say(message)

    def assigned(self) -> Assign:
        message = self.line.assigned()
        self.session.receive(message)
        return message

    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_unfinished:
                self.session.report(self.engine.step())


def asking(job: Job) -> tuple[Line, ClientSession]:
    line = job.client()
    return line, ClientSession(lambda message: line.say(message))


def hear(line: Line, session: ClientSession) -> None:
    while line.heard:
        session.receive(line.hear(Update))


def checked(rank: Rank, inputs: dict[str, torch.Tensor]) -> ImagePrompt:
    """A prompt as a rank's own loop submits it: with the keys that blocks are hashed by."""
    prompt = rank.engine.check_request(inputs, LIKELIEST)
    assert isinstance(prompt, ImagePrompt)
    return prompt


@pytest.fixture(scope="module")
def alone() -> list[VLMInferenceRequest]:
    engine = make_engine(shared_vision_model(NAME), block_size_tokens=BLOCK)
    engine.add_request(picture_prompt(NAME, PARTS), LIKELIEST)
    requests: list[Any] = list(finish(engine).values())
    return requests


def assert_as_alone(result: Any, alone: list[VLMInferenceRequest]) -> None:
    for mine, theirs in zip(result, alone, strict=True):
        assert isinstance(mine, VLMInferenceRequest)
        assert mine.generated_tokens == theirs.generated_tokens
        assert mine.precomputed_block_hashes == theirs.precomputed_block_hashes
        assert mine.images is not None
        assert theirs.images is not None
        assert mine.images.digest == theirs.images.digest


def test_a_group_with_images_comes_back_with_them_and_is_what_one_engine_makes(
    alone: list[VLMInferenceRequest],
) -> None:
    job = Job()
    rank = Rank(job, "rank")
    line, session = asking(job)
    group = session.submit(checked(rank, picture_prompt(NAME, PARTS)), LIKELIEST)
    rank.assigned()
    rank.step(50)
    hear(line, session)
    assert_as_alone(group.result(), alone)
    assert isinstance(group.request(1), VLMInferenceRequest)


@pytest.mark.parametrize("steps", [1, 4])
def test_when_a_rank_dies_another_goes_on_with_the_same_images(steps: int, alone: list[VLMInferenceRequest]) -> None:
    job = Job()
    first = Rank(job, "first")
    line, session = asking(job)
    # A client without an engine sends what its processor returned; it knows no keys.
    group = session.submit(picture_prompt(NAME, PARTS), LIKELIEST.replace(seed=alone[0].seed), interval=1)
    first.assigned()
    first.step(steps)
    second = Rank(job, "second")
    job.wait(30.0, silent=[first.line])
    second.assigned()
    second.step(50)
    hear(line, session)
    made = [request.generated_tokens for request in group.result()]
    assert made == [request.generated_tokens for request in alone]


def matches(*parts: tuple[int | str, ...], keyed: bool) -> list[int]:
    """Blocks found on the rank that each of several prompts in turn is sent to, of two ranks."""
    job = Job()
    ranks = [Rank(job, "one"), Rank(job, "two")]
    line, session = asking(job)
    found = []
    for each in parts:
        inputs = picture_prompt(NAME, each)
        session.submit(checked(ranks[0], inputs) if keyed else inputs, LIKELIEST)
        for rank in ranks:
            if rank.line.heard:
                rank.assigned()
                rank.step(50)
        hear(line, session)
        (decision,) = job.core.take_decisions()
        found.append(decision.num_matched)
    return found


def test_prompts_are_routed_to_where_their_images_are_cached() -> None:
    """Prompts that differ in their second image alone share the blocks before it, equal ones all."""
    whole = len(picture_prompt(NAME, PARTS)["input_ids"][0]) // BLOCK
    first, second, third = matches(PARTS, PARTS, (3, "a", 5, "d", 4), keyed=True)
    assert (first, second) == (0, whole)
    assert 0 < third < whole


def test_images_of_a_client_that_knows_no_keys_are_never_taken_for_others() -> None:
    assert matches(PARTS, PARTS, keyed=False) == [0, 0]


def test_images_larger_than_a_request_may_be_are_refused_with_the_cure_and_nothing_is_sent() -> None:
    sent: list[Message] = []
    session = ClientSession(sent.append)
    inputs = picture_prompt(NAME, ["a"]) | {"pixel_values": torch.zeros(MAX_REQUEST_BYTES // 4)}
    with pytest.raises(
        InvalidRequestError, match=r"bytes of images with 0 known: .* smaller images, or .*coordinator=False"
    ):
        session.submit(processed_prompt(inputs), SamplingParams())
    assert not sent
