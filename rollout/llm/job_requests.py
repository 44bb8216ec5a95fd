"""Requests of an `LLM` or `JobLLM` through a client of a coordinator, from any thread.

Always true: every group that was accepted ends once at its listener, with its samples or with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.client.futures import Readers, RequestStream
from rollout.distributed.client.group import OpenGroup
from rollout.distributed.protocol.messages import Stretch
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConnectionLostError, EngineStateError
from rollout.llm.delivery import Listener
from rollout.llm.engine_loop import SHUT_DOWN
from rollout.sampling_params import SamplingParams
from rollout.threads.loop_thread import LoopThread

T = TypeVar("T")


class JobRequests:
    """Open groups of a client; a subclass connects `_client` on the loop.

    Args:
        engine: this rank's.
        loop: the private loop, which the client belongs to.
    """

    def __init__(self, engine: DynamicInferenceEngine, loop: LoopThread) -> None:
        self.engine = engine
        self.loop = loop
        self.readers = Readers(loop.call_soon)
        # None: on its way to the loop.
        self._groups: dict[int, OpenGroup | None] = {}
        self._client: InferenceClient | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Groups that were accepted and have not ended."""
        return len(self._groups)

    def refuse_when_over(self) -> None:
        """Raises: EngineDeadError, EngineStateError, ConnectionLostError: no request is served any more."""
        self.engine.lifecycle.refuse_when_stopped()
        if self._closed:
            raise EngineStateError(SHUT_DOWN)
        if self._client is not None and self._client.lost is not None:
            raise ConnectionLostError(str(self._client.lost), final=True)

    def open_group(
        self,
        number: int,
        tokens: list[int],
        params: SamplingParams,
        listener: Listener,
        **options: Any,
    ) -> None:
        """Submit a group, from any thread; the listener receives what follows.

        Args:
            number: the caller's, new.
            options: of `ClientSession.submit`.

        Raises:
            RolloutError: no request is served any more.
        """
        self.refuse_when_over()
        self._groups[number] = None
        try:
            self.loop.call_soon(self._open, number, tokens, params, listener, options)
        except RuntimeError as exc:
            del self._groups[number]
            raise EngineStateError(SHUT_DOWN) from exc

    def _open(
        self, number: int, tokens: list[int], params: SamplingParams, listener: Listener,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        try:
            group = self._the_client().open_group(tokens, params, **options)
        except Exception as exc:  # noqa: BLE001 - passed to the waiting caller, whatever it is
            del self._groups[number]
            listener.fail(exc)
            return
        self._groups[number] = group
        group.on_done = partial(self._ended, number, listener)
        if isinstance(listener, RequestStream) and not listener.whole:
            group.on_update = partial(_grown, listener)

    def _ended(self, number: int, listener: Listener, group: OpenGroup) -> None:
        self._groups.pop(number, None)
        try:
            samples = list(group.result())
        except Exception as exc:  # noqa: BLE001 - passed to the waiting caller, whatever it is
            listener.fail(exc)
        else:
            for sample in samples:
                sample.request_id, sample.prompt = number, listener.prompt
            listener.end(samples)

    def _abort(self, number: int) -> bool:
        group, client = self._groups.get(number), self._client
        if group is None or client is None or client.lost is not None:
            return False
        return client.abort_request(group.request_id)

    def abort(self, numbers: Iterable[int] | None = None) -> Future[int]:
        """How many of these groups (None: of all) were open and end now.

        Raises:
            EngineStateError: shut down.
        """

        async def abort() -> int:
            return sum([self._abort(number) for number in (list(self._groups) if numbers is None else numbers)])

        return self._start(abort())

    # --- control ----------------------------------------------------------------------------------------------------

    def control(self, ask: Callable[[InferenceClient], Coroutine[Any, Any, T]]) -> Future[T]:
        """A control call of the client, on the private loop.

        Raises:
            EngineStateError: not the primary rank, or shut down.
        """
        return self._start(ask(self._the_client()))

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return self.loop.start(coroutine)
        except RuntimeError as exc:
            raise EngineStateError(SHUT_DOWN) from exc

    def _the_client(self) -> InferenceClient:
        if self._client is None:
            raise EngineStateError("requests and control calls are taken on the primary rank")
        return self._client


def _grown(stream: RequestStream[Any], group: OpenGroup, stretch: Stretch) -> None:
    """Hand new tokens of a group to a stream."""
    for delta in stretch.deltas():
        stream.take(delta, None if delta.outcome is None else group.request(delta.sample_index))
