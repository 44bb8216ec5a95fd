"""The worker of one rank: connects an engine to a coordinator, runs the engine's steps, and reports results.

    loop thread     does the socket I/O; heartbeats continue while the engine steps or suspends
    apply thread    applies received messages at the next step boundary, even while the training loop is busy

The session is used only under the engine's lock. Once it has ended, it sends nothing more, and further messages are dropped.
Its samples are then aborted on this rank, because the coordinator assigns them to other ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import torch

from rollout.distributed.protocol.messages import PROTOCOL_VERSION, Message, Register, RegisterAck
from rollout.distributed.transport.dealer import Dealer
from rollout.distributed.worker.link import Link
from rollout.distributed.worker.session import RankSession
from rollout.engine.blocks.index import CacheChanges
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.holds import COORDINATOR
from rollout.errors import ConnectionLostError, DeadlineError, EngineDeadError, EngineStateError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.state import EngineState
from rollout.threads.diagnosis import watch
from rollout.threads.interrupts import interrupt_pending
from rollout.threads.loop_thread import LoopThread

if TYPE_CHECKING:
    from rollout.distributed.transport.keys import JobKeys

CLOSE_TIMEOUT_S = 10.0
"""Seconds to wait for the socket to close and for the apply thread to finish."""
ATTEMPT_S = 2.0
"""Seconds that one connection attempt may take. It is short because the attempt may reach a coordinator that is exiting."""
RETRY_S = 0.5
"""Seconds between two connection attempts."""


class EngineWorker:
    """The worker of one rank. It connects an engine to a coordinator and runs the engine's steps.

    It runs no steps while another component keeps the engine paused or suspended (`Holds.forbid_steps`).

    Args:
        engine: this rank's engine, which computes the samples that the coordinator assigns.
        address: the coordinator's address, `tcp://host:port`.
        name: name of this rank. A later process with the same name replaces this rank.
        keys: the job's keys; None if the coordinator uses no keys.
        loop: event loop for the socket; if None, the worker creates its own.
        reconnect_timeout_s: seconds for which `reconnect` tries to reach a coordinator.
        on_lost: called with the reason when a session is lost. It runs on one of the worker's threads, so it must not block.
        follows_version: see `RankSession`.

    Attributes:
        lost: the reason why the session was lost; None if the worker is connected, not started, or stopped.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        address: str,
        *,
        name: str,
        keys: JobKeys | None = None,
        loop: LoopThread | None = None,
        reconnect_timeout_s: float = 60.0,
        on_lost: Callable[[Exception], object] = lambda error: None,
        follows_version: bool = True,
    ) -> None:
        self.engine = engine
        self.address = address
        self.name = name
        self.lost: Exception | None = None
        self.reconnect_timeout_s = reconnect_timeout_s
        self.keys = keys
        self._on_lost = on_lost
        self._follows_version = follows_version
        self._owns_loop = loop is None
        self._loop = loop
        self._link = self._new_link()
        # Mark the initial link as cut, because it is not connected and must send nothing.
        self._link.cut, self._link.error = True, EngineStateError(f"worker {name!r}: start() it first")
        self._thread: threading.Thread | None = None
        self._idle = False
        # Let only one thread at a time start or end sessions.
        self._connecting = threading.Lock()
        # Guard the fields below and the inbox. This is a leaf lock: its holder must not acquire the engine's lock.
        self._changed = threading.Condition()
        self._engine_moved = False
        self._closed = False
        watch(self)

    def describe_state(self) -> Iterator[str]:
        """Yield the line that `rollout.threads.diagnosis` prints about this worker."""
        how = f"lost ({self.lost})" if self.lost is not None else "in a session" if self._link.live else "no session"
        yield (
            f"worker {self.name!r} of {self.address}: {how}{', idle' if self._idle else ''}"
            f"{', closed' if self._closed else ''}"
        )

    def start(self, timeout_s: float = 30.0) -> None:
        """Register with the coordinator and start accepting its assignments.

        Raises:
            DeadlineError: the coordinator did not answer within `timeout_s` seconds.
            ConnectionLostError: the coordinator is stopping, or has another protocol version or block size.
            ConfigError: the address is invalid.
            EngineStateError: the worker was started before.
        """
        if self._thread is not None or self._closed:
            raise EngineStateError(f"worker {self.name!r}: start() again; build another, or reconnect()")
        if self._loop is None:
            self._loop = LoopThread(f"rollout-worker-{self.name}")
        self.engine.lifecycle.on_move = self._note_move
        self._thread = threading.Thread(target=self._apply_forever, name=f"rollout-apply-{self.name}", daemon=True)
        self._thread.start()
        try:
            self._connect(timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Disconnect, and release the hold through which the coordinator pauses or suspends the engine. Idempotent.

        The coordinator then assigns the samples that this rank has not finished to other ranks.

        Raises:
            Exception: the engine could not be resumed. The worker is stopped nevertheless.
        """
        with self._changed:
            if self._thread is None or self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        with self._connecting, self.engine.locked():
            self._link.session.report(self._link.session.take_ended(), everything=True)
            self._drop(self._link, "the worker was stopped")
            self.engine.lifecycle.on_move = None
            self.engine.track_prefix_cache(CacheChanges())
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._owns_loop:
            self._its_loop().close()
        with self.engine.locked():
            # Release the coordinator's hold on the engine, because no coordinator can release it any more.
            if COORDINATOR in self.engine.holds and self.engine.state is not EngineState.STOPPED:
                self.engine.holds.release(COORDINATOR)

    def reconnect(
        self, address: str | None = None, keys: JobKeys | None = None, timeout_s: float | None = None
    ) -> None:
        """End the session and start a new one, with the same or another coordinator.

        Args:
            address: address of another coordinator; if None, the current address.
            keys: keys of another coordinator; if None, the current keys.
            timeout_s: seconds for all attempts together; if None, `reconnect_timeout_s`.

        Raises:
            ConnectionLostError: no attempt succeeded within the timeout.
            EngineStateError: the worker is stopped or was never started.
        """
        self.address = self.address if address is None else address
        self.keys = self.keys if keys is None else keys
        limit = self.reconnect_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while True:
            try:
                return self._connect(max(0.0, min(deadline - time.monotonic(), ATTEMPT_S)))
            except (ConnectionLostError, DeadlineError) as exc:
                if time.monotonic() >= deadline:
                    raise ConnectionLostError(
                        f"{self.address}: no session of worker {self.name!r} within {limit} s; the last attempt: {exc}"
                    ) from exc
            with self._changed:
                self._changed.wait_for(lambda: self._closed, min(RETRY_S, max(0.0, deadline - time.monotonic())))

    def _connect(self, timeout_s: float) -> None:
        with self._connecting:
            if self._thread is None or self._closed:
                raise EngineStateError(f"worker {self.name!r}: reconnect() before start() or after stop()")
            with self.engine.locked():
                self._drop(self._link, "it reconnects")
            link = self._open()
            with self._changed:
                self._changed.wait_for(
                    lambda: link.session.entered or link.error is not None or self._closed, timeout_s
                )
            with self.engine.locked():
                if link.error is None and not link.session.entered:
                    self._lose(
                        link,
                        DeadlineError(
                            f"{self.address}: no coordinator has answered worker {self.name!r} within {timeout_s:g} s; is "
                            "it running, and is this its address?"
                        ),
                    )
            if link.error is not None:
                raise link.error

    def _new_link(self) -> Link:
        dealer = Dealer(
            self.address,
            self.name,
            keys=self.keys,
            on_message=lambda message: self._arrived(link, message),
            on_lost=lambda error: self._arrived(link, error),
        )
        session = RankSession(
            self.engine, lambda message: self._send(link, message), follows_version=self._follows_version,
            idle=lambda: self._idle,
        )  # fmt: skip
        link = Link(self.address, self.name, dealer, session)
        return link

    def _open(self) -> Link:
        engine, link = self.engine, self._new_link()

        async def open_dealer() -> None:
            link.dealer.open()

        self._its_loop().run_sync(open_dealer(), CLOSE_TIMEOUT_S)
        with engine.locked():
            hashes = engine.track_prefix_cache(link.session.changes)
            self._link, self.lost = link, None
            self._send(
                link,
                Register(
                    PROTOCOL_VERSION,
                    self.name,
                    engine.config.max_requests,
                    engine.config.advanced.block_size_tokens,
                    engine.state.value,
                    engine.policy_version,
                    np.asarray(hashes, "<i8").tobytes(),
                ),
            )
        return link

    def _drop(self, link: Link, reason: str, quietly: bool = False) -> None:
        link.session.lost()
        if not link.cut:
            link.cut = True
            self._its_loop().call_soon(lambda: link.dealer.close(reason, quietly=quietly))

    def _its_loop(self) -> LoopThread:
        if self._loop is None:
            raise EngineStateError(f"worker {self.name!r}: start() it first")
        return self._loop

    # --- on the event loop's thread ---------------------------------------------------------------------------------

    def _arrived(self, link: Link, item: Message | ConnectionLostError) -> None:
        if isinstance(item, RegisterAck):
            link.dealer.heartbeat(item.heartbeat_interval_s, item.heartbeat_timeout_s)
        with self._changed:
            link.put(item)
            self._changed.notify_all()

    def _send(self, link: Link, message: Message) -> None:
        if not link.cut:
            self._its_loop().call_soon(link.transmit, message)

    # --- on the apply thread ----------------------------------------------------------------------------------------

    def _note_move(self) -> None:
        with self._changed:
            self._engine_moved = True
            self._changed.notify_all()

    def _apply_forever(self) -> None:
        device = self.engine.controller.layout.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._engine_moved or (self._link.error is None and bool(self._link.inbox))
                )
                if self._closed:
                    return
                self._engine_moved = False
            with self.engine.locked():
                lost = self._apply()
            with self._changed:
                self._changed.notify_all()
            if lost is not None:
                self._on_lost(lost)

    def _apply(self) -> Exception | None:
        """Apply the received messages. Return the error if the session was lost in doing so, otherwise None."""
        link = self._link
        if link.error is not None:
            return None
        try:
            link.apply()
            if link.live and not link.session.stopped:
                self.engine.lifecycle.refuse_when_stopped()
        except Exception as exc:  # noqa: BLE001 - end the session, because the engine could not apply its messages
            return self._lose(link, exc)
        if link.live:
            link.session.report(link.session.take_ended(), steps=0)
        return None

    def _lose(self, link: Link, error: Exception) -> Exception:
        self._drop(link, f"{type(error).__name__}: {error}", quietly=isinstance(error, DeadlineError))
        link.error = self.lost = error
        return error

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one engine step and report its results. Return False if there was no work or steps are forbidden.

        Raises:
            EngineDeadError: the engine has died. The session was ended, and the coordinator reassigns the samples.
        """
        with self.engine.locked():
            if not self._has_work():
                return False
            self._step_done(self._engine_step())
            return True

    def steps(self) -> bool:
        """Run engine steps until there is no work, another thread waits for the engine, or Ctrl-C is pending.

        Before the first of these steps, the engine checks whether the model was changed; it does not repeat this check
        before later steps. For the return value and errors see `step`.
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
        if self.engine.state is not EngineState.STOPPED:
            self._link.session.report(ended, steps=self.engine.parts.stepper.made)
            return
        try:
            self.engine.lifecycle.refuse_when_stopped()
        except EngineDeadError as exc:
            self._lose(self._link, exc)
            raise

    def report_active(self) -> None:
        """Report to the coordinator that this rank runs steps again, until the next `report_idle`."""
        if self._idle:
            with self.engine.locked():
                self._idle = False
                if not self._link.cut:
                    self._link.session.moved()

    def report_idle(self) -> None:
        """Send all unsent tokens, and report that this rank is idle. Its waiting samples may then be reassigned."""
        with self.engine.locked():
            self._idle = True
            if self._link.live:
                self._link.session.report_idle()

    def _has_work(self) -> bool:
        engine = self.engine
        return not engine.holds.forbid_steps and engine.state is EngineState.RUNNING and engine.has_unfinished

    def run(self) -> None:
        """Run steps, and reconnect if necessary, until another thread calls `stop` or the engine stops.

        Raises:
            ConnectionLostError: no coordinator was found in `reconnect_timeout_s`, or another process has this rank's name.
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
            timeout_s: seconds to wait.
            or_when: a function that returns whether to stop waiting for another reason. It must not block, and `wake` must
                be called when its result becomes True.

        Returns:
            False if `timeout_s` has passed without any of these events.
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
        """Make `wait_for_work` check its conditions again, for example after another caller has queued work."""
        with self._changed:
            self._changed.notify_all()
        self.engine.ask_for_boundary()
