"""Explains one engine with its model on this machine: layers, forward, kernels, KV pool, and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.explain.machine import Machine
from rollout.engine.explain.trial import Trial
from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.kernels import cpu_library, triton_paged
from rollout.engine.kernels.cpu_attention import MAX_GROUP
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.training.served import why_not_exact
from rollout.engine.weights.base import Weights as WeightSource
from rollout.metrics import binary_bytes, short_count

LENGTH = 512
"""Tokens of a sequence that each of `max_requests` should have room for."""

_EXACT = {
    "cpu": "C++ operations whose sums have an order that follows from the place in their own row",
    "cuda": "Triton operations with one tile for any number of rows, and log-probs by torch's log-softmax",
}
"""Type of device → what exact mode runs there."""
_ASKED = {"cpu": "True", "cuda": "'experimental'"}
"""Type of device → value of `InferenceConfig.exact` that turns it on."""


@dataclass(frozen=True)
class LayerKind:
    """Attention layers, or recurrent ones, that are alike.

    Attributes:
        description: class, heads and window, or size of the state, and what surrounds it.
    """

    count: int
    description: str


@dataclass(frozen=True)
class ModelPart:
    """The model and how its forward runs."""

    name: str
    parameters: int
    parameter_bytes: int
    dtype: str
    device: str
    weights: str
    """Source of the weights."""
    layers: tuple[LayerKind, ...]
    fused: bool | None
    """Whether the fused forward runs, or exact mode's on a GPU; None: unknown while suspended or sharded."""
    why_not_fused: str
    attention: str
    """Kernel of the paged attention."""
    sampling: str
    """Kernel of the draw."""
    graphs: str
    """CUDA graphs: `decode steps`, or why there are none."""
    exact: str
    """Exact mode: what it runs here if it is on; else whether it could be turned on, and why not."""


@dataclass(frozen=True)
class KVPart:
    """The KV pool."""

    bytes_per_token: int
    block_size: int
    blocks: int
    tokens: int
    """That fit."""
    bytes: int
    max_sequence_length: int
    full_sequences: int
    """Sequences of the greatest length that fit together."""
    max_requests: int
    """Samples that may run at once."""
    state_bytes: int = 0
    """Of the recurrent states of one sequence."""
    state_slots: int = 0
    """Sequences and prefixes whose states are kept."""
    window: int | None = None
    """Tokens behind which layers with a window give back the KV of a running sequence; None: all is kept, or the whole block
    is given back."""
    bytes_per_token_behind: int = 0
    """What is kept of a token behind it."""


