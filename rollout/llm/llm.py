"""`AsyncLLM` and the blocking `LLM`: the engine without a training loop.

    AsyncLLM(model, tokenizer)                         direct mode: every rank is primary and runs its own prompts
    AsyncLLM(model, tokenizer, use_coordinator=True)   one coordinator for all ranks; rank 0 is primary and takes requests

The model is sampled in place, on a separate thread. Every accepted request finishes with samples or one error. Change the
weights only while no step runs: inside `suspended`, or with the hook `trainer_hooks.optimizer.attach(optimizer, llm)`.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch import nn

from rollout.config import CoordinatorConfig, InferenceConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.meeting import Gathering
from rollout.distributed.job.world import World
from rollout.distributed.transport.keys import JobKeys
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.models.attention import refuse_inside_forward
from rollout.engine.weights.folder import load_model
from rollout.engine.weights.source import weights_of
from rollout.errors import ConfigError, DeadlineError, EngineStateError
from rollout.llm.control import LLMControl
from rollout.llm.engine_loop import EngineLoop, FollowerLoop
from rollout.llm.requests import LLMRequests, OnError, Params, Samples
from rollout.llm.service import EngineService, options_of_coordinator
from rollout.requests.prompt import Prompt
from rollout.sampling_params import takes_options
from rollout.state import EngineState, Mode
from rollout.threads.blocking import blocking, called, on_thread, read, threaded
from rollout.threads.loop_thread import LoopThread

if TYPE_CHECKING:
    from rollout.config import ServerConfig
    from rollout.server.server import Server

T = TypeVar("T")


class AsyncLLM(LLMRequests):
    """An `LLM` for asyncio code on any event loop, with the same arguments. No method blocks the caller's loop."""

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
        coordinator = options_of_coordinator(use_coordinator, coordinator_host, coordinator_port, coordinator_config)
        if not isinstance(model, nn.Module):
            model, tokenizer = load_model(model, tokenizer)
        weights = weights_of(model)
        if coordinator is not None and weights.spread:
            raise ConfigError(
                f"use_coordinator=True, and the weights of {type(model).__name__} are spread over the ranks: leave it out "
                "(with FSDP every rank runs its own prompts, in a tensor-parallel group the first rank sends requests)"
            )
        if weights.expert_parallel_mesh is not None:
            raise ConfigError(
                f"LLM of {type(model).__name__}, whose ranks exchange tokens in each layer: a request on one would wait "
                "for the others' forwards; load the model with ep_size=tp_size, or generate by RolloutManager on every rank"
            )
        engine = DynamicInferenceEngine(model, tokenizer, inference_config)
        # Gather the weights now and keep them gathered until the shutdown. Gathering is a collective operation, so it
        # cannot wait for a request, which arrives on one rank only.
        world = World.of_torch() if engine.weights.collective else None
        calls = "LLM(), suspended(), before_optimizer_step() and weights_updated()"
        gathering = Gathering(engine, lambda call: None, world, calls)
        gathering.ensure()
        loop = LoopThread("rollout-llm")
        try:
            if coordinator is not None:
                self._service: EngineLoop | EngineService = EngineService(engine, loop, coordinator)
            else:
                leads = engine.peers.group is None or engine.peers.group.leads
                self._service = EngineLoop(engine) if leads else FollowerLoop(engine)
        except BaseException:
            loop.close()
            raise
        self._control = LLMControl(engine, loop, gathering, self._service)
        super().__init__(engine, loop, self._service)
        # Shut down at exit: threads that still compute would crash the interpreter's shutdown.
        self._at_exit = partial(_shut_down, weakref.ref(self))
        atexit.register(self._at_exit)

    def __del__(self) -> None:
        # Close an LLM that was dropped without `close`, to free its KV cache and threads. Use a new thread, because
        # `__del__` may run on the engine's thread, for which `close` waits.
        service: EngineLoop | EngineService | None = getattr(self, "_service", None)
        if service is not None and not service.closed:
            with suppress(RuntimeError):
                threading.Thread(target=_close, args=(service, self.loop), name="rollout-forgotten").start()

    def _admit(self, what: str) -> None:
        self._control.admit(what)

    async def abort(self, request_id: int | None = None) -> int:
        """Abort one request, or all open requests if `request_id` is omitted; return the number of aborted requests."""
        numbers = None if request_id is None else [request_id]
        return await asyncio.wrap_future(self._service.abort(numbers))

    async def pause(self, timeout_s: float | None = None) -> None:
        """Pause every engine at its next step boundary. On a rank that is not primary, wait until its engine is paused.

        Args:
            timeout_s: seconds within which every engine must be paused; if None, the engine's `control_timeout_s`. The
                `timeout_s` of `unpause`, `suspend` and `resume` has the same meaning.

        Raises (`unpause`, `suspend` and `resume` raise the same errors):
            RuntimeError: this LLM runs in direct mode, which has no coordinator.
            ControlError: the job's state does not allow the call, or the engines in the message did not answer in time.
            DeadlineError: the coordinator did not answer, or this rank's engine was not paused, within the timeout.
        """
        await self._control.relay("pause", EngineState.PAUSED, timeout_s)

    async def unpause(self, timeout_s: float | None = None) -> None:
        """Resume stepping on every engine that is paused."""
        await self._control.relay("unpause", EngineState.RUNNING, timeout_s)

    async def suspend(self, mode: Mode = None, timeout_s: float | None = None) -> None:
        """Suspend every paused engine. `mode` sets what happens to the KV cache; None means the configured mode."""
        await self._control.relay("suspend", EngineState.SUSPENDED, mode, timeout_s)

    async def resume(self, timeout_s: float | None = None) -> None:
        """Restore the KV cache of every suspended engine and leave the engine paused."""
        await self._control.relay("resume", EngineState.PAUSED, timeout_s)

    async def set_policy_version(self, version: int | None = None) -> int:
        """Announce changed weights on all ranks and return the new policy version.

        If `version` is omitted, it is the current version + 1. With a coordinator, call this method on the primary rank.
        """
        chosen = self.policy_version + 1 if version is None else version
        self._control.refuse_in_group("set_policy_version")
        if not isinstance(self._service, EngineService):
            announce = self._control.weights_updated if self.engine.weights.collective else self.engine.weights_updated
            # Announce on another thread: the call blocks until a step boundary, and this event loop may serve streams.
            return await on_thread(announce, chosen)
        await asyncio.wrap_future(self._service.control(lambda client: client.set_policy_version(chosen)))
        return chosen

    score = threaded("_control", LLMControl.score)
    flush_prefix_cache = threaded("_control", LLMControl.flush_prefix_cache)
    weights_updated = threaded("_control", LLMControl.weights_updated)
    before_optimizer_step = threaded("_control", LLMControl.before_optimizer_step)
    load_weights = threaded("_control", LLMControl.load_weights)
    load_lora_adapter = threaded("_control", LLMControl.load_lora_adapter)
    unload_lora_adapter = threaded("_control", LLMControl.unload_lora_adapter)

    @asynccontextmanager
    async def suspended(self, mode: Mode = None) -> AsyncIterator[None]:
        """Suspend like `LLM.suspended`, but for an `async with` block."""
        held = ExitStack()
        try:
            await on_thread(held.enter_context, self._control.suspended(mode))
            yield
        finally:
            await on_thread(held.close)

    @property
    def blocking(self) -> LLMControl:
        """The control calls as blocking methods, for code that cannot await, such as a hook around `optimizer.step`."""
        return self._control

    @property
    def coordinator_address(self) -> str | None:
        """The coordinator's address, `tcp://host:port`; None in direct mode."""
        return self._service.member.coordinator.address if isinstance(self._service, EngineService) else None

    @property
    def coordinator_keys(self) -> JobKeys | None:
        """The keys that admit a process to the job, without the coordinator's secret key. Share them in a file that only
        its owner can read (`JobKeys.serialize`). None in direct mode, and for a coordinator without keys (on loopback).
        """
        keys = self._service.member.coordinator.keys if isinstance(self._service, EngineService) else None
        return None if keys is None else keys.client_side()

    def client(self, name: str = "agent") -> InferenceClient:
        """Return another client of the coordinator, on any rank: `async with llm.client() as client`.

        In another process, use `InferenceClient(llm.coordinator_address, keys=llm.coordinator_keys)`.

        Args:
            name: the client's name in logs and in `rollout top`.

        Raises:
            EngineStateError: this LLM runs in direct mode, or it is closed.
        """
        if not isinstance(self._service, EngineService) or self._service.closed:
            why = "it was closed" if self._service.closed else "direct mode has no coordinator to connect to"
            raise EngineStateError(f"client() of an LLM: {why}; build the LLM with use_coordinator=True")
        return self._service.member.coordinator.client(name, self.config.advanced.control_timeout_s)

    @property
    def is_primary_rank(self) -> bool:
        """Whether this rank accepts requests. In direct mode every rank accepts them, with a coordinator only rank 0, and
        in a tensor-parallel group only the group's first rank."""
        return self._service.is_primary

    @property
    def world_size(self) -> int:
        """The number of engines that compute for this LLM: 1 in direct mode, one per rank with a coordinator."""
        return self._service.world_size

    def serve(self, config: ServerConfig | None = None, *, blocking: bool = True) -> Server:
        """Serve like `LLM.serve`. Raise `RuntimeError` if the call would block a running event loop."""
        if blocking and asyncio._get_running_loop() is not None:
            raise RuntimeError(
                "serve() inside a running event loop would stop it until the server ends: call "
                "server = llm.serve(blocking=False), and await asyncio.to_thread(server.wait) to wait for its end"
            )
        return super().serve(config, blocking=blocking)

    async def wait_for_shutdown(self, timeout_s: float | None = None) -> None:
        """Wait until this rank's engine has stopped, because `close` was called on this rank or on the primary rank.

        Args:
            timeout_s: seconds to wait; if None, there is no limit.

        Raises:
            DeadlineError: the engine has not stopped within `timeout_s`.
            EngineDeadError, ConnectionLostError: the engine died, or its coordinator was lost.
        """
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._service.over)), timeout_s)
        except TimeoutError as exc:
            raise _too_late(timeout_s) from exc

    async def close(self) -> None:
        """Fail open requests and stop this rank's engine; on the primary rank, stop every rank's engine. Idempotent."""
        await asyncio.to_thread(self._close)

    shutdown = close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _close(self) -> None:
        self.loop.refuse_inside("close()")
        if self._server is not None:
            self._server.close()
        _close(self._service, self.loop)
        with suppress(Exception):
            atexit.unregister(self._at_exit)


