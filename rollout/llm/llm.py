"""`AsyncLLM` and the blocking `LLM`: the engine without a training loop.

    AsyncLLM(model, tokenizer)                    direct mode: every rank is primary and runs its own prompts
    AsyncLLM(model, tokenizer, use_coordinator=True)   one coordinator for all ranks; rank 0 is primary and asks

Always true: the model is sampled in place, on a thread of its own; a result says of every token which version of the
weights made it; what was accepted ends with samples or with one named error. While requests run, leave the module alone
(`suspended`, or `trainer_hooks.optimizer.attach(optimizer, llm)` around a step); while none runs it is as you left it.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from torch import nn

from rollout.config import CoordinatorConfig, InferenceConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.client.text_stream import GroupText
from rollout.distributed.job.world import World
from rollout.engine.context import DynamicInferenceContext
from rollout.engine.controller import TextGenerationController
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.weights.source import weights_of
from rollout.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    RequestError,
    RolloutError,
    UnsupportedModelError,
)
from rollout.llm.model_loading import load
from rollout.llm.prompts import normalized
from rollout.llm.results import PendingGroup, Readers, Samples, TextStream
from rollout.llm.service import EngineService
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams, one_each
from rollout.state import EngineState, FinishReason, KVCacheManagementMode, Mode, Status
from rollout.threads.loop_thread import LoopThread

if TYPE_CHECKING:
    from rollout.config import ServerConfig
    from rollout.server.server import Server

T = TypeVar("T")
OnError = Literal["raise", "return"]
Params = SamplingParams | Sequence[SamplingParams] | None

_PAUSE_IS_DIRECT = (
    "direct mode has no coordinator to relay {0}(): use llm.engine.{0}() or llm.suspended(), or build the LLM with "
    "use_coordinator=True"
)


class _LLM:
    """What both have: everything that does not wait, and the waiting itself, for each to wrap."""

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
        coordinator = _coordinator(use_coordinator, coordinator_host, coordinator_port, coordinator_config)
        if not isinstance(model, nn.Module):
            model, tokenizer = load(model, tokenizer)
        if weights_of(model).collective:
            raise UnsupportedModelError(
                f"{type(model).__name__} has its weights spread over the ranks, which have to gather them together, and "
                "requests of an LLM come at any time: use RolloutManager, whose generate() every rank calls"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.config = inference_config or InferenceConfig()
        self._numbers = count()
        self._holds = 0
        self._paused_here = self._suspended_here = False
        self._readers = Readers()
        self._server: Server | None = None
        self._service = EngineService(DynamicInferenceEngine(model, tokenizer, self.config), coordinator)
        # Threads that still compute while the interpreter ends would crash it.
        self._at_exit = partial(_shut_down, weakref.ref(self))
        atexit.register(self._at_exit)

    def __del__(self) -> None:
        # Forgotten, it would hold its KV cache and its threads for ever. On a thread: this may be any one, also its own.
        service: EngineService | None = getattr(self, "_service", None)
        if service is not None and not service.closed:
            with suppress(RuntimeError):
                threading.Thread(target=service.close, name="rollout-forgotten").start()

    # --- parts ------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> DynamicInferenceEngine:
        """This rank's."""
        return self._service.engine

    @property
    def context(self) -> DynamicInferenceContext:
        """The engine's KV blocks, and what is active in them."""
        return self.engine.context

    @property
    def controller(self) -> TextGenerationController:
        """The engine's tokenise, forward, sample, detokenise."""
        return self.engine.controller

    @property
    def loop(self) -> LoopThread:
        """The private event loop on its thread."""
        return self._service.loop

    @property
    def direct(self) -> bool:
        """Whether there is no coordinator process."""
        return self._service.direct

    @property
    def is_primary_rank(self) -> bool:
        """Whether requests are taken here: everywhere in direct mode, on rank 0 with a coordinator."""
        return self._service.is_primary

    @property
    def state(self) -> EngineState:
        """Where this rank's engine stands."""
        return self.engine.state

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.engine.policy_version

    @property
    def max_sequence_length(self) -> int:
        """Longest prompt + completion, in tokens: what the model can have and the KV pool holds."""
        return min(self.engine.max_sequence_length, self.context.allocator.num_blocks * self.config.block_size_tokens)

    @property
    def num_open(self) -> int:
        """Prompts that were accepted and have not ended."""
        return self._service.num_open

    def refuse_when_over(self) -> None:
        """Raises: EngineDeadError, EngineStateError, ConnectionLostError: no request is served any more."""
        self._service.refuse_when_over()

    def stats(self) -> dict[str, float]:
        """Counters and gauges of this rank's engine, by plain names."""
        return self.engine.stats()

    def flush_prefix_cache(self) -> int:
        """Forget cached blocks that no request holds, with a coordinator those of every rank; returns how many.

        It waits for the engines' next step boundary: in a coroutine, `await asyncio.to_thread(llm.flush_prefix_cache)`.

        Raises:
            RuntimeError: not the primary rank: `llm.engine.flush_prefix_cache()` is this rank's own.
            ControlError: engines are late; names them.
        """
        self._refuse_unless_primary("flush_prefix_cache")
        if self.direct:
            return self.engine.flush_prefix_cache()
        self.loop.refuse_inside("flush_prefix_cache()")
        return self._service.control(lambda client: client.flush_prefix_cache()).result()

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> PendingGroup:
        """Ask for one prompt's n samples and do not wait; from any thread.

        Args:
            priority: higher runs first; equal ones in order of arrival.
            timeout_s: the request fails after so many seconds. None: never.

        Returns:
            What to await, or to abort. It fails with a `RequestError` (aborted, timed out), or with
            `ConnectionLostError` where engine or coordinator have ended; a sample that failed alone is in the result,
            with its `error`.

        Raises:
            InvalidRequestError: it can never be served; nothing was queued.
            RuntimeError: not the primary rank.
            WeightsChangedError: they were changed without a word since the last update; looked at when nothing runs.
            EngineStateError, EngineDeadError, ConnectionLostError: no request is served any more.
        """
        self._refuse_unless_primary("generate")
        self._check_weights_when_idle()
        params = sampling_params or SamplingParams()
        return self._submit(prompt, self.engine.check_request(prompt, params), params, priority, timeout_s)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        interval: int = 1,
    ) -> TextStream:
        """Ask for one prompt's n samples and read them as they grow: `async for delta in llm.stream(prompt)`.

        Args:
            interval: tokens of a sample that come together.

        Raises: as `submit`; what happens later is raised by the iteration.
        """
        self._refuse_unless_primary("stream")
        self._check_weights_when_idle()
        params = sampling_params or SamplingParams()
        tokens = self.engine.check_request(prompt, params)
        pending = self._pending(prompt)
        stream = TextStream(pending, GroupText(params, self.tokenizer), self._readers)
        options = {"priority": priority, "timeout_s": timeout_s, "interval": interval}
        self._service.open_group(pending.request_id, tokens, params, stream, **options)
        return stream

    def _check_weights_when_idle(self) -> None:
        # Whoever asks while others are served does not wait for a step boundary.
        if not self.num_open:
            self._service.worker.check_weights()

    def _submit(
        self, prompt: Prompt, tokens: list[int], params: SamplingParams, priority: int, timeout_s: float | None
    ) -> PendingGroup:
        pending = self._pending(prompt)
        options = {"priority": priority, "timeout_s": timeout_s}
        self._service.open_group(pending.request_id, tokens, params, pending, **options)
        return pending

    def _pending(self, prompt: Prompt) -> PendingGroup:
        text = prompt if isinstance(prompt, str) else None
        return PendingGroup(next(self._numbers), text, self._service.abort, self.loop.refuse_inside)

    def _submit_all(
        self, prompts: object, sampling_params: Params, priority: int, timeout_s: float | None
    ) -> tuple[list[tuple[PendingGroup, list[int], SamplingParams]], bool]:
        self._refuse_unless_primary("generate")
        self._check_weights_when_idle()
        asked, single = normalized(prompts)
        params = one_each(sampling_params, len(asked))
        tokens = [self._checked(position, *each) for position, each in enumerate(zip(asked, params, strict=True))]
        return [
            (self._submit(prompt, ids, each, priority, timeout_s), ids, each)
            for prompt, ids, each in zip(asked, tokens, params, strict=True)
        ], single

    def _checked(self, position: int, prompt: Prompt, params: SamplingParams) -> list[int]:
        try:
            return self.engine.check_request(prompt, params)
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"prompts[{position}]: {exc}") from exc

    async def _generate(
        self, prompts: object, sampling_params: Params, priority: int, timeout_s: float | None, on_error: OnError
    ) -> DynamicInferenceRequest | Samples:
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error={on_error!r}: must be 'raise' or 'return'")
        asked, single = self._submit_all(prompts, sampling_params, priority, timeout_s)
        results: Samples = []
        first: BaseException | None = None
        try:
            for pending, tokens, params in asked:
                try:
                    results += await pending
                except RolloutError as exc:
                    first = first or exc
                    results += [_failed(pending, tokens, params, index, exc) for index in range(params.n)]
        except BaseException:
            for pending, _, _ in asked:
                pending.abort()
            raise
        if on_error == "raise":
            _raise_first(first, results)
        return results[0] if single and len(results) == 1 else results

    # --- weights and memory -----------------------------------------------------------------------------------------

    def weights_updated(self, version: int | None = None) -> int:
        """This rank's weights have changed: its policy version moves, by 1 or to `version`. Every rank calls it.

        Goes on with what `before_optimizer_step` has stopped. The optimizer hook calls both.

        Returns:
            The policy version.

        Raises:
            ConfigError: `version` is below the present one.
        """
        if self.engine.state is not EngineState.STOPPED:
            self.engine.weights_updated(version)
            self._let_go()
        return self.policy_version

    def before_optimizer_step(self, mode: Mode = None) -> None:
        """Stop before the weights change: no forward runs from here to `weights_updated`. The optimizer hook calls it.

        Args:
            mode: what becomes of the KV cache; None: the configured mode. "persist" leaves it on the device.
        """
        self._hold(mode)

    @contextmanager
    def suspended(self, mode: Mode = None) -> Iterator[None]:
        """A `with` block in which this rank's engine stands still and its KV cache is off the device; then it goes on.

        Args:
            mode: what becomes of the KV cache; None: the configured mode.
        """
        self._holds += 1
        try:
            self._hold(mode)
            yield
        finally:
            self._holds -= 1
            self._let_go()

    def _hold(self, mode: Mode) -> None:
        chosen = KVCacheManagementMode.parse(mode)
        worker = self._service.worker
        worker.withhold()
        with self.engine.locked():
            if self.engine.state in (EngineState.STOPPED, EngineState.SUSPENDED):
                return
            # What the caller has paused by himself stays so afterwards.
            his = self.engine.state is EngineState.PAUSED and not worker.held_by_coordinator
            self._paused_here = self._paused_here or not his
            self.engine.pause()
            self.engine.suspend(chosen, keep_prefix_cache=False)
            self._suspended_here = True

    def _let_go(self) -> None:
        if self._holds or self.engine.state is EngineState.STOPPED:
            return
        with self.engine.locked():
            suspended, paused = self._suspended_here, self._paused_here
            self._suspended_here = self._paused_here = False
            if not self._service.worker.give_back(suspended=suspended):
                if suspended:
                    self.engine.resume()
                if paused:
                    self.engine.unpause()

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def serve(self, config: ServerConfig | None = None, *, blocking: bool = True) -> Server:
        """Serve an OpenAI-compatible API (`rollout.server`) from this process, on the private loop.

        Args:
            config: address, key, limits; None: loopback, port 8000.
            blocking: wait until Ctrl-C or SIGTERM, then stop the server. False: return; `Server.url`, `Server.stop()`.

        Raises:
            RuntimeError: not the primary rank (without a coordinator every rank is: each serves its own engine, on a port
                of its own), or it is served already; or an `AsyncLLM` is to wait in a running loop.
            EngineStateError, EngineDeadError, ConnectionLostError: no request is served any more.
            ConfigError: the address is taken or not this machine's, or what serving needs is not installed.
        """
        self._refuse_unless_primary("serve")
        if blocking:
            self._refuse_to_block("serve()")
        self.refuse_when_over()
        try:
            from rollout.server.server import serve
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"serve() needs {exc.name}, which is not installed: pip install 'rollout-engine[serve]'"
            ) from exc
        if self._server is not None and self._server.running:
            raise RuntimeError(f"this LLM is served already, at {self._server.url}; stop() that server first")
        try:
            self._server = serve(self, config, blocking=False)
        except ConfigError as exc:
            world = World.of_torch() if self.direct else None
            if world is None:
                raise
            raise ConfigError(
                f"rank {world.rank} of {world.size}: {exc}. Without a coordinator every rank serves its own engine: give "
                f"each its own port (ServerConfig.port + rank), or set use_coordinator=True, where rank 0 serves all"
            ) from exc
        if blocking:
            self._server.wait()
        return self._server

    # --- inside -----------------------------------------------------------------------------------------------------

    def _refuse_to_block(self, what: str) -> None:
        """Whoever calls this class may wait: it blocks all the same."""

    def _refuse_unless_primary(self, what: str) -> None:
        if not self.is_primary_rank:
            raise RuntimeError(
                f"{what}() on a rank that is not primary: with a coordinator rank 0 asks, and the others compute; call "
                "wait_for_shutdown() here, or build the LLM without use_coordinator"
            )

    async def _pause(self, timeout_s: float | None) -> None:
        await self._control("pause", EngineState.PAUSED, timeout_s, lambda client: client.pause_engines(timeout_s))

    async def _unpause(self, timeout_s: float | None) -> None:
        await self._control("unpause", EngineState.RUNNING, timeout_s, lambda client: client.unpause_engines(timeout_s))

    async def _suspend(self, mode: Mode, timeout_s: float | None) -> None:
        await self._control(
            "suspend", EngineState.SUSPENDED, timeout_s, lambda client: client.suspend_engines(mode, timeout_s)
        )

    async def _resume(self, timeout_s: float | None) -> None:
        await self._control("resume", EngineState.PAUSED, timeout_s, lambda client: client.resume_engines(timeout_s))

    async def _control(self, what: str, state: EngineState, timeout_s: float | None, ask: Any) -> None:
        if self.direct:
            raise RuntimeError(_PAUSE_IS_DIRECT.format(what))
        if self.is_primary_rank:
            await asyncio.wrap_future(self._service.control(ask))
        else:
            await asyncio.to_thread(self.engine.wait_until, state, timeout_s)

    async def _set_version(self, version: int | None) -> int:
        chosen = self.policy_version + 1 if version is None else version
        if self.direct:
            # It waits for a step boundary, and this may be the loop that the server's streams live on.
            return await asyncio.to_thread(self.engine.weights_updated, chosen)

        def ask(client: InferenceClient) -> Coroutine[Any, Any, None]:
            return client.set_policy_version(chosen)

        await asyncio.wrap_future(self._service.control(ask))
        return chosen

    async def _abort(self, request_id: int | None) -> int:
        numbers = None if request_id is None else [request_id]
        return await asyncio.wrap_future(self._service.abort_all(numbers))

    def _shutdown(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._service.close()
        with suppress(Exception):
            atexit.unregister(self._at_exit)


class AsyncLLM(_LLM):
    """Generation for asyncio, from any event loop. Built as `LLM` is."""

    def _refuse_to_block(self, what: str) -> None:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(
                f"{what} inside a running event loop would stop it until the server ends: call "
                "server = llm.serve(blocking=False), and await asyncio.to_thread(server.wait) where you want to wait"
            )

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
    ) -> DynamicInferenceRequest | Samples:
        """Sample completions. Cancelling the task ends the requests.

        Args:
            prompts: a text, token ids, chat messages, or a list of one of these; `[]` gives `[]`.
            sampling_params: for all prompts, or one per prompt.
            priority, timeout_s: of each, as `submit` has them.
            on_error: `raise`: the first failure, once all have ended. `return`: failed samples have their `error`.

        Returns:
            One request for a single prompt and n = 1, else a list: prompts in order, the samples of a prompt side by side.

        Raises:
            TypeError: `prompts` are something else.
            InvalidRequestError: a prompt can never be served; nothing was queued.
            RequestError: `on_error="raise"` and a sample failed.
            RuntimeError: not the primary rank.
            EngineStateError, EngineDeadError, ConnectionLostError: no request is served any more.
        """
        return await self._generate(prompts, sampling_params, priority, timeout_s, on_error)

    async def abort(self, request_id: int | None = None) -> int:
        """End a request (None: every one); how many were open."""
        return await self._abort(request_id)

    async def pause(self, timeout_s: float | None = None) -> None:
        """Have every engine stop at its next step boundary; on other ranks than the primary, wait until this one has.

        So all four, with a coordinator.

        Args:
            timeout_s: deadline; None: `control_timeout_s`.

        Raises:
            RuntimeError: direct mode.
            ControlError: not allowed now, or engines are late; names them.
            DeadlineError: neither done nor refused in time.
        """
        await self._pause(timeout_s)

    async def unpause(self, timeout_s: float | None = None) -> None:
        """Have every engine go on."""
        await self._unpause(timeout_s)

    async def suspend(self, mode: Mode = None, timeout_s: float | None = None) -> None:
        """Give every paused engine's KV memory back; `mode` None: as each is configured."""
        await self._suspend(mode, timeout_s)

    async def resume(self, timeout_s: float | None = None) -> None:
        """Have every suspended engine's KV back; leads to paused."""
        await self._resume(timeout_s)

    async def set_policy_version(self, version: int | None = None) -> int:
        """All ranks' weights have changed: every engine's version moves, by 1 or to `version`. On the primary rank."""
        return await self._set_version(version)

    async def wait_for_shutdown(self, timeout_s: float | None = None) -> None:
        """Wait until this rank's engine has ended: `shutdown` here or on the primary rank.

        Raises:
            DeadlineError: it has not within `timeout_s`.
            EngineDeadError, ConnectionLostError: that is how it ended.
        """
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._service.over)), timeout_s)
        except TimeoutError as exc:
            raise _too_late(timeout_s) from exc

    async def shutdown(self) -> None:
        """End: what is open fails by name; on the primary rank, every rank's engine stops. Harmless when repeated."""
        await asyncio.to_thread(self._shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()


class LLM(_LLM):
    """Generation for blocking code, also inside a running event loop (Jupyter's).

    Args:
        model: the Hugging Face causal model, sampled in place; or the folder of one, which is loaded.
        tokenizer: its tokenizer; None where prompts are token ids and no text is asked for (from a folder: its own).
        inference_config: see `InferenceConfig`; None: defaults.
        use_coordinator: one coordinator process for all ranks; every rank builds its LLM, rank 0 is primary.
        coordinator_host, coordinator_port: where the coordinator listens; None: loopback (across hosts: the address
            that the others reach, with keys), and a free port.
        coordinator_config: its other options.

    Raises:
        ValueError: a host, a port or options of a coordinator without `use_coordinator`.
        UnsupportedModelError: the model does something the engine cannot honour; the message names it.
        DeadlineError: the ranks have not found each other.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
    ) -> Samples:
        """As `AsyncLLM.generate`, but always a list. Ctrl-C ends the requests."""
        results = self._run(self._generate(prompts, sampling_params, priority, timeout_s, on_error))
        return results if isinstance(results, list) else [results]

    def abort(self, request_id: int | None = None) -> int:
        """End a request (None: every one); how many were open."""
        return self._run(self._abort(request_id))

    def pause(self, timeout_s: float | None = None) -> None:
        """As `AsyncLLM.pause`."""
        self._run(self._pause(timeout_s))

    def unpause(self, timeout_s: float | None = None) -> None:
        """As `AsyncLLM.unpause`."""
        self._run(self._unpause(timeout_s))

    def suspend(self, mode: Mode = None, timeout_s: float | None = None) -> None:
        """As `AsyncLLM.suspend`."""
        self._run(self._suspend(mode, timeout_s))

    def resume(self, timeout_s: float | None = None) -> None:
        """As `AsyncLLM.resume`."""
        self._run(self._resume(timeout_s))

    def set_policy_version(self, version: int | None = None) -> int:
        """As `AsyncLLM.set_policy_version`."""
        return self._run(self._set_version(version))

    def wait_for_shutdown(self, timeout_s: float | None = None) -> None:
        """As `AsyncLLM.wait_for_shutdown`."""
        self.loop.refuse_inside("wait_for_shutdown()")
        try:
            self._service.over.result(timeout_s)
        except TimeoutError as exc:
            raise _too_late(timeout_s) from exc

    def shutdown(self) -> None:
        """As `AsyncLLM.shutdown`."""
        self._shutdown()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            future = self.loop.start_from_outside(coroutine)
        except RuntimeError:
            self.refuse_when_over()
            raise
        try:
            return future.result()
        except CancelledError:
            self.refuse_when_over()
            raise
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shutdown()


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


def _failed(
    pending: PendingGroup, tokens: list[int], params: SamplingParams, index: int, error: RolloutError
) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        request_id=pending.request_id,
        sample_index=index,
        prompt=pending.prompt,
        prompt_tokens=tokens,
        sampling_params=params,
        status=Status.FAILED,
        finish_reason=FinishReason.ERROR,
        error=f"{type(error).__name__}: {error}",
    )


def _raise_first(first: BaseException | None, results: Samples) -> None:
    if first is not None:
        raise first
    for sample in results:
        if sample.error is not None:
            raise RequestError(
                f"request {sample.request_id} sample {sample.sample_index}: {sample.error}", sample.request_id
            )


def _too_late(timeout_s: float | None) -> DeadlineError:
    return DeadlineError(f"wait_for_shutdown: the engine has not ended within timeout_s={timeout_s}")


def _shut_down(llm: weakref.ref[_LLM]) -> None:
    alive = llm()
    if alive is not None:
        alive._shutdown()
