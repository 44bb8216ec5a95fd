"""Functions that build the parts of an engine from a model: KV cache, scheduler, model runner and bookkeeping."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.forward.model_runner import DecodeRuns, ModelRunner
from rollout.engine.forward.model_watch import ModelWatch
from rollout.engine.forward.module_forward import ModuleForward
from rollout.engine.forward.trial_forwards import bytes_to_come, peak_bytes, verify_model
from rollout.engine.fused.fused_forward import FusedForward
from rollout.engine.graphs.cuda_capture import CudaDevice
from rollout.engine.graphs.cuda_graphs import GraphedDecode
from rollout.engine.graphs.decode_step import TritonDecode
from rollout.engine.memory.arena import pool_memory
from rollout.engine.memory.block_pool import Allocate, PoolMemory, zeros
from rollout.engine.memory.buffers import plain_tensors
from rollout.engine.memory.host_blocks import HostMemoryError
from rollout.engine.memory.huge_pages import collapse
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.models.adapters import LoraAdapters
from rollout.engine.models.attention import Installation
from rollout.engine.models.model_support import (
    DEFAULT_LENGTH,
    ModelLayout,
    check_lengths,
    inspect_model,
)
from rollout.engine.models.routers import Routers, routers_of
from rollout.engine.multimodal.vision import Vision
from rollout.engine.parts.context import DynamicInferenceContext, pool_size, spare_bytes, state_slots
from rollout.engine.parts.control import EngineControl
from rollout.engine.parts.controller import TextGenerationController, eos_token_ids
from rollout.engine.parts.inspection import Inspection
from rollout.engine.parts.intake import Intake
from rollout.engine.parts.ledger import Ledger
from rollout.engine.parts.lifecycle import Lifecycle
from rollout.engine.parts.peers import Peers
from rollout.engine.parts.stepper import Stepper
from rollout.engine.sampling.constraints import Constraints
from rollout.engine.sampling.token_values import TokenValues, ValueFunction
from rollout.engine.weights.guard import WeightsGuard, dtype_named
from rollout.errors import ConfigError, EngineStateError, UnsupportedModelError
from rollout.observe.recorder import EngineTap
from rollout.state import KVCacheManagementMode
from rollout.threads.interrupts import interrupt_deferred

CUDA_STEP_TOKENS = 8192
"""The token budget of a step on CUDA if `InferenceConfig.max_tokens_per_step` is None."""


@dataclass(frozen=True, eq=False)
class EngineBase:
    """The parts of an engine that are kept when it is rebuilt for a changed model; see `DynamicInferenceEngine`."""

    config: InferenceConfig
    guard: WeightsGuard
    peers: Peers
    adapters: LoraAdapters
    lifecycle: Lifecycle
    tap: EngineTap
    tokenizer: Any
    token_values: ValueFunction | None
    clock: Callable[[], float]
    allocate: Allocate

    @property
    def autocast(self) -> torch.dtype | None:
        """The autocast dtype of the engine's forward passes. If None, the caller's autocast setting applies."""
        return dtype_named(self.config.autocast_dtype)

    def under_autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context for the engine's forward passes, which has no effect without an `autocast` dtype."""
        return (
            nullcontext() if self.autocast is None else torch.autocast(self.guard.training_device.type, self.autocast)
        )


@dataclass(frozen=True, eq=False)
class EngineParts:
    """The parts of an engine that depend on its model, and are replaced when the engine is rebuilt."""

    config: InferenceConfig
    max_sequence_length: int
    """The maximum number of tokens of prompt and completion together."""
    cache: KVCache
    context: DynamicInferenceContext
    controller: TextGenerationController
    ledger: Ledger
    stepper: Stepper
    intake: Intake
    control: EngineControl
    inspection: Inspection
    watch: ModelWatch


