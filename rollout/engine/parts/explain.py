"""Explains how one engine runs its model on this machine, and why: layers, forward, kernels, KV pool, advice."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.requirements import Requirement
from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.kernels import cpu_library, triton_paged
from rollout.engine.kernels.cpu_attention import MAX_GROUP
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.training.exact import why_not_exact
from rollout.engine.weights.base import Weights as WeightSource
from rollout.observe.metric_table import binary_bytes, short_count
from rollout.sampling_params import SamplingParams

LENGTH = 512
"""Number of tokens that the pool should have room for in each of `max_requests` sequences."""
PACKAGES = ("torch", "transformers")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE")
SEQUENCES, PROMPT, TOKENS = 16, 16, 32
"""Size of the timed decode: sequences, and tokens of each prompt and completion."""
_EXACT = "C++ operations whose sums have an order that follows from the place in their own row"


@dataclass(frozen=True)
class ModelPart:
    """The model and how its forward runs."""

    name: str
    parameters: int
    parameter_bytes: int
    dtype: str
    device: str
    weights: str
    layers: tuple[str, ...]
    """Layers by kind: number, class, heads and window or recurrent state, and the modules next to them."""
    fused: bool | None
    """Whether the fused forward runs; None: unknown while suspended or sharded."""
    why_not_fused: str
    attention: str
    sampling: str
    graphs: str
    """CUDA graphs: `decode steps`, or why there are none."""
    exact: str
    """Exact mode: its kernels if it is on; otherwise whether it could be turned on, and why not."""


@dataclass(frozen=True)
class KVPart:
    """The KV pool and the recurrent states."""

    bytes_per_token: int
    block_size: int
    blocks: int
    tokens: int
    bytes: int
    max_sequence_length: int
    full_sequences: int
    """Number of sequences of maximum length that fit together."""
    max_requests: int
    state_bytes: int
    """Bytes of the recurrent states of one sequence."""
    state_slots: int
    """Number of sequences and prefixes whose states are kept."""
    window: int | None
    """Tokens after which layers with a window free the KV of a running sequence; None: they keep it."""
    bytes_per_token_behind: int
    """Bytes kept per token outside the window."""


@dataclass(frozen=True)
class Machine:
    """Machine of the engine; None: unknown."""

    processor: str
    cores: float
    """Cores that this process may use: its affinity, or less by a control group's quota."""
    threads: int
    ranks_here: int
    """Processes of this job on this machine (`LOCAL_WORLD_SIZE`)."""
    variables: dict[str, str]
    load: float | None
    """Runnable processes and threads, averaged over a minute."""
    memory_total: int | None
    memory_free: int | None
    python: str
    packages: tuple[str, ...]
    """Packages that the forward depends on: name, version, and the supported versions."""
    untested: tuple[str, ...]
    """Packages with other versions than the supported ones."""


@dataclass(frozen=True)
class Trial:
    """Decode speed of an engine."""

    sequences: int
    length: int
    """Positions that each sequence attended to, on average."""
    tokens_per_s: float


@dataclass(frozen=True)
class Explanation:
    """Report of how an engine runs its model on this machine. `str()` is a page of text, `as_dict()` plain values.

    Attributes:
        compiler: compiler and file of the CPU kernels, or why there are none; empty on other devices.
        advice: causes of unnecessary slowness, with cures.
        trial: a timed decode of this engine; None: not measured.
    """

    model: ModelPart
    kv: KVPart
    machine: Machine
    compiler: str
    advice: tuple[str, ...]
    trial: Trial | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines, last = [], ""
        for title, text in _rows(self):
            lines.append(f"{'' if title == last else title:<10}  {text}")
            last = title
        return "\n".join(lines)


def explain(
    runner: ModelRunner, scheduler: Scheduler, config: InferenceConfig, source: WeightSource, length: int
) -> Explanation:
    """Read an engine's parts, which no step may use in the meantime; `length`: longest sequence, in tokens."""
    model, kv, machine = _model_part(runner, config, source), _kv_part(runner, scheduler, config, length), _machine()
    compiler = cpu_library.status().described if runner.layout.device.type == "cpu" else ""
    return Explanation(model, kv, machine, compiler, tuple(_advice(model, kv, machine)))


