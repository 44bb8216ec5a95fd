"""Factories of methods that forward to a part of the object, with the same signature and docstring.

The part is named by its attribute, `"control"`, or by a path of attributes, `"parts.control"`. The call runs on the caller's
thread, on another thread, or on an event loop.

class Control:  def load(self, folder): ...                      blocks
class Async:    load = threaded("control", Control.load)         await it; the caller's loop continues
                async def pause(self): ...
class Blocking: load = called("control", Control.load)           on the caller's thread
                pause = blocking("inner", Async.pause)           on a private loop, by `self._run(coroutine)`
                state = read("inner", Async.state)               a property
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from inspect import iscoroutinefunction, unwrap
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def called(part: str, verb: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that forwards to the method `verb` of the part named `part`.

    It is a coroutine method if `verb` is a coroutine function.
    """
    find = attrgetter(part)

    @wraps(verb)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return verb(find(self), *args, **kwargs)

    @wraps(verb)
    async def call_async(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        # Await here to keep a reference to the object until the call has finished.
        return await cast("Awaitable[Any]", verb(find(self), *args, **kwargs))

    return cast("Callable[Concatenate[Any, P], T]", call_async) if iscoroutinefunction(unwrap(verb)) else call


def blocking(
    part: str, verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls the part's async method `verb` and waits for its result with `self._run`."""

    @wraps(verb)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._run(verb(getattr(self, part), *args, **kwargs))
        return result

    return run


def threaded(
    part: str, verb: Callable[Concatenate[Any, P], T]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a coroutine method that calls the part's blocking method `verb` with `on_thread`."""

    @wraps(verb)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await on_thread(verb, getattr(self, part), *args, **kwargs)

    return call


def read(part: str, getter: Callable[[Any], T]) -> T:
    """Return a read-only property with the name and value of `getter`, a property of the part."""
    find, source = attrgetter(part), cast("Any", getter).fget

    @wraps(source)
    def value(self: Any) -> T:
        found: T = getattr(find(self), source.__name__)
        return found

    return cast("T", property(value))


async def on_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function on a thread with the caller's CUDA stream, and return its result.

    If the caller is cancelled, the cancellation takes effect only after the function has returned.
    """
    stream = _current_stream()

    def call() -> T:
        with stream:
            return function(*args, **kwargs)

    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((running,))
        # Retrieve the exception: otherwise asyncio would report it as never retrieved.
        running.exception()
        raise


def _current_stream() -> AbstractContextManager[Any]:
    """Return a context manager for the caller's current CUDA stream; a new thread would use the default stream."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return nullcontext()
    chosen: AbstractContextManager[Any] = cuda.stream(cuda.current_stream())
    return chosen
