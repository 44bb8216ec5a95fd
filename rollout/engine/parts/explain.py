"""A report on how one engine runs its model on this machine: layers, forward pass, kernels, KV pool and advice."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from rollout.config import InferenceConfig
from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.kernels import cpu_library, triton_paged
from rollout.engine.kernels.cpu_attention import MAX_GROUP
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.training.exact import why_not_exact
from rollout.engine.weights.base import Weights as WeightSource
from rollout.observe.metric_table import binary_bytes, short_count
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams

LENGTH = 512
"""The number of tokens that the KV pool should hold for each of `max_requests` sequences. If the pool holds fewer, the
report's advice is to enlarge the pool."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE")
SEQUENCES, PROMPT, TOKENS = 16, 16, 32
"""The size of the timed decode: number of sequences, tokens per prompt, tokens per completion."""
_EXACT = "C++ operations whose sums have an order that follows from the place in their own row"


@dataclass(frozen=True)
class Explanation:
    """A report on how an engine runs its model on this machine: text (`str()`) or a dict for JSON (`as_dict()`)."""

    fused: bool | None
    """Whether the fused forward pass runs. None means unknown: the engine is suspended, or its weights are sharded."""
    why_not_fused: str
    """The reason why the fused forward pass does not run, or an empty string if it runs or this is unknown."""
    rows: tuple[tuple[str, str], ...]
    """The lines of the report without the advice, each as (title, text)."""
    advice: tuple[str, ...]
    """The reasons why sampling is slower than necessary, most of them with a cure."""

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON with `fused`, `why_not_fused`, `advice`, and the list of texts for each title in `rows`."""
        texts: dict[str, list[str]] = {}
        for title, text in self.rows:
            texts.setdefault(title, []).append(text)
        return {"fused": self.fused, "why_not_fused": self.why_not_fused, **texts, "advice": list(self.advice)}

    def __str__(self) -> str:
        lines, last = [], ""
        for title, text in (*self.rows, *(("advice", each) for each in self.advice or ("none",))):
            lines.append(f"{'' if title == last else title:<10}  {text}")
            last = title
        return "\n".join(lines)


def explain(
    runner: ModelRunner, scheduler: Scheduler, config: InferenceConfig, source: WeightSource, length: int
) -> Explanation:
    """Explain how the engine with these parts runs its model. The caller must prevent steps during this call.

    Args:
        source: the source of the engine's weights.
        length: maximum length of a sequence, in tokens.
    """
    unknown = (source.collective and not source.ready) or not runner.cache.on_device
    why = None if unknown else runner.why_not_fused()
    rows = (
        *_model_rows(runner, config, source, unknown=unknown, why_not_fused=why),
        *_kv_rows(runner, scheduler, length),
        *_machine_rows(),
        (
            "versions",
            f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}",
        ),
        *[("compiler", cpu_library.status().described)] * (runner.layout.device.type == "cpu"),
    )
    advice = (*_model_advice(runner, why), *_pool_advice(scheduler, length))
    return Explanation(None if unknown else why is None, why or "", rows, advice)


def decode_trial(
    generate: Callable[[Sequence[list[int]], SamplingParams], object],
    scheduler: Scheduler,
    vocabulary: int,
    length: int,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Measure the decode speed for random prompts, excluding prefill time, and return the speed as text.

    The faster of two calls counts. The trial uses up request ids, so nothing else should sample with this engine.

    Args:
        generate: the engine's `generate` method.
        scheduler: the engine's scheduler.
        vocabulary: number of token ids.
        length: maximum length of a sequence, in tokens.
        clock: function that returns the time in seconds.
    """
    count = min(SEQUENCES, scheduler.num_places, _pool_tokens(scheduler) // (2 * (PROMPT + TOKENS)))
    if not count or length <= PROMPT + TOKENS:
        return "not measured: not a single sequence fits"
    prompts = [row.tolist() for row in np.random.default_rng(0).integers(0, vocabulary, (count, PROMPT))]

    def seconds(tokens: int) -> float:
        took = []
        for _ in range(2):
            start = clock()
            generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0))
            took.append(clock() - start)
        return min(took)

    # Time the longer calls first: lazy initialisation slows down only the first of them, and `min` drops it.
    speed = count * TOKENS / max(seconds(1 + TOKENS) - seconds(1), 1e-9)
    return f"decode of {count} sequences of {PROMPT + TOKENS // 2} tokens: {speed:,.0f} tokens/s"


def greedy_trial(
    generate: Callable[[Sequence[list[int]], SamplingParams], list[DynamicInferenceRequest]], model: PreTrainedModel
) -> str:
    """Compare the engine's greedy tokens with `model.generate`, and return the result as text.

    Raises:
        RuntimeError: the tokens differ.
    """
    prompt, greedily = [5, 6, 7, 8], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    ours = generate([prompt], greedily)[0].generated_tokens
    ids = torch.tensor([prompt], device=model.device)
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 4:].tolist()
    if ours != theirs:
        raise RuntimeError(f"a greedy sample {ours} differs from model.generate, {theirs}")
    return "8 greedy tokens equal those of model.generate"


# --- rows about the model -------------------------------------------------------------------------------------------------