def build(base: EngineBase) -> EngineParts:
    """Build an engine's parts from its current model. All ranks that compute forward passes together must call this.

    Raises:
        UnsupportedModelError, InvalidRequestError: the engine cannot serve this model.
        ConfigError: the engine cannot serve the model with this configuration.
    """
    model, config, peers = base.guard.source.sampled, base.config, base.peers
    collapse(model.parameters())
    layout = inspect_model(model, config.max_sequence_length)
    longest = config.max_sequence_length or layout.max_position_embeddings or DEFAULT_LENGTH
    if config.max_tokens_per_step is None:
        config = replace(config, max_tokens_per_step=step_tokens(config, layout.device))
    check_lengths(model, longest)
    routers = routers_of(model) if config.record_routes else None
    cache, states, context = _memory(base, config, model, layout, longest, routers)
    runner = _runner(base, config, model, layout, longest, routers, cache, states, context)
    controller = TextGenerationController(model, base.tokenizer, layout, runner)
    parts = _assemble(base, config, model, longest, cache, context, controller)
    if config.advanced.verify_model:
        room = min(longest, cache.num_blocks * config.advanced.block_size_tokens)
        verify_model(runner, room, peers.all_hold)
    # Measure peak memory only if this rank computes alone. The ranks of a group have already agreed on one pool size, and
    # if the trial pass failed on one rank, the other ranks would wait for that rank's collectives.
    if peers.everyone is None:
        context.keep_free(peak_bytes(runner, config.step_tokens, longest, config.max_requests))
    return parts


def rebuilt(base: EngineBase, before: EngineParts) -> EngineParts:
    """Build new parts and move the requests in flight from `before` to them. If building raises, `before` stays usable.

    This function raises the same errors as `build`.
    """
    with interrupt_deferred(), base.lifecycle.lock:
        records, cache, runner = before.inspection.snapshot(), before.cache, before.controller.runner
        # Free the KV cache and the graphs first, because `build` computes the new pool size from the free memory.
        runner.order.settle()
        runner.release_workspace(graphs=True)
        before.context.suspend(KVCacheManagementMode.RECOMPUTE, keep_prefix_cache=False)
        host_slots = cache.host_slots
        # Release the host blocks, which are empty now: the host may not have memory for a second set.
        cache.release_host_blocks()
        try:
            with plain_tensors(), base.under_autocast():
                parts = build(base)
            parts.intake.next_request_id, parts.intake.order = before.intake.next_request_id, before.intake.order
            parts.ledger.ended, parts.ledger.counters = before.ledger.ended, before.ledger.counters
            parts.context.allocator.index.changes = before.context.allocator.index.changes
            parts.context.scheduler.advance_version(before.context.scheduler.version)
            for record in records:
                parts.intake.add_record(record)
        except BaseException:
            before.context.resume()
            if host_slots:
                cache.keep_host_blocks(host_slots)
            raise
        base.guard.rebuild_due = False
        return parts


def followed(base: EngineBase, parts: EngineParts) -> EngineParts:
    """Rebuild `parts` if windows or masks of attention layers have changed since they were built; otherwise return them.

    Raises:
        UnsupportedModelError: the changed attention layers need a feature that the engine does not support.
        EngineStateError: settings have changed, but several ranks compute together, and one rank cannot rebuild alone.
    """
    if not (names := parts.watch.changed_settings()):
        return parts
    if (group := base.peers.everyone) is not None:
        raise EngineStateError(
            f"{names} of {type(base.guard.model).__name__} changed after the rollout was built, and the {group.name} "
            "computes forwards together: undo it, or call manager.close() and build another on every rank"
        )
    with plain_tensors(), base.under_autocast():
        changed = parts.watch.masks_changed(base.config.max_sequence_length)
    return rebuilt(base, parts) if changed else parts


def _memory(
    base: EngineBase,
    config: InferenceConfig,
    model: nn.Module,
    layout: ModelLayout,
    longest: int,
    routers: Routers | None,
) -> tuple[KVCache, StatePool, DynamicInferenceContext]:
    """Build the KV cache, the pool of recurrent states, and the context that manages both.

    Raises:
        UnsupportedModelError: the model combines recurrent layers with an unsupported feature.
    """
    peers = base.peers
    if layout.states:
        layers = f"{type(model).__name__} has recurrent layers"
        if (host_gb := config.kv_cache_host_memory_gb) is not None:
            raise UnsupportedModelError(
                f"InferenceConfig.kv_cache_host_memory_gb={host_gb}: {layers}, whose states are not kept on the host; set "
                "it to None"
            )
        if peers.everyone is not None:
            raise UnsupportedModelError(
                f"{layers}, whose states are not split over ranks; load it whole on every rank (tp_size=1, ep_size=1)"
            )
    routes = None if routers is None else routers.shape
    slots = state_slots(config, layout.states, layout.device) if layout.states else 0
    state_bytes = slots * sum(each.num_bytes for each in layout.states)
    blocks = peers.least(pool_size(config, layout, longest, routes, state_bytes))
    cache = KVCache(
        layout.layers, blocks, config.advanced.block_size_tokens, layout.kv_dtype, layout.device,
        _pool_memory(base, layout.device), routes,
    )  # fmt: skip
    if config.kv_cache_host_memory_gb is not None:
        _keep_host_blocks(cache, peers, config.kv_cache_host_memory_gb)
    memory = _pool_memory(base, layout.device) if slots else PoolMemory()
    states = StatePool(layout.states, slots, layout.device, memory)
    spare = partial(spare_bytes, layout.device)
    context = DynamicInferenceContext(config, cache, states, base.clock, spare)
    context.may_shrink = peers.group is None
    if routers is not None:
        # Let the scheduler read a sequence's expert routes from its blocks, to copy them to the sequence's record.
        context.scheduler.table.read_routes = cache.read_routes
    return cache, states, context


