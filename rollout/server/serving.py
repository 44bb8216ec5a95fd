"""State shared by all endpoints: model name, limits, abortable replies. Independent of tensors and request schemas."""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rollout.config import ServerConfig
from rollout.errors import EngineStateError, QueueFullError
from rollout.server.errors import ApiError, ClientGoneError, bad_request, shutting_down
from rollout.server.prometheus import RequestMetrics
from rollout.state import EngineState

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope

    from rollout.server.chat_template.conversation import Conversation

T = TypeVar("T")

TURN_S = 0.005
"""Seconds after which work on one reply yields to other replies."""
_SAMPLES = "rollout.samples"
"""The key in a request's scope of the number of samples it was admitted with."""


@dataclass(kw_only=True, eq=False)
class Serving:
    """The state of one server, shared by its endpoints. Used on the server's event loop only."""

    llm: Any
    """An `AsyncLLM`, `LLM` or `JobLLM`."""
    config: ServerConfig
    model_name: str
    """The name of the model in requests and replies."""
    counters: RequestMetrics
    conversation: Conversation | None
    """The renderer of messages to token ids; None if the model has no tokenizer."""
    texts: Any
    """`TokenTexts` of the model's tokenizer."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Construction time, in seconds since 1970."""
    stopping: bool = False
    """True during shutdown: new requests are refused."""
    shut: bool = False
    """Whether a pause by `abort` or `wait` is active: new requests are rejected until the engines continue."""
    samples: int = 0
    """The number of open samples, including those whose prompts are still being parsed."""
    _computed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Reply id of the client → ids of its requests, for every reply that is being computed."""
    _cut: set[str] = field(default_factory=set)
    _closing: int = 0
    _drained: asyncio.Event = field(default_factory=asyncio.Event)

    # --- whether to serve a request -----------------------------------------------------------------------------

    def adapter_of(self, model: str | None) -> str | None:
        """Return the LoRA adapter that a request's `model` names; None: the served model. `ApiError` 404 for other names."""
        if model is None or model == self.model_name:
            return None
        adapters = self.llm.lora_adapters
        if model not in adapters:
            loaded = "".join(f", {name!r}" for name in adapters)
            message = f"model={model!r:.80}: not served here; there is {self.model_name!r}{loaded}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    def admit(self, request: Request, samples: int) -> None:
        """Count the samples of a request (prompts times n) as open until the request ends.

        Raises:
            ApiError: 503, the server is shutting down; 400, `samples` exceeds `ServerConfig.max_open_requests`.
            EngineStateError: the engine was paused by `abort` or `wait`.
            QueueFullError: open samples and `samples` together exceed `ServerConfig.max_open_requests`.
        """
        if self.stopping:
            raise shutting_down()
        state = EngineState(self.llm.state)
        # Admit requests again if the engines run and no pause is in progress: the owning program has then resumed the
        # engines.
        self.shut = self.shut and (bool(self._closing) or state is not EngineState.RUNNING)
        if self.shut:
            raise EngineStateError(
                f"the engines are paused ({state}) and new requests are refused: try again after /resume"
            )
        limit = self.config.max_open_requests
        if samples > limit:
            raise bad_request(
                f"prompts times n: {samples} samples, and at most max_open_requests={limit} may be open; send fewer in a "
                "request"
            )
        if self.samples + samples > limit:
            raise QueueFullError(
                f"{self.samples} samples are open and the request has {samples}: at most max_open_requests={limit} may be "
                "open; try again later"
            )
        self.samples += samples
        request.scope[_SAMPLES] = request.scope.get(_SAMPLES, 0) + samples

    def ended(self, scope: Scope) -> None:
        """Release the samples of a request whose reply has been sent completely."""
        self.samples -= scope.pop(_SAMPLES, 0)
        if not self.samples:
            self._drained.set()

    def time_limit(self, timeout_s: float | None) -> float:
        """Return a request's deadline in seconds: `timeout_s`, capped at `ServerConfig.request_timeout_s`."""
        longest = self.config.request_timeout_s
        return longest if timeout_s is None else min(timeout_s, longest)

    # --- pauses ---------------------------------------------------------------------------------------------------

    def let_in(self, new_requests: bool) -> None:
        """Admit new requests, which ends `drained`, or reject them until the engines continue."""
        self.shut = not new_requests
        if new_requests:
            self._drained.set()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Keep a shut server shut although the engines run, until the pause inside the block has completed."""
        self._closing += 1
        try:
            yield
        finally:
            self._closing -= 1

    async def drained(self, timeout_s: float | None) -> None:
        """Wait until no request is open, new requests are admitted again, or the time is over."""
        if self.samples:
            self._drained.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()

    # --- open replies -------------------------------------------------------------------------------------------

    @contextmanager
    def computing(self, reply_id: str, request_ids: Iterable[int]) -> Iterator[None]:
        """Register a reply for `abort(reply_id)` and server shutdown during the block."""
        self._computed[reply_id] = tuple(request_ids)
        try:
            yield
        finally:
            del self._computed[reply_id]
            self._cut.discard(reply_id)

    def name_of_reply(self, prefix: str, wanted: str | None = None) -> str:
        """Return the id of a new reply: `wanted`, which must not be in use, or one that begins with `prefix`."""
        if wanted in self._computed:
            raise bad_request(
                f"request_id={wanted!r}: a request of that id is open; choose another", param="request_id"
            )
        return wanted or f"{prefix}-{uuid.uuid4().hex}"

    async def abort(self, reply_id: str) -> int:
        """Abort the requests of a reply; return the number of open requests, 0 for an unknown or finished reply."""
        if reply_id in self._computed:
            self._cut.add(reply_id)
        return sum([await self.ask(self.llm.abort, request_id) for request_id in self._computed.get(reply_id, ())])

    def was_cut(self, reply_id: str) -> bool:
        """Return whether a control call aborted an unfinished reply. Its stream then ends with the tokens so far."""
        return reply_id in self._cut and not self.stopping

    async def abort_all(self) -> int:
        """Abort all requests over HTTP; return the number of open requests."""
        return sum([await self.abort(reply_id) for reply_id in tuple(self._computed)])

    @staticmethod
    async def ask(method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the LLM: await a coroutine function, run another function in a thread."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await asyncio.to_thread(method, *arguments)


class Turn:
    """A bound on a turn of the event loop; long work calls `pause` between its parts."""

    def __init__(self) -> None:
        self._until = time.monotonic() + TURN_S

    async def pause(self) -> None:
        """Let other tasks run if this turn has lasted for `TURN_S`."""
        if time.monotonic() > self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + TURN_S


async def or_disconnected(request: Request, awaitable: Awaitable[T]) -> T:
    """Return the result of `awaitable`; cancel it and raise `ClientGoneError` if the client disconnects first.

    Args:
        request: a request whose body has been read.
    """
    work = asyncio.ensure_future(awaitable)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGoneError
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
