"""The methods of `AsyncLLM` and `JobLLM` that submit prompts to a `Service`, in Python or over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rollout.distributed.client.futures import Readers, RequestFuture, RequestStream
from rollout.distributed.client.text_stream import GroupText
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError, InvalidRequestError, RequestError, RolloutError
from rollout.requests.prompt import Prompt, normalized
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams, one_each, takes_options
from rollout.state import FinishReason, Status
from rollout.threads.blocking import called, read
from rollout.threads.loop_thread import LoopThread

if TYPE_CHECKING:
    from rollout.config import ServerConfig
    from rollout.server.server import Server

OnError = Literal["raise", "return"]
Params = SamplingParams | Sequence[SamplingParams] | None
Samples = list[DynamicInferenceRequest]


class Service(Protocol):
    """A backend that computes requests with the engine of this process or of a job. Any thread may call its methods."""

    readers: Readers

    @property
    def num_open(self) -> int:
        """The number of accepted groups that have not finished."""

    def refuse_when_over(self) -> None:
        """Raise `EngineDeadError`, `EngineStateError` or `ConnectionLostError` if the service has ended."""

    @property
    def open_group(self) -> Callable[..., None]:
        """A function (number, tokens, params, listener, **options) that submits a group; `listener` receives the result."""

    def abort(self, numbers: Iterable[int] | None = None) -> Future[int]:
        """Abort the groups with these numbers, or all if None. The future's result is the number of aborted groups."""