def _runner(
    base: EngineBase,
    config: InferenceConfig,
    model: nn.Module,
    layout: ModelLayout,
    longest: int,
    routers: Routers | None,
    cache: KVCache,
    states: StatePool,
    context: DynamicInferenceContext,
) -> ModelRunner:
    peers, weights = base.peers, base.guard.source
    image_bytes = int(config.advanced.image_cache_memory_gb * 1024**3)
    vision = Vision(model, layout.device, image_bytes, min(config.step_tokens, longest))
    if config.exact and weights.spread:
        raise UnsupportedModelError(
            f"InferenceConfig.exact=True: the weights of {type(model).__name__} are spread over the ranks (FSDP, "
            "ZeRO-3, tensor parallelism); exact mode serves whole weights (one rank, or DDP)"
        )
    module = ModuleForward(
        model,
        layout,
        cache,
        Installation(model, base.autocast),
        vision,
        TokenValues(model, base.token_values),
        states,
        routers=routers,
    )
    runner = ModelRunner(
        module,
        context.scheduler.table,
        base.adapters,
        peers.together,
        Constraints(base.tokenizer, layout.vocab_size, eos_token_ids(model, base.tokenizer)),
        exact=config.exact,
    )
    context.to_come = partial(bytes_to_come, runner)
    obstacles = (
        (f"the model is on {layout.device}", layout.device.type != "cuda"),
        ("Advanced.cuda_graphs=False", not config.advanced.cuda_graphs),
        ("collectives inside a forward are not captured", peers.everyone is not None),
        ("gathered weights have other addresses each time", not weights.fixed_addresses),
        ("a model with recurrent states runs its own forward in every step", bool(layout.states)),
        ("a graph returns logits only", routers is not None or base.token_values is not None),
        ("Triton does not run here", module.paged is None),
    )
    runner.without_graphs = next((why for why, holds in obstacles if holds), "")
    whole = peers.everyone is None and weights.tensor_parallel_mesh is None
    _choose_forwards(runner, config, routers, base.lifecycle.lock.asked, whole=whole)
    if config.exact:
        runner.refuse_inexact()
    if runner.fused is not None:
        runner.fused.values = runner.values
    runner.values.try_out(partial(runner.module.own_logits, [0, 0]))
    context.scheduler.table.values = np.zeros((0, 0, runner.values.width), np.float32)
    return runner


def _choose_forwards(
    runner: ModelRunner,
    config: InferenceConfig,
    routers: Routers | None,
    asked: ctypes.c_int32,
    *,
    whole: bool,
) -> None:
    """Set up the forward passes of a runner that are faster than the module's own: fused C++ code and CUDA graphs.

    Args:
        asked: the flag that stops a call of several decode steps early; see `DecodeRuns`.
        whole: whether this rank has all weights and computes forward passes alone.
    """
    module, layout, cache = runner.module, runner.layout, runner.cache
    if module.library is None:
        runner.without_fused = module.without_library
    elif not whole:
        runner.without_fused = "its weights are split over ranks, and the fused forward reads whole matrices"
    elif routers is not None:
        runner.without_fused = "it records the experts that its routers choose (InferenceConfig.record_routes)"
    elif config.advanced.fused_forward:
        runner.fused = FusedForward(
            runner.model,
            layout,
            cache,
            module.library,
            exact=config.exact,
            states=runner.states if layout.states else None,
        )
        if not config.exact:
            runner.runs = DecodeRuns(runner.fused, runner, asked)
    if not runner.without_graphs and module.paged is not None:
        # Give the graphs a separate workspace: they may still be in use when `release_workspace` frees the module's.
        decode = TritonDecode(module.paged.with_own_workspace(), cache)
        runner.graphs = GraphedDecode(
            runner.model, layout, cache, config.max_requests, CudaDevice(layout.device), decode
        )


