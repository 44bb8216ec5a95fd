"""The parts of one engine and how they are built of a model: weights, KV cache, scheduler, controller, bookkeeping."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.admission import Admission
from rollout.engine.context import DynamicInferenceContext, pool_size, spare_bytes, state_slots
from rollout.engine.controller import TextGenerationController
from rollout.engine.exact.kernels import kernels_on
from rollout.engine.exact.paged_forward import run_exactly
from rollout.engine.expert_parallel.lockstep import Lockstep
from rollout.engine.failures import FailureContainment
from rollout.engine.forward.adapters import LoraAdapters
from rollout.engine.forward.attention import Installation
from rollout.engine.forward.cuda_switches import refuse_unknown_parts
from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.forward.model_support import (
    DEFAULT_LENGTH,
    inspect_model,
    refuse_growing_rope,
    refuse_packed_temperature,
)
from rollout.engine.forward.model_watch import ModelWatch
from rollout.engine.forward.routers import routers_of
from rollout.engine.forward.trial_forwards import bytes_to_come, peak_bytes
from rollout.engine.kernels import triton_exact
from rollout.engine.ledger import Ledger
from rollout.engine.lifecycle import Lifecycle
from rollout.engine.memory.arena import PoolMemory, pool_memory
from rollout.engine.memory.block_pool import Allocate, zeros
from rollout.engine.memory.host_pool import HostMemoryError
from rollout.engine.memory.huge_pages import collapse
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.multimodal.vision import Vision
from rollout.engine.plain_tensors import plain_tensors
from rollout.engine.scheduling.host_cache import HostCache
from rollout.engine.scheduling.state_slots import StateSlots
from rollout.engine.staleness import Staleness
from rollout.engine.stepper import Stepper
from rollout.engine.tensor_parallel.group import TensorParallelGroup
from rollout.engine.tensor_parallel.leader import Leader
from rollout.engine.weights.autocast_copies import autocast_copies
from rollout.engine.weights.base import Weights
from rollout.engine.weights.guard import WeightsGuard, dtype_named
from rollout.engine.weights.tensor_parallel import modules_split_over
from rollout.errors import ConfigError, UnsupportedModelError
from rollout.metrics import ENGINE_STATS
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.state import EngineState
from rollout.threads.fair_lock import FairLock
from rollout.threads.interrupts import interrupt_deferred
from rollout.threads.turns import Turns
from rollout.tracing.recorder import EngineTap

VERIFY_TOKENS = 12
CUDA_STEP_TOKENS = 8192
"""`InferenceConfig.max_tokens_per_step` on CUDA, if it is None."""
_log = logging.getLogger(__name__)
_HOLD_LEVELS = dict.fromkeys(EngineState, 1) | {EngineState.RUNNING: 0, EngineState.SUSPENDED: 2}


class EngineParts:
    """Builds the parts of an engine; what uses them is in the subclasses."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: InferenceConfig,
        clock: Callable[[], float],
        allocate: Allocate,
    ) -> None:
        self.config = config
        self._autocast = dtype_named(config.autocast_dtype)
        self._clock = clock
        self._lock = FairLock()
        self._lifecycle = Lifecycle(self._lock)
        self.turns = Turns()
        """One is taken by every caller that steps until requests have ended."""
        self.tap = EngineTap(self, clock)
        """Where a trace of this process hears of the engine."""
        self._made_with = tokenizer, allocate
        with plain_tensors():
            self._guard = WeightsGuard(model, config, self._lock)
            self.group = self._join_group()
            """Ranks that compute every step together, each with its shard of the weights; None: this rank alone."""
            self.lockstep = self._join_exchange()
            """Ranks whose layers exchange tokens with this one's; None: each forward is this rank's own."""
            self.leader = Leader(self.group) if self.group is not None and self.group.leads else None
            self.adapters = LoraAdapters(self.weights.sampled)
            """LoRA adapters that requests may name."""
            with self.whole_weights(), self._under_autocast():
                self._build()
                if self.lockstep is not None:
                    self.lockstep.learn(lambda: self.controller.forward_logits([0]))

    def _join_group(self) -> TensorParallelGroup | None:
        mesh = self.weights.tensor_parallel_mesh
        if mesh is None or mesh.size() == 1:
            return None
        group = TensorParallelGroup(mesh, self.config.control_timeout_s)
        group.refuse_unequal("InferenceConfig", repr(self.config))
        return group

    def _join_exchange(self) -> Lockstep | None:
        mesh = self.weights.expert_parallel_mesh
        if mesh is None:
            return None
        group = TensorParallelGroup(mesh, self.config.control_timeout_s, "expert-parallel")
        # The verification is a forward of every rank, or of none.
        group.refuse_unequal("InferenceConfig.verify_model", str(self.config.verify_model))
        return Lockstep(group, modules_split_over("ep", self.weights.trained))

    @property
    def peers(self) -> TensorParallelGroup | None:
        """The ranks without which this one computes no forward; None: there are none."""
        return self.group if self.lockstep is None else self.lockstep.group

    def _build(self) -> None:
        refuse_unknown_parts()
        model, clock = self.weights.sampled, self._clock
        collapse(model.parameters())
        tokenizer, allocate = self._made_with
        layout = inspect_model(model, self.config.max_sequence_length)
        self.max_sequence_length = self.config.max_sequence_length or layout.max_position_embeddings or DEFAULT_LENGTH
        if self.config.max_tokens_per_step is None:
            self.config = replace(self.config, max_tokens_per_step=step_tokens(self.config, model, layout.device))
        refuse_growing_rope(model, self.max_sequence_length)
        refuse_packed_temperature(model, max(self.max_sequence_length, self.config.step_tokens))
        routers = routers_of(model) if self.config.record_routes else None
        routes = None if routers is None else routers.shape
        if layout.states:
            self._refuse_beside_states(model)
        slots = state_slots(self.config, layout.states, layout.device) if layout.states else 0
        state_bytes = slots * sum(each.num_bytes for each in layout.states)
        groups = layout.groups(self.max_sequence_length)
        # The members of a tensor-parallel group follow the first one's ids of blocks or pages, which stand for memory.
        if self.group is not None and not self.group.least(groups is not None):
            groups = None
        blocks = pool_size(self.config, layout, self.max_sequence_length, routes, state_bytes, groups)
        if self.group is not None:
            blocks = self.group.least(blocks)
        memory = self._pool_memory(allocate, layout.device)
        self.cache = KVCache(
            layout.layers, blocks, self.config.block_size_tokens, layout.kv_dtype, layout.device, memory.allocate, routes,
            memory.release, groups,
        )  # fmt: skip
        if self.config.kv_cache_host_memory_gb is not None:
            self._keep_host_blocks(self.config.kv_cache_host_memory_gb)
        self.states: StatePool | None = None
        if layout.states:
            memory = self._pool_memory(allocate, layout.device)
            self.states = StatePool(layout.states, slots, layout.device, memory.allocate, memory.release)
        spare = partial(spare_bytes, layout.device)
        self.context = DynamicInferenceContext(self.config, self.cache, clock, spare, self.states, groups)
        self.context.may_shrink = self.group is None
        if routers is not None:
            # Routes of a whole sequence are read from its blocks at its end.
            self.context.scheduler.table.read_routes = self.cache.read_routes
        else:
            self.context.scheduler.limit_reach(layout.reach)
        vision = Vision(
            model,
            layout.device,
            int(self.config.image_cache_memory_gb * 1024**3),
            min(self.config.step_tokens, self.max_sequence_length),
            together=None if self.leader is None else self.leader.encode,
        )
        # Collectives inside a forward are not captured.
        captured = self.config.cuda_graphs and routers is None and self.peers is None
        graphed_rows = self.config.max_requests * captured * (self.states is None)
        copies = autocast_copies(self.config, self.weights, layout.device, self.context.room)
        runner = ModelRunner(
            model,
            layout,
            self.cache,
            self.context.scheduler.table,
            vision,
            fused=self.config.fused_forward,
            split=self.peers is not None or self.weights.tensor_parallel_mesh is not None,
            exact=self.config.exact,
            graphed_rows=0 if self.config.exact else graphed_rows,
            moving_weights=not self.weights.fixed_addresses,
            routers=routers,
            adapters=self.adapters,
            leader=self.leader,
            lockstep=self.lockstep,
            autocast=self._autocast,
            states=self.states,
            asked=self._lock.asked,
            copies=copies,
        )
        self.context.to_come = partial(bytes_to_come, runner)
        if self.config.exact:
            if self.weights.collective or self.weights.tensor_parallel_mesh is not None:
                raise UnsupportedModelError(
                    f"InferenceConfig.exact=True: the weights of {type(model).__name__} are spread over the ranks (FSDP, "
                    "ZeRO-3, tensor parallelism); exact mode serves whole weights (one rank, or DDP)"
                )
            if kernels_on(layout.device) is triton_exact:
                run_exactly(runner, self.max_sequence_length, graphed_rows)
            runner.refuse_inexact()
        self.controller = TextGenerationController(model, tokenizer, layout, runner, self.config.image_folder)
        self._order = 0
        self._next_request_id = 0
        self.on_move: Callable[[], None] | None = None
        """Called after every control call and weight update, and when the engine dies, by the thread that did it; also
        when nothing has changed. That thread may hold the engine's lock (`step`, `locked`), so this must not wait for
        another thread, only wake it."""
        self._assemble(model)
        if self.config.verify_model:
            room = min(self.max_sequence_length, blocks // self.cache.num_groups * self.config.block_size_tokens)
            peers = self.peers
            all_ranks = bool if peers is None else lambda holds: peers.least(int(holds)) == 1
            self.controller.verify_model(min(VERIFY_TOKENS, room), all_ranks)
        config = self.config
        # The pools of a group are of one size, which was agreed on; in lock-step a trial that fails would end the group.
        if self.peers is None:
            peak = peak_bytes(runner, config.step_tokens, self.max_sequence_length, config.max_requests)
            self.context.keep_free(peak)

    def _keep_host_blocks(self, gib: float) -> None:
        """Take host memory for evicted blocks.

        Raises:
            ConfigError: it holds no block, or the host has not so much.
        """
        blocks = int(gib * 2**30 // self.cache.block_bytes) if self.cache.block_bytes else 0
        if self.group is not None:
            # The first rank's slot numbers hold on all members.
            blocks = self.group.least(blocks)
        named = f"InferenceConfig.kv_cache_host_memory_gb={gib}"
        if blocks < self.cache.num_groups:
            raise ConfigError(
                f"{named} holds no block of {self.cache.block_bytes * self.cache.num_groups / 2**20:.2f} MiB: raise it, or "
                "set it to None"
            )
        try:
            self.cache.keep_host_blocks(blocks)
        except HostMemoryError as exc:
            raise ConfigError(
                f"{named}: the host has not {exc}; lower it, or raise ulimit -l or the container's limit"
            ) from exc

    def _refuse_beside_states(self, model: nn.Module) -> None:
        """Refuse what a model with recurrent layers cannot be combined with.

        Raises:
            UnsupportedModelError: names it.
        """
        if self.config.kv_cache_host_memory_gb is not None:
            raise UnsupportedModelError(
                f"InferenceConfig.kv_cache_host_memory_gb={self.config.kv_cache_host_memory_gb}: {type(model).__name__} has "
                "recurrent layers, whose states are not kept on the host; set it to None"
            )
        if self.config.speculation:
            raise UnsupportedModelError(
                f"InferenceConfig.speculation=True: {type(model).__name__} has recurrent layers, whose state cannot go back "
                "behind a rejected draft token; set it to False"
            )
        if self.lockstep is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has recurrent layers, whose steps are several forwards, and its ranks exchange "
                "tokens in each layer, in one forward at a time; load it with ep_size=1"
            )
        if self.group is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has recurrent layers, whose states are not split over a tensor-parallel group; "
                "load it whole on every rank (tp_size=1)"
            )

    def _pool_memory(self, allocate: Allocate, device: torch.device) -> PoolMemory:
        """Memory of one pool."""
        if allocate is not zeros:
            return PoolMemory(allocate)
        return pool_memory(device, virtual=self.config.virtual_memory)

    def _assemble(self, model: nn.Module) -> None:
        scheduler, clock = self.context.scheduler, self._clock
        watch = self._watch = ModelWatch(model, self.controller.layout, self.installation, self._autocast)
        self._ledger = Ledger(scheduler, self.controller, clock, self.tap)
        self._admission = Admission(self.config, self.controller, self.max_sequence_length, clock, self.cache.routes)
        failures = self._failures = FailureContainment(
            self.context, self._ledger, self._admission, self._lifecycle, clock
        )
        self._staleness = Staleness(self.config, scheduler, self._ledger, self._admission, failures)
        self._stepper = Stepper(
            scheduler, self.controller, self._ledger, failures, watch, self.stats, self.tap, self._make_room,
            self._lock,
        )  # fmt: skip

    def _make_room(self, exc: BaseException) -> bool:
        """Free device memory for a step that ran out of it; False: nothing is left to free."""
        runner, before = self.controller.runner, self.cache.num_blocks
        runner.release_workspace(graphs=True)
        if not self.context.shrink(exc):
            return False
        self._ledger.counters["kv_pool_shrinks"] += 1
        _log.warning(
            "a step ran out of device memory: the KV pool shrinks from %d to %d %s, and its requests are computed "
            "again; a smaller kv_cache_memory_fraction or max_tokens_per_step leaves more to the forward (%s)",
            before, self.cache.num_blocks, self.context.allocator.unit, str(exc).partition("\n")[0],
        )  # fmt: skip
        return True

    def _under_autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._autocast is None else torch.autocast(self.training_device.type, self._autocast)

    def stats(self) -> dict[str, float]:
        """Counters since construction and present gauges, by the names of `ENGINE_STATS`."""
        sources = SimpleNamespace(
            scheduler=self.context.scheduler,
            queues=SimpleNamespace(**self.context.scheduler.counters),
            allocator=self.context.allocator,
            states=self.context.allocator.states or StateSlots(0),
            host=self.context.allocator.host or HostCache(0, self.config.block_size_tokens),
            cache=self.cache,
            runner=self.controller.runner,
            state_pool=SimpleNamespace(device_bytes=0) if self.states is None else self.states,
            images=self.controller.runner.vision.features,
            ledger=SimpleNamespace(**self._ledger.counters),
            engine=SimpleNamespace(
                oldest_request_timestamp_s=self._ledger.oldest_arrival(), hold_level=_HOLD_LEVELS[self._lifecycle.state]
            ),
        )
        return {name: attrgetter(metric.read)(sources) for name, metric in ENGINE_STATS.items()}

    # --- what a trace reads (`TracedEngine`) ----------------------------------------------------------------------

    def traced_state(self) -> str:
        """Value of the lifecycle state."""
        return self._lifecycle.state.value

    def traced_records(self) -> list[DynamicInferenceRequestRecord]:
        """Records of the unfinished samples, brought up to date at a step boundary."""
        with self._lock:
            unfinished = self._ledger.unfinished()
            for sample in unfinished:
                if sample.active:
                    self.context.scheduler.table.write_back(sample)
            return [sample.record for sample in unfinished]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Several calls at one step boundary: no step of another thread comes between them."""
        with interrupt_deferred(), self._lock, plain_tensors():
            yield

    @property
    def wanted(self) -> bool:
        """Inside `locked()`: whether another thread waits for a step boundary."""
        return self._lock.wanted

    @property
    def installation(self) -> Installation:
        """A context manager that keeps our attention in the model over many steps; each step enters it anyway."""
        return self.controller.runner.installation

    # --- weights ------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """Where the weights are read."""
        return self._guard.source

    @property
    def model(self) -> nn.Module:
        """The Hugging Face model the optimizer steps, out of its wrappers."""
        return self._guard.model

    @property
    def training_device(self) -> torch.device:
        """Where the trainer wants its batches."""
        return self._guard.training_device

    def is_of(self, model: nn.Module) -> bool:
        """Whether it was built of this model, or of its wrapper."""
        return self._guard.is_of(model)

    def sharded_since(self) -> bool:
        """Whether the trainer has sharded the weights by FSDP2 since the engine was built; then `rebuild` is due.

        They are gathered as those of FSDP2 from here on. Local: no collective.
        """
        return self._guard.sharded_since()

    def gather_weights(self) -> None:
        """Have whole, current weights. Where they are spread over the ranks, every rank calls it."""
        with self.locked():
            self.weights.gather()

    def release_weights(self) -> None:
        """Leave the weights as the trainer had them. No collective; harmless when repeated."""
        with self.locked():
            self.weights.release()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """A block in which steps can run; where the weights are spread over the ranks, every rank enters it."""
        if self.weights.collective and self.weights.ready:
            yield
            return
        self.gather_weights()
        try:
            yield
        finally:
            self.release_weights()

    def check_weights(self) -> None:
        """Refuse weights that changed without an announced update. The first call takes them as they are: a checkpoint
        may be loaded after the engine was built.

        Raises:
            WeightsChangedError: some are not what they were at the last update; names them.
            EngineStateError: they were sharded, or moved to another device or dtype, after the engine was built.
        """
        self._guard.check(self.context.scheduler.version)


def step_tokens(config: InferenceConfig, model: Any, device: torch.device) -> int:
    """Token budget of a step where the configuration names none."""
    if device.type != "cuda":
        return config.step_tokens
    # See `refuse_packed_temperature`.
    floor = getattr(model.config.get_text_config(), "floor_scale", None)
    return max(CUDA_STEP_TOKENS if floor is None else min(CUDA_STEP_TOKENS, int(floor) - 1), config.max_requests)
