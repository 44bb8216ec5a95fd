"""Tests of threads that generate with one manager, and of the progress bar."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rollout.errors import DeadlineError
from rollout.threads.locks import Turns
from tests.models import greedy
from tests.rollouts import GREEDY, assert_nothing_leaked, completions, make_rollout

# --- the progress bar -------------------------------------------------------------------------------------------------


def test_a_progress_bar_is_shown_when_asked_for(rollout, capsys):
    rollout.generate(["a", "b"], GREEDY)
    rollout.generate(["a", "b"], GREEDY, progress=False)
    assert capsys.readouterr().err == ""
    rollout.generate(["a", "b", "c"], GREEDY, progress=True)
    shown = capsys.readouterr().err
    assert "rollout" in shown
    assert "/3" in shown


# --- several threads, and inference mode --------------------------------------------------------------------------------


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return the result of each call, or its exception."""
    found: list[Any] = [None] * len(calls)

    def work(place: int, call: Callable[[], Any]) -> None:
        try:
            found[place] = call()
        except Exception as exc:  # noqa: BLE001 - whoever asks looks at it
            found[place] = exc

    threads = [threading.Thread(target=work, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_threads_that_generate_with_one_manager_each_get_their_own(model):
    rollout = make_rollout(model)
    prompts = [[5 + number, 6, 7] for number in range(6)]

    def ask(number: int) -> Callable[[], Any]:
        if number == 4:
            return lambda: next(iter(rollout.as_completed(rollout.submit([prompts[4]], GREEDY))))
        return lambda: rollout.generate([prompts[number]], GREEDY)

    for number, batch in enumerate(in_threads([ask(number) for number in range(6)])):
        assert not isinstance(batch, Exception), batch
        assert completions(batch) == [greedy(model, prompts[number], 6)]
    assert_nothing_leaked(rollout)


def test_threads_that_generate_with_one_engine_each_get_their_own(model):
    engine = make_rollout(model).engine
    found = in_threads([lambda number=number: engine.generate([[5 + number]], GREEDY) for number in range(4)])
    for number, requests in enumerate(found):
        assert [request.prompt_tokens for request in requests] == [[5 + number]]


def test_a_thread_waits_for_anothers_turn_no_longer_than_it_wants_and_queues_nothing(rollout):
    with rollout.engine.turns.taken():
        (error,) = in_threads([lambda: rollout.generate([[5]], GREEDY, timeout_s=0.01)])
        rollout.generate([[6]], GREEDY)
    assert isinstance(error, DeadlineError)
    assert "waited 0.01 s for thread 'MainThread', which generates with the same engine" in str(error)
    assert_nothing_leaked(rollout)
    assert len(rollout.generate([[5]], GREEDY)) == 1


def test_turns_are_taken_in_order_of_arrival_and_given_back_whatever_happens():
    turns, seen = Turns(), []
    arrived = threading.Semaphore(0)

    def take(number: int) -> None:
        with turns.taken():
            seen.append(number)
            if number % 2:
                raise ValueError(number)

    threads = []
    with turns.taken():
        for number in range(4):
            threads.append(threading.Thread(target=lambda number=number: in_threads([lambda: take(number)])))
            threads[-1].start()
            while len(turns._queue) < number + 2:
                arrived.acquire(timeout=0.001)
    for thread in threads:
        thread.join(120)
    assert seen == [0, 1, 2, 3]
    with turns.taken(0.0):
        pass
