"""The state that all endpoints share: model name, limits and abortable replies. This module does not import torch."""

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
"""Seconds after which work on one reply yields to other tasks of the event loop."""
_SAMPLES = "rollout.samples"
"""The key in a request's ASGI scope under which its number of admitted samples is stored."""


@dataclass(kw_only=True, eq=False)
class Serving:
    """The state of one server, which its endpoints share. Only the server's event loop uses it."""

    llm: Any
    """The served `AsyncLLM`, `LLM` or `JobLLM`."""
    config: ServerConfig
    model_name: str
    """The name of the model in requests and replies."""
    counters: RequestMetrics
    conversation: Conversation | None
    """The renderer of chat messages to token ids; None if the model has no tokenizer."""
    texts: Any
    """The `TokenTexts` of the model's tokenizer, which gives the tokens' texts in log-probs."""
    created: int = field(default_factory=lambda: int(time.time()))
    """The time at which the server was built, in seconds since 1970."""
    stopping: bool = False
    """Whether the server is shutting down. New requests are then rejected."""
    shut: bool = False
    """Whether the engines were paused in mode `abort` or `wait`. New requests are rejected until the engines resume."""
    samples: int = 0
    """The number of open samples, including samples whose prompts are still being parsed."""
    _computed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """A dict from the id of each reply in progress to the ids of the LLM requests that compute it."""
    _cut: set[str] = field(default_factory=set)
    _closing: int = 0
    _drained: asyncio.Event = field(default_factory=asyncio.Event)

    # --- whether to serve a request -----------------------------------------------------------------------------

    def adapter_of(self, model: str | None) -> str | None:
        """Return the LoRA adapter that a request's `model` names, or None for the served model.

        Any other name raises `ApiError` 404."""
        if model is None or model == self.model_name:
            return None
        adapters = self.llm.lora_adapters
        if model not in adapters:
            loaded = "".join(f", {name!r}" for name in adapters)
            message = f"model={model!r:.80}: not served here; there is {self.model_name!r}{loaded}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    def admit(self, request: Request, samples: int) -> None:
        """Count the samples of a request as open until its reply has been sent.

        Args:
            samples: number of samples of the request: its number of prompts times n.

        Raises:
            ApiError: 503 if the server is shutting down, 400 if `samples` exceeds `ServerConfig.max_open_requests`.
            EngineStateError: the engines were paused in mode `abort` or `wait`.
            QueueFullError: with `samples` more, the open samples would exceed `ServerConfig.max_open_requests`.
        """
        if self.stopping:
            raise shutting_down()
        state = EngineState(self.llm.state)
        # Admit requests again if the engines are running and no pause is in progress, because this means that the
        # program that owns the engines has resumed them.
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
        """Stop counting a request's samples as open, because its reply has been sent completely."""
        self.samples -= scope.pop(_SAMPLES, 0)
        if not self.samples:
            self._drained.set()

    def time_limit(self, timeout_s: float | None) -> float:
        """Return a request's time limit in seconds: `timeout_s`, at most and by default `ServerConfig.request_timeout_s`."""
        longest = self.config.request_timeout_s
        return longest if timeout_s is None else min(timeout_s, longest)

    # --- pauses ---------------------------------------------------------------------------------------------------

    def let_in(self, new_requests: bool) -> None:
        """Admit new requests, or reject them until the engines resume. Admitting them makes `drained` return."""
        self.shut = not new_requests
        if new_requests:
            self._drained.set()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Mark a pause in progress during the `with` block, so that `admit` rejects requests even while the engines run."""
        self._closing += 1
        try:
            yield
        finally:
            self._closing -= 1

    async def drained(self, timeout_s: float | None) -> None:
        """Wait until no request is open, new requests are admitted again, or `timeout_s` has passed (None for no limit)."""
        if self.samples:
            self._drained.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()

    # --- open replies -------------------------------------------------------------------------------------------

    @contextmanager
    def computing(self, reply_id: str, request_ids: Iterable[int]) -> Iterator[None]:
        """Register a reply during the `with` block, so that `abort(reply_id)` and a shutdown can abort its requests."""
        self._computed[reply_id] = tuple(request_ids)
        try:
            yield
        finally:
            del self._computed[reply_id]
            self._cut.discard(reply_id)

    def name_of_reply(self, prefix: str, wanted: str | None = None) -> str:
        """Return the id of a new reply: `wanted`, which must not be in use, or a new id that begins with `prefix`."""
        if wanted in self._computed:
            raise bad_request(
                f"request_id={wanted!r}: a request of that id is open; choose another", param="request_id"
            )
        return wanted or f"{prefix}-{uuid.uuid4().hex}"

    async def abort(self, reply_id: str) -> int:
        """Abort the requests of a reply; return the number of aborted requests, 0 if the reply is unknown or finished."""
        if reply_id in self._computed:
            self._cut.add(reply_id)
        return sum([await self.ask(self.llm.abort, request_id) for request_id in self._computed.get(reply_id, ())])

    def was_cut(self, reply_id: str) -> bool:
        """Return whether a control call aborted the open reply `reply_id`, whose stream finishes with the tokens so far."""
        return reply_id in self._cut and not self.stopping

    async def abort_all(self) -> int:
        """Abort the requests of all open replies; return the number of aborted requests."""
        return sum([await self.abort(reply_id) for reply_id in tuple(self._computed)])

    @staticmethod
    async def ask(method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the LLM: await it if it is a coroutine function, otherwise run it in a thread."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await asyncio.to_thread(method, *arguments)


class Turn:
    """A limit on how long a task keeps the event loop. Long work calls `pause` between its parts."""

    def __init__(self) -> None:
        self._until = time.monotonic() + TURN_S

    async def pause(self) -> None:
        """Let other tasks run if `TURN_S` seconds have passed since they last could."""
        if time.monotonic() > self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + TURN_S


async def or_disconnected(request: Request, awaitable: Awaitable[T]) -> T:
    """Return the result of `awaitable`; cancel it and raise `ClientGoneError` if the client disconnects first.

    Args:
        request: a request whose body has been read, so that only a disconnect can follow.
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
