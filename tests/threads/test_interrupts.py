"""Tests of when a Ctrl-C takes effect: at the end of a block, or at once if it is the second and nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollout.threads.interrupts import interrupt_deferred, interrupt_pending, interruptible, uninterrupted
from rollout.threads.locks import FairLock


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted() -> Iterator[None]:
    """The block is left by Ctrl-C."""
    with pytest.raises(KeyboardInterrupt):
        yield


@pytest.fixture(autouse=True)
def handler_is_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_waits_for_the_end_of_the_block_and_the_second_does_not() -> None:
    done = []
    with interrupted(), interrupt_deferred():
        press()
        done.append(interrupt_pending())
        press()
        done.append(False)
    assert done == [True]


def test_nothing_interrupts_what_must_not_be_half_done() -> None:
    done = []
    with interrupted(), interrupt_deferred():
        with uninterrupted():
            for number in range(3):
                press()
                done.append(number)
        done.append(99)
    assert done == [0, 1, 2]


def test_what_takes_long_is_left_at_the_second_and_cleared_up_after_whatever_is_pressed_then() -> None:
    done = []
    with interrupted(), uninterrupted():
        try:
            with interruptible():
                press()
                done.append("the first waits")
                press()
                done.append("the second does not")
        except KeyboardInterrupt:
            press()
            done.append("cleared up")
            raise
    assert done == ["the first waits", "cleared up"]


def test_a_block_inside_another_one_can_shield_what_takes_long_too() -> None:
    done = []
    with interrupted(), uninterrupted(), uninterrupted(wholly=True), interruptible():
        press()
        press()
        done.append("both wait")
    assert done == ["both wait"]


def test_a_second_one_ends_the_wait_for_a_lock_and_leaves_it_to_its_holder() -> None:
    lock, held, over = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with interrupted(), uninterrupted():
        press()
        press()
        lock.__enter__()
    over.set()
    holder.join()
    with lock:
        assert not lock.wanted
