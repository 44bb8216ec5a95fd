"""Stage `speed`: rates of the machine and of decode steps."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.findings import HEAD_DIM, SHAPES, Run, captured, gib, prompts

BANDWIDTHS = {"H200": 4.3e12, "H100": 3.0e12}
"""Bytes a second that a device reads, for the floor of a decode step; `env` says what this one does."""
CASES = ((64, 1024), (256, 1024), (64, 4096))
"""(sequences, tokens of each)."""
NEW = 190
PROFILED, TIMED = 4, 48
"""Steps that are profiled, and timed."""


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


def seconds(run: Run, work: Callable[[], object], repeats: int = 10) -> float:
    """Median of the seconds that `work` takes, the device's included."""
    times = []
    for _ in range(repeats + 2):
        run.wait()
        start = time.perf_counter()
        work()
        run.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def machine(run: Run) -> None:
    """Versions, what torch offers, and rates of the machine: copies, matrix products, pinned memory."""
    run.say(
        "versions", torch=torch.__version__, cuda=torch.version.cuda, transformers=transformers.__version__,
        python=sys.version.split()[0], cores=os.cpu_count(), tf32=torch.backends.cuda.matmul.allow_tf32,
        private={name: hasattr(torch._C, name) for name in
                 ("_cuda_endAllocateToPool", "_cuda_releasePool", "_cuda_clearCublasWorkspaces")},
    )  # fmt: skip
    if run.cuda:
        device = torch.cuda.get_device_properties(run.device)
        run.say("device", name=device.name, processors=device.multi_processor_count, gib=gib(device.total_memory))
    size, side = (2**32, 8192) if run.cuda else (2**22, 256)
    one = torch.zeros(size, dtype=torch.uint8, device=run.device)
    two = torch.empty_like(one)
    product_of = torch.randn(side, side, device=run.device, dtype=torch.bfloat16)
    run.say(
        "rates", copy_tb_s=2 * size / seconds(run, lambda: two.copy_(one)) / 1e12,
        read_tb_s=size / seconds(run, lambda: one.view(torch.int64).sum()) / 1e12,
        bf16_tflops=2 * side**3 / seconds(run, lambda: product_of @ product_of) / 1e12,
    )  # fmt: skip
    start = time.perf_counter()
    host = torch.empty(size // 2, dtype=torch.uint8, pin_memory=run.cuda)
    pinned = time.perf_counter() - start
    part = one[: size // 2]
    run.say(
        "host", pin_gib_s=gib(size / 2) / pinned, out_gib_s=gib(size / 2) / seconds(run, lambda: host.copy_(part)),
        in_gib_s=gib(size / 2) / seconds(run, lambda: part.copy_(host)),
    )  # fmt: skip


def speed(run: Run) -> None:
    """Rates of the machine, and decode steps of every size and case in bf16; of float32 under autocast in one case."""
    machine(run)
    cases = CASES if run.cuda else ((2, 16),)
    for size in run.sizes:
        model = run.model(size)
        for batch, context in cases:
            decode_steps(run, model, size, batch, context, "bf16")
        del model
        run.collect()
    model = run.model(run.sizes[0], torch.float32)
    decode_steps(run, model, run.sizes[0], *cases[0], "fp32 under autocast", autocast_dtype="bfloat16")


def decode_steps(
    run: Run,
    model: PreTrainedModel,
    size: str,
    batch: int,
    context: int,
    label: str,
    **options: Any,
) -> None:
    """Time the steps of `batch` sequences."""
    shape = SHAPES[size]
    per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * HEAD_DIM * 2
    weights = sum(parameter.numel() for parameter in model.parameters()) * 2
    need = batch * (context + NEW + 10) * per_token * (1 if model.dtype == torch.bfloat16 else 2) / 2**30 + 1
    if run.cuda and need > gib(torch.cuda.mem_get_info(run.device)[0]) - 12:
        run.say("skipped", label=label, size=size, batch=batch, context=context, need_gib=need)
        return
    chosen = {"kv_cache_memory_gb": need if run.cuda else 0.05, "max_requests": batch, "max_tokens_per_step": 8192,
              "max_sequence_length": 40960, "verify_model": False, "enable_prefix_caching": False}  # fmt: skip
    with run.engine(model, **chosen, **options) as engine:
        for prompt in prompts(model, batch, context, context):
            engine.add_request(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True))
        scheduler = engine.context.scheduler
        with engine.installation:
            start, prefills = time.perf_counter(), 0
            while scheduler.waiting or scheduler.prefilling:
                engine.step()
                prefills += 1
            run.wait()
            prefill = time.perf_counter() - start
            start = time.perf_counter()
            engine.step()
            run.wait()
            first = time.perf_counter() - start
            step = seconds(run, engine.step, TIMED if run.cuda else 3)
            spent = device_time(engine.step, PROFILED, run.device) if run.cuda else DeviceTime(0.0, {})
    floor = (weights + batch * (context + NEW / 2) * per_token) / _bandwidth(run)
    run.say(
        "decode step", label=label, size=size, batch=batch, context=context, ms=step * 1e3, tokens_s=batch / step,
        floor_ms=floor * 1e3, of_floor=floor / step,
        device_ms=spent.busy_ms, idle_ms=step * 1e3 - spent.busy_ms, kernels=spent.kernels,
        prefill_tokens_s=batch * context / prefill, prefill_steps=prefills, first_step_s=first,
        **captured(engine), longest=[(name[:60], round(ms, 3)) for name, ms in list(spent.ms.items())[:14]],
    )  # fmt: skip
    run.say_memory(f"{label}, {size}, {batch} x {context}")


def _bandwidth(run: Run) -> float:
    name = torch.cuda.get_device_name(run.device) if run.cuda else ""
    return next((rate for known, rate in BANDWIDTHS.items() if known in name), BANDWIDTHS["H200"])
