"""Control of one engine: pause, suspend, resume, stop, adapter switches and weight updates, at step boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TypeVar

import torch

from rollout.engine.context import MemoryMove
from rollout.engine.inspection import EngineInspection
from rollout.engine.plain_tensors import plain_tensors
from rollout.engine.weights.folder import load_weights
from rollout.errors import ConfigError, EngineStateError, UnsupportedModelError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.spans import MAX_VERSION
from rollout.sampling_params import SamplingParams
from rollout.state import ControlSignal, EngineState, FinishReason, KVCacheManagementMode, Mode, Status

T = TypeVar("T")


class EngineControl(EngineInspection):
    """The lifecycle verbs of an engine, and the announcement of new weights."""

    @property
    def state(self) -> EngineState:
        """The lifecycle state."""
        return self._lifecycle.state

    def refuse_when_stopped(self) -> None:
        """Raises: EngineDeadError, EngineStateError: the engine is dead, or stopping or stopped."""
        self._lifecycle.refuse_when_stopped()

    @contextmanager
    def adapter_switch(self, what: str | None = None) -> Iterator[None]:
        """A block that changes which adapters of the model act: at a step boundary, with no step meanwhile.

        Args:
            what: ignored; in `RolloutManager.adapter_switch` the other ranks wait for it.
        """
        with self.locked():
            try:
                yield
            finally:
                self.installation.module_epoch += 1
        self._moved()

    def pause(self) -> None:
        """Stop stepping at the next step boundary; requests keep their KV and wait."""
        self._signal(ControlSignal.PAUSE, self._pause_active)

    def unpause(self) -> None:
        """Allow steps again."""
        self._signal(ControlSignal.UNPAUSE, lambda: self._mark_active(Status.ACTIVE_AND_GENERATING_TOKENS))

    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Free the KV cache's device memory as `mode` (None: the configured mode) says.

        Args:
            keep_prefix_cache: also keep cached blocks that no request holds. Pass False before the weights change:
                they could not be used afterwards.

        Raises:
            ConfigError: there is no such mode.
            EngineStateError: the engine is not PAUSED.
        """
        chosen = KVCacheManagementMode.parse(mode) or self.config.kv_cache_management_mode

        def act() -> MemoryMove:
            if chosen is not KVCacheManagementMode.PERSIST:
                # Steps may have run on another stream than the caller's.
                self.controller.runner.order.settle()
                self.controller.runner.release_workspace(graphs=self.config.release_cuda_graphs)
            return self.context.suspend(chosen, keep_prefix_cache=keep_prefix_cache)

        return self._signal(ControlSignal.SUSPEND, act) or MemoryMove()

    def resume(self) -> MemoryMove:
        """Bring the KV cache back to the device; leads to PAUSED.

        On CUDA copies may go on after this: the next step waits for them, and so does `wait_until_restored`.
        """

        def act() -> MemoryMove:
            move = self.context.resume()
            self.controller.runner.order.mark()
            return move

        return self._signal(ControlSignal.RESUME, act) or MemoryMove()

    def wait_until_restored(self) -> None:
        """Block until the copies of a `resume` have ended."""
        with self.locked():
            self.controller.runner.order.wait()

    def stop(self) -> list[DynamicInferenceRequestRecord]:
        """Stop the engine. Every unfinished request ends with an error; returns all records not handed out yet."""

        def act() -> None:
            for sample in self.context.scheduler.remove(lambda key: True):
                self._ledger.end(sample, FinishReason.ABORT, "RequestAbortedError: the engine was stopped")
            self.context.drop()

        self._signal(ControlSignal.STOP, act)
        return self.take_ended()

    def _signal(self, signal: ControlSignal, act: Callable[[], T]) -> T | None:
        log, before, began = self.tap.log, self.state, self._clock()
        try:
            with plain_tensors():
                done = self._lifecycle.signal(signal, act)
        finally:
            self._moved()
        if log is not None and self.state is not before:
            moved = vars(done) if isinstance(done, MemoryMove) else {}
            log.control(signal.value, began, self.state.value, **moved)
        return done

    def _moved(self) -> None:
        if self.on_move is not None:
            self.on_move()

    def wait_until(self, state: EngineState, timeout_s: float | None = None) -> None:
        """Block until the engine is in a stable state.

        Raises:
            ValueError: `state` is a transient one.
            DeadlineError: not reached within `timeout_s` (default: `control_timeout_s`).
        """
        self._lifecycle.wait_until(state, self.config.control_timeout_s if timeout_s is None else timeout_s)

    def weights_updated(self, version: int | None = None) -> int:
        """Announce changed weights: the policy version moves by 1, or to `version`, in any state but STOPPED.

        KV of earlier weights is no longer shared, also where `version` is the present one. Requests that would
        exceed `max_staleness` are handled by `staleness_policy`; none of them makes this raise.

        Returns:
            The new policy version.

        Raises:
            ConfigError: `version` is below the present one, or no version.
        """
        with self.locked():
            self._lifecycle.refuse_when_stopped()
            scheduler = self.context.scheduler
            if version is not None and (type(version) is not int or version > MAX_VERSION):
                raise ConfigError(f"weights_updated({version!r}): must be an integer of at most {MAX_VERSION}")
            if version is not None and version < scheduler.version:
                raise ConfigError(
                    f"weights_updated({version}): the policy version is {scheduler.version} and only rises; build "
                    "another engine to go back"
                )
            self._guard.changed()
            self.installation.module_epoch += 1
            self.controller.runner.order.mark()
            torch.clear_autocast_cache()
            scheduler.advance_version(scheduler.version + 1 if version is None else version)
            self.controller.runner.vision.features.clear()
            self._staleness.enforce()
            updated = scheduler.version
        if (log := self.tap.log) is not None:
            log.instant("weights updated", version=updated)
        self._moved()
        return updated

    def load_weights(self, folder: str | PathLike[str]) -> int:
        """Load the weights of a folder of safetensors into the module between two steps; `weights_updated` is to follow.

        Returns:
            Number of tensors loaded.

        Raises:
            ConfigError: the folder does not fit the model; nothing was changed.
            EngineStateError: the weights are spread over the ranks.
        """
        with self.locked():
            self._lifecycle.refuse_when_stopped()
            if self.weights.collective or self.weights.tensor_parallel_mesh is not None:
                raise EngineStateError(
                    f"load_weights() into {type(self.model).__name__}, whose weights are spread over the ranks: load them "
                    "there as the trainer does (torch.distributed.checkpoint, say), and call weights_updated() on every rank"
                )
            loaded = load_weights(self.model, folder)
            # A step that comes before the announcement does not mix them with copies of the former ones.
            self.installation.module_epoch += 1
            return loaded

    def load_adapter(self, name: str, folder: str | PathLike[str]) -> int:
        """Load a LoRA adapter from a folder, as PEFT saves it, for requests with `SamplingParams.adapter=name`.

        Takes the place of a loaded one of that name, whose requests go on with it; `weights_updated` is to follow then.

        Returns:
            Number of layers that it changes.

        Raises:
            ConfigError: the name is malformed, or the adapter does not fit the model; nothing was changed.
            UnsupportedModelError: requests for this model cannot name adapters.
        """
        SamplingParams(adapter=name)
        with self.locked():
            self._lifecycle.refuse_when_stopped()
            self._refuse_adapters()
            if self.adapters.load(name, folder):
                self.context.allocator.drop_cached()
            return self.adapters.num_layers(name)

    def unload_adapter(self, name: str) -> int:
        """Unload an adapter: requests that name it end with an error, which says so. Harmless when repeated.

        Returns:
            Number of samples that have ended by it.
        """
        with self.locked():
            scheduler = self.context.scheduler
            keys = {sample.key for sample in scheduler if sample.params.adapter == name}
            for sample in scheduler.remove(keys.__contains__):
                why = f"RequestAbortedError: request {sample.key[0]}: adapter {name!r} was unloaded"
                self._ledger.end(sample, FinishReason.ABORT, why)
            self.adapters.unload(name)
        self._moved()
        return len(keys)

    def _refuse_adapters(self) -> None:
        runner, why = self.controller.runner, None
        if self.weights.collective or self.weights.tensor_parallel_mesh is not None:
            why = "its weights are spread over the ranks"
        elif runner.exact:
            why = "exact mode runs the fused forward only, which has no adapters (InferenceConfig.exact)"
        elif runner.states is not None:
            why = "it has recurrent layers"
        elif self.controller.takes_images:
            why = "it takes images"
        elif self._watch.adapters.present(self.installation.module_epoch):
            why = "it has PEFT layers of its own, which would act beside it; build the engine of the base model"
        if why is not None:
            raise UnsupportedModelError(f"load_adapter() into {type(self.model).__name__}: {why}")

    def take_ended(
        self, keys: Callable[[tuple[int, int]], bool] = lambda key: True
    ) -> list[DynamicInferenceRequestRecord]:
        """Records that have ended and that no step has returned yet: aborted or too stale between two steps.

        Args:
            keys: which (request_id, sample_index) to take; the others stay for the next step.
        """
        with self._lock:
            return self._ledger.take(keys)

    def _pause_active(self) -> None:
        self._mark_active(Status.ACTIVE_BUT_NOT_GENERATING_TOKENS)
        now = self._clock()
        for leader in self.context.scheduler.active():
            for sample in (leader, *leader.siblings):
                sample.request.add_event_pause(timestamp=now)

    def _mark_active(self, status: Status) -> None:
        for leader in self.context.scheduler.active():
            for sample in (leader, *leader.siblings):
                sample.request.status = status
