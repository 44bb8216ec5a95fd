"""Jobs of `test_data_parallel`, each run on every rank, with their expected results."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from rollout.config import Advanced, InferenceConfig, ServerConfig
from rollout.distributed.job.data_parallel import DataParallelBackend
from rollout.distributed.protocol.messages import BarrierDone
from rollout.distributed.worker.worker import EngineWorker
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import (
    ConfigError,
    DeadlineError,
    EngineStateError,
    InvalidRequestError,
    RolloutError,
    RolloutFailedError,
)
from rollout.llm.job_llm import JobLLM
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.manager import RolloutManager
from rollout.manager.scoring import PromptTask
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.configs import coordinator_config, engine_config
from tests.engines import PATIENCE_S, make_engine, one_step_per_call
from tests.models import make_model, make_tokenizer
from tests.ranks import assert_nothing_is_left
from tests.rollouts import logprob_error, tokens, trainer_logprobs_of, update, value_error
from trainer_hooks.optimizer import attach


def the_model() -> PreTrainedModel:
    return make_model("qwen3", num_hidden_layers=2)


@contextmanager
def a_manager(model: PreTrainedModel | None = None, **options: Any) -> Iterator[RolloutManager]:
    """Blocks of four tokens; a coordinator that notices soon when somebody is gone. In the end nothing is left of it."""
    heartbeat = options.pop("heartbeat_timeout_s", 10.0)
    interval = options.pop("progress_interval", 4)
    values = options.pop("token_values", None)
    defaults: dict[str, Any] = {"kv_cache_blocks": 512, "block_size_tokens": 4, "max_requests": 16,
                                "max_tokens_per_step": 64, "verify_model": False}  # fmt: skip
    rollout = RolloutManager(
        model or the_model(),
        make_tokenizer(),
        engine_config(**(defaults | options)),
        token_values=values,
        coordinator=coordinator_config(heartbeat_timeout_s=heartbeat, progress_interval=interval),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="close\\(\\) drops")
        with rollout:
            yield rollout
    assert_nothing_is_left()


# --- what is asked for, and what comes back ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A prompt, how many samples of it, how long, and where its random stream begins."""

    prompt: str
    n: int
    max_tokens: int
    seed: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(n=self.n, max_tokens=self.max_tokens, seed=self.seed, ignore_eos=True)


@dataclass(frozen=True)
class Sample:
    prompt: str | None
    tokens: list[int]
    log_probs: list[float]
    text: str | None
    metadata: Any
    versions: list[int]
    events: list[str]