class LLMRequests:
    """The base class of `AsyncLLM` and `JobLLM`: request methods, engine properties and an HTTP server.

    Attributes:
        loop: the private event loop, which runs on its own thread.
        service: the backend that computes the requests.
    """

    def __init__(self, engine: DynamicInferenceEngine, loop: LoopThread, service: Service) -> None:
        self.model, self.config, self.tokenizer = engine.model, engine.config, engine.controller.tokenizer
        self._engine, self.loop, self.service = engine, loop, service
        self._numbers = count()
        self._server: Server | None = None

    def _admit(self, what: str) -> None:
        """Raise an error if the method named `what` cannot be called now."""

    @takes_options
    def submit(
        self,
        /,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> RequestFuture:
        """Submit one prompt and return a future of its n samples. Any thread may call this.

        Args:
            prompt: a string, token ids or chat messages.
            sampling_params: the sampling options; if None, the defaults or `fields`.
            priority: requests with a higher priority run first; requests of equal priority run in order of arrival.
            timeout_s: seconds after which the request fails; if None, there is no limit.
            fields: `SamplingParams` fields instead of a `sampling_params` object: `submit(prompt, n=8)`.

        Returns:
            A future of the list of samples: `await` it on any event loop, or call `result(timeout_s)` in a thread. It fails
            with a `RequestError` if the request is aborted or times out, and with `ConnectionLostError` if the engine or
            the coordinator is lost. If a single sample fails, the list still contains that sample, with `error` set.

        Raises:
            InvalidRequestError: the prompt can never be served; nothing was queued.
            RuntimeError: this rank is not primary.
            WeightsChangedError: weights changed without an announced update. This is checked only while no request runs.
            EngineStateError, EngineDeadError, ConnectionLostError: requests are no longer served.
        """
        self._admit("submit")
        (params,) = one_each(sampling_params, 1)
        tokens = self._engine.check_request(prompt, params)
        return self._submit(prompt, tokens, params, priority=priority, timeout_s=timeout_s)

    @takes_options
    def stream(
        self,
        /,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        interval: int | None = 1,
        **fields: Any,
    ) -> RequestStream:
        """Submit one prompt and stream its n samples: `async for delta in llm.stream(prompt)`.

        Args:
            prompt, sampling_params, priority, timeout_s, fields: see `submit`.
            interval: number of tokens per piece after the first piece. A piece has more tokens while the reader is busy,
                or if all streams together would exceed 1,000 pieces per second. If None, every sample is delivered whole
                once all samples have finished.

        Raises: the same errors as `submit`. If the request fails later, iterating over the stream raises the error.
        """
        self._admit("stream")
        (params,) = one_each(sampling_params, 1)
        tokens = self._engine.check_request(prompt, params)
        reader = GroupText(params, self._engine.controller.tokenizer)
        stream = RequestStream(self._future(prompt), reader, self.service.readers, whole=interval is None)
        options = {} if interval is None else {"interval": interval}
        self.service.open_group(
            stream.request_id, tokens, params, stream, priority=priority, timeout_s=timeout_s, **options
        )
        return stream

    def _submit(self, prompt: Prompt, tokens: list[int], params: SamplingParams, **options: Any) -> RequestFuture:
        future = self._future(prompt)
        self.service.open_group(future.request_id, tokens, params, future, **options)
        return future

    def _future(self, prompt: Prompt) -> RequestFuture:
        return RequestFuture(
            next(self._numbers),
            partial(_abort, self.service),
            loop=asyncio._get_running_loop() or self.loop.event_loop,
            prompt=prompt if isinstance(prompt, str) else None,
            refuse_to_block=partial(self.loop.refuse_inside, "result()"),
        )

    def _submit_all(
        self, prompts: object, sampling_params: Params, priority: int, timeout_s: float | None
    ) -> tuple[list[tuple[RequestFuture, list[int], SamplingParams]], bool]:
        self._admit("generate")
        asked, single = normalized(self._engine.controller.unpadded(prompts, single=True))
        params = one_each(sampling_params, len(asked))
        tokens = []
        for position, (prompt, each) in enumerate(zip(asked, params, strict=True)):
            try:
                tokens.append(self._engine.check_request(prompt, each))
            except InvalidRequestError as exc:
                raise exc.at(f"prompts[{position}]: ") from exc
        return [
            (self._submit(prompt, ids, each, priority=priority, timeout_s=timeout_s), ids, each)
            for prompt, ids, each in zip(asked, tokens, params, strict=True)
        ], single

    @takes_options
    async def generate(
        self,
        /,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
        **fields: Any,
    ) -> DynamicInferenceRequest | Samples:
        """Sample completions. Cancelling the task aborts the requests.

        Args:
            prompts: a string, token ids or chat messages, or a list of such prompts; `[]` returns `[]`.
            sampling_params: one object for all prompts, or a sequence with one object per prompt.
            priority, timeout_s, fields: see `submit`; they apply to every prompt.
            on_error: "raise" raises the first failure once all requests have finished. "return" returns failed samples
                with their `error` set.

        Returns:
            One sample for a single prompt with n = 1; otherwise a list of all samples, in order of the prompts.

        Raises: the same errors as `submit`, and
            TypeError: `prompts` has another type.
            RequestError: `on_error="raise"` and a sample failed.
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error={on_error!r}: must be 'raise' or 'return'")
        asked, single = self._submit_all(prompts, sampling_params, priority, timeout_s)
        results: Samples = []
        first: RolloutError | None = None
        try:
            for future, tokens, params in asked:
                try:
                    results += await future
                except RolloutError as exc:
                    first = first or exc
                    results += [_failed(future, tokens, params, index, exc) for index in range(params.n)]
        except BaseException:
            for future, _, _ in asked:
                future.abort()
            raise
        for sample in results if on_error == "raise" else ():
            if sample.error is not None:
                where = f"request {sample.request_id} sample {sample.sample_index}"
                raise first or RequestError(f"{where}: {sample.error}", sample.request_id)
        return results[0] if single and len(results) == 1 else results

    @property
    def engine(self) -> DynamicInferenceEngine:
        """This rank's engine."""
        return self._engine

    context = read("engine", DynamicInferenceEngine.context)
    controller = read("engine", DynamicInferenceEngine.controller)
    state = read("engine", DynamicInferenceEngine.state)
    policy_version = read("engine", DynamicInferenceEngine.policy_version)
    stats = called("engine", DynamicInferenceEngine.stats)

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks that compute each forward pass together, each with a shard of the weights."""
        return 1 if self.engine.peers.group is None else len(self.engine.peers.group.ranks)

    @property
    def max_sequence_length(self) -> int:
        """The maximum length of prompt plus completion, in tokens, that the model and the KV cache allow."""
        allocator = self.context.allocator
        return min(self.engine.parts.max_sequence_length, allocator.num_blocks * allocator.block_size)

    @property
    def num_open(self) -> int:
        """The number of accepted prompts that have not finished."""
        return self.service.num_open

    def refuse_when_over(self) -> None:
        """Raise `EngineDeadError`, `EngineStateError` or `ConnectionLostError` if the service has ended."""
        self.service.refuse_when_over()

    @property
    def lora_adapters(self) -> dict[str, str]:
        """The loaded LoRA adapters: name (for `SamplingParams.adapter`) → folder."""
        return self.engine.adapters.folders

    def serve(self, config: ServerConfig | None = None, *, blocking: bool = True) -> Server:
        """Serve an OpenAI-compatible API (`rollout.server`) from this process, on the private loop.

        Args:
            config: address, key and limits of the server. If None, the server listens on loopback at port 8000.
            blocking: whether to wait until Ctrl-C or SIGTERM and then stop the server. If False, return at once; stop
                the server with `Server.close()`.

        Raises:
            RuntimeError: this rank is not primary, or this LLM is served already. Without a coordinator every rank is
                primary and serves its own engine, on its own port.
            EngineStateError, EngineDeadError, ConnectionLostError: requests are no longer served.
            ConfigError: the address is in use or not an address of this machine, or a required package is not installed.
        """
        self._admit("serve")
        self.refuse_when_over()
        try:
            from rollout.server.server import Server
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"serve() needs {exc.name}, which is not installed: pip install 'rollout-engine[serve]'"
            ) from exc
        if self._server is not None and self._server.running:
            raise RuntimeError(
                f"this LLM is served already, at {self._server.url}; stop that server first: server.close()"
            )
        self._server = Server(self, config).start()
        if blocking:
            self._server.wait()
        return self._server


def _abort(service: Service, number: int) -> None:
    # Ignore errors: the request or the service may already have finished.
    with suppress(RolloutError):
        service.abort([number])


def _failed(
    future: RequestFuture, tokens: list[int], params: SamplingParams, index: int, error: RolloutError
) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        request_id=future.request_id,
        sample_index=index,
        prompt=future.prompt,
        prompt_tokens=tokens,
        sampling_params=params,
        status=Status.FAILED,
        finish_reason=FinishReason.ERROR,
        error=f"{type(error).__name__}: {error}",
    )
