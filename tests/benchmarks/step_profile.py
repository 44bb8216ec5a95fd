"""Profile of a decode step, and the cost of scheduling without a model."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from rollout import Advanced, DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.forward import model_runner
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequences import Sequence
from rollout.engine.scheduling.step import StepTokens
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from tests.benchmarks.subject import Subject
from tests.benchmarks.workloads import Workload

STEPS = 8


@contextmanager
def stopwatch(spent: dict[str, list[float]], calls: dict[str, tuple[Any, str]]) -> Iterator[None]:
    """Within the block, the seconds of every call of `calls` (name → owner and method) go to `spent[name]`."""

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name].append(time.perf_counter() - start)

        return run

    with ExitStack() as restored:
        for name, (owner, method) in calls.items():
            restored.enter_context(patch.object(owner, method, timed(name, getattr(owner, method))))
        yield


def decode_step(subject: Subject, workload: Workload) -> dict[str, Any]:
    """Milliseconds of a decode step in the middle of the completions, by part, on the host's clock.

    Parts: schedule, inputs (the tensors a forward needs), forward, sample, update, other. Bookkeeping is all of them but
    forward and sample.
    """
    (turn,) = workload.turns
    blocks = -(-workload.kv_tokens // Advanced.block_size_tokens) + 2 * workload.sequences
    engine = DynamicInferenceEngine(
        subject.model, None, InferenceConfig(kv_cache_blocks=blocks, max_requests=max(64, workload.sequences))
    )
    for prompt, length in zip(turn.prompts, turn.lengths, strict=True):
        engine.add_request(prompt, SamplingParams(max_tokens=length + 3 * STEPS, ignore_eos=True, logprobs=0))
    scheduler, controller = engine.context.scheduler, engine.controller
    calls = {
        "schedule": (scheduler, "schedule"), "update": (scheduler, "update"), "execute": (controller.runner, "execute"),
        "forward": (controller.runner, "forward"), "sample": (model_runner, "sample_step"), "step": (engine, "step"),
    }  # fmt: skip
    spent: dict[str, list[float]] = defaultdict(list)
    with engine.installation:
        while scheduler.waiting or scheduler.prefilling or not scheduler.decoding:
            engine.step()
        for _ in range(max(turn.lengths) // 2):
            engine.step()
        with stopwatch(spent, calls):
            for _ in range(STEPS):
                engine.step()
    for number in range(engine.parts.intake.next_request_id):
        engine.abort_request(number)
    ms = {name: 1e3 * statistics.median(values) for name, values in spent.items()}
    parts = {
        "step": ms["step"],
        "schedule": ms["schedule"],
        "inputs": max(0.0, ms["execute"] - ms["forward"] - ms["sample"]),
        "forward": ms["forward"],
        "sample": ms["sample"],
        "update": ms["update"],
        "other": max(0.0, ms["step"] - ms["schedule"] - ms["execute"] - ms["update"]),
    }
    return {
        "kind": "decode step", "size": subject.size, "dtype": subject.dtype, "sequences": workload.sequences, "ms": parts,
        "bookkeeping_share": sum(parts[name] for name in ("schedule", "inputs", "update", "other")) / parts["step"],
    }  # fmt: skip


def scheduling(requests: int = 4096, steps: int = 50) -> dict[str, Any]:
    """Milliseconds a step of schedule and update for that many running requests, tokens drawn without a model."""
    config = InferenceConfig(kv_cache_blocks=requests * 16, max_requests=requests, max_tokens_per_step=requests * 16)
    scheduler = Scheduler(config, BlockAllocator(requests * 16, config.advanced.block_size_tokens), time.time)
    rng = np.random.default_rng(0)
    for number in range(requests):
        scheduler.add(_sample(number, rng.integers(0, 1000, int(rng.integers(5, 100))).tolist(), 2 * steps + 40))
    spent: dict[str, list[float]] = defaultdict(list)
    while len(spent["update"]) < steps:
        start = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        assert step is not None, "requests are running, so there is a step"
        count = len(step.sampled_rows)
        sampled = StepTokens(rng.integers(0, 1000, count), np.full(count, -1, np.float32))
        before = time.perf_counter()
        scheduler.update(step, sampled)
        updated = time.perf_counter()
        if len(step.rows) == step.num_decodes == requests:
            spent["schedule"].append(scheduled - start)
            spent["update"].append(updated - before)
    ms = {name: 1e3 * statistics.median(values) for name, values in spent.items()}
    return {"kind": "scheduling", "requests": requests, "schedule_ms": ms["schedule"], "update_ms": ms["update"],
            "step_ms": ms["schedule"] + ms["update"]}  # fmt: skip


def _sample(number: int, prompt: list[int], new: int) -> Sequence:
    request = DynamicInferenceRequest(
        request_id=number, prompt_tokens=prompt, sampling_params=SamplingParams(max_tokens=new), block_size_tokens=16,
        enable_prefix_caching=True, seed=0, arrival_time=0.0,
    )  # fmt: skip
    return Sequence(
        record=DynamicInferenceRequestRecord.from_request(request), order=(0, number), tokens=np.asarray(prompt, np.int32),
        stop_ids=(), max_length=len(prompt) + new, min_length=0, hashes=request.precomputed_block_hashes,
    )  # fmt: skip
