"""Stages `env`, `speed`, `ways`, `tune`, `top_p`: rates of the machine, of decode steps, of attention, of the sampler."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.kernels import decode_parts, triton_draw, triton_paged
from rollout.engine.kernels.decode_parts import DecodeParts
from rollout.engine.sampling.sampler import sample
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.findings import HEAD_DIM, SHAPES, Run, captured, gib, prompts

BANDWIDTHS = {"H200": 4.3e12, "H100": 3.0e12}
"""Bytes a second that a device reads, for the floor of a decode step; `env` says what this one does."""
CASES = ((64, 1024), (256, 1024), (64, 4096))
"""(sequences, tokens of each)."""
NEW = 190
PROFILED, TIMED = 4, 48


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


def env(run: Run) -> None:
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
    size, side = (2**32, 8192) if run.large else (2**22, 256)
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
    """Decode steps of every size and case in bf16: milliseconds, what device and host did in them, the floor of bytes."""
    for size in run.sizes:
        model = run.model(size)
        for batch, context in CASES if run.large else ((2, 16),):
            decode_steps(run, model, size, batch, context, "bf16")
        del model
        run.collect()


def speed_small(run: Run) -> None:
    """Decode steps of the first size in its first case."""
    model = run.model(run.sizes[0])
    batch, context = CASES[0] if run.large else (2, 16)
    decode_steps(run, model, run.sizes[0], batch, context, "bf16")


def ways(run: Run) -> None:
    """The step of float32 weights under autocast: by the option, around the call, and inside of the forward."""
    size, (batch, context) = run.sizes[0], CASES[0] if run.large else (2, 16)
    kind = run.device.type
    model = run.model(size, torch.float32)
    decode_steps(run, model, size, batch, context, "fp32, autocast_dtype", autocast_dtype="bfloat16")
    with torch.autocast(kind, torch.bfloat16):
        decode_steps(run, model, size, batch, context, "fp32, autocast around the call")
    decode_steps(run, model, size, batch, context, "fp32, a bf16 copy", inference_dtype="bfloat16")
    # accelerate makes one context at `prepare`, in which every forward runs.
    model.forward = torch.autocast(kind, torch.bfloat16)(model.forward)
    decode_steps(run, model, size, batch, context, "fp32, autocast in the forward")


def decode_steps(
    run: Run,
    model: PreTrainedModel,
    size: str,
    batch: int,
    context: int,
    label: str,
    *,
    samples: int = 1,
    **options: Any,
) -> None:
    """Time the steps of `batch` sequences, `samples` of each prompt."""
    shape = SHAPES[size]
    per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * HEAD_DIM * 2
    weights = sum(parameter.numel() for parameter in model.parameters()) * 2
    need = batch * (context + NEW + 10) * per_token * (1 if model.dtype == torch.bfloat16 else 2) / 2**30 + 1
    if run.large and need > gib(torch.cuda.mem_get_info(run.device)[0]) - 12:
        run.say("skipped", label=label, size=size, batch=batch, context=context, need_gib=need)
        return
    chosen = {"kv_cache_memory_gb": need if run.large else 0.05, "max_requests": batch, "max_tokens_per_step": 8192,
              "max_sequence_length": 40960, "verify_model": False, "enable_prefix_caching": False}  # fmt: skip
    with run.engine(model, **chosen, **options) as engine:
        for prompt in prompts(model, batch // samples, context, context):
            engine.add_request(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True, n=samples))
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
            step = seconds(run, engine.step, TIMED if run.large else 3)
            host = _host_parts(engine, 16 if run.large else 2)
            busy, count, longest = _profiled(run, engine) if run.cuda else (0.0, 0.0, [])
    floor = (weights + batch * (context + NEW / 2) * per_token) / _bandwidth(run)
    run.say(
        "decode step", label=label, size=size, batch=batch, context=context, ms=step * 1e3, tokens_s=batch / step,
        floor_ms=floor * 1e3, of_floor=floor / step, device_ms=busy, idle_ms=step * 1e3 - busy, kernels=count,
        host_ms=host, prefill_tokens_s=batch // samples * context / prefill, prefill_steps=prefills, first_step_s=first,
        **captured(engine), longest=longest,
    )  # fmt: skip
    run.say_memory(f"{label}, {size}, {batch} x {context}")


def _bandwidth(run: Run) -> float:
    name = torch.cuda.get_device_name(run.device) if run.cuda else ""
    return next((rate for known, rate in BANDWIDTHS.items() if known in name), BANDWIDTHS["H200"])


def _host_parts(engine: DynamicInferenceEngine, steps: int) -> dict[str, float]:
    """Median milliseconds of the host in the parts of a step."""
    spent: dict[str, list[float]] = defaultdict(list)
    scheduler, runner = engine.context.scheduler, engine.controller.runner
    owners = [
        (scheduler, "schedule"),
        (scheduler, "update"),
        (runner, "forward"),
        (runner, "_sample"),
    ]
    with _timed(owners, spent):
        for _ in range(steps):
            engine.step()
    return {name: round(statistics.median(times) * 1e3, 3) for name, times in spent.items()}


@contextmanager
def _timed(owners: list[tuple[Any, str]], spent: dict[str, list[float]]) -> Iterator[None]:
    for owner, name in owners:
        setattr(owner, name, _timing(getattr(owner, name), spent[name]))
    try:
        yield
    finally:
        for owner, name in owners:
            delattr(owner, name)


def _timing(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - start)

    return run


def _profiled(run: Run, engine: DynamicInferenceEngine) -> tuple[float, float, list[tuple[str, float]]]:
    """Milliseconds and kernels of the device per step, and its longest kernels."""
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * run.large]) as trace:
        for _ in range(PROFILED):
            engine.step()
        run.wait()
    by, count = Counter[str](), 0
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by[event.name[:60]] += event.device_time / 1e3 / PROFILED
            count += 1
    longest = [(name, round(spent, 3)) for name, spent in by.most_common(14)]
    return sum(by.values()), count / PROFILED, longest


def tune(run: Run) -> None:
    """Decode attention alone: bytes a second by tile, warps, pipeline stages and keys per part."""
    paged = triton_paged.load(run.device)
    if paged is None:
        raise RuntimeError("the Triton kernels do not load; see the warning above")
    plan, split = triton_paged._plan, decode_parts.SPLIT
    try:
        cases = ((64, 1024, 16, 8), (64, 4096, 32, 8), (256, 1024, 32, 8))
        for batch, context, heads, kv_heads in cases if run.large else ((2, 32, 2, 1),):
            found = sorted(_attention_rates(run, paged, batch, context, heads, kv_heads), reverse=True)
            now = next((each for each in found if each[1] == (64, 4, 3, split)), None)
            run.say(
                "decode attention, TB/s", batch=batch, context=context, heads=heads, kv_heads=kv_heads, now=now,
                best=found[:5], worst=found[-2:],
            )  # fmt: skip
            run.collect()
    finally:
        triton_paged._plan, decode_parts.SPLIT = plan, split


def _attention_rates(
    run: Run, paged: triton_paged.TritonPaged, batch: int, context: int, heads: int, kv_heads: int
) -> Iterator[tuple[float, tuple[int, int, int, int]]]:
    blocks = batch * context // 16
    keys = torch.randn(blocks, 16, kv_heads, HEAD_DIM, device=run.device, dtype=torch.bfloat16)
    values = torch.randn_like(keys)
    table = torch.randperm(blocks, device=run.device).int().view(batch, -1)
    query = torch.randn(batch, heads, HEAD_DIM, device=run.device, dtype=torch.bfloat16)
    last = torch.full((batch,), context - 1, device=run.device, dtype=torch.int32)
    for span, warps, stages, split in product((64, 128), (4, 8) if run.large else (4,), (2, 3), (256, 512)):
        tiles = triton_paged._Plan(16, span, warps, stages)
        triton_paged._plan, decode_parts.SPLIT = lambda *_, tiles=tiles: tiles, split
        parts = DecodeParts(last, batch * decode_parts.num_splits(context))
        attend = partial(paged.decode_with_lse, query, keys, values, table, last, None, HEAD_DIM**-0.5, parts=parts)
        try:
            took = seconds(run, attend, 20)
        except Exception as exc:  # noqa: BLE001 - a tile that the device has no room for
            run.say("a tile that does not work", tile=(span, warps, stages, split), why=str(exc)[:100])
            continue
        yield 2 * keys.numel() * 2 / took / 1e12, (span, warps, stages, split)


def top_p(run: Run) -> None:
    """The sampler's milliseconds by kind of parameters, by Triton and by plain torch, and whether tokens are the same."""
    kinds = {
        "plain": SamplingParams(), "temperature": SamplingParams(temperature=0.7), "top_p": SamplingParams(top_p=0.95),
        "top_k": SamplingParams(top_k=20), "both": SamplingParams(top_k=20, top_p=0.95),
        "greedy": SamplingParams(temperature=0), "logprobs": SamplingParams(logprobs=5),
    }  # fmt: skip
    vocabulary = SHAPES[run.sizes[0]]["vocab_size"]
    for batch in (64, 256) if run.large else (4,):
        logits = (torch.randn(batch, vocabulary, device=run.device) * 3).bfloat16()
        positions = torch.arange(batch, device=run.device)
        for kind, params in kinds.items():
            table = SamplingTable(run.device)
            for row in range(batch):
                table.set(row, params, row)
            rows = table.select(np.arange(batch))
            draw = partial(sample, logits, rows, positions)
            ours, took = draw(), seconds(run, draw)
            with _plain_sampler():
                plain, torch_took = draw(), seconds(run, draw)
            same = float((ours.token_ids == plain.token_ids).float().mean())
            apart = float((ours.logprobs - plain.logprobs)[ours.token_ids == plain.token_ids].abs().max())
            run.say(
                "sampler",
                batch=batch,
                kind=kind,
                ms=1e3 * took,
                torch_ms=1e3 * torch_took,
                same=same,
                logprobs_apart=apart,
            )


@contextmanager
def _plain_sampler() -> Iterator[None]:
    serves, triton_draw.serves = triton_draw.serves, lambda scores: False
    try:
        yield
    finally:
        triton_draw.serves = serves
