"""Tests of the launcher's secret: what is published, who is admitted, and which ranks are refused by name."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from pathlib import Path

import pytest
import zmq

from rollout.config import CoordinatorConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.job_coordinator import SECRET, SECRET_FILE, JobCoordinator, JobSecret
from rollout.distributed.job.world import World
from rollout.distributed.transport.keys import JobKeys
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError, DeadlineError
from tests.distributed.job.test_data_parallel import OneHostStore
from tests.engines import make_engine

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE"),
]

ONE, OTHER = "1" * 64, "2" * 64


@cache
def engine() -> DynamicInferenceEngine:
    return make_engine("qwen3")


def rank(number: int, store: OneHostStore) -> JobCoordinator:
    world = World(number, 2, store, "rollout/0", one_host=True)
    return JobCoordinator(CoordinatorConfig(outlive_launcher=False), engine(), world)


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({SECRET: ONE, SECRET_FILE: "x"}, f"{SECRET} and {SECRET_FILE} are both set"),
        ({SECRET: " password "}, "8 characters; a secret has at least 32.*openssl rand"),
        ({SECRET: ""}, "0 characters"),
        ({SECRET_FILE: "/nowhere/secret"}, "No such file.*every host"),
    ],
)
def test_a_malformed_secret_is_refused_and_not_shown(environment: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        JobSecret.of_environment(environment)
    assert "password" not in str(caught.value)


def test_the_environment_and_a_file_give_the_same_keys(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{ONE}\n")
    given = JobSecret.of_environment({SECRET: ONE})
    read = JobSecret.of_environment({SECRET_FILE: str(tmp_path / "secret")})
    assert given is not None
    assert read is not None
    assert given.keys(b"a" * 16) == read.keys(b"a" * 16) != given.keys(b"b" * 16)
    assert JobSecret.of_environment({}) is None
    assert ONE not in f"{given} {given!r}"


def test_an_address_that_was_changed_in_the_store_is_refused() -> None:
    secret, salt = JobSecret(ONE.encode()), b"s" * 16
    proof = [salt, secret.tag(salt, "tcp://10.0.0.1:5000")]
    assert secret.proven_keys(proof, "tcp://10.0.0.1:5000") == secret.keys(salt).client_side()
    for wrong in (None, [], [salt], [salt, b""], [salt, "text"], [salt[1:], proof[1]], [salt, proof[1], 1]):
        with pytest.raises(ConfigError, match="not published under this process's job secret"):
            secret.proven_keys(wrong, "tcp://10.0.0.1:5000")
    with pytest.raises(ConfigError, match=re.escape("tcp://10.0.0.2:5000 was not published")):
        secret.proven_keys(proof, "tcp://10.0.0.2:5000")


def test_with_a_secret_no_key_lies_in_the_store_and_ranks_without_it_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = OneHostStore()
    monkeypatch.setenv(SECRET, ONE)
    first = rank(0, store)
    first.launch_or_learn()
    assert first.handle is not None
    try:
        second = rank(1, store)
        second.launch_or_learn()
        assert isinstance(first.keys, JobKeys)
        assert first.keys.server_secret is not None
        assert (second.address, second.keys) == (first.address, first.keys.client_side())
        for key in (first.keys.client_secret, first.keys.server_secret, ONE.encode()):
            assert not any(key in value for value in store.values.values())

        async def visit() -> None:
            async with second.client("friend", 60.0) as friend:
                assert (await friend.status())["state"] == "running"
            with pytest.raises(DeadlineError):
                await InferenceClient(first.address).start(1.0)

        asyncio.run(visit())
        monkeypatch.setenv(SECRET, OTHER)
        with pytest.raises(ConfigError, match=f"not published under this process's job secret: set the same {SECRET}"):
            rank(1, store).launch_or_learn()
        monkeypatch.delenv(SECRET)
        with pytest.raises(ConfigError, match="rank 1: rank 0 has a job secret and rank 1 has none"):
            rank(1, store).launch_or_learn()
    finally:
        first.handle.stop(60.0)


def test_a_rank_with_a_secret_does_not_believe_a_store_without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    store = OneHostStore()
    first = rank(0, store)
    first.launch_or_learn()
    assert first.handle is not None
    try:
        monkeypatch.setenv(SECRET, ONE)
        with pytest.raises(ConfigError, match="rank 1: rank 1 has a job secret and rank 0 has none"):
            rank(1, store).launch_or_learn()
    finally:
        first.handle.stop(60.0)


def test_why_rank_0_has_no_secret_is_said_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = OneHostStore()
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(ConfigError, match="5 characters"):
        rank(0, store).launch_or_learn()
    monkeypatch.delenv(SECRET)
    with pytest.raises(ConfigError, match=r"rank 1: rank 0 could not join: ConfigError: .*5 characters"):
        rank(1, store).launch_or_learn()
