"""Makes an engine's steps for a coordinator and for other callers, and reports the results after each."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import ExitStack

from rollout.distributed.worker.connection import RankConnection
from rollout.distributed.worker.link import Link
from rollout.errors import ConnectionLostError, EngineDeadError, EngineStateError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.state import EngineState
from rollout.threads.interrupts import interrupt_pending


class EngineWorker(RankConnection):
    """One rank of a coordinator: connects an engine to it and makes the engine's steps.

    The engine may also serve other callers: they call `wake` after queueing requests, and get the records that ended in
    this worker's steps from `take_ended`. No step is made while the engine is held (`Holds.forbid_steps`).
    """

    def step(self) -> bool:
        """Make one engine step and report its results.

        Returns:
            Whether a step was made; False: no work, or the engine is not RUNNING.

        Raises:
            EngineDeadError: the engine has died; the session is ended and the coordinator reassigns its requests.
        """
        with self.engine.locked():
            if not self._has_work():
                return False
            self._step_done(self._engine_step())
            return True

    def steps(self) -> bool:
        """Make engine steps until there is no work, another thread wants the engine, or Ctrl-C is pending.

        The module counts as unchanged between the steps, until the last step is reported.

        Returns, raises: as `step`.
        """
        with self.engine.locked():
            if not self._has_work():
                return False
            with ExitStack() as installed:
                installed.enter_context(self.engine.stepping())
                while True:
                    ended = self._engine_step()
                    going_on = self._has_work() and not self.engine.lifecycle.lock.wanted and not interrupt_pending()
                    if not going_on:
                        installed.close()
                    self._step_done(ended)
                    if not going_on:
                        return True

    def _engine_step(self) -> list[DynamicInferenceRequestRecord]:
        self._idle = False
        return self.engine.step(ahead=True)

    def _step_done(self, ended: list[DynamicInferenceRequestRecord]) -> None:
        if self.engine.state is EngineState.STOPPED:
            self._engine_died(self._link, ended)
        elif self._link is not None:
            self._report(self._link, ended, steps=self.engine.parts.stepper.made)
        else:
            self._ended += ended

    def report_active(self) -> None:
        """Report this rank as active: steps are made until `report_idle`."""
        if self._idle:
            with self.engine.locked():
                self._idle = False
                if self._link is not None and not self._link.cut:
                    self._link.session.moved()

    def report_idle(self) -> None:
        """Report all tokens known so far and this rank as idle; its waiting samples may be reassigned."""
        with self.engine.locked():
            self._idle = True
            link = self._link
            if link is not None and link.live:
                link.session.report_idle()

    def _engine_died(self, link: Link | None, ended: list[DynamicInferenceRequestRecord]) -> None:
        numbers: Container[int] = () if link is None else link.session.numbers
        self._ended += [record for record in ended if record.request_id not in numbers]
        try:
            self.engine.lifecycle.refuse_when_stopped()
        except EngineDeadError as exc:
            if link is not None:
                self._lose(link, exc)
            raise

    def _has_work(self) -> bool:
        engine = self.engine
        return not engine.holds.forbid_steps and engine.state is EngineState.RUNNING and engine.has_unfinished

    def run(self) -> None:
        """Step whenever there is work, until `stop` is called by another thread or the engine stops.

        Reconnects when a session is lost.

        Raises:
            ConnectionLostError: no coordinator for `reconnect_timeout_s`, or another process uses this rank's name.
            EngineDeadError: the engine has died.
            EngineStateError: the worker was not started.
        """
        if self._thread is None:
            raise EngineStateError(f"worker {self.name!r}: run() before start(): call worker.start() first")
        while not self._closed and self.engine.state is not EngineState.STOPPED:
            if self.lost is not None:
                self._find_another()
            elif not self.steps():
                self.wait_for_work(self.engine.config.advanced.control_timeout_s)

        if not self._closed and isinstance(self.lost, EngineDeadError):
            raise self.lost

    def _find_another(self) -> None:
        if isinstance(self.lost, ConnectionLostError) and self.lost.final:
            raise self.lost
        try:
            self.reconnect()
        except EngineStateError:
            if not self._closed:
                raise

    def wait_for_work(self, timeout_s: float, *, or_when: Callable[[], bool] = lambda: False) -> bool:
        """Wait until there is work, the session is lost, or the worker or engine has stopped.

        Args:
            or_when: additional condition; `wake` must be called when it becomes true. It must not block.

        Returns:
            False after `timeout_s`.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._has_work()
                    or or_when()
                    or self._closed
                    or self.lost is not None
                    or self.engine.state is EngineState.STOPPED
                ),
                timeout_s,
            )

    def wake(self) -> None:
        """Make `wait_for_work` check its conditions again, after another caller has queued work in the engine."""
        with self._changed:
            self._changed.notify_all()
        self.engine.ask_for_boundary()

    def take_ended(self) -> list[DynamicInferenceRequestRecord]:
        """Return ended records of requests that were not assigned by the coordinator, each once."""
        with self.engine.locked():
            ended, self._ended = self._ended, []
            return ended
