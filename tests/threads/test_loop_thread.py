"""Tests of the event-loop thread: results and errors are returned, and no caller waits forever."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from rollout.errors import DeadlineError
from rollout.threads.loop_thread import LoopThread

DEADLINE_S = 120.0


@pytest.fixture
def loop():
    thread = LoopThread()
    yield thread
    thread.close()


async def answer(value):
    await asyncio.sleep(0)
    return value


async def for_ever():
    await asyncio.get_running_loop().create_future()


def test_a_coroutine_runs_on_the_thread_and_its_result_comes_back(loop):
    async def where():
        return threading.current_thread()

    assert loop.run_sync(answer(3), DEADLINE_S) == 3
    assert loop.run_sync(answer(5)) == 5
    assert loop.run_sync(where(), DEADLINE_S) is not threading.current_thread()
    assert loop.run_sync(where(), DEADLINE_S).daemon


def test_what_takes_longer_is_cancelled_and_named(loop):
    cancelled = threading.Event()

    async def slow():
        try:
            await for_ever()
        finally:
            cancelled.set()

    with pytest.raises(DeadlineError, match=r"slow took longer than timeout_s=0.01"):
        loop.run_sync(slow(), 0.01)
    assert cancelled.wait(DEADLINE_S)


def test_waiting_for_the_loop_from_the_loop_raises_instead_of_deadlocking(loop):
    async def nested():
        return loop.run_sync(answer(1), DEADLINE_S)

    async def closing():
        loop.close()

    with pytest.raises(RuntimeError, match=r"run_sync\(\) on rollout-loop from that loop itself would never return"):
        loop.run_sync(nested(), DEADLINE_S)
    with pytest.raises(RuntimeError, match=r"close\(\) on rollout-loop from that loop itself"):
        loop.run_sync(closing(), DEADLINE_S)
    assert loop.run_sync(answer(2), DEADLINE_S) == 2


def test_close_twice_is_harmless_and_calls_after_it_raise(loop):
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match=r"start\(\) on rollout-loop after close\(\)"):
        loop.run_sync(answer(1), DEADLINE_S)
    with pytest.raises(RuntimeError, match=r"call_soon\(\) on rollout-loop after close\(\)"):
        loop.call_soon(print)


def test_whoever_waits_is_told_when_the_loop_is_closed(loop):
    begun = threading.Event()

    async def waiting():
        begun.set()
        await for_ever()

    def close():
        assert begun.wait(DEADLINE_S)
        loop.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(RuntimeError, match=r"was closed while .*waiting ran on it"):
        loop.run_sync(waiting(), DEADLINE_S)
    closer.join(DEADLINE_S)


def test_the_cuda_device_is_carried_over_only_where_torch_uses_cuda(monkeypatch):
    chosen = []

    class Cuda:
        initialized = True

        def is_initialized(self):
            return self.initialized

        def current_device(self):
            return 5

        def set_device(self, device):
            chosen.append((device, threading.current_thread().name))

    class Torch:
        cuda = Cuda()

    monkeypatch.setitem(sys.modules, "torch", Torch())
    LoopThread("with").close()
    Torch.cuda.initialized = False
    LoopThread("without").close()
    assert chosen == [(5, "with")]


def test_a_loop_thread_loads_no_torch_and_does_not_keep_its_process_alive():
    program = """
import sys, asyncio
from rollout.threads.loop_thread import LoopThread
loop = LoopThread()
loop.run_sync(asyncio.sleep(0), 30)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
