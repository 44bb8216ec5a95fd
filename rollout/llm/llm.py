"""`AsyncLLM` and the blocking `LLM`: the engine without a training loop.

    AsyncLLM(model, tokenizer)                    direct mode: every rank is primary and runs its own prompts
    AsyncLLM(model, tokenizer, use_coordinator=True)   one coordinator for all ranks; rank 0 is primary and asks

Always true: the model is sampled in place, on a thread of its own; a result says of every token which version of the
weights made it; what was accepted ends with samples or with one named error. While requests run, leave the module alone
(`suspended`, or `trainer_hooks.optimizer.attach(optimizer, llm)` around a step); while none runs it is as you left it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Self, TypeVar

from rollout.distributed.client.client import InferenceClient
from rollout.engine.forward.attention import refuse_inside_forward
from rollout.errors import (
    DeadlineError,
    EngineStateError,
)
from rollout.llm.base import BaseLLM
from rollout.llm.requests import OnError, Params, Samples
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.state import EngineState, Mode
from rollout.threads.blocking import blocking

T = TypeVar("T")


class AsyncLLM(BaseLLM):
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
        """End one request, or all open ones (None); returns how many were open."""
        numbers = None if request_id is None else [request_id]
        return await asyncio.wrap_future(self._service.abort(numbers))

    async def pause(self, timeout_s: float | None = None) -> None:
        """Stop every engine at its next step boundary; on a rank that is not primary, wait until its engine has stopped.

        `pause`, `unpause`, `suspend` and `resume` need a coordinator.

        Args:
            timeout_s: deadline; None: `control_timeout_s`.

        Raises:
            RuntimeError: direct mode.
            ControlError: not allowed now, or engines are late; names them.
            DeadlineError: neither done nor refused in time.
        """
        await self._control("pause", EngineState.PAUSED, timeout_s, lambda client: client.pause_engines(timeout_s))

    async def unpause(self, timeout_s: float | None = None) -> None:
        """Resume stepping on every engine that is paused."""
        await self._control("unpause", EngineState.RUNNING, timeout_s, lambda client: client.unpause_engines(timeout_s))

    async def suspend(self, mode: Mode = None, timeout_s: float | None = None) -> None:
        """Suspend the KV cache of every paused engine; `mode` None: each engine's configured mode."""
        await self._control(
            "suspend", EngineState.SUSPENDED, timeout_s, lambda client: client.suspend_engines(mode, timeout_s)
        )

    async def resume(self, timeout_s: float | None = None) -> None:
        """Bring the KV cache of every suspended engine back; leads to PAUSED."""
        await self._control("resume", EngineState.PAUSED, timeout_s, lambda client: client.resume_engines(timeout_s))

    async def set_policy_version(self, version: int | None = None) -> int:
        """Announce changed weights on all ranks: every policy version moves by 1, or to `version`. On the primary rank."""
        chosen = self.policy_version + 1 if version is None else version
        self._refuse_in_group("set_policy_version")
        if self._job is None and self.engine.weights.collective:
            return await asyncio.to_thread(self.weights_updated, chosen)
        if self._job is None:
            # It waits for a step boundary, and this may be the loop that the server's streams live on.
            return await asyncio.to_thread(self.engine.weights_updated, chosen)

        def ask(client: InferenceClient) -> Coroutine[Any, Any, None]:
            return client.set_policy_version(chosen)

        await asyncio.wrap_future(self._job.control(ask))
        return chosen

    async def wait_for_shutdown(self, timeout_s: float | None = None) -> None:
        """Wait until this rank's engine has ended: `shutdown` here or on the primary rank.

        Raises:
            DeadlineError: it has not within `timeout_s`.
            EngineDeadError, ConnectionLostError: the reason why it ended.
        """
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._service.over)), timeout_s)
        except TimeoutError as exc:
            raise _too_late(timeout_s) from exc

    async def shutdown(self) -> None:
        """Fail open requests and stop the engine; on the primary rank, every rank's engine. Harmless when repeated."""
        await asyncio.to_thread(self._shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()


class LLM(BaseLLM):
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

    abort = blocking(AsyncLLM.abort)
    pause = blocking(AsyncLLM.pause)
    unpause = blocking(AsyncLLM.unpause)
    suspend = blocking(AsyncLLM.suspend)
    resume = blocking(AsyncLLM.resume)
    set_policy_version = blocking(AsyncLLM.set_policy_version)

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
            refuse_inside_forward()
            future = self.loop.start_from_outside(coroutine)
        except EngineStateError:
            coroutine.close()
            raise
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


def _too_late(timeout_s: float | None) -> DeadlineError:
    return DeadlineError(f"wait_for_shutdown: the engine has not ended within timeout_s={timeout_s}")
