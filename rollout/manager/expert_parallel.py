"""The loop of a manager whose ranks exchange tokens inside each layer: every rank computes a forward whenever one does.

    each round     agree            what every rank has to do: nothing any more, wait, or compute
                    └ compute       one step here; without requests, the layers of experts alone, without tokens

Always true: the ranks of the group begin and end a run together. One that raises first takes part in the round, and tells
the others before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollout.engine.memory.buffers import plain_tensors
from rollout.engine.parallel.lockstep import BUSY, DONE, IDLE, LEFT
from rollout.errors import EngineDeadError, EngineStateError
from rollout.manager.run_loop import RunLoop
from rollout.state import EngineState
from rollout.threads.interrupts import interrupt_deferred

IDLE_S = 0.005
"""Longest wait for work between two rounds, in which no rank had any."""


class LockstepLoop(RunLoop):
    """The loop of one rank of an expert-parallel group."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        lockstep = self._engine.peers.lockstep
        assert lockstep is not None
        self._lockstep = lockstep

    def _steps(self, finished: Callable[[], bool], step: Callable[[float], None], left: Callable[[], float]) -> None:
        told, done, idle_since = BUSY, False, self._clock()
        with self._lockstep.watching():
            try:
                while told != DONE:
                    with interrupt_deferred():
                        done = done or finished()
                        told = self._engine.parts.member.agree(DONE if done else BUSY if self._can_step() else IDLE)
                        if told == LEFT:
                            raise EngineStateError(
                                f"a rank of the {self._lockstep.group.name} has left generate() by an error; what "
                                "is in flight stays in flight: call it again on every rank"
                            )
                        if told == BUSY:
                            idle_since = self._clock()
                            with plain_tensors(), self._lockstep.round():
                                if not done:
                                    step(0.0)
                        elif not done:
                            left()
                            self._wait(self._clock() - idle_since)
            except BaseException:
                # After the last round (a deferred Ctrl-C) the others agree on nothing any more.
                if told not in (LEFT, DONE):
                    with suppress(EngineDeadError):
                        self._engine.parts.member.agree(LEFT)
                raise

    def _can_step(self) -> bool:
        return self._engine.has_unfinished and self._engine.state is EngineState.RUNNING

    def _wait(self, idle_s: float) -> None:
        """Wait for work; after a control timeout for so long that the backend names the ranks that do not come."""
        limit = self._engine.config.control_timeout_s
        self._backend.wait(IDLE_S if idle_s < limit else 2 * limit)
        if self._engine.state is EngineState.SUSPENDED:
            self._ensure_running()
        self.take_ended()
