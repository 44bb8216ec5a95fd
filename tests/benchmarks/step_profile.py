"""Profile of a decode step, and the cost of scheduling without a model."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rollout import Advanced, DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.forward import model_runner
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequences import Sequence
from rollout.engine.scheduling.step import StepTokens
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from tests.benchmarks.floors import Floor
from tests.benchmarks.subject import Subject
from tests.benchmarks.workloads import Workload

STEPS = 8
KINDS = {
    "matmul": ("aten::mm", "aten::addmm", "mkldnn"),
    "attention": ("attention", "aten::bmm"),
    "gather": ("aten::index",),
}


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


def decode_step(subject: Subject, workload: Workload, floor: Floor) -> dict[str, Any]:
    """Milliseconds of a decode step in the middle of the completions, by part (wall clock) and by kind of torch op.

    Parts: schedule, inputs (the tensors a forward needs), forward, sample, update, other. Bookkeeping is all of them but
    forward and sample. Kernels that are called past torch's dispatcher, and Python, are no torch op. On a GPU the parts
    are the host's, the device's own work is in `device`, and the step is that of both.
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
        seen = sum(len(record.merge().generated_tokens) for record in engine.snapshot()) + sum(map(len, turn.prompts))
        if subject.device.type == "cuda":
            device = device_time(engine.step, STEPS, subject.device)
        else:
            with profile(activities=[ProfilerActivity.CPU]) as trace:
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
    found = {
        "kind": "decode step", "size": subject.size, "dtype": subject.dtype, "sequences": workload.sequences, "ms": parts,
        "bookkeeping_share": sum(parts[name] for name in ("schedule", "inputs", "update", "other")) / parts["step"],
        "watch_share": _watch_share(engine, turn.prompts[0], max(turn.lengths)),
    }  # fmt: skip
    if subject.device.type == "cuda":
        kv_bytes = seen * subject.kv_bytes_per_token
        return found | {"device": _of_device(device, ms["step"], kv_bytes, floor.decode_step(workload.sequences, seen))}
    return found | {"torch_ops_ms": _torch_ops(trace, ms["step"])}


def _watch_share(engine: DynamicInferenceEngine, prompt: list[int], length: int) -> float:
    """Share of a `generate` call, of one sample, in which it looks for changes of the module."""
    spent: dict[str, list[float]] = defaultdict(list)
    with stopwatch(spent, {"look": (engine.parts.watch, "forward_key"), "generate": (engine, "generate")}):
        for _ in range(STEPS):
            engine.generate([prompt], SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0))
    return sum(spent["look"]) / sum(spent["generate"])


def _of_device(device: DeviceTime, step_ms: float, kv_bytes: int, floor_s: float) -> dict[str, float]:
    """Kernels of a step, milliseconds in which the device has work and has none, rates.

    Args:
        kv_bytes: that attention reads.
        floor_s: least seconds of the step.
    """
    attention = device.of("attend", "merge")
    return {
        "kernels": device.kernels, "busy_ms": device.busy_ms, "idle_ms": max(0.0, step_ms - device.busy_ms),
        "attention_ms": attention, "attention_tb_s": kv_bytes / attention / 1e9 if attention else 0.0,
        "of_floor": floor_s * 1e3 / step_ms,
    }  # fmt: skip


def _torch_ops(trace: Any, step_ms: float) -> dict[str, float]:
    spent = dict.fromkeys([*KINDS, "other torch ops"], 0.0)
    for event in trace.key_averages():
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key for name in names)), None)
        spent[kind or "other torch ops"] += event.self_cpu_time_total / STEPS / 1e3
    return spent | {"kernels of ours and Python": max(0.0, step_ms - sum(spent.values()))}


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


@dataclass(frozen=True)
class DeviceTime:
    """Mean number of kernels and copies of one call on a GPU, and milliseconds by name of the kernel."""

    kernels: float
    ms: dict[str, float]

    @property
    def busy_ms(self) -> float:
        return sum(self.ms.values())

    def of(self, *parts: str) -> float:
        return sum(spent for name, spent in self.ms.items() if any(part in name for part in parts))


def device_time(call: Callable[[], object], calls: int, device: torch.device) -> DeviceTime:
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(calls):
            call()
        torch.cuda.synchronize(device)
    spent, count = Counter[str](), 0
    for event in trace.events():
        if event.device_type == DeviceType.CUDA:
            spent[event.name] += event.device_time / 1e3 / calls
            count += 1
    return DeviceTime(count / calls, dict(spent.most_common()))
