"""Parts of an `LLM`, how they are built and closed, and what is called around weight updates."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import nn

from rollout.config import CoordinatorConfig, InferenceConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.gathering import Gathering
from rollout.distributed.job.world import World
from rollout.distributed.transport.keys import JobKeys
from rollout.distributed.worker.worker import EngineWorker
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.holds import BLOCK
from rollout.engine.weights.source import weights_of
from rollout.errors import (
    ConfigError,
    ControlError,
    EngineStateError,
)
from rollout.llm.engine_loop import EngineLoop
from rollout.llm.follower import FollowerLoop
from rollout.llm.model_loading import load
from rollout.llm.requests import LLMRequests
from rollout.llm.service import EngineService
from rollout.llm.update_hold import UpdateHold
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState, Mode
from rollout.threads.loop_thread import LoopThread

if TYPE_CHECKING:
    pass


class LLMParts(LLMRequests):
    """Parts of an `LLM`, and what is called around weight updates."""

    def __init__(
        self,
        model: nn.Module | str | PathLike[str],
        tokenizer: Any = None,
        inference_config: InferenceConfig | None = None,
        *,
        use_coordinator: bool = False,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        coordinator_config: CoordinatorConfig | None = None,
    ) -> None:
        super().__init__()
        coordinator = _coordinator(use_coordinator, coordinator_host, coordinator_port, coordinator_config)
        if not isinstance(model, nn.Module):
            model, tokenizer = load(model, tokenizer)
        weights = weights_of(model)
        if coordinator is not None and (weights.collective or weights.tensor_parallel_mesh is not None):
            raise ConfigError(
                f"use_coordinator=True, and the weights of {type(model).__name__} are spread over the ranks: leave it out "
                "(with FSDP every rank runs its own prompts, in a tensor-parallel group the first rank asks)"
            )
        if weights.expert_parallel_mesh is not None:
            raise ConfigError(
                f"LLM of {type(model).__name__}, whose ranks exchange tokens in each layer: a request on one would wait "
                "for the others' forwards; load the model with ep_size=tp_size, or generate by RolloutManager on every rank"
            )
        self.model = model
        self.config = inference_config or InferenceConfig()
        self._engine = engine = DynamicInferenceEngine(model, tokenizer, self.config)
        self.tokenizer = engine.controller.tokenizer
        # Held until the shutdown: requests come at any time, and the ranks have to gather together.
        world = World.of_torch() if engine.weights.collective else None
        calls = "LLM(), suspended(), before_optimizer_step() and weights_updated()"
        self._gathering = Gathering(engine, lambda call: None, world, calls)
        self._gathering.ensure()
        self._loop = LoopThread("rollout-llm")
        self._job: EngineService | None = None
        self._service: EngineLoop | EngineService
        self._steps: EngineLoop | EngineWorker
        try:
            if coordinator is None:
                leads = engine.peers.group is None or engine.peers.group.leads
                self._service = self._steps = EngineLoop(engine) if leads else FollowerLoop(engine)
            else:
                self._service = self._job = EngineService(self._engine, self._loop, coordinator)
                self._steps = self._job.member.worker
        except BaseException:
            self._loop.close()
            raise
        self._hold = UpdateHold(self._engine)
        self._adapters_change = threading.Lock()
        # Threads that still compute while the interpreter ends would crash it.
        self._at_exit = partial(_shut_down, weakref.ref(self))
        atexit.register(self._at_exit)

    def __del__(self) -> None:
        # Forgotten, it would hold its KV cache and its threads for ever. On a thread: this may be any one, also its own.
        service: EngineLoop | EngineService | None = getattr(self, "_service", None)
        if service is not None and not service.closed:
            with suppress(RuntimeError):
                threading.Thread(target=_close, args=(service, self._loop), name="rollout-forgotten").start()

    # --- parts ------------------------------------------------------------------------------------------------------

    @property
    def service(self) -> EngineLoop | EngineService:
        """Where requests are computed."""
        return self._service

    @property
    def direct(self) -> bool:
        """Whether there is no coordinator process."""
        return self._job is None

    @property
    def coordinator_address(self) -> str | None:
        """`tcp://host:port` of the coordinator; None in direct mode."""
        return None if self._job is None else self._job.member.coordinator.address

    @property
    def coordinator_keys(self) -> JobKeys | None:
        """Keys that the coordinator asks for, without its own secret; None in direct mode, and
        where it listens on loopback and the launcher gave no secret.

        They are what admits a process to the job: hand them on by a file that only its user can read (`JobKeys.serialize`).
        """
        keys = None if self._job is None else self._job.member.coordinator.keys
        return None if keys is None else keys.client_side()

    def client(self, name: str = "agent") -> InferenceClient:
        """A further client of the coordinator, on any rank: `async with llm.client() as client`.

        In another process: `InferenceClient(llm.coordinator_address, keys=llm.coordinator_keys)`.

        Args:
            name: shown in logs and in `rollout top`.

        Raises:
            EngineStateError: direct mode, which has no coordinator, or shut down.
        """
        if self._job is None or self._service.closed:
            why = "it was shut down" if self._service.closed else "direct mode has no coordinator to connect to"
            raise EngineStateError(f"client() of an LLM: {why}; build the LLM with use_coordinator=True")
        return self._job.member.coordinator.client(name, self.config.control_timeout_s)

    @property
    def is_primary_rank(self) -> bool:
        """Whether requests are taken here: everywhere in direct mode, on rank 0 with a coordinator, on the first rank of a
        tensor-parallel group."""
        if (group := self.engine.peers.group) is not None:
            return group.leads
        return self._job is None or self._job.is_primary

    @property
    def world_size(self) -> int:
        """Engines that compute for this LLM: one in direct mode, every rank's with a coordinator."""
        return 1 if self._job is None else self._job.world_size

    def flush_prefix_cache(self) -> int:
        """Drop cached blocks that no request holds, with a coordinator those of every rank; returns their number.

        Waits for the engines' next step boundary: in a coroutine, `await asyncio.to_thread(llm.flush_prefix_cache)`.

        Raises:
            RuntimeError: not the primary rank: `llm.engine.flush_prefix_cache()` is this rank's own.
            ControlError: engines are late; names them.
        """
        self._refuse_unless_primary("flush_prefix_cache")
        if self._job is None:
            return self.engine.flush_prefix_cache()
        self.loop.refuse_inside("flush_prefix_cache()")
        return self._job.control(lambda client: client.flush_prefix_cache()).result()

    # --- weights and memory -----------------------------------------------------------------------------------------

    def weights_updated(self, version: int | None = None) -> int:
        """Announce changed weights: this rank's policy version moves by 1, or to `version`. Every rank calls it.

        Resumes what `before_optimizer_step` has stopped. The optimizer hook calls both.

        Returns:
            The policy version.

        Raises:
            ConfigError: `version` is below the present one.
        """
        self._refuse_in_group("weights_updated")
        if self.engine.state is not EngineState.STOPPED:
            # No step may find the weights scattered.
            with self.engine.locked():
                self.engine.weights_updated(version)
                if BLOCK not in self.engine.holds:
                    self._gathering.ensure()
            self._hold.let_go()
        return self.policy_version

    def before_optimizer_step(self, mode: Mode = None) -> None:
        """Stop before the weights change: no forward runs from here to `weights_updated`. The optimizer hook calls it.

        Args:
            mode: what becomes of the KV cache; None: the configured mode. "persist" leaves it on the device.
        """
        self._refuse_in_group("before_optimizer_step")
        self._hold.hold(mode)
        self.engine.guard.release()

    @contextmanager
    def suspended(self, mode: Mode = None) -> Iterator[None]:
        """A `with` block in which this rank makes no step and its KV cache is suspended; its end resumes both.

        Args:
            mode: what becomes of the KV cache; None: the configured mode.
        """
        self._refuse_in_group("suspended")
        with self._hold.held(mode):
            self.engine.guard.release()
            try:
                yield
            finally:
                self._gathering.ensure()

    def load_weights(self, folder: str | PathLike[str], version: int | None = None) -> int:
        """Load the weights of a folder of safetensors into the module of every rank, and announce them.

        Running requests go on under them; no step is made meanwhile.

        Returns:
            The policy version.

        Raises:
            ConfigError: the folder does not fit the model, in which case nothing was changed; or `version` is too low.
            ControlError: it does not fit, or is not there, on one of several ranks; names them.
            RuntimeError: not the primary rank.
        """
        self._refuse_in_group("load_weights")
        if self._job is None or self.world_size == 1:
            with self.suspended():
                self.engine.load_weights(folder)
                return self.weights_updated(version)
        self._refuse_unless_primary("load_weights")
        self.loop.refuse_inside("load_weights()")
        present = self.policy_version
        chosen = present + 1 if version is None else version
        if chosen < present:
            raise ConfigError(f"load_weights(version={version}): the policy version is {present} and only rises")
        running = self.state is EngineState.RUNNING
        size = self.world_size
        return self._job.control_all(
            lambda client: _load_everywhere(client, size, lambda: client.load_weights(str(folder)), chosen, running)
        ).result()

    def load_lora_adapter(self, name: str, folder: str | PathLike[str], *, replace: bool = False) -> int:
        """Load a LoRA adapter from a folder, as PEFT saves it, on every rank: requests name it by `SamplingParams.adapter`.

        The model stays as it is, and so do requests that name no adapter.

        Args:
            replace: take the place of a loaded adapter of that name, whose requests go on with this one; the policy version
                moves by 1 then.

        Returns:
            The policy version.

        Raises:
            ConfigError: there is one of that name and `replace` is False; or it does not fit the model; nothing was changed.
            ControlError: it does not fit, or is not there, on some of several ranks; names them. No rank has it then.
            UnsupportedModelError: requests for this model cannot name adapters.
            RuntimeError: not the primary rank.
        """
        self._refuse_in_group("load_lora_adapter")
        self._refuse_unless_primary("load_lora_adapter")
        with self._adapters_change:
            replaced = name in self.lora_adapters
            if replaced and not replace:
                raise ConfigError(f"adapter {name!r} is loaded already: unload it first, or pass replace=True")
            if self._job is None or self.world_size == 1:
                with self.engine.locked():
                    self.engine.load_adapter(name, folder)
                    return self.weights_updated() if replaced else self.policy_version
            self.loop.refuse_inside("load_lora_adapter()")
            SamplingParams(adapter=name)
            present, size, running = self.policy_version, self.world_size, self.state is EngineState.RUNNING
            version = present + 1 if replaced else None
            self._job.control_all(
                lambda client: _load_adapter_everywhere(client, size, name, str(folder), version, running)
            ).result()
            return present if version is None else version

    def unload_lora_adapter(self, name: str) -> int:
        """Unload an adapter on every rank. Requests that name it end with `RequestAbortedError`.

        Returns:
            Number of samples that have ended by it.

        Raises:
            InvalidRequestError: there is no such adapter.
            ControlError: engines are late; names them.
            RuntimeError: not the primary rank.
        """
        self._refuse_unless_primary("unload_lora_adapter")
        with self._adapters_change:
            self.engine.adapters.check(name)
            if self._job is None:
                return self.engine.unload_adapter(name)
            self.loop.refuse_inside("unload_lora_adapter()")
            return self._job.control(lambda client: client.unload_adapter(name)).result()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check_weights_when_idle(self) -> None:
        # While requests run, a new one does not wait for a step boundary.
        if not self.num_open:
            self._steps.check_weights()

    def _refuse_in_group(self, what: str) -> None:
        if (group := self.engine.peers.group) is not None:
            raise EngineStateError(
                f"{what}() of an LLM in the {group.name}, which samples with the weights it was built with: shut it down "
                "and build another, or train with RolloutManager"
            )

    def _refuse_unless_primary(self, what: str) -> None:
        if not self.is_primary_rank:
            raise RuntimeError(
                f"{what}() on a rank that is not primary: with a coordinator rank 0 asks, in a tensor-parallel group its "
                "first rank, and the others compute; call wait_for_shutdown() here, or build the LLM without use_coordinator"
            )

    def _shutdown(self) -> None:
        self.loop.refuse_inside("shutdown()")
        if self._server is not None:
            self._server.stop()
        _close(self._service, self._loop)
        with suppress(Exception):
            atexit.unregister(self._at_exit)