def asks(count: int, n: int, longest: int, seed: int) -> list[Ask]:
    generator = np.random.default_rng(seed)
    return [
        Ask("".join(map(chr, generator.integers(97, 123, generator.integers(2, 20)))), n,
            int(generator.integers(longest // 2, longest + 1)), 1000 * seed + index)
        for index in range(count)
    ]  # fmt: skip


def generate(rollout: RolloutManager, wanted: Sequence[Ask], **options: Any) -> RolloutBatch:
    return rollout.generate(
        [ask.prompt for ask in wanted],
        [ask.params for ask in wanted],
        metadata=[ask.seed for ask in wanted],
        progress=False,
        **options,
    )


def submit(rollout: RolloutManager, wanted: Sequence[Ask]) -> list[int]:
    return rollout.submit(
        [ask.prompt for ask in wanted], [ask.params for ask in wanted], metadata=[ask.seed for ask in wanted]
    )


def samples(batch: RolloutBatch) -> list[Sample]:
    return [
        Sample(
            request.prompt,
            request.generated_tokens,
            request.generated_log_probs,
            request.generated_text,
            request.metadata,
            request.policy_spans.dense()[len(request.prompt_tokens) :].tolist(),
            [event.type.name for event in request.events],
        )
        for request in batch
    ]


def coordinator_of(rollout: RolloutManager) -> Any:
    backend = rollout._rounds.backend
    assert isinstance(backend, DataParallelBackend)
    return backend._member.coordinator.handle


def after_steps(rollout: RolloutManager, count: int, act: Callable[[], object]) -> None:
    """Call `act` once, when this rank has made so many turns of its loop, of one step each."""
    one_step_per_call(rollout.engine)
    backend, turns = rollout._rounds.backend, iter(range(count))
    advance = backend.step

    def counted() -> Any:
        if next(turns, None) is None:
            backend.step = advance  # type: ignore[method-assign]
            act()
        return advance()

    backend.step = counted  # type: ignore[method-assign]


# --- jobs -------------------------------------------------------------------------------------------------------------


def share_of(rank: int, size: int) -> list[Ask]:
    """Rank 0 asks for most, the last one for nothing."""
    return [] if rank == size - 1 else asks(8 if rank == 0 else 2, 2, 40 if rank == 0 else 12, seed=rank)


def halved(hidden: torch.Tensor) -> torch.Tensor:
    return hidden / 2


def generates_twice(rank: int) -> dict[str, Any]:
    size = dist.get_world_size()
    with a_manager(token_values=halved) as rollout:
        batch = generate(rollout, share_of(rank, size))
        assert not len(batch) or value_error(rollout.model, batch, halved) < 1e-4
        first = samples(batch)
        computed = rollout.engine.stats()["generated_tokens"]
        metrics = rollout.metrics()
        # Whoever is quick must not ask for more before everybody has looked.
        dist.barrier()
        second = samples(generate(rollout, share_of(size - 1 - rank, size)))
        assert rollout.groups_in_flight == 0
        assert not rollout.engine.has_unfinished
        assert rollout.engine.context.allocator.num_used == 0
    return {"first": first, "second": second, "computed": computed, "metrics": metrics}


WORK = {0: asks(6, 2, 60, seed=20), 1: asks(3, 2, 30, seed=21)}


def loses_its_coordinator(rank: int, after: int | None) -> list[list[Sample]]:
    with a_manager(heartbeat_timeout_s=3.0) as rollout:
        process = coordinator_of(rollout).process if rank == 0 else None
        if process is not None and after is not None:
            after_steps(rollout, after, process.kill)
        batches = [generate(rollout, WORK[rank])]
        if process is not None and after is None:
            process.kill()
        batches.append(generate(rollout, WORK[1 - rank]))
        if process is not None:
            assert coordinator_of(rollout).process is not process
    return list(map(samples, batches))


def is_cut_off_at_the_end(rank: int) -> list[Sample]:
    """Rank 1 never hears that all have come to the end; then the coordinator dies while rank 0 is elsewhere."""
    with a_manager(heartbeat_timeout_s=1.0) as rollout:
        if rank == 1:
            session = rollout._rounds.backend._member.client._session  # type: ignore[attr-defined]
            receive = session.receive
            session.receive = lambda message: None if isinstance(message, BarrierDone) else receive(message)
        first = generate(rollout, WORK[rank])
        if rank == 0:
            coordinator_of(rollout).process.kill()
        dist.barrier()
        second = generate(rollout, WORK[rank])
    return samples(first) + samples(second)


def is_cut(rank: int, what: str) -> list[Sample]:
    """One of rank 1's sessions is lost, or the coordinator stands still."""
    with a_manager(heartbeat_timeout_s=1.0) as rollout:
        backend = rollout._rounds.backend
        assert isinstance(backend, DataParallelBackend)
        if what == "coordinator" and rank == 0:
            process = coordinator_of(rollout).process
            after_steps(rollout, 8, lambda: process.send_signal(signal.SIGSTOP))
        if what == "worker" and rank == 1:
            dealer = backend._member.worker._link.dealer  # type: ignore[union-attr]
            after_steps(rollout, 8, lambda: backend._loop.call_soon(dealer._lose, "the test has cut it"))
        first = generate(rollout, WORK[rank])
        return samples(first) + samples(generate(rollout, WORK[rank]))


def cannot_join(rank: int) -> str:
    """Why this one has no manager; rank 1 has a model that is not supported."""
    model = torch.nn.Linear(2, 2) if rank == 1 else the_model()
    try:
        RolloutManager(model, config=InferenceConfig(kv_cache_blocks=64, advanced=Advanced(verify_model=False)))
    except RolloutError as exc:
        # The store is this process's, too.
        dist.barrier()
        return f"{type(exc).__name__}: {exc}"
    raise AssertionError("it has joined")


def dies(rank: int) -> list[Sample] | None:
    with a_manager(heartbeat_timeout_s=3.0) as rollout:
        generate(rollout, [])
        if rank == 1:
            after_steps(rollout, 10, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return samples(generate(rollout, WORK[rank]))


def stalls_while_the_others_update(rank: int, rounds: int) -> list[list[int]]:
    """Weights change without a collective that would hold the others back: they are two updates ahead when it comes back."""
    store, versions = distributed_c10d._get_default_store(), []
    with a_manager(heartbeat_timeout_s=1.0, control_timeout_s=30.0) as rollout:

        def stall() -> None:
            me = os.getpid()
            subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep 4; kill -CONT {me}"]).wait()
            store.set("back", "")

        if rank == 1:
            after_steps(rollout, 10, stall)
        for number in range(rounds):
            if (rank, number) == (0, 2):
                store.wait(["back"], timedelta(seconds=PATIENCE_S))
            batch = generate(rollout, asks(8, 2, 30, seed=100 * number + rank))
            versions.append(sorted({version for sample in samples(batch) for version in sample.versions}))
            rollout.weights_updated()
        dist.barrier()
    return versions


def trains(rank: int, rounds: int) -> dict[str, Any]:
    """Steps of DDP until a sample was continued after one of them; every log-prob against the weights of its version."""
    model = the_model()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.02)
    weights: list[dict[str, torch.Tensor]] = []
    versions, errors, mixed = [], [], 0
    with a_manager(model, enable_prefix_caching=True) as rollout:
        attach(optimizer, rollout, mode="recompute")
        ended = False
        while not ended:
            number, continued = len(weights), torch.tensor(mixed)
            # How far a rank has computed the long ones when the other comes to the end depends on their speed.
            dist.all_reduce(continued)
            ended = number >= rounds and bool(continued)
            weights.append({name: value.clone() for name, value in model.state_dict().items()})
            wanted = asks(2 + rank, 2, 20, seed=100 * number + rank) + asks(2, 1, 120, seed=100 * number + rank + 50)
            goal = rollout.groups_in_flight if ended else 2
            batch = generate(rollout, [] if ended else wanted, min_groups=goal)
            assert {int(batch.policy_version)} == {number}
            present = weights[-1]
            for version, then in enumerate(weights if len(batch) else []):
                model.load_state_dict(then)
                with torch.no_grad():
                    difference = (trainer_logprobs_of(model, batch) - batch.logprobs).abs()
                mask = batch.response_mask & (batch.policy_versions == version)
                errors.append(float(difference[mask].max()) if mask.any() else 0.0)
                others = batch.response_mask & (batch.policy_versions != version)
                if others.any():
                    assert float(difference[others].max()) > 1e-3, "the weights do not tell versions apart"
            model.load_state_dict(present)
            mixed += sum(len(set(sample.versions)) > 1 for sample in samples(batch))
            if not ended:
                ids = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(number))
                loss = parallel(ids).logits.float().log_softmax(-1)[..., 5].mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            versions.append(rollout.policy_version)
        assert rollout.groups_in_flight == 0
    return {"versions": versions, "error": max(errors)}


def paces(rank: int) -> int:
    """Rounds with groups in flight and a limit on their age; one rank says late what it has computed."""
    with a_manager(max_staleness=1, progress_interval=1000) as rollout:
        stale = 0
        backend = rollout._rounds.backend
        rest = backend.report_idle

        def rest_late() -> None:
            time.sleep(0.2 * rank)
            rest()

        backend.report_idle = rest_late  # type: ignore[method-assign]
        for number in range(5):
            wanted = asks(2, 2, 12, seed=10 * number + rank) + asks(2, 2, 120, seed=10 * number + rank + 5)
            batch = generate(rollout, wanted, min_groups=2)
            assert int(batch.policy_staleness[batch.response_mask].max()) <= 1
            stale += sum(request.finish_reason == "stale" for request in batch)
            rollout.weights_updated()
        return stale


def takes_groups_as_they_end(rank: int) -> dict[str, Any]:
    with a_manager() as rollout:
        ragged = asks(2 + 3 * rank, 2, 20, seed=30 + rank)
        numbers = submit(rollout, ragged)
        ended = {int(batch.group_ids[0]): samples(batch) for batch in rollout.as_completed()}
        more = asks(4, 2, 20, seed=40 + rank)
        submit(rollout, more)
        for _ in rollout.as_completed():
            if rank == 0:
                break
        left = rollout.groups_in_flight
        rest = samples(generate(rollout, [], min_groups=left))
        filled = scored(rollout, rank)
    return {
        "all": [each for number in numbers for each in ended[number]],
        "left": left,
        "rest": len(rest),
        "filled": filled,
    }


def scored(rollout: RolloutManager, rank: int) -> list[int]:
    """Metadata of the kept groups; rank 0 discards three of four, rank 1 none."""
    tasks = iter([PromptTask(each.prompt, number, each.params) for number, each in enumerate(asks(12, 2, 20, rank))])

    def reward(group: Sequence[DynamicInferenceRequest]) -> list[float]:
        return [float(each.sample_index * (each.metadata % 4 == 3 or rank == 1)) for each in group]

    return rollout.generate_scored(tasks, reward, groups=3, progress=False).metadata[::2]


def fails_and_aborts(rank: int) -> dict[str, Any]:
    wanted = asks(3, 2, 20, seed=50 + rank)
    with a_manager() as rollout:
        numbers = submit(rollout, wanted)
        rollout.abort(numbers[:1])
        kept = samples(generate(rollout, [], min_groups=3))
        broken = None
        if rank == 0:
            # What is asked of it is refused where it is computed, after it was accepted here.
            client = rollout._rounds.backend._member.client  # type: ignore[attr-defined]
            open_group = client.open_group

            def refuse_one(prompt: Any, params: SamplingParams, **options: Any) -> Any:
                if params.seed == wanted[1].seed:
                    raise InvalidRequestError("this one cannot be sent")
                return open_group(prompt, params, **options)

            client.open_group = refuse_one
        try:
            again = samples(generate(rollout, wanted))
        except RolloutFailedError as exc:
            broken = str(exc)
            again = samples(exc.batch)  # type: ignore[arg-type]
        last = samples(generate(rollout, wanted[:1]))
    return {"kept": kept, "broken": broken, "again": again, "last": last}


def raises_before_the_end(rank: int) -> dict[str, Any]:
    wanted = asks(4, 2, 40, seed=60 + rank)
    said = []
    with a_manager() as rollout:
        if rank == 0:
            with pytest.raises(InvalidRequestError) as refused:
                rollout.generate(["a" * 600], SamplingParams(max_tokens=4))
            said.append(str(refused.value))
            with pytest.raises(DeadlineError) as late:
                generate(rollout, wanted, timeout_s=1e-3)
            said.append(str(late.value))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            submit_again = asks(1, 1, 8, seed=1)
            after_steps(rollout, 5, lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                generate(rollout, submit_again)
            assert rollout.groups_in_flight == 4
            batch = generate(rollout, [], min_groups=4)
        else:
            batch = generate(rollout, wanted)
        return {"said": said, "samples": samples(batch)}


def does_not_come(rank: int) -> dict[str, str]:
    """One rank does less than the other, and each time the other hears of it."""
    said = {}
    with a_manager(control_timeout_s=2.0) as rollout:
        if rank == 0:
            with pytest.raises(DeadlineError) as late:
                generate(rollout, asks(6, 2, 12, seed=70))
            said["generate"] = str(late.value)
        dist.barrier()
        if rank == 1:
            generate(rollout, [])
        else:
            assert len(generate(rollout, [], min_groups=6)) == 12
        dist.barrier()
        if rank == 1:
            with pytest.raises(DeadlineError) as late:
                rollout.pause()
            said["pause"] = str(late.value)
        dist.barrier()
        rollout.pause()
        with pytest.raises(EngineStateError) as held:
            generate(rollout, [])
        said["paused"] = str(held.value)
        rollout.unpause()
        rollout.suspend("offload")
        rollout.resume()
        generate(rollout, asks(1, 1, 4, seed=71))
    return said


def differs(rank: int) -> list[str]:
    said = []
    with a_manager() as rollout:
        if rank == 0:
            rollout.weights_updated()
        with pytest.raises(EngineStateError) as differ:
            generate(rollout, WORK[rank])
        said.append(str(differ.value))
        if rank == 1:
            rollout.weights_updated()
        assert len(generate(rollout, [], min_groups=len(WORK[rank]))) == 2 * len(WORK[rank])
        call = rollout.resume if rank == 1 else lambda: generate(rollout, [])
        with pytest.raises(EngineStateError) as differ:
            call()
        said.append(str(differ.value))
        generate(rollout, [])
    return said


def is_held_while_it_trains(rank: int) -> list[Sample]:
    """Check that an operator's pause during a suspend lasts when the training loop continues."""
    with a_manager() as rollout:
        rollout.weights_updated()
        said = threading.Event()
        made: list[float] = []

        async def hold() -> None:
            async with rollout.client("operator") as client:
                await client.pause_engines()
                said.set()
                everything = sum(ask.n for asked in WORK.values() for ask in asked)
                there = 0
                while there < everything:
                    await asyncio.sleep(0.02)
                    status = await client.status()
                    there = status["queued_samples"] + sum(each["assigned_samples"] for each in status["ranks"])
                made.append(rollout.engine.stats()["generated_tokens"])
                await client.unpause_engines()

        with rollout.suspended():
            if rank == 0:
                operator = threading.Thread(target=lambda: asyncio.run(hold()))
                operator.start()
                assert said.wait(60)
            dist.barrier()
        batch = generate(rollout, WORK[rank])
        if rank == 0:
            operator.join()
            assert made == [0]
        return samples(batch)


def answers_over_http(rank: int) -> dict[str, Any] | None:
    """An HTTP server on rank 0 in front of both ranks, while they make their rounds."""
    with a_manager() as rollout, ThreadPoolExecutor(8) as agents, ExitStack() as close:
        asked, refused = [], ""
        if rank == 0:
            llm = close.enter_context(JobLLM(rollout))
            try:
                llm.serve(ServerConfig(admin=True, api_key="k"))
            except ConfigError as exc:
                refused = str(exc)
            server = llm.serve(ServerConfig(port=0))

            def ask(each: Ask) -> list[list[int]]:
                body = {"model": "x", "prompt": rollout.engine.check_request(each.prompt, each.params), "n": each.n,
                        "max_tokens": each.max_tokens, "seed": each.seed, "ignore_eos": True}  # fmt: skip
                model = json.load(urlopen(f"{server.url}/v1/models", timeout=PATIENCE_S))["data"][0]["id"]
                content = json.dumps(body | {"model": model}).encode()
                request = Request(f"{server.url}/v1/completions", content, {"Content-Type": "application/json"})
                choices = json.load(urlopen(request, timeout=PATIENCE_S))["choices"]
                return [choice["rollout"]["token_ids"] for choice in choices]

            asked = [agents.submit(ask, each) for each in WORK[0]]
        ended = torch.zeros(1)
        while not ended.item():
            generate(rollout, WORK[1])
            ended.fill_(rank == 0 and all(each.done() for each in asked))
            dist.all_reduce(ended)
        return None if rank else {"tokens": [ids for each in asked for ids in each.result()], "refused": refused}


def is_saved_and_goes_on(rank: int) -> list[Sample]:
    wanted = asks(5, 2, 40, seed=80 + rank)
    with a_manager() as rollout:
        rollout.weights_updated()
        first = samples(generate(rollout, wanted, min_groups=1))
        left = rollout.groups_in_flight
        state = rollout.state_dict()
    with a_manager() as rollout:
        rollout.load_state_dict(state)
        assert rollout.policy_version == 1
        assert rollout.groups_in_flight == left
        again = rollout.state_dict()
        rollout.abort(range(100))
        generate(rollout, [])
        rollout.load_state_dict(again)
        rest = samples(generate(rollout, [], min_groups=left))
    assert all(set(sample.versions) == {1} for sample in (*first, *rest))
    return sorted([*first, *rest], key=lambda sample: sample.metadata)


def is_traced(rank: int, folder: str) -> None:
    with a_manager() as rollout:
        assert rollout.coordinator_address is not None
        assert rollout.coordinator_address.startswith("tcp://127.0.0.1:")
        with rollout.trace(f"{folder}/step.json"):
            generate(rollout, share_of(rank, dist.get_world_size()))
            rollout.suspend()
            rollout.resume()
        if rank == 0:
            with pytest.raises(ZeroDivisionError), rollout.trace(f"{folder}/broken.json"):
                _ = 1 / 0


async def play(episode: Any) -> float:
    """Three turns with a tool between them."""
    for _ in range(3):
        await episode.sample([*episode.tokens, 5, episode.task], tokens(4))
        await asyncio.sleep(0.002 * episode.task)
    return 1.0


def plays(rank: int) -> dict[str, Any]:
    """Rank 0 has six tasks, the other none; then both have one, under new weights."""
    model = the_model()
    with a_manager(model) as rollout:
        first = rollout.run(range(3, 9) if rank == 0 else [], play, n=2, timeout_s=100)
        error = logprob_error(model, first) if len(first) else 0.0
        steps = rollout.engine.stats()["steps"]
        update(model, rollout)
        second = rollout.run([3 + rank], play, timeout_s=100)
        return {
            "rewards": first.rewards.tolist(),
            "error": max(error, logprob_error(model, second)),
            "sampled": int(first.response_mask.sum()),
            "steps": steps,
            "versions": second.policy_versions[second.response_mask].unique().tolist(),
        }


# --- without a training loop --------------------------------------------------------------------------------------------


@cache
def serving_model() -> PreTrainedModel:
    return make_model("llama", num_hidden_layers=2)


def serving_engine() -> DynamicInferenceEngine:
    room = {"kv_cache_blocks": 4096, "max_requests": 16, "max_tokens_per_step": 128}
    return make_engine(serving_model(), block_size_tokens=16, **room)


def serves(pipe: Connection, name: str, address: str) -> None:
    """A rank without a training loop."""
    torch.set_num_threads(1)
    worker = EngineWorker(serving_engine(), address, name=name)
    worker.start()
    worker.run()
