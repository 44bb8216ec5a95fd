"""The control operations of an `LLM` on one or all engines: scoring, weights, adapters, prefix-cache resets.

No step runs while weights change. An engine that was paused or suspended before a call is paused or suspended after it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

from torch import nn

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.meeting import Gathering
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.holds import BLOCK, UPDATE, HoldLevel
from rollout.errors import ConfigError, ControlError, EngineStateError
from rollout.llm.engine_loop import EngineLoop
from rollout.llm.service import EngineService
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.scores import Scorer, Sequences, TokenScores
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState, KVCacheManagementMode, Mode
from rollout.threads.loop_thread import LoopThread

_PAUSE_IS_DIRECT = (
    "direct mode has no coordinator to relay {0}(): use llm.engine.{0}() or llm.suspended(), or build the LLM with "
    "use_coordinator=True"
)


class LLMControl:
    """The control calls of an `LLM`. Every method except `relay` blocks, usually until the next step boundary.

    Args:
        engine: this rank's engine.
        loop: the LLM's private event loop.
        gathering: the object that gathers the engine's weights. Sharded weights must be gathered before any step runs.
        service: the backend that computes the LLM's requests; an `EngineService` if the LLM has a coordinator.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        loop: LoopThread,
        gathering: Gathering,
        service: EngineLoop | EngineService,
    ) -> None:
        self.engine = engine
        self._loop, self._gathering, self._service = loop, gathering, service
        self._job = service if isinstance(service, EngineService) else None
        self._adapters_change = threading.Lock()
        self._long_calls: list[str] = []

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    def admit(self, what: str) -> None:
        """Raise an error if this rank is not primary (takes no requests), or if weights changed without an announced update.

        Weights are checked only while no request and no long call runs, because the check waits for a step boundary.

        Args:
            what: name of the checked method, for the message.
        """
        self.refuse_unless_primary(what)
        if not self._service.num_open and not self._long_calls:
            with self.engine.locked():
                running = self.engine.state is EngineState.RUNNING and not self.engine.holds.forbid_steps
                if running and not self.engine.has_unfinished:
                    self.engine.check_weights()
                    self.engine.follow_model()

    @contextmanager
    def _long_call(self, what: str) -> Iterator[None]:
        """Record, for a `with` block, that the call `what` may occupy the engine for seconds although no request runs."""
        self._long_calls.append(what)
        try:
            yield
        finally:
            self._long_calls.remove(what)

    async def relay(self, what: str, state: EngineState, *arguments: Any) -> None:
        """Send a lifecycle call to the coordinator. On a rank that is not primary, wait until its engine is in `state`.

        Args:
            what: name of the call, such as "pause".
            state: the state of an engine after the call.
            arguments: arguments for the client's method; the last one is `timeout_s`.
        """
        if self._job is None:
            raise RuntimeError(_PAUSE_IS_DIRECT.format(what))
        if self._service.is_primary:
            await asyncio.wrap_future(self._job.control(lambda client: getattr(client, f"{what}_engines")(*arguments)))
        else:
            await asyncio.to_thread(self.engine.wait_until, state, arguments[-1])

    def score(
        self,
        rollouts: RolloutBatch | Sequences,
        *,
        prompt_lengths: int | Sequence[int] | None = None,
        temperature: float | None = None,
        top_k: int = 0,
        entropy: bool = False,
        adapter: str | None = None,
    ) -> TokenScores:
        """Score the given sequences on this rank's engine; see `RolloutManager.score`. Running requests wait meanwhile.

        Raises:
            InvalidRequestError, ConfigError: see `RolloutManager.score`.
            EngineStateError: the engine is paused, suspended or stopped.
            EngineDeadError: the engine is dead.
            RuntimeError: the call was made on the private loop's thread, which it would block.
        """
        self._loop.refuse_inside("score()")
        return Scorer(self.engine, lambda: self._long_call("score")).score(
            rollouts,
            prompt_lengths=prompt_lengths,
            temperature=temperature,
            top_k=top_k,
            entropy=entropy,
            adapter=adapter,
        )

    def flush_prefix_cache(self) -> int:
        """Evict cached blocks that no request uses (with a coordinator, on all ranks); return the number of evicted blocks.

        Raises:
            RuntimeError: this rank is not primary. `llm.engine.flush_prefix_cache()` evicts this rank's own blocks.
            ControlError: some engines did not answer in time; the message names them.
        """
        self.refuse_unless_primary("flush_prefix_cache")
        if self._job is None:
            return self.engine.flush_prefix_cache()
        self._loop.refuse_inside("flush_prefix_cache()")
        return self._job.control(lambda client: client.flush_prefix_cache()).result()

    # --- weights and memory -----------------------------------------------------------------------------------------

    def weights_updated(self, version: int | None = None) -> int:
        """Announce changed weights; return the new policy version: `version`, or the current version + 1 if None.

        Call it on every rank. It also resumes the steps that `before_optimizer_step` stopped. The hook that
        `trainer_hooks.optimizer.attach` installs calls both methods. A `version` below the current one raises `ConfigError`.
        """
        self.refuse_in_group("weights_updated")
        if self.engine.state is not EngineState.STOPPED:
            # Announce the weights and gather them at the same step boundary: no step may run while they are sharded.
            with self.engine.locked():
                self.engine.weights_updated(version)
                if BLOCK not in self.engine.holds:
                    self._gathering.ensure()
            self._let_go()
        return self.engine.policy_version

    def before_optimizer_step(self, mode: Mode = None) -> None:
        """Stop the steps before the weights change: no forward pass runs until `weights_updated`.

        Args:
            mode: what happens to the KV cache; "persist" keeps it on the device. If None, the configured mode is used.
        """
        self.refuse_in_group("before_optimizer_step")
        chosen = KVCacheManagementMode.parse(mode)
        if self.engine.state is not EngineState.STOPPED:
            self.engine.holds.hold(UPDATE, HoldLevel.SUSPENDED, chosen, keep_prefix_cache=False)
        self.engine.guard.release()

    @contextmanager
    def suspended(self, mode: Mode = None) -> Iterator[None]:
        """Stop this rank's steps and suspend its KV cache during a `with` block; then restore the cache and continue.

        Args:
            mode: what happens to the KV cache; if None, the configured mode is used.
        """
        self.refuse_in_group("suspended")
        try:
            with self.engine.holds.held(BLOCK, HoldLevel.SUSPENDED, mode):
                self.engine.guard.release()
                try:
                    yield
                finally:
                    self._gathering.ensure()
        finally:
            # Also resume the steps that `before_optimizer_step` stopped inside the block.
            self._let_go()

    def _let_go(self) -> None:
        if self.engine.state is not EngineState.STOPPED:
            self.engine.holds.release(UPDATE)

    def load_weights(self, folder: str | PathLike[str], version: int | None = None) -> int:
        """Load a folder of safetensors into every rank's model and announce the update; return the policy version.

        Running requests continue under the new weights; no step runs during the call. Without `version`, the new policy
        version is the current version + 1.

        Raises:
            ConfigError: the folder does not fit the model, or `version` is too low. No weight was changed.
            ControlError: with several ranks, the folder does not fit or is missing on the ranks that the message names.
            RuntimeError: this rank is not primary.
        """
        self.refuse_in_group("load_weights")
        if self._job is None or self._service.world_size == 1:
            with self._long_call("load_weights"), self.suspended():
                self.engine.load_weights(folder)
                return self.weights_updated(version)
        self.refuse_unless_primary("load_weights")
        present = self.engine.policy_version
        chosen = present + 1 if version is None else version
        if chosen < present:
            raise ConfigError(f"load_weights(version={version}): the policy version is {present} and only rises")
        return self._load_everywhere("load_weights", lambda client: client.load_weights(str(folder)), chosen)

    def load_lora_adapter(self, name: str, folder: str | PathLike[str], *, replace: bool = False) -> int:
        """Load a LoRA adapter saved by PEFT on every rank, for `SamplingParams.adapter`; return the policy version.

        The model, and requests that name no adapter, do not change.

        Args:
            name: name under which requests use the adapter.
            folder: folder that PEFT saved. With several ranks, every rank must be able to read it under this path.
            replace: whether to replace a loaded adapter of that name. Requests that use the old adapter continue with
                the new adapter, and the policy version rises by 1.

        Raises:
            ConfigError: the name is in use and `replace` is False, or the adapter does not fit. Nothing was changed.
            ControlError: the adapter does not fit or is missing on the ranks that the message names. If other ranks have
                loaded it, it was unloaded from all ranks.
            UnsupportedModelError: requests for this model cannot name adapters.
            RuntimeError: this rank is not primary.
        """
        self.refuse_in_group("load_lora_adapter")
        self.refuse_unless_primary("load_lora_adapter")
        with self._adapters_change:
            replaced = name in self.engine.adapters.folders
            if replaced and not replace:
                raise ConfigError(f"adapter {name!r} is loaded already: unload it first, or pass replace=True")
            if self._job is None or self._service.world_size == 1:
                with self._long_call("load_lora_adapter"), self.engine.locked():
                    self.engine.load_adapter(name, folder)
                    return self.weights_updated() if replaced else self.engine.policy_version
            SamplingParams(adapter=name)
            return self._load_everywhere(
                "load_lora_adapter",
                lambda client: client.load_adapter(name, str(folder)),
                self.engine.policy_version + replaced,
                undo=lambda client: client.unload_adapter(name),
            )

    def unload_lora_adapter(self, name: str) -> int:
        """Unload an adapter on every rank. Samples that use it fail with `RequestAbortedError`; return their number.

        Raises:
            InvalidRequestError: no adapter of that name is loaded.
            ControlError: some engines did not answer in time; the message names them.
            RuntimeError: this rank is not primary.
        """
        self.refuse_unless_primary("unload_lora_adapter")
        with self._adapters_change:
            self.engine.adapters.check(name)
            if self._job is None:
                return self.engine.unload_adapter(name)
            self._loop.refuse_inside("unload_lora_adapter()")
            return self._job.control(lambda client: client.unload_adapter(name)).result()

    def _load_everywhere(
        self,
        what: str,
        load: Callable[[InferenceClient], Awaitable[None]],
        version: int,
        undo: Callable[[InferenceClient], Awaitable[object]] | None = None,
    ) -> int:
        """Run `load` on every rank and announce `version`. If `load` fails on only some ranks, run `undo` on every rank."""
        self._loop.refuse_inside(f"{what}()")
        assert self._job is not None
        running, size = self.engine.state is EngineState.RUNNING, self._job.world_size

        async def everywhere(client: InferenceClient) -> int:
            if running:
                await client.pause_engines()
            try:
                try:
                    await load(client)
                except ControlError as exc:
                    if len(exc.engines) < size:
                        if undo is not None:
                            await undo(client)
                        # Announce the version to all ranks anyway, so that the ranks which loaded new weights stop
                        # using KV blocks that the old weights computed.
                        await client.set_policy_version(version)
                    raise
                await client.set_policy_version(version)
            finally:
                if running:
                    await client.unpause_engines()
            return version

        return self._job.control_all(everywhere).result()

    # --- which ranks may call -----------------------------------------------------------------------------------------

    def refuse_in_group(self, what: str) -> None:
        """Raise `EngineStateError` if this rank is in a tensor-parallel group. `what` names the method in the message."""
        if (group := self.engine.peers.group) is not None:
            raise EngineStateError(
                f"{what}() of an LLM in the {group.name}, which samples with the weights it was built with: shut it down "
                "and build another, or train with RolloutManager"
            )

    def refuse_unless_primary(self, what: str) -> None:
        """Raise `RuntimeError` if this rank takes no requests (is not primary). `what` names the method in the message."""
        if not self._service.is_primary:
            raise RuntimeError(
                f"{what}() on a rank that is not primary: with a coordinator rank 0 asks, in a tensor-parallel group its "
                "first rank, and the others compute; call wait_for_shutdown() here, or build the LLM without use_coordinator"
            )
