"""Derives a blocking method from an async one: same signature and docstring, run on the object's private event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def blocking(verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """A method that runs the async `verb` by `self._run(coroutine)`, which waits for its result.

    In a class body: `pause = blocking(AsyncClient.pause)`.
    """

    @wraps(verb)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._run(verb(self, *args, **kwargs))
        return result

    return run