def _model_rows(
    runner: ModelRunner, config: InferenceConfig, source: WeightSource, *, unknown: bool, why_not_fused: str | None
) -> Iterator[tuple[str, str]]:
    layout, parameters = runner.layout, list(source.trained.parameters())
    size = short_count(sum(each.numel() for each in parameters))
    size_bytes = binary_bytes(sum(each.numel() * each.itemsize for each in parameters))
    name = type(source.trained).__name__
    yield "model", f"{name}, {size} parameters in {_short(parameters[0].dtype)} ({size_bytes}) on {layout.device}"
    yield "weights", _weights(source, runner)
    yield from (("layers", kind) for kind in _layer_kinds(runner.model, layout))
    forward = "fused C++" if why_not_fused is None else f"the module's own: {why_not_fused}"
    yield "forward", "known when weights are gathered and the engine is resumed" if unknown else forward
    yield "attention", _attention(runner)
    yield "graphs", _graphs(runner, config)
    yield "exact mode", _exact(runner, config, source)


def _model_advice(runner: ModelRunner, why_not_fused: str | None) -> Iterator[str]:
    if (attention := _attention(runner)).startswith("plain torch"):
        yield f"attention runs in {attention}"
    if runner.layout.device.type != "cpu":
        return
    if why_not_fused is not None:
        yield f"the module's own forward runs, because {why_not_fused}; the fused one is several times as fast"
    threads, ranks, cores = torch.get_num_threads(), _ranks_here(), usable_cores()
    if threads * ranks > cores:
        yield (
            f"{ranks} × {threads} threads share {cores:g} cores: set OMP_NUM_THREADS={max(1, int(cores / ranks))} before "
            "the start, or torch.set_num_threads"
        )
    elif threads < cores * 0.75 and ranks == 1:
        yield f"{threads} threads on {cores:g} cores: more may be faster (OMP_NUM_THREADS)"
    if (load := _load()) > cores:
        yield f"a load of {load:.1f} on {cores:g} cores: other processes slow this one down"


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
        # Select the innermost module with this layer index that is not an attention layer. A decoder layer may have both an
        # attention module and a recurrent module.
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


def _graphs(runner: ModelRunner, config: InferenceConfig) -> str:
    why = runner.without_graphs if runner.graphs is None else runner.graphs.why_not
    return f"none: {why}" if why else f"decode steps of up to {config.max_requests} rows"


def _exact(runner: ModelRunner, config: InferenceConfig, source: WeightSource) -> str:
    if config.exact:
        return f"on: {_EXACT}, in the trainer's forward inside rollout.exact(model) and in every step here"
    if source.spread:
        return "off, and refused: the weights are spread over the ranks"
    if not runner.cache.on_device:
        return "off; known when the engine is resumed"
    why = why_not_exact(runner.model, runner.layout, runner.cache)
    return f"off, and refused: {why}" if why else f"off; InferenceConfig(exact=True) runs {_EXACT}"


# --- rows about the KV pool and the machine -------------------------------------------------------------------------------


def _pool_tokens(scheduler: Scheduler) -> int:
    return scheduler.allocator.num_blocks * scheduler.allocator.block_size


def _full_sequences(scheduler: Scheduler, length: int) -> int:
    return scheduler.allocator.num_blocks // -(-length // scheduler.allocator.block_size)


def _kv_rows(runner: ModelRunner, scheduler: Scheduler, length: int) -> Iterator[tuple[str, str]]:
    cache, states, tokens = runner.cache, runner.states, _pool_tokens(scheduler)
    pool = f"{tokens:,} tokens fit, in {tokens // cache.block_size:,} blocks of {cache.block_size}"
    pool += f" ({binary_bytes(cache.num_blocks * cache.block_bytes)})"
    yield "KV cache", f"{cache.block_bytes // cache.block_size:,} bytes per token; {pool}"
    full = f"{_full_sequences(scheduler, length):,} sequences of {length:,} tokens at once"
    yield "KV cache", f"{full}; at most {scheduler.num_places} run at once"
    if runner.layout.states:
        fit = f"{states.num_blocks:,} fit ({binary_bytes(states.num_blocks * states.block_bytes)})"
        yield (
            "states",
            f"{binary_bytes(states.block_bytes)} per sequence; {fit}: one per running sequence, others for prefix hits",
        )


def _pool_advice(scheduler: Scheduler, length: int) -> Iterator[str]:
    tokens, most = _pool_tokens(scheduler), scheduler.num_places
    if not _full_sequences(scheduler, length):
        yield (
            f"no sequence of max_sequence_length={length:,} fits the pool of {tokens:,} tokens: longer requests are "
            "refused; raise kv_cache_memory_gb"
        )
    elif tokens < most * min(LENGTH, length):
        yield (
            f"the pool holds {tokens // most:,} tokens for each of max_requests={most}: beyond that samples are preempted "
            "and computed again; raise kv_cache_memory_gb or lower max_requests"
        )


def _machine_rows() -> Iterator[tuple[str, str]]:
    memory = ""
    with suppress(OSError, ValueError, IndexError, KeyError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        size = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        memory = f", {binary_bytes(size['MemAvailable'])} of {binary_bytes(size['MemTotal'])} memory free"
    yield "machine", f"{_processor()}, {usable_cores():g} cores{memory}"
    variables = "".join(f", {name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ)
    ranks = f"{torch.get_num_threads()} in each of {_ranks_here()} ranks on this machine"
    yield "threads", f"{ranks}{variables}; load {_load():.1f}"


def _ranks_here() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdecimal() else 1


def _load() -> float:
    """Return the system's load average over the last minute, or 0 if the system does not report one."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the number of cores that this process may use.

    Args:
        root: root folder of the Linux control groups. Tests replace it.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return min(cores, int(quota) / int(period))
    return cores


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
