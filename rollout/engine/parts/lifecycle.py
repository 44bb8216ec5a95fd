"""The engine's state machine, with the lock that is held during a step and a method that waits for a given state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rollout.engine.memory.buffers import plain_tensors
from rollout.errors import DeadlineError, EngineDeadError, EngineStateError
from rollout.state import ENGINE_TRANSITIONS, STABLE_ENGINE_STATES, ControlSignal, EngineState
from rollout.threads.interrupts import interrupt_deferred, uninterrupted
from rollout.threads.locks import FairLock

T = TypeVar("T")


class Lifecycle:
    """The state machine of one engine. Every transition happens under `lock`, between two steps.

    Attributes:
        lock: the lock that is held during a step.
        cause_of_death: the error that stopped the engine for good. If None, no error has stopped the engine.
        on_move: a listener that is called after every control call and weight update, and when an error stops the engine,
            even if the state is unchanged. It must not wait for another thread, because its caller may hold `lock`.
    """

    def __init__(self) -> None:
        self.state = EngineState.RUNNING
        self.cause_of_death: BaseException | None = None
        self.lock = FairLock()
        self.on_move: Callable[[], None] | None = None
        # Do not use `lock` for this condition: a thread that waits for a state must not queue behind the steps.
        self._changed = threading.Condition()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Open a block in which no other thread can run a step. Entering waits for the current step to finish."""
        with interrupt_deferred(), self.lock, plain_tensors():
            yield

    def moved(self) -> None:
        """Call the listener `on_move`, if one is set."""
        if self.on_move is not None:
            self.on_move()

    def signal(self, signal: ControlSignal, act: Callable[[], T]) -> T | None:
        """Move to the intermediate state of `signal`, call `act`, then move to the target state. If `act` raises, move back.

        Returns:
            The result of `act`, or None without calling `act` if the signal has no effect in the current state.

        Raises:
            EngineStateError: the signal is not allowed in the current state.
            EngineDeadError: an error has stopped the engine for good.
        """
        acts_in, through, to, harmless_in = ENGINE_TRANSITIONS[signal]
        with uninterrupted(), self.lock:
            if self.state in harmless_in:
                return None
            self.refuse_when_stopped()
            if self.state not in acts_in:
                allowed = " or ".join(sorted(state.value for state in acts_in))
                cure = "resume()" if self.state is EngineState.SUSPENDED else "pause()"
                raise EngineStateError(
                    f"{signal.value}() while {self.state.value}: allowed when {allowed}; call {cure} first"
                )
            before = self.state
            self._move(through)
            try:
                done = act()
            except BaseException:
                self._move(before)
                raise
            self._move(to)
            return done

    def die(self, cause: BaseException) -> None:
        """Record `cause` as the error that stopped the engine for good, and move to STOPPED."""
        self.cause_of_death = cause
        self._move(EngineState.STOPPED)

    def wait_until(self, state: EngineState, timeout_s: float) -> None:
        """Block until the engine is in `state`, which must be a stable state (one of `STABLE_ENGINE_STATES`).

        Raises:
            ValueError: `state` is transient.
            DeadlineError: the engine did not reach `state` within `timeout_s` seconds.
        """
        if state not in STABLE_ENGINE_STATES:
            stable = ", ".join(sorted(each.value for each in STABLE_ENGINE_STATES))
            raise ValueError(f"wait_until({state.value}): a transient state; wait for one of {stable}")
        with self._changed:
            if not self._changed.wait_for(lambda: self.state is state, timeout_s):
                raise DeadlineError(f"the engine is {self.state.value}, not {state.value}, after {timeout_s} s")

    def refuse_when_stopped(self) -> None:
        """Raise `EngineDeadError` if an error has stopped the engine, `EngineStateError` if it is stopping or stopped."""
        if (cause := self.cause_of_death) is not None:
            if isinstance(cause, EngineDeadError):
                raise EngineDeadError(str(cause)) from cause
            raise EngineDeadError(
                f"the engine is dead, too many steps in a row have failed, the last with {type(cause).__name__}: {cause}; "
                "build another"
            ) from cause
        if self.state in (EngineState.STOPPING, EngineState.STOPPED):
            raise EngineStateError(f"the engine is {self.state.value}: it accepts no requests; build another")

    def refuse_unless_running(self) -> None:
        """Raise `EngineStateError` or `EngineDeadError` unless the engine is RUNNING."""
        self.refuse_when_stopped()
        if self.state is not EngineState.RUNNING:
            cure = "resume() and unpause()" if self.state is EngineState.SUSPENDED else "unpause()"
            raise EngineStateError(f"step() while {self.state.value}: call {cure} first")

    def _move(self, state: EngineState) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()
