"""A blocking method has the signature and the docstring of the async one it is derived from, and gives its result."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any

import pytest

from rollout import LLM, AsyncLLM
from rollout.threads.blocking import blocking
from rollout.threads.loop_thread import LoopThread


class Async:
    async def double(self, number: int, *, plus: int = 0) -> int:
        """Twice the number."""
        if number < 0:
            raise ValueError(f"{number} is negative")
        return 2 * number + plus


class Blocking:
    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(coroutine, 10.0)

    double = blocking(Async.double)


def test_it_waits_for_the_result_and_raises_what_the_coroutine_raises() -> None:
    loop = LoopThread()
    try:
        assert Blocking(loop).double(3, plus=1) == 7
        with pytest.raises(ValueError, match="-1 is negative"):
            Blocking(loop).double(-1)
    finally:
        loop.close()


@pytest.mark.parametrize("verb", ["abort", "pause", "unpause", "suspend", "resume", "set_policy_version"])
def test_the_verbs_of_an_llm_are_those_of_the_async_one(verb: str) -> None:
    ours, theirs = getattr(LLM, verb), getattr(AsyncLLM, verb)
    assert not inspect.iscoroutinefunction(ours)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)
