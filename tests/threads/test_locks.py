"""Tests of the fair lock: a loop that reacquires it cannot starve a waiting thread."""

from __future__ import annotations

import signal
import threading

import pytest

from rollout.threads.locks import FairLock
from tests.engines import until


def test_a_thread_that_waits_gets_it_before_its_holder_has_it_again() -> None:
    lock = FairLock()
    order: list[str] = []
    held, waiting = threading.Event(), threading.Event()

    def loop() -> None:
        with lock:
            held.set()
            assert waiting.wait(120.0)
            # The other thread holds the gate as soon as it waits; from then on it is next.
            while not lock._next.locked():
                pass
            order.append("first turn")
        with lock:
            order.append("second turn")

    runner = threading.Thread(target=loop)
    runner.start()
    assert held.wait(120.0)
    waiting.set()
    with lock:
        order.append("the one who waited")
    runner.join(120.0)
    assert order == ["first turn", "the one who waited", "second turn"]


def test_its_holder_sees_without_the_interpreter_that_another_thread_waits() -> None:
    lock, done = FairLock(), threading.Event()

    def wait() -> None:
        with lock:
            done.set()

    with lock:
        assert lock.asked.value == 0
        waiter = threading.Thread(target=wait)
        waiter.start()
        until(lambda: lock.asked.value)
        # What it has heard of, and what it is still wanted for.
        lock.heard()
        assert lock.asked.value == 0
        assert lock.wanted
    assert done.wait(120)
    waiter.join(120)
    lock.ask()
    assert lock.asked.value == 1


def test_ctrl_c_while_waiting_leaves_the_lock_free() -> None:
    lock = FairLock()
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            while not lock._next.locked():
                pass
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(120.0)
    with pytest.raises(KeyboardInterrupt), lock:
        pytest.fail("Ctrl-C was lost")
    thread.join(120.0)
    with lock:
        pass
