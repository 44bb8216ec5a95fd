"""Tests of `LLM` and `AsyncLLM` among threads and event loops, and at their end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import ConnectionLostError, EngineStateError, RequestError
from rollout.llm.llm import LLM, AsyncLLM
from rollout.state import EngineState
from tests.engines import PATIENCE_S, greedily, token_ids
from tests.llm.asking import asyncio_llm, blocking, nothing_is_left
from tests.models import make_model


def test_the_blocking_class_works_inside_a_running_loop_but_not_on_its_own() -> None:
    async def in_a_notebook(llm: LLM) -> list[int]:
        return llm.generate("abc", greedily(5))[0].generated_tokens

    with blocking() as llm:
        assert asyncio.run(in_a_notebook(llm)) == llm.generate("abc", greedily(5))[0].generated_tokens

        async def on_its_own() -> None:
            with pytest.raises(RuntimeError, match="would never return"):
                llm.generate("abc")
            with pytest.raises(RuntimeError, match="would never return"):
                llm.close()
            with pytest.raises(RuntimeError, match="would never return"):
                llm.wait_for_shutdown(1)
            with pytest.raises(RuntimeError, match="would never return"):
                llm.submit("abc", greedily(5)).result(1)

        llm.loop.run_sync(on_its_own(), PATIENCE_S)
        assert llm.generate("abc", greedily(5))


def test_many_threads_and_loops_ask_at_once_and_each_gets_its_own() -> None:
    with nothing_is_left(), blocking() as llm:
        answers: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            async def inside() -> None:
                answers[number] = (await llm.submit([3 + number, 4], greedily(10)))[0].generated_tokens

            if number % 2:
                asyncio.run(inside())
            else:
                answers[number] = llm.generate([3 + number, 4], greedily(10))[0].generated_tokens

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert answers == {
            number: llm.generate([3 + number, 4], greedily(10))[0].generated_tokens for number in range(12)
        }


def test_whatever_keeps_a_prompt_from_being_asked_for_reaches_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OverflowError("too much")

    with blocking() as llm:
        monkeypatch.setattr(llm.engine, "add_request", fail)
        with pytest.raises(OverflowError, match="too much"):
            llm.submit("abc").result(PATIENCE_S)
        assert llm.num_open == 0


def test_a_step_that_raises_a_bug_fails_what_is_open_and_every_later_call_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with nothing_is_left(), blocking() as llm:

        def fail(**_: object) -> None:
            raise AssertionError("a bug")

        async def read_it(llm: LLM) -> None:
            async for _ in llm.stream("abc", greedily(5)):
                pass

        monkeypatch.setattr(llm.engine, "step", fail)
        with pytest.raises(ConnectionLostError, match="AssertionError: a bug"):
            asyncio.run(read_it(llm))
        with pytest.raises(AssertionError, match="a bug"):
            llm.wait_for_shutdown(PATIENCE_S)
        for call in (llm.submit, llm.stream):
            with pytest.raises(EngineStateError, match="thread has ended"):
                call("abc")  # type: ignore[operator]
        assert llm.num_open == 0


def test_a_caller_of_the_engine_itself_and_one_of_the_llm_may_have_the_same_number() -> None:
    with blocking() as llm:
        llm.engine.pause()
        theirs = llm.engine.add_request(token_ids(5), greedily(3))
        ours = llm.submit(token_ids(7), greedily(4))
        assert theirs == ours.request_id
        llm.engine.unpause()
        (sample,) = ours.result(PATIENCE_S)
        assert (sample.request_id, len(sample.prompt_tokens), len(sample.generated_tokens)) == (theirs, 7, 4)


def test_calls_after_the_end_name_it() -> None:
    async def ask() -> None:
        llm = asyncio_llm()
        await llm.close()
        with pytest.raises(EngineStateError, match="the LLM was closed"):
            await llm.abort()
        with pytest.raises(EngineStateError):
            await llm.generate("abc")
        with pytest.raises(EngineStateError):
            llm.serve(blocking=False)

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


async def suspended(llm: AsyncLLM) -> None:
    async with llm.suspended():
        assert llm.state is EngineState.SUSPENDED


CALLS: dict[str, Callable[[AsyncLLM], Coroutine[Any, Any, object]]] = {
    "weights_updated": lambda llm: llm.weights_updated(),
    "before_optimizer_step": lambda llm: llm.before_optimizer_step(),
    "flush_prefix_cache": lambda llm: llm.flush_prefix_cache(),
    "score": lambda llm: llm.score([[5, 6, 7]]),
    "suspended": suspended,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_waits_for_a_step_does_not_stop_the_callers_loop(name: str) -> None:
    async def ask() -> None:
        async with asyncio_llm() as llm:
            with llm.engine.locked():
                call = asyncio.ensure_future(CALLS[name](llm))
                for _ in range(3):
                    await asyncio.sleep(0.01)
                assert not call.done()
            await call
            assert llm.state is (EngineState.SUSPENDED if name == "before_optimizer_step" else EngineState.RUNNING)

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


def test_a_request_during_a_score_does_not_stop_the_callers_loop() -> None:
    held, release, submitted_first = threading.Event(), threading.Event(), threading.Event()

    async def ask() -> None:
        async with asyncio_llm() as llm:

            def hold() -> None:
                with llm.engine.locked():
                    held.set()
                    # Let go in any case: a caller that waits for this lock would never say so.
                    if release.wait(2):
                        submitted_first.set()

            holder = asyncio.ensure_future(asyncio.to_thread(hold))
            await asyncio.to_thread(held.wait, PATIENCE_S)
            score = asyncio.ensure_future(llm.score([[5, 6, 7]]))
            while not llm.engine.lifecycle.lock.wanted:
                await asyncio.sleep(0.001)
            pending = llm.submit("abc", greedily(3))
            release.set()
            await asyncio.gather(holder, score, pending)

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))
    assert submitted_first.is_set()


def test_cancelling_a_caller_that_waits_to_suspend_leaves_the_engine_running() -> None:
    async def ask() -> None:
        async with asyncio_llm() as llm:
            with llm.engine.locked():
                call = asyncio.ensure_future(suspended(llm))
                await asyncio.sleep(0.05)
                call.cancel()
                await asyncio.sleep(0.01)
            with pytest.raises(asyncio.CancelledError):
                await call
            assert llm.state is EngineState.RUNNING
            assert await llm.generate("abc", greedily(2))

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


CTRL_C = """
    import os, signal, sys, threading, time
    from rollout import SamplingParams
    from tests.llm.asking import blocking
    llm = blocking(kv_cache_blocks=256)
    def press():
        while llm.stats()["generated_tokens"] < 20:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press).start()
    endless = SamplingParams(max_tokens=500, ignore_eos=True, top_p=0.99)
    try:
        while True:
            llm.generate(["abc"] * 8, endless)
    except KeyboardInterrupt:
        deadline = time.monotonic() + 60
        while (llm.num_open or llm.context.allocator.num_used) and time.monotonic() < deadline:
            time.sleep(0.01)
        print("open", llm.num_open, "blocks", llm.context.allocator.num_used)
        print("tokens", len(llm.generate("abc", SamplingParams(max_tokens=7, ignore_eos=True))[0].generated_tokens))
        llm.submit("abc", endless)
        sys.exit(7)
"""


def test_ctrl_c_ends_the_requests_and_the_interpreter_ends_in_the_middle_of_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CTRL_C)], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        check=False, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["open 0 blocks 0", "tokens 7"], done.stderr
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr


def test_generating_in_a_hook_of_the_model_is_refused_and_does_not_hang() -> None:
    model = make_model("qwen3")
    with blocking(model) as llm:

        def again(*_: Any) -> None:
            llm.generate([token_ids(4)], greedily(2))

        handle = model.model.layers[1].register_forward_pre_hook(again)
        with pytest.raises(RequestError, match="inside a forward of the model"):
            llm.generate([token_ids(5)], greedily(2))
        handle.remove()
        assert len(llm.generate([token_ids(5)], greedily(2))[0].generated_tokens) == 2
