"""Control of one engine between its steps: pause, suspend, resume, stop, adapter switches and weight updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import TypeVar

import torch

from rollout.config import InferenceConfig
from rollout.engine.blocks.index import CacheChanges
from rollout.engine.forward.model_watch import ModelWatch
from rollout.engine.memory.buffers import plain_tensors
from rollout.engine.models.adapters import LoraAdapters
from rollout.engine.parts.context import DynamicInferenceContext, MemoryMove
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.parts.intake import Intake
from rollout.engine.parts.ledger import Ledger
from rollout.engine.parts.lifecycle import Lifecycle
from rollout.engine.weights.folder import load_weights
from rollout.engine.weights.guard import WeightsGuard
from rollout.errors import ConfigError, EngineStateError, UnsupportedModelError
from rollout.observe.recorder import EngineTap
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.spans import MAX_VERSION
from rollout.sampling_params import SamplingParams
from rollout.state import ControlSignal, FinishReason, KVCacheManagementMode, Mode, StalenessPolicy, Status

T = TypeVar("T")


@dataclass(eq=False)
class EngineControl:
    """The methods that control one engine: its lifecycle, announced weight updates, LoRA adapters and prefix cache."""

    _config: InferenceConfig
    _lifecycle: Lifecycle
    _guard: WeightsGuard
    _adapters: LoraAdapters
    _watch: ModelWatch
    _controller: TextGenerationController
    _context: DynamicInferenceContext
    _ledger: Ledger
    _intake: Intake
    _tap: EngineTap
    _clock: Callable[[], float]

    @contextmanager
    def adapter_switch(self, what: str | None = None) -> Iterator[None]:
        """Open a block in which the caller may change the model's active adapters, while no step runs. `what` is ignored."""
        with self._lifecycle.locked():
            try:
                yield
            finally:
                self._controller.runner.installation.module_epoch += 1
        self._lifecycle.moved()

    def pause(self) -> None:
        """Stop running steps once the current step has finished. Unfinished requests keep their KV and wait."""
        self._signal(ControlSignal.PAUSE, lambda: self._mark_active(Status.ACTIVE_BUT_NOT_GENERATING_TOKENS))

    def unpause(self) -> None:
        """Let the engine run steps again after `pause`."""
        self._signal(ControlSignal.UNPAUSE, lambda: self._mark_active(Status.ACTIVE_AND_GENERATING_TOKENS))

    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Keep, offload or drop the KV cache on the device, according to `mode`. Return what was copied or dropped.

        Args:
            mode: the KV cache mode. If None, the mode in the configuration applies.
            keep_prefix_cache: whether to also keep cached blocks that no request holds (useless once the weights change).

        Raises:
            ConfigError: `mode` is not the name of a KV cache mode.
            EngineStateError: the engine is not PAUSED.
        """
        chosen = KVCacheManagementMode.parse(mode) or self._config.kv_cache_management_mode

        def act() -> MemoryMove:
            if chosen is not KVCacheManagementMode.PERSIST:
                # Wait for all device work, because steps may have run on a CUDA stream other than the caller's.
                self._controller.runner.order.settle()
                self._controller.runner.release_workspace()
            return self._context.suspend(chosen, keep_prefix_cache=keep_prefix_cache)

        return self._signal(ControlSignal.SUSPEND, act) or MemoryMove()

    def resume(self) -> MemoryMove:
        """Restore the KV cache on the device, and wait until it is copied. Afterwards the engine is PAUSED."""

        def act() -> MemoryMove:
            move = self._context.resume()
            self._controller.runner.order.settle()
            return move

        return self._signal(ControlSignal.RESUME, act) or MemoryMove()

    def stop(self) -> list[DynamicInferenceRequestRecord]:
        """Stop the engine and abort every unfinished request. Return all records that were not returned yet."""

        def act() -> None:
            for sample in self._context.scheduler.remove(lambda key: True):
                self._ledger.end(sample, FinishReason.ABORT, "RequestAbortedError: the engine was stopped")
            self._context.drop()

        self._signal(ControlSignal.STOP, act)
        with self._lifecycle.lock:
            return self._ledger.take()

    def _signal(self, signal: ControlSignal, act: Callable[[], T]) -> T | None:
        log, before, began = self._tap.log, self._lifecycle.state, self._clock()
        try:
            with plain_tensors():
                done = self._lifecycle.signal(signal, act)
        finally:
            self._lifecycle.moved()
        if log is not None and self._lifecycle.state is not before:
            moved = vars(done) if isinstance(done, MemoryMove) else {}
            log.control(signal.value, began, self._lifecycle.state.value, **moved)
        return done

    def weights_updated(self, version: int | None = None) -> int:
        """Announce changed weights, in any state but STOPPED.

        KV of earlier weights is no longer shared with new requests, even if `version` equals the current version. The
        configured `staleness_policy` is applied to requests that now exceed `max_staleness`, without raising an error.

        Args:
            version: the new policy version. If None, the current version plus 1.

        Returns:
            The new policy version.

        Raises:
            ConfigError: `version` is lower than the current version, too large, or not an integer.
        """
        with self._lifecycle.locked():
            self._lifecycle.refuse_when_stopped()
            scheduler = self._context.scheduler
            if version is not None and (type(version) is not int or version > MAX_VERSION):
                raise ConfigError(f"weights_updated({version!r}): must be an integer of at most {MAX_VERSION}")
            if version is not None and version < scheduler.version:
                raise ConfigError(
                    f"weights_updated({version}): the policy version is {scheduler.version} and only rises; build "
                    "another engine to go back"
                )
            self._guard.changed()
            self._controller.runner.installation.module_epoch += 1
            self._controller.runner.order.mark()
            torch.clear_autocast_cache()
            scheduler.advance_version(scheduler.version + 1 if version is None else version)
            self._controller.runner.vision.features.clear()
            self._enforce_staleness()
            updated = scheduler.version
        if (log := self._tap.log) is not None:
            log.instant("weights updated", version=updated)
        self._lifecycle.moved()
        return updated

    def _enforce_staleness(self) -> None:
        limit, policy, scheduler = self._config.max_staleness, self._config.staleness_policy, self._context.scheduler
        if limit is None or policy is StalenessPolicy.MASK:
            return
        stale = {sample.key for sample in scheduler if self._ledger.staleness(sample) > limit}
        for sample in scheduler.remove(stale.__contains__) if stale else ():
            if policy is StalenessPolicy.PARTIAL:
                self._ledger.end(sample, FinishReason.STALE)
            else:
                self._ledger.counters["requests_requeued"] += self._intake.restart(sample)

    def load_weights(self, folder: str | PathLike[str]) -> int:
        """Load a folder of safetensors files into the model between two steps. Call `weights_updated` afterwards.

        Returns:
            The number of tensors loaded.

        Raises:
            ConfigError: the folder's tensors do not fit the model. Nothing was changed.
            EngineStateError: the weights are spread over the ranks.
        """
        with self._lifecycle.locked():
            self._lifecycle.refuse_when_stopped()
            if self._guard.source.spread:
                raise EngineStateError(
                    f"load_weights() into {type(self._guard.model).__name__}, whose weights are spread over the ranks: load "
                    "them there as the trainer does (for example with torch.distributed.checkpoint), and call "
                    "weights_updated() on every rank"
                )
            loaded = load_weights(self._guard.model, folder)
            # Invalidate the engine's copies of the old weights. Otherwise a step that runs before the announcement could
            # combine them with the new weights.
            self._controller.runner.installation.module_epoch += 1
            return loaded

    def load_adapter(self, name: str, folder: str | PathLike[str]) -> int:
        """Load a LoRA adapter from a folder saved by PEFT, for requests with `SamplingParams.adapter=name`.

        The new adapter replaces a loaded adapter of the same name, and running requests continue with the new adapter. After
        such a replacement, call `weights_updated`.

        Returns:
            The number of layers that the adapter changes.

        Raises:
            ConfigError: the name is malformed, or the adapter does not fit the model. Nothing was changed.
            UnsupportedModelError: requests for this model cannot name adapters.
        """
        SamplingParams(adapter=name)
        with self._lifecycle.locked():
            self._lifecycle.refuse_when_stopped()
            runner, why = self._controller.runner, None
            if self._guard.source.spread:
                why = "its weights are spread over the ranks"
            elif runner.exact:
                why = "exact mode runs the fused forward only, which has no adapters (InferenceConfig.exact)"
            elif runner.layout.states:
                why = "it has recurrent layers"
            elif self._controller.takes_images:
                why = "it takes images"
            elif self._watch.adapted_layers():
                why = "it has its own PEFT layers, which would also be applied; build the engine of the base model"
            if why is not None:
                raise UnsupportedModelError(f"load_adapter() into {type(self._guard.model).__name__}: {why}")
            self._adapters.load(name, folder)
            # Drop the cached blocks, which are looked up by adapter name: another adapter may have had this name before.
            self._context.allocator.drop_cached()
            return self._adapters.num_layers(name)

    def unload_adapter(self, name: str) -> int:
        """Unload an adapter and abort the requests that use it. Do nothing if no adapter of this name is loaded.

        Returns:
            The number of aborted samples.
        """
        with self._lifecycle.locked():
            scheduler = self._context.scheduler
            keys = {sample.key for sample in scheduler if sample.params.adapter == name}
            for sample in scheduler.remove(keys.__contains__):
                why = f"RequestAbortedError: request {sample.key[0]}: adapter {name!r} was unloaded"
                self._ledger.end(sample, FinishReason.ABORT, why)
            self._adapters.unload(name)
        self._lifecycle.moved()
        return len(keys)

    def flush_prefix_cache(self) -> int:
        """Drop every block of the prefix cache that no request holds, and return the number of dropped blocks."""
        with self._lifecycle.lock:
            return self._context.allocator.drop_cached()

    def track_prefix_cache(self, changes: CacheChanges) -> list[int]:
        """Record later changes to the prefix cache in `changes`. Return the hashes of the blocks that are cached now."""
        with self._lifecycle.lock:
            self._context.allocator.index.changes = changes
            return list(self._context.allocator.index.current)

    def _mark_active(self, status: Status) -> None:
        now = self._clock()
        for leader in self._context.scheduler.active():
            for sample in (leader, *leader.siblings):
                sample.request.status = status
                if status is Status.ACTIVE_BUT_NOT_GENERATING_TOKENS:
                    sample.request.add_event_pause(timestamp=now)
