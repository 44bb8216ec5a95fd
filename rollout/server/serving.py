"""State shared by all endpoints: model name, limits, abortable replies.

Always true: a reply is in the table exactly while somebody computes it, under the id its client sees. Nothing here
touches a tensor or knows a schema.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

HUGE_BODIES_AT_ONCE = 2
"""The largest bodies wait for one another."""


_SAMPLES = "rollout.samples"
"""Where a request's scope says how many it was admitted with."""


def _few_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(HUGE_BODIES_AT_ONCE, "rollout-body")


@dataclass(kw_only=True, eq=False)
class Serving:
    """What endpoints are given. Lives on the server's event loop.

    Attributes:
        llm: an `AsyncLLM` or `LLM`, or what looks like one.
        config: the server's options.
        model_name: the model's name in requests and replies.
        counters: where requests and results are counted.
        conversation: messages to token ids; None where the model has no tokenizer.
        created: when the server was built, in seconds since 1970.
        stopping: nothing new is taken in.
        reading: tasks whose request's body is not whole yet.
        threads_for_huge_bodies: as `bodies.HUGE` says.
        samples: open ones, those of prompts that are still read included.
    """

    llm: Any
    config: ServerConfig
    model_name: str
    counters: RequestMetrics
    conversation: Conversation | None
    created: int = field(default_factory=lambda: int(time.time()))
    stopping: bool = False
    reading: set[asyncio.Task[Any]] = field(default_factory=set)
    threads_for_huge_bodies: ThreadPoolExecutor = field(default_factory=_few_threads)
    samples: int = 0
    _computed: dict[str, tuple[int, ...]] = field(default_factory=dict)

    # --- may this request be served? ----------------------------------------------------------------------------

    def check_model(self, name: str) -> None:
        """Refuse a name that is not this model's.

        Raises:
            ApiError: 404.
        """
        if name != self.model_name:
            message = f"model={name!r}: not served here; the model is {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def admit(self, request: Request, samples: int, *, wait_while_suspended: bool = True) -> None:
        """Count so many samples more as open, from here to the request's end.

        Args:
            wait_while_suspended: the caller waits until the engine runs again; False: it wants to be told.

        Raises:
            ApiError: 503, the server is shutting down; 400, so many can never be open.
            EngineStateError: the engine does not run, and the caller does not wait.
            QueueFullError: more would be open than `ServerConfig.max_open_requests`.
        """
        if self.stopping:
            raise shutting_down()
        state = EngineState(self.llm.state)
        if not wait_while_suspended and state is not EngineState.RUNNING:
            raise EngineStateError(
                f"the engine is {state}, and wait_while_suspended=false asks not to wait: try again later"
            )
        limit = self.config.max_open_requests
        if samples > limit:
            raise bad_request(
                f"prompts times n: {samples} samples, and at most max_open_requests={limit} may be open; send fewer in a "
                "request"
            )
        if self.samples + samples > limit:
            raise QueueFullError(
                f"{self.samples} samples are open and the request brings {samples}: at most "
                f"max_open_requests={limit} may be; try again later"
            )
        self.samples += samples
        request.scope[_SAMPLES] = request.scope.get(_SAMPLES, 0) + samples

    def ended(self, scope: Scope) -> None:
        """A request has ended, its reply's last byte included."""
        self.samples -= scope.pop(_SAMPLES, 0)

    def time_limit(self, timeout_s: float | None) -> float:
        """Seconds a request may take: what it asks for, at most `ServerConfig.request_timeout_s`."""
        longest = self.config.request_timeout_s
        return longest if timeout_s is None else min(timeout_s, longest)

    # --- what is being computed ---------------------------------------------------------------------------------

    @contextmanager
    def computing(self, reply_id: str, request_ids: Iterable[int]) -> Iterator[None]:
        """Inside the block, `abort(reply_id)` and the end of the server reach these requests.

        Args:
            reply_id: what the client sees, `chatcmpl-…`.
            request_ids: of the groups it is made of.
        """
        self._computed[reply_id] = tuple(request_ids)
        try:
            yield
        finally:
            del self._computed[reply_id]

    async def abort(self, reply_id: str) -> int:
        """Abort what a reply is made of.

        Returns:
            How many requests were still open; 0 also for a reply that has ended or never was.
        """
        return sum([await self.ask(self.llm.abort, request_id) for request_id in self._computed.get(reply_id, ())])

    async def abort_all(self) -> int:
        """Abort everything that came over HTTP, and nothing else; a body that is not whole is not waited for.

        Returns:
            How many requests were still open.
        """
        for task in self.reading:
            task.cancel()
        return sum([await self.abort(reply_id) for reply_id in tuple(self._computed)])

    @staticmethod
    async def ask(method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the LLM that takes its time: awaited on an `AsyncLLM`, in a thread on an `LLM`."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await asyncio.to_thread(method, *arguments)


async def or_disconnected(request: Request, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, which is cancelled at once when the client goes away before.

    Args:
        request: whose body has been read.

    Raises:
        ClientGoneError: the client has gone; nobody is there to answer.
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