@dataclass(frozen=True)
class Explanation:
    """What an engine does with its model on this machine. `str()` is a page of text, `as_dict()` plain values.

    Attributes:
        trial: a timed decode of this engine; None: not measured.
        compiler: compiler and file of the CPU kernels, or why there are none; empty on other devices.
        advice: what makes this slower than it need be, and the cure.
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
        rows = [*_model_rows(self.model), *_kv_rows(self.kv), *_speed_rows(self.trial)]
        rows += [*_machine_rows(self.machine), *([("compiler", self.compiler)] if self.compiler else [])]
        rows += [("advice", each) for each in self.advice] or [("advice", "none")]
        lines, last = [], ""
        for title, text in rows:
            lines.append(f"{'' if title == last else title:<10}  {text}")
            last = title
        return "\n".join(lines)


def explain(
    runner: ModelRunner,
    cache: KVCache,
    scheduler: Scheduler,
    config: InferenceConfig,
    source: WeightSource,
    length: int,
) -> Explanation:
    """Look at an engine's parts, which no step uses meanwhile.

    Args:
        source: where the weights are read.
        length: longest sequence, in tokens.
    """
    model, machine = _model_part(runner, config, source), Machine.look()
    kv = _kv_part(cache, scheduler, runner.states, config, length)
    compiler = cpu_library.status().described if runner.layout.device.type == "cpu" else ""
    return Explanation(model, kv, machine, compiler, tuple(_advice(model, kv, machine)))


# --- parts ----------------------------------------------------------------------------------------------------------------


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
        weights=_weights(source, layout) + _copied(runner),
        layers=tuple(_layer_kinds(runner.model, layout)),
        fused=None if unknown else why is None,
        why_not_fused=why or "",
        attention=_attention(runner),
        sampling=_sampling(layout),
        graphs=_graphs(runner, config, source),
        exact=_exact(runner, config, source),
    )


def _weights(source: WeightSource, layout: ModelLayout) -> str:
    if (mesh := source.tensor_parallel_mesh) is not None:
        split = f"split over the tensor-parallel ranks {', '.join(map(str, mesh.mesh.tolist()))}"
        return f"{split}, and gathered by FSDP2 while generating" if source.collective else split
    if (mesh := source.expert_parallel_mesh) is not None:
        ranks = ", ".join(map(str, mesh.mesh.tolist()))
        return f"gathered from the ranks while generating, but for the experts, split over the expert-parallel ranks {ranks}"
    if source.collective:
        moved = f", to other addresses each time: {source.why_moved}" if source.why_moved else ""
        return "gathered from the ranks while generating" + (", to fixed addresses" * source.fixed_addresses or moved)
    if source.sampled is source.trained:
        return "the trainer's own, no copy"
    return f"a copy on {layout.device}, renewed after each update"


def _copied(runner: ModelRunner) -> str:
    size = runner.copies.nbytes
    return f", and copies for autocast ({binary_bytes(size)}), filled again when they may have changed" if size else ""


def _layer_kinds(model: nn.Module, layout: ModelLayout) -> list[LayerKind]:
    names = {module: name for name, module in model.named_modules()}
    kinds: Counter[str] = Counter()
    for module, index in layout.layer_of.items():
        shape, call = layout.layers[index], layout.calls[index]
        heads = f"{call.num_heads} query heads over {shape.num_kv_heads} KV heads of {shape.head_dim}"
        seen = "full attention" if call.window is None else f"a window of {call.window:,} tokens"
        capped = "" if call.softcap is None else f", scores capped at {call.softcap:g}"
        kinds[f"{type(module).__name__}: {heads}, {seen}{capped}; {_beside(model, module, names[module])}"] += 1
    sizes: Counter[int] = Counter()
    for each in layout.states:
        sizes[each.key.layer] += each.num_bytes
    for index, size in sizes.items():
        # The innermost module that knows its layer, beside the attention that the same layer may have.
        *_, module = (m for m in names if getattr(m, "layer_idx", None) == index and m not in layout.layer_of)
        described = f"a recurrent state of {binary_bytes(size)} per sequence"
        kinds[f"{type(module).__name__}: {described}; {_beside(model, module, names[module])}"] += 1
    return [LayerKind(count, description) for description, count in kinds.items()]


def _beside(model: nn.Module, module: nn.Module, name: str) -> str:
    layer = model.get_submodule(name.rpartition(".")[0])
    beside = [type(child).__name__ for child in layer.children() if child is not module]
    others = [each for each in dict.fromkeys(beside) if not each.endswith(("Norm", "Dropout"))]
    return ", ".join(others) or "nothing beside it"


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
    if runner.paged is None:
        return f"plain torch: Triton does not run on {layout.device}"
    sizes = {size for shape in layout.layers for size in (shape.head_dim, shape.value_dim)}
    fits = layout.kv_dtype in triton_paged.DTYPES and group <= triton_paged.MAX_GROUP
    fits = fits and all(triton_paged.MIN_HEAD_DIM <= size <= triton_paged.MAX_HEAD_DIM for size in sizes)
    described = f"keys of {_short(layout.kv_dtype)} of sizes {sorted(sizes)} with {group} query heads per KV head"
    return "Triton" if fits else f"plain torch: {described}"


def _sampling(layout: ModelLayout) -> str:
    if layout.device.type == "cpu" and cpu_library.load() is not None:
        return "C++; top-k, top-p, min-p and penalties in torch before it"
    return "torch"


def _graphs(runner: ModelRunner, config: InferenceConfig, source: WeightSource) -> str:
    if runner.layout.device.type != "cuda":
        return f"none: the model is on {runner.layout.device}"
    if not config.advanced.cuda_graphs:
        return "none: Advanced.cuda_graphs=False"
    if source.tensor_parallel_mesh is not None or source.expert_parallel_mesh is not None:
        return "none: collectives inside a forward are not captured"
    if not source.fixed_addresses:
        return "none: gathered weights lie at other addresses each time"
    if runner.states is not None:
        return "none: a model with recurrent states runs its own forward in every step"
    if runner.graphs is None:
        return "none: Triton does not run here"
    why = runner.graphs.why_not
    return f"none: {why}" if why else f"decode steps of up to {config.max_requests} rows"


def _exact(runner: ModelRunner, config: InferenceConfig, source: WeightSource) -> str:
    kind = runner.layout.device.type
    if config.exact:
        return f"on: {_EXACT[kind]}, in the trainer's forward inside rollout.exact(model) and in every step here"
    if source.collective or source.tensor_parallel_mesh is not None:
        return "off, and refused: the weights are spread over the ranks"
    if not runner.cache.on_device:
        return "off; known when the engine is resumed"
    why = why_not_exact(runner.model, runner.layout, runner.cache)
    return f"off, and refused: {why}" if why else f"off; InferenceConfig(exact={_ASKED[kind]}) runs {_EXACT[kind]}"


def _kv_part(
    cache: KVCache, scheduler: Scheduler, states: StatePool | None, config: InferenceConfig, length: int
) -> KVPart:
    slots, pages = 0 if states is None else states.num_blocks, scheduler.allocator.pages
    blocks, needed = cache.num_blocks // cache.num_groups, -(-length // cache.block_size)
    if pages is not None:
        needed = pages.shape.needed(needed, 1, cache.block_size)
    return KVPart(
        bytes_per_token=cache.num_groups * cache.block_bytes // cache.block_size,
        block_size=cache.block_size,
        blocks=blocks,
        tokens=blocks * cache.block_size,
        bytes=cache.num_blocks * cache.block_bytes,
        max_sequence_length=length,
        full_sequences=cache.num_blocks // needed if scheduler.longest >= length else 0,
        window=None if pages is None else pages.shape.reach,
        bytes_per_token_behind=0 if pages is None else pages.whole * cache.block_bytes // cache.block_size,
        max_requests=min(config.max_requests, slots) if slots else config.max_requests,
        state_bytes=0 if states is None else states.block_bytes,
        state_slots=slots,
    )


# --- advice ---------------------------------------------------------------------------------------------------------------


def _advice(model: ModelPart, kv: KVPart, machine: Machine) -> list[str]:
    advice = []
    if model.fused is False and model.device == "cpu":
        advice.append(
            f"the module's own forward runs, because {model.why_not_fused}; the fused one is several times as fast"
        )
    if model.attention.startswith("plain torch"):
        advice.append(f"attention runs in {model.attention}")
    wanted = machine.threads * machine.ranks_here
    if model.device == "cpu" and wanted > machine.cores:
        advice.append(
            f"{machine.ranks_here} × {machine.threads} threads share {machine.cores:g} cores: set OMP_NUM_THREADS="
            f"{max(1, int(machine.cores / machine.ranks_here))} before the start, or torch.set_num_threads"
        )
    if model.device == "cpu" and wanted < machine.cores * 0.75 and machine.ranks_here == 1:
        advice.append(f"{machine.threads} threads on {machine.cores:g} cores: more may be faster (OMP_NUM_THREADS)")
    if model.device == "cpu" and machine.load is not None and machine.load > machine.cores:
        advice.append(f"a load of {machine.load:.1f} on {machine.cores:g} cores: other processes slow this one down")
    if not kv.full_sequences:
        advice.append(
            f"no sequence of max_sequence_length={kv.max_sequence_length:,} fits the pool of {kv.tokens:,} tokens: longer "
            "requests are refused; raise kv_cache_memory_gb"
        )
    elif kv.tokens < kv.max_requests * min(LENGTH, kv.max_sequence_length):
        advice.append(
            f"the pool holds {kv.tokens // kv.max_requests:,} tokens for each of max_requests={kv.max_requests}: beyond "
            "that samples are preempted and computed again; raise kv_cache_memory_gb or lower max_requests"
        )
    for package in machine.packages:
        if not package.known_to_work:
            advice.append(f"{package.name} {package.installed} is not among the tested versions ({package.works_with})")
    return advice


# --- text -----------------------------------------------------------------------------------------------------------------

Row = tuple[str, str]


def _model_rows(model: ModelPart) -> Sequence[Row]:
    size = f"{short_count(model.parameters)} parameters in {model.dtype} ({binary_bytes(model.parameter_bytes)})"
    fused = "fused C++" if model.device == "cpu" else "exact mode's, in Triton"
    forward = fused if model.fused else f"the module's own: {model.why_not_fused}"
    return [
        ("model", f"{model.name}, {size} on {model.device}"),
        ("weights", model.weights),
        *(("layers", f"{kind.count} × {kind.description}") for kind in model.layers),
        ("forward", "known when weights are gathered and the engine is resumed" if model.fused is None else forward),
        ("attention", model.attention),
        ("sampling", model.sampling),
        ("graphs", model.graphs),
        ("exact mode", model.exact),
    ]  # fmt: skip


def _kv_rows(kv: KVPart) -> Sequence[Row]:
    return [
        ("KV cache", f"{kv.bytes_per_token:,} bytes per token{_behind(kv)}; {kv.tokens:,} tokens fit, in {kv.blocks:,} "
                     f"blocks of {kv.block_size} ({binary_bytes(kv.bytes)})"),
        ("KV cache", f"{kv.full_sequences:,} sequences of {kv.max_sequence_length:,} tokens at once; at most "
                     f"{kv.max_requests} run at once"),
        *[("states", f"{binary_bytes(kv.state_bytes)} per sequence; {kv.state_slots:,} fit "
                     f"({binary_bytes(kv.state_slots * kv.state_bytes)}): one per running sequence, others for prefix hits")
          for _ in range(bool(kv.state_slots))],
    ]  # fmt: skip


def _behind(kv: KVPart) -> str:
    return "" if kv.window is None else f", {kv.bytes_per_token_behind:,} behind a window of {kv.window:,} tokens"


def _speed_rows(trial: Trial | None) -> Sequence[Row]:
    if trial is None:
        return [("speed", "not measured")]
    told = f"decode of {trial.sequences} sequences of {trial.length} tokens: {trial.tokens_per_s:,.0f} tokens/s"
    return [("speed", told)]


def _machine_rows(machine: Machine) -> Sequence[Row]:
    memory = ""
    if machine.memory_total is not None and machine.memory_free is not None:
        memory = f", {binary_bytes(machine.memory_free)} of {binary_bytes(machine.memory_total)} memory free"
    variables = "".join(f", {name}={value}" for name, value in machine.variables.items())
    load = "" if machine.load is None else f"; load {machine.load:.1f}"
    rows = [
        ("machine", f"{machine.processor}, {machine.cores:g} cores{memory}"),
        ("threads", f"{machine.threads} in each of {machine.ranks_here} ranks on this machine{variables}{load}"),
    ]
    packages = [
        f"{each.name} {each.installed}" + (f" (works with {each.works_with})" if each.works_with else "")
        for each in machine.packages
    ]
    return [*rows, ("versions", f"Python {machine.python}, {', '.join(packages)}")]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