class LLM:
    """A blocking interface to generation, usable even inside a running event loop such as Jupyter's. It wraps an `AsyncLLM`.

    Args:
        model: a Hugging Face causal language model, which is sampled in place, or a folder from which to load one.
        tokenizer: the model's tokenizer. If None, it is loaded from the folder. A model object without a tokenizer
            accepts only token ids as prompts, and its samples have no text.
        inference_config: options of the engine; if None, the defaults.
        use_coordinator: whether one coordinator serves all ranks. Every rank then builds its LLM; rank 0 is primary.
        coordinator_host: address that the coordinator listens on. If None, it is loopback or, for ranks on several
            hosts, an address that the other hosts can reach, protected by keys.
        coordinator_port: port that the coordinator listens on; if None, a free port.
        coordinator_config: all options of the coordinator, instead of `coordinator_host` and `coordinator_port`.

    Raises:
        ConfigError: coordinator options without `use_coordinator`, or host or port together with `coordinator_config`.
        UnsupportedModelError: the engine cannot sample from the model as it is; the message gives the reason.
        DeadlineError: this rank could not reach the coordinator, which rank 0 starts, in time.
    """

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
        self._inner = inner = AsyncLLM(
            model, tokenizer, inference_config, use_coordinator=use_coordinator, coordinator_host=coordinator_host,
            coordinator_port=coordinator_port, coordinator_config=coordinator_config,
        )  # fmt: skip
        self.model, self.tokenizer, self.config = inner.model, inner.tokenizer, inner.config
        self.loop, self.service = inner.loop, inner.service
        self._control = inner.blocking

    @takes_options
    def generate(
        self,
        /,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
        **fields: Any,
    ) -> Samples:
        """Sample completions like `AsyncLLM.generate`, but always return a list. Ctrl-C aborts the requests."""
        results = self._run(
            self._inner.generate(prompts, sampling_params, priority=priority, timeout_s=timeout_s, on_error=on_error)
        )
        return results if isinstance(results, list) else [results]

    submit = called("_inner", AsyncLLM.submit)
    stream = called("_inner", AsyncLLM.stream)
    abort = blocking("_inner", AsyncLLM.abort)

    pause = blocking("_inner", AsyncLLM.pause)
    unpause = blocking("_inner", AsyncLLM.unpause)
    suspend = blocking("_inner", AsyncLLM.suspend)
    resume = blocking("_inner", AsyncLLM.resume)
    set_policy_version = blocking("_inner", AsyncLLM.set_policy_version)

    score = called("_control", LLMControl.score)
    flush_prefix_cache = called("_control", LLMControl.flush_prefix_cache)
    weights_updated = called("_control", LLMControl.weights_updated)
    before_optimizer_step = called("_control", LLMControl.before_optimizer_step)
    suspended = called("_control", LLMControl.suspended)
    load_weights = called("_control", LLMControl.load_weights)
    load_lora_adapter = called("_control", LLMControl.load_lora_adapter)
    unload_lora_adapter = called("_control", LLMControl.unload_lora_adapter)

    engine = read("_inner", AsyncLLM.engine)
    context = read("engine", DynamicInferenceEngine.context)
    controller = read("engine", DynamicInferenceEngine.controller)
    state = read("engine", DynamicInferenceEngine.state)
    policy_version = read("engine", DynamicInferenceEngine.policy_version)
    stats = called("engine", DynamicInferenceEngine.stats)
    max_sequence_length = read("_inner", AsyncLLM.max_sequence_length)
    num_open = read("_inner", AsyncLLM.num_open)
    lora_adapters = read("_inner", AsyncLLM.lora_adapters)
    tensor_parallel_size = read("_inner", AsyncLLM.tensor_parallel_size)
    world_size = read("_inner", AsyncLLM.world_size)
    is_primary_rank = read("_inner", AsyncLLM.is_primary_rank)
    coordinator_address = read("_inner", AsyncLLM.coordinator_address)
    coordinator_keys = read("_inner", AsyncLLM.coordinator_keys)

    client = called("_inner", AsyncLLM.client)
    refuse_when_over = called("_inner", AsyncLLM.refuse_when_over)
    serve = called("_inner", LLMRequests.serve)

    def wait_for_shutdown(self, timeout_s: float | None = None) -> None:
        self.loop.refuse_inside("wait_for_shutdown()")
        try:
            self._inner._service.over.result(timeout_s)
        except TimeoutError as exc:
            raise _too_late(timeout_s) from exc

    def close(self) -> None:
        self._inner._close()

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            refuse_inside_forward()
        except EngineStateError:
            coroutine.close()
            raise
        try:
            return self.loop.run_sync(coroutine)
        except (RuntimeError, CancelledError) as exc:
            if isinstance(exc, CancelledError) or self.loop.closed:
                self.refuse_when_over()
            raise


def _close(service: EngineLoop | EngineService, loop: LoopThread) -> None:
    service.close()
    loop.close()
    service.engine.guard.release()


def _shut_down(llm: weakref.ref[AsyncLLM]) -> None:
    alive = llm()
    if alive is not None:
        alive._close()


def _too_late(timeout_s: float | None) -> DeadlineError:
    return DeadlineError(f"wait_for_shutdown: the engine has not ended within timeout_s={timeout_s}")
