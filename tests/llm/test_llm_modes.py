"""Tests of an `LLM` with a coordinator and without: which calls and options each takes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rollout.config import CoordinatorConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.job_coordinator import _completed
from rollout.distributed.job.world import World
from rollout.engine.weights.folder import load_model
from rollout.errors import ConfigError, ConnectionLostError, DeadlineError, EngineStateError, InvalidRequestError
from rollout.llm.llm import LLM, AsyncLLM
from rollout.llm.service import _joined
from rollout.requests.block_hash import stream_key
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from tests.engines import PATIENCE_S, at_random, greedily, make_engine, shared_model, token_ids
from tests.llm.asking import ENDLESS, blocking, nothing_is_left, options
from tests.models import greedy, make_model, make_tokenizer

# --- the rules of the modes -------------------------------------------------------------------------------------------


def test_lifecycle_calls_in_direct_mode_say_what_to_call_instead() -> None:
    with blocking() as llm:
        for name in ("pause", "unpause", "suspend", "resume"):
            with pytest.raises(RuntimeError, match=rf"use llm.engine.{name}\(\)"):
                getattr(llm, name)()


@pytest.mark.parametrize(
    "given",
    [{"coordinator_host": "127.0.0.1"}, {"coordinator_port": 5000}, {"coordinator_config": CoordinatorConfig()}],
)
def test_options_of_a_coordinator_without_one_are_refused(given: dict[str, Any]) -> None:
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ValueError, match=rf"{next(iter(given))}=.*use_coordinator=True"):
            kind(shared_model("qwen3"), **given)


@pytest.fixture(scope="module")
def job() -> Iterator[LLM]:
    with nothing_is_left():
        chosen = options(seed=5, control_timeout_s=7.0)
        with LLM(shared_model("qwen3"), make_tokenizer(), chosen, use_coordinator=True) as llm:
            yield llm
        with pytest.raises(EngineStateError, match="it was closed"):
            llm.client()


def test_with_a_coordinator_the_primary_rank_pauses_suspends_and_goes_on(job: LLM) -> None:
    assert job.is_primary_rank
    assert job.service._the_client()._control_timeout_s == 7.0
    params = at_random(50, seed=3)
    expected = make_engine("qwen3").generate([token_ids(5)], params)[0].generated_tokens
    assert job.generate(token_ids(5), params)[0].generated_tokens == expected
    pending = job.submit(token_ids(5), params)
    job.pause()
    assert job.state is EngineState.PAUSED
    job.suspend("offload")
    assert (job.state, job.stats()["kv_device_bytes"]) == (EngineState.SUSPENDED, 0)
    assert job.set_policy_version() == 1
    job.resume()
    job.unpause()
    assert len(pending.result(PATIENCE_S)[0].generated_tokens) == 50
    assert job.policy_version == 1


def test_a_flush_reaches_the_engines_of_a_coordinator(job: LLM) -> None:
    (sample,) = job.generate(token_ids(20), SamplingParams(max_tokens=4))
    assert sample.seed in {stream_key(5, number) for number in range(9)}
    assert job.flush_prefix_cache() > 0
    assert job.flush_prefix_cache() == 0


def test_further_clients_of_the_coordinator_ask_beside_the_llm(job: LLM) -> None:
    async def ask() -> list[list[int]]:
        assert job.coordinator_address is not None
        elsewhere = InferenceClient(job.coordinator_address, keys=job.coordinator_keys)
        async with job.client() as client, elsewhere:
            results = [await each.add_request(token_ids(5), greedily(6)) for each in (client, elsewhere)]
        return [result[0].generated_tokens for result in results]

    assert asyncio.run(ask()) == 2 * [job.generate([token_ids(5)], greedily(6))[0].generated_tokens]
    with LLM(shared_model("qwen3"), make_tokenizer(), options()) as llm:
        assert (llm.coordinator_address, llm.coordinator_keys) == (None, None)
        with pytest.raises(EngineStateError, match=r"direct mode has no coordinator.*use_coordinator=True"):
            llm.client()


class InPython(PreTrainedTokenizerFast):
    """A tokenizer whose code the coordinator cannot have."""


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, InPython])
def test_a_client_of_the_coordinator_asks_by_text_with_the_tokenizer_of_the_llm(kind: type) -> None:
    tokenizer = kind(tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="<eos>", pad_token="<pad>")
    # Its last call leaves this in it.
    tokenizer(["a", "abcdef"], padding="max_length", truncation=True, max_length=4)
    with nothing_is_left(), LLM(shared_model("qwen3"), tokenizer, options(), use_coordinator=True) as llm:

        async def ask() -> list[int]:
            async with llm.client() as client:
                return (await client.add_request("hello!", greedily(6)))[0].generated_tokens

        if kind is InPython:
            with pytest.raises(InvalidRequestError, match=r"has no tokenizer \(one in Python does not reach so far\)"):
                asyncio.run(ask())
        else:
            assert asyncio.run(ask()) == llm.generate("hello!", greedily(6))[0].generated_tokens


def test_a_lost_coordinator_fails_what_is_open_and_the_next_call() -> None:
    with nothing_is_left():
        llm = LLM(shared_model("qwen3"), make_tokenizer(), options(), use_coordinator=True)
        llm.engine.pause()
        pending = llm.submit("abc", ENDLESS)
        job = llm.service.member.coordinator
        assert job is not None
        assert job.handle is not None
        job.handle.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionLostError):
            pending.result(PATIENCE_S)
        with pytest.raises(ConnectionLostError):
            llm.generate("abc")
        llm.close()


def test_a_folder_is_loaded_and_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    with LLM(tmp_path / "model", inference_config=options()) as llm:
        assert llm.generate([5, 6, 7], greedily(8))[0].generated_tokens == greedy(model, [5, 6, 7], 8)
        assert llm.generate("abc", greedily(3))[0].generated_text is not None
    for name, why in (
        ("nowhere", "is not a folder; .*hf download .*nowhere --local-dir FOLDER`; pass"),
        (".", "has no config.json"),
    ):
        with pytest.raises(ConfigError, match=why):
            LLM(tmp_path / name)
    for bad in ("nn", "float7"):
        with pytest.raises(ConfigError, match=f"dtype='{bad}'"):
            load_model(tmp_path / "model", dtype=bad)


# --- options that the engine and its coordinator share ---------------------------------------------------------------------


def job_options(coordinator: CoordinatorConfig, **inference: Any) -> CoordinatorConfig:
    """Return the options with which the coordinator of a job of one rank is started."""
    return _completed(coordinator, make_engine("qwen3", **inference), World.alone())


def test_an_option_of_the_coordinator_that_contradicts_the_job_is_refused_by_name() -> None:
    assert job_options(CoordinatorConfig(), seed=7).seed == 7
    assert job_options(CoordinatorConfig(seed=9)).seed == 9
    assert job_options(CoordinatorConfig(block_size_tokens=4)).block_size_tokens == 4
    for given, said in (
        (CoordinatorConfig(seed=9), "seed=9: InferenceConfig.seed is 7; leave it out"),
        (CoordinatorConfig(block_size_tokens=8), "block_size_tokens=8: Advanced.* is 4"),
        (CoordinatorConfig(data_parallel_size=3), "data_parallel_size=3: the number of ranks is 1"),
    ):
        with pytest.raises(ConfigError, match=f"CoordinatorConfig.{said}"):
            job_options(given, seed=7)
    with pytest.raises(ConfigError, match="with coordinator_config"):
        LLM(
            shared_model("qwen3"), None, options(), use_coordinator=True, coordinator_host="127.0.0.3",
            coordinator_config=CoordinatorConfig(host="127.0.0.2"),
        )  # fmt: skip


def test_an_async_llm_with_a_coordinator_may_be_asked_on_its_private_loop() -> None:
    """The HTTP server asks there: a call that waited for that loop would wait forever."""

    async def ask(llm: AsyncLLM) -> tuple[int, EngineState, int]:
        await llm.generate(token_ids(20), SamplingParams(max_tokens=4))
        flushed = await llm.flush_prefix_cache()
        async with llm.suspended():
            state = llm.state
        with pytest.raises(ConfigError, match="nowhere"):
            await llm.load_weights("nowhere")
        return flushed, state, await llm.weights_updated()

    with nothing_is_left():
        llm = AsyncLLM(shared_model("qwen3"), make_tokenizer(), options(), use_coordinator=True)
        flushed, state, version = llm.loop.run_sync(ask(llm), PATIENCE_S)
        asyncio.run(llm.close())
    assert flushed > 0
    assert (state, version) == (EngineState.SUSPENDED, 1)


class Joining:
    """A client of a coordinator that has one rank more at each look, up to `most`."""

    def __init__(self, most: int) -> None:
        self.most, self.looks = most, 0

    async def status(self) -> dict[str, Any]:
        self.looks += 1
        return {"ranks": [{"name": f"rank-{index:04d}"} for index in range(min(self.looks, self.most))]}


def test_a_control_call_of_all_ranks_waits_until_they_have_joined() -> None:
    client: Any = Joining(3)
    asyncio.run(_joined(client, 3, 100.0))
    assert client.looks == 3
    with pytest.raises(DeadlineError, match=r"3 ranks: 2 have joined .*\(rank-0000, rank-0001\); every rank builds"):
        asyncio.run(_joined(Joining(2), 3, 0.2))  # type: ignore[arg-type]