def _assemble(
    base: EngineBase,
    config: InferenceConfig,
    model: nn.Module,
    longest: int,
    cache: KVCache,
    context: DynamicInferenceContext,
    controller: TextGenerationController,
) -> EngineParts:
    scheduler, clock, lifecycle, tap = context.scheduler, base.clock, base.lifecycle, base.tap
    watch = ModelWatch(model, controller.layout, controller.runner.installation, base.autocast)
    # Call `variant` only for its error: it raises if the engine cannot sample with the model's active adapters.
    watch.variant()
    if controller.runner.graphs is not None:
        controller.runner.graphs.watched = watch.modules
    ledger = Ledger(scheduler, controller, clock, tap)
    intake = Intake(config, lifecycle, controller, scheduler, ledger, watch, longest, clock, cache.routes)
    stepper = Stepper(context, controller, ledger, lifecycle, base.peers, watch, tap)
    control = EngineControl(
        config, lifecycle, base.guard, base.adapters, watch, controller, context, ledger, intake, tap, clock
    )
    inspection = Inspection(config, longest, lifecycle, base.guard, controller, context, ledger, stepper, watch)
    return EngineParts(config, longest, cache, context, controller, ledger, stepper, intake, control, inspection, watch)


def _keep_host_blocks(cache: KVCache, peers: Peers, gib: float) -> None:
    """Allocate host memory for evicted blocks.

    Raises:
        ConfigError: `gib` (size in GiB) is too small for one block, or the host does not have that much memory.
    """
    # Use the smallest block count in the group: the first rank assigns slot numbers that every member must have.
    blocks = peers.least(int(gib * 2**30 // cache.block_bytes) if cache.block_bytes else 0)
    named = f"InferenceConfig.kv_cache_host_memory_gb={gib}"
    if not blocks:
        raise ConfigError(f"{named} holds no block of {cache.block_bytes / 2**20:.2f} MiB: raise it, or set it to None")
    try:
        cache.keep_host_blocks(blocks)
    except HostMemoryError as exc:
        raise ConfigError(
            f"{named}: the host lacks {exc}; lower it, or raise ulimit -l or the container's limit"
        ) from exc


def _pool_memory(base: EngineBase, device: torch.device) -> PoolMemory:
    if base.allocate is not zeros:
        return PoolMemory(base.allocate)
    return pool_memory(device, virtual=base.config.advanced.virtual_memory)


def check_arguments(model: object, tokenizer: object, config: object) -> None:
    """Raise `TypeError` if an argument of an engine or a manager has the wrong type; the message shows a correct call."""
    if not isinstance(model, nn.Module):
        loaded = f"AutoModelForCausalLM.from_pretrained({model!r})" if isinstance(model, str | PathLike) else "model"
        raise TypeError(
            f"model is a {type(model).__name__}: must be the torch module that is trained: "
            f"RolloutManager({loaded}, tokenizer)"
        )
    if isinstance(tokenizer, InferenceConfig):
        raise TypeError("tokenizer is an InferenceConfig, the third argument: RolloutManager(model, tokenizer, config)")
    if isinstance(tokenizer, str | PathLike):
        raise TypeError(
            f"tokenizer={str(tokenizer)!r}: must be loaded: AutoTokenizer.from_pretrained({str(tokenizer)!r})"
        )
    if not isinstance(config, InferenceConfig | None):
        cure = "InferenceConfig(**config)" if isinstance(config, Mapping) else "InferenceConfig(kv_cache_memory_gb=1.0)"
        raise TypeError(f"config is a {type(config).__name__}: must be an InferenceConfig: {cure}")


def step_tokens(config: InferenceConfig, device: torch.device) -> int:
    """Return the token budget of a step for a configuration without `max_tokens_per_step`."""
    return max(CUDA_STEP_TOKENS, config.max_requests) if device.type == "cuda" else config.step_tokens