def decode_trial(
    generate: Callable[[Sequence[list[int]], SamplingParams], object],
    vocabulary: int,
    kv: KVPart,
    clock: Callable[[], float] = time.perf_counter,
) -> Trial | None:
    """Decode random tokens, best of two; the time of the prompts is subtracted. None: not a single sequence fits.

    Uses request ids, so nothing else should sample with this engine.

    Args:
        generate: the engine's method.
        vocabulary: number of token ids.
        clock: seconds.
    """
    count = min(SEQUENCES, kv.max_requests, kv.tokens // (2 * (PROMPT + TOKENS)))
    if not count or kv.max_sequence_length <= PROMPT + TOKENS:
        return None
    prompts = [row.tolist() for row in np.random.default_rng(0).integers(0, vocabulary, (count, PROMPT))]

    def seconds(tokens: int) -> float:
        took = []
        for _ in range(2):
            start = clock()
            generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0))
            took.append(clock() - start)
        return min(took)

    # The first call also pays for lazy initialisation.
    difference = seconds(1 + TOKENS) - seconds(1)
    return Trial(count, PROMPT + TOKENS // 2, count * TOKENS / max(difference, 1e-9))


# --- model ----------------------------------------------------------------------------------------------------------------


def _model_part(runner: ModelRunner, config: InferenceConfig, source: WeightSource) -> ModelPart:
    layout, parameters = runner.layout, list(source.trained.parameters())
    unknown = (source.collective and not source.ready) or not runner.cache.on_device
    why = None if unknown else runner.why_not_fused()
    return ModelPart(
        name=type(source.trained).__name__,
        parameters=sum(each.numel() for each in parameters),
        parameter_bytes=sum(each.numel() * each.itemsize for each in parameters),
        dtype=_short(parameters[0].dtype),
        device=str(layout.device),
        weights=_weights(source, runner),
        layers=tuple(_layer_kinds(runner.model, layout)),
        fused=None if unknown else why is None,
        why_not_fused=why or "",
        attention=_attention(runner),
        sampling=_sampling(layout),
        graphs=_graphs(runner, config, source),
        exact=_exact(runner, config, source),
    )


def _weights(source: WeightSource, runner: ModelRunner) -> str:
    if (mesh := source.tensor_parallel_mesh) is not None:
        text = f"split over the tensor-parallel ranks {', '.join(map(str, mesh.mesh.tolist()))}"
        text += ", and gathered by FSDP2 while generating" * source.collective
    elif (mesh := source.expert_parallel_mesh) is not None:
        ranks = ", ".join(map(str, mesh.mesh.tolist()))
        text = f"gathered from the ranks while generating, but for the experts, split over the expert-parallel ranks {ranks}"
    elif source.collective:
        text = "gathered from the ranks while generating"
    elif source.sampled is source.trained:
        text = "the trainer's own, no copy"
    else:
        text = f"a copy on {runner.layout.device}, renewed after each update"
    return text


def _layer_kinds(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    names = {module: name for name, module in model.named_modules()}
    kinds: Counter[str] = Counter()

    def add(module: nn.Module, described: str) -> None:
        layer = model.get_submodule(names[module].rpartition(".")[0])
        beside = [type(child).__name__ for child in layer.children() if child is not module]
        others = [each for each in dict.fromkeys(beside) if not each.endswith(("Norm", "Dropout"))]
        kinds[f"{type(module).__name__}: {described}; {', '.join(others) or 'nothing beside it'}"] += 1

    for module, index in layout.layer_of.items():
        shape, call = layout.layers[index], layout.calls[index]
        heads = f"{call.num_heads} query heads over {shape.num_kv_heads} KV heads of {shape.head_dim}"
        seen = "full attention" if call.window is None else f"a window of {call.window:,} tokens"
        capped = "" if call.softcap is None else f", scores capped at {call.softcap:g}"
        add(module, f"{heads}, {seen}{capped}")
    sizes: Counter[int] = Counter()
    for each in layout.states:
        sizes[each.key.layer] += each.num_bytes
    for index, size in sizes.items():
        # The innermost module that has this index, next to the attention that the same layer may have.
        *_, module = (m for m in names if getattr(m, "layer_idx", None) == index and m not in layout.layer_of)
        add(module, f"a recurrent state of {binary_bytes(size)} per sequence")
    return (f"{count} × {described}" for described, count in kinds.items())


def _attention(runner: ModelRunner) -> str:
    layout = runner.layout
    if not layout.layers:
        return "none: no attention layers"
    group = max(call.num_heads // shape.num_kv_heads for call, shape in zip(layout.calls, layout.layers, strict=True))
    if layout.device.type == "cpu":
        if cpu_library.load() is None:
            return "plain torch: no C++ kernels"
        dtypes = (torch.float32, torch.bfloat16)
        fits = layout.kv_dtype in dtypes and layout.narrowest_dtype == layout.kv_dtype and group <= MAX_GROUP
        return "C++" if fits else f"plain torch: keys of {_short(layout.kv_dtype)} with {group} query heads per KV head"
    if runner.module.paged is None:
        return f"plain torch: Triton does not run on {layout.device}"
    sizes = {size for shape in layout.layers for size in (shape.head_dim, shape.value_dim)}
    fits = layout.kv_dtype in triton_paged.DTYPES and group <= triton_paged.MAX_GROUP
    fits = fits and all(triton_paged.MIN_HEAD_DIM <= size <= triton_paged.MAX_HEAD_DIM for size in sizes)
    described = f"keys of {_short(layout.kv_dtype)} of sizes {sorted(sizes)} with {group} query heads per KV head"
    return "Triton" if fits else f"plain torch: {described}"


def _sampling(layout: ModelLayout) -> str:
    compiled = layout.device.type == "cpu" and cpu_library.load() is not None
    return "C++; top-k, top-p, min-p and penalties in torch before it" if compiled else "torch"


def _graphs(runner: ModelRunner, config: InferenceConfig, source: WeightSource) -> str:
    if runner.layout.device.type != "cuda":
        return f"none: the model is on {runner.layout.device}"
    if not config.advanced.cuda_graphs:
        return "none: InferenceConfig.cuda_graphs=False"
    if source.tensor_parallel_mesh is not None or source.expert_parallel_mesh is not None:
        return "none: collectives inside a forward are not captured"
    if not source.fixed_addresses:
        return "none: gathered weights lie at other addresses each time"
    if runner.states is not None:
        return "none: a model with recurrent states runs its own forward in every step"
    if runner.values.width:
        return "none: a graph returns logits alone, and token_values reads hidden states"
    if runner.graphs is None:
        return "none: Triton does not run here"
    why = runner.graphs.why_not
    return f"none: {why}" if why else f"decode steps of up to {config.max_requests} rows"


def _exact(runner: ModelRunner, config: InferenceConfig, source: WeightSource) -> str:
    if config.exact:
        return f"on: {_EXACT}, in the trainer's forward inside rollout.exact(model) and in every step here"
    if source.collective or source.tensor_parallel_mesh is not None:
        return "off, and refused: the weights are spread over the ranks"
    if not runner.cache.on_device:
        return "off; known when the engine is resumed"
    why = why_not_exact(runner.model, runner.layout, runner.cache)
    return f"off, and refused: {why}" if why else f"off; InferenceConfig(exact=True) runs {_EXACT}"


# --- KV pool and machine --------------------------------------------------------------------------------------------------


def _kv_part(runner: ModelRunner, scheduler: Scheduler, config: InferenceConfig, length: int) -> KVPart:
    cache, states, shape = runner.cache, runner.states, scheduler.allocator.pages.shape
    slots = 0 if states is None else states.num_blocks
    blocks, needed = cache.num_blocks // cache.num_groups, -(-length // cache.block_size)
    needed = shape.needed(needed, 1, cache.block_size)
    return KVPart(
        bytes_per_token=cache.num_groups * cache.block_bytes // cache.block_size,
        block_size=cache.block_size,
        blocks=blocks,
        tokens=blocks * cache.block_size,
        bytes=cache.num_blocks * cache.block_bytes,
        max_sequence_length=length,
        full_sequences=cache.num_blocks // needed if scheduler.longest >= length else 0,
        max_requests=min(config.max_requests, slots) if slots else config.max_requests,
        state_bytes=0 if states is None else states.block_bytes,
        state_slots=slots,
        window=shape.reach if shape.limited else None,
        bytes_per_token_behind=shape.whole * cache.block_bytes // cache.block_size if shape.limited else 0,
    )


def _machine() -> Machine:
    memory: dict[str, int] = {}
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        memory = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    packages, untested = _packages()
    return Machine(
        processor=_processor(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        ranks_here=max(1, int(ranks)) if ranks.isdecimal() else 1,
        variables={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        memory_total=memory.get("MemTotal"),
        memory_free=memory.get("MemAvailable"),
        python=sys.version.split()[0],
        packages=packages,
        untested=untested,
    )


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that this process may use.

    Args:
        root: folder of the control groups, version 2 or 1; for tests.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return min(cores, int(quota) / int(period))
    with suppress(OSError, ValueError):
        allowed, every = (int((root / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return min(cores, allowed / every) if allowed > 0 else cores
    return cores


def _packages() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The installed packages that the forward depends on, and those of untested versions."""
    try:
        wanted = {each.name: each for each in map(Requirement, requires("rollout-engine") or ())}
    except PackageNotFoundError:
        wanted = {}
    packages, untested = [], []
    for name in PACKAGES:
        text = f"{name} {version(name)}"
        if name in wanted:
            allowed = wanted[name].specifier
            works = ",".join(sorted(map(str, allowed), reverse=True))
            if not allowed.contains(version(name), prereleases=True):
                untested.append(f"{text} is not among the tested versions ({works})")
            text += f" (works with {works})" if works else ""
        packages.append(text)
    return tuple(packages), tuple(untested)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


# --- advice and text ------------------------------------------------------------------------------------------------------


def _advice(model: ModelPart, kv: KVPart, machine: Machine) -> Iterator[str]:
    if model.attention.startswith("plain torch"):
        yield f"attention runs in {model.attention}"
    if model.device == "cpu":
        if model.fused is False:
            yield f"the module's own forward runs, because {model.why_not_fused}; the fused one is several times as fast"
        wanted = machine.threads * machine.ranks_here
        if wanted > machine.cores:
            yield (
                f"{machine.ranks_here} × {machine.threads} threads share {machine.cores:g} cores: set OMP_NUM_THREADS="
                f"{max(1, int(machine.cores / machine.ranks_here))} before the start, or torch.set_num_threads"
            )
        elif wanted < machine.cores * 0.75 and machine.ranks_here == 1:
            yield f"{machine.threads} threads on {machine.cores:g} cores: more may be faster (OMP_NUM_THREADS)"
        if machine.load is not None and machine.load > machine.cores:
            yield f"a load of {machine.load:.1f} on {machine.cores:g} cores: other processes slow this one down"
    if not kv.full_sequences:
        yield (
            f"no sequence of max_sequence_length={kv.max_sequence_length:,} fits the pool of {kv.tokens:,} tokens: longer "
            "requests are refused; raise kv_cache_memory_gb"
        )
    elif kv.tokens < kv.max_requests * min(LENGTH, kv.max_sequence_length):
        yield (
            f"the pool holds {kv.tokens // kv.max_requests:,} tokens for each of max_requests={kv.max_requests}: beyond "
            "that samples are preempted and computed again; raise kv_cache_memory_gb or lower max_requests"
        )
    yield from machine.untested


def _rows(found: Explanation) -> Iterator[tuple[str, str]]:
    """Title and text of each line of the page."""
    model, kv, machine, trial = found.model, found.kv, found.machine, found.trial
    forward = "fused C++"
    if model.fused is None:
        forward = "known when weights are gathered and the engine is resumed"
    elif not model.fused:
        forward = f"the module's own: {model.why_not_fused}"
    size = f"{short_count(model.parameters)} parameters in {model.dtype} ({binary_bytes(model.parameter_bytes)})"
    yield "model", f"{model.name}, {size} on {model.device}"
    yield "weights", model.weights
    yield from (("layers", kind) for kind in model.layers)
    yield "forward", forward
    yield "attention", model.attention
    yield "sampling", model.sampling
    yield "graphs", model.graphs
    yield "exact mode", model.exact
    behind = f", {kv.bytes_per_token_behind:,} behind a window of {kv.window:,} tokens" if kv.window is not None else ""
    pool = f"{kv.tokens:,} tokens fit, in {kv.blocks:,} blocks of {kv.block_size} ({binary_bytes(kv.bytes)})"
    yield "KV cache", f"{kv.bytes_per_token:,} bytes per token{behind}; {pool}"
    full = f"{kv.full_sequences:,} sequences of {kv.max_sequence_length:,} tokens at once"
    yield "KV cache", f"{full}; at most {kv.max_requests} run at once"
    if kv.state_slots:
        fit = f"{kv.state_slots:,} fit ({binary_bytes(kv.state_slots * kv.state_bytes)})"
        yield (
            "states",
            f"{binary_bytes(kv.state_bytes)} per sequence; {fit}: one per running sequence, others for prefix hits",
        )
    speed = "not measured"
    if trial is not None:
        speed = f"decode of {trial.sequences} sequences of {trial.length} tokens: {trial.tokens_per_s:,.0f} tokens/s"
    yield "speed", speed
    memory = ""
    if machine.memory_total is not None and machine.memory_free is not None:
        memory = f", {binary_bytes(machine.memory_free)} of {binary_bytes(machine.memory_total)} memory free"
    yield "machine", f"{machine.processor}, {machine.cores:g} cores{memory}"
    variables = "".join(f", {name}={value}" for name, value in machine.variables.items())
    load = "" if machine.load is None else f"; load {machine.load:.1f}"
    yield "threads", f"{machine.threads} in each of {machine.ranks_here} ranks on this machine{variables}{load}"
    yield "versions", f"Python {machine.python}, {', '.join(machine.packages)}"
    if found.compiler:
        yield "compiler", found.compiler
    yield from (("advice", each) for each in found.advice or ("none",))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