async def _load_adapter_everywhere(
    client: InferenceClient, size: int, name: str, folder: str, version: int | None, running: bool
) -> None:
    def load() -> Awaitable[None]:
        return client.load_adapter(name, folder)

    try:
        if version is None:
            await load()
        else:
            await _load_everywhere(client, size, load, version, running)
    except ControlError as exc:
        if len(exc.engines) < size:
            await client.unload_adapter(name)
        raise


async def _load_everywhere(
    client: InferenceClient, size: int, load: Callable[[], Awaitable[None]], version: int, running: bool
) -> int:
    if running:
        await client.pause_engines()
    try:
        try:
            await load()
        except ControlError as exc:
            if len(exc.engines) < size:
                # The others have new weights: cached KV of the old ones must not be used.
                await client.set_policy_version(version)
            raise
        await client.set_policy_version(version)
    finally:
        if running:
            await client.unpause_engines()
    return version


def _close(service: EngineLoop | EngineService, loop: LoopThread) -> None:
    service.close()
    loop.close()
    service.engine.guard.release()


def _coordinator(
    wanted: bool, host: str | None, port: int | None, config: CoordinatorConfig | None
) -> CoordinatorConfig | None:
    given = {"coordinator_host": host, "coordinator_port": port, "coordinator_config": config}
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if not wanted:
        if named:
            raise ConfigError(f"{', '.join(named)} without a coordinator: set use_coordinator=True, or leave it out")
        return None
    chosen = config or CoordinatorConfig()
    for name, value in (("host", host), ("inference_coordinator_port", port)):
        said = getattr(chosen, name)
        if value is not None and said not in (value, getattr(CoordinatorConfig, name)):
            raise ConfigError(
                f"coordinator_config.{name}={said!r}, and {value!r} beside it: two values for one option; leave one out"
            )
    if host is not None:
        chosen = chosen.replace(host=host)
    return chosen if port is None else chosen.replace(inference_coordinator_port=port)


def _shut_down(llm: weakref.ref[LLMParts]) -> None:
    alive = llm()
    if alive is not None:
        alive._shutdown()
