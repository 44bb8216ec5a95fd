"""Jobs of `tests.llm.test_llm_ranks`: each runs on every rank."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rollout.config import Advanced, InferenceConfig
from rollout.errors import ConnectionLostError, ControlError
from rollout.llm.llm import LLM
from rollout.state import EngineState
from tests.configs import coordinator_config
from tests.engines import PATIENCE_S, at_random, gated, token_ids
from tests.models import make_model
from tests.ranks import assert_nothing_is_left


def small() -> Any:
    return make_model("qwen3", num_hidden_layers=2)


def an_llm() -> LLM:
    config = InferenceConfig(
        kv_cache_blocks=512,
        max_requests=8,
        max_tokens_per_step=64,
        advanced=Advanced(block_size_tokens=4, verify_model=False),
    )
    coordinator = coordinator_config(heartbeat_timeout_s=10.0, progress_interval=4)
    return LLM(small(), None, config, use_coordinator=True, coordinator_config=coordinator)


def asks_and_computes(rank: int) -> dict[str, Any]:
    """Rank 0 asks, both compute; who may not ask is told so; the end of rank 0 is everybody's."""
    with an_llm() as llm:
        answer: dict[str, Any] = {"primary": llm.is_primary_rank, "refused": []}
        if rank == 0:
            prompts = [token_ids(5, seed=seed) for seed in range(24)]
            results = llm.generate(prompts, [at_random(30, seed=seed) for seed in range(24)])
            answer["tokens"] = [result.generated_tokens for result in results]
        else:
            for call in (lambda: llm.generate([5]), lambda: llm.stream([5]), lambda: llm.submit([5]), llm.serve):
                try:
                    call()
                except RuntimeError as exc:
                    answer["refused"].append(str(exc))
            llm.wait_for_shutdown(PATIENCE_S)
        answer["made"] = llm.stats()["generated_tokens"]
    answer["state"] = llm.state.value
    assert_nothing_is_left()
    return answer


def pauses_and_goes_on(rank: int) -> list[str]:
    """Control calls end on every rank when this rank's engine has done it."""
    states = []
    with an_llm() as llm:
        pending = [llm.submit(token_ids(5, seed=seed), at_random(100)) for seed in range(8)] if rank == 0 else []
        for call, state in (
            (llm.pause, EngineState.PAUSED),
            (llm.suspend, EngineState.SUSPENDED),
            (llm.resume, EngineState.PAUSED),
            (llm.unpause, EngineState.RUNNING),
        ):
            call(timeout_s=PATIENCE_S)
            # A rank that is not primary may see the next state already.
            states.append(llm.state.value if rank == 0 else "")
            assert rank != 0 or llm.state is state
            dist.barrier()
        llm.weights_updated()
        dist.barrier()
        if rank == 0:
            assert [len(each.result(PATIENCE_S)[0].generated_tokens) for each in pending] == [100] * 8
        else:
            llm.wait_for_shutdown(PATIENCE_S)
        states.append(f"version {llm.policy_version}")
    assert_nothing_is_left()
    return states


def names_an_adapter(rank: int, base: str) -> dict[str, Any]:
    """An adapter reaches all ranks or none, and so do its replacement and its end; `base` holds the adapters a and b."""
    answer: dict[str, Any] = {"mixed": [], "versions": []}
    with an_llm() as llm:
        if rank:
            dist.barrier()
            with gated(llm.engine):
                dist.barrier()
                dist.barrier()
            llm.wait_for_shutdown(PATIENCE_S)
        else:
            os.chdir(base)
            try:
                llm.load_lora_adapter("x", "a")  # a relative folder, which is not there on the other rank
            except ControlError as exc:
                answer["refused"] = (len(exc.engines), llm.lora_adapters)
            llm.load_lora_adapter("x", f"{base}/a")
            for _ in range(2):
                params = [at_random(20, seed=seed, adapter="x" if seed % 2 else None) for seed in range(16)]
                results = llm.generate([token_ids(5, seed=seed) for seed in range(16)], params)
                answer["mixed"].append([result.generated_tokens for result in results])
                answer["versions"].append(llm.load_lora_adapter("x", f"{base}/b", replace=True))
            dist.barrier()
            with gated(llm.engine):
                dist.barrier()
                pending = llm.submit(token_ids(5), at_random(400, adapter="x", n=6, top_p=0.99))
                answer["ended"] = llm.unload_lora_adapter("x")
                dist.barrier()
            answer["errors"] = [sample.error for sample in pending.result(PATIENCE_S)]
        answer["made"] = llm.stats()["generated_tokens"]
    assert_nothing_is_left()
    return answer


def loses_a_rank(rank: int) -> list[list[int]] | None:
    """Kill a rank, whose samples continue elsewhere."""
    with an_llm() as llm:
        # Otherwise a busy machine may let rank 0 finish alone, before the other has joined.
        dist.barrier()
        if rank == 1:
            while llm.stats()["generated_tokens"] < 40:
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        prompts = [token_ids(5, seed=seed) for seed in range(12)]
        results = llm.generate(prompts, [at_random(60, seed=seed) for seed in range(12)])
        return [result.generated_tokens for result in results]


def is_left_alone(rank: int) -> str:
    """The primary rank goes away without a word: the others do not wait for ever."""
    with an_llm() as llm:
        store = distributed_c10d._get_default_store()
        if rank == 1:
            store.set("joined", b"yes")
        else:
            # The primary rank may be done first; the other one is to lose a job that it has joined.
            store.wait(["joined"], timedelta(seconds=PATIENCE_S))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            llm.wait_for_shutdown(PATIENCE_S)
        except ConnectionLostError as exc:
            return f"{type(exc).__name__}: {exc}"
    return "ended"
