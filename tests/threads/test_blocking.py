"""Derived methods have the signature and docstring of the one they call, and give its result, on the right thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from rollout import LLM, AsyncLLM
from rollout.threads.blocking import blocking, called, on_thread, read, threaded
from rollout.threads.loop_thread import LoopThread


class Part:
    def halve(self, number: int) -> tuple[float, threading.Thread]:
        """Half the number, and the thread that computed it."""
        return number / 2, threading.current_thread()


class Async:
    def __init__(self) -> None:
        self.part = Part()

    @property
    def name(self) -> str:
        """Its name."""
        return "async"

    async def double(self, number: int, *, plus: int = 0) -> int:
        """Twice the number."""
        if number < 0:
            raise ValueError(f"{number} is negative")
        return 2 * number + plus

    halve = threaded("part", Part.halve)


class Blocking:
    def __init__(self, loop: LoopThread) -> None:
        self._loop, self.inner = loop, Async()
        self.part = self.inner.part

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_sync(coroutine, 10.0)

    double = blocking("inner", Async.double)
    halve = called("part", Part.halve)
    name = read("inner", Async.name)


@pytest.fixture
def one() -> Iterator[Blocking]:
    loop = LoopThread()
    yield Blocking(loop)
    loop.close()


def test_it_waits_for_the_result_and_raises_what_the_coroutine_raises(one: Blocking) -> None:
    assert one.double(3, plus=1) == 7
    with pytest.raises(ValueError, match="-1 is negative"):
        one.double(-1)


def test_a_part_is_called_on_the_callers_thread_or_awaited_on_another(one: Blocking) -> None:
    assert one.halve(4) == (2.0, threading.current_thread())
    half, thread = asyncio.run(one.inner.halve(4))
    assert half == 2.0
    assert thread is not threading.current_thread()


def test_a_property_is_read_and_cannot_be_set(one: Blocking) -> None:
    assert one.name == "async"
    with pytest.raises(AttributeError, match="no setter"):
        one.name = "another"


def test_a_cancelled_caller_waits_for_the_end_of_its_call() -> None:
    began, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        release.wait(10)
        ended.set()
        raise ValueError("nobody hears of it")

    async def main() -> None:
        task = asyncio.ensure_future(on_thread(work))
        await asyncio.to_thread(began.wait, 10)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())


CONTROL = ["abort", "pause", "unpause", "suspend", "resume", "set_policy_version"]
WEIGHTS = [
    "score", "flush_prefix_cache", "weights_updated", "before_optimizer_step", "load_weights", "load_lora_adapter",
    "unload_lora_adapter",
]  # fmt: skip


@pytest.mark.parametrize("verb", [*CONTROL, *WEIGHTS])
def test_the_verbs_of_an_llm_are_those_of_the_async_one(verb: str) -> None:
    ours, theirs = getattr(LLM, verb), getattr(AsyncLLM, verb)
    assert inspect.iscoroutinefunction(theirs)
    assert not inspect.iscoroutinefunction(ours)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)


def test_an_llm_has_every_public_name_of_the_async_one_and_is_none() -> None:
    assert not issubclass(LLM, AsyncLLM)
    assert inspect.iscoroutinefunction(AsyncLLM.generate)
    assert not inspect.iscoroutinefunction(LLM.generate)
    assert {name for name in dir(AsyncLLM) if name[0] != "_"} - {"blocking"} <= {*dir(LLM)}
