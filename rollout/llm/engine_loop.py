"""The in-process engine loop: a thread that steps an engine, applies commands between steps, and delivers the results.

- New groups, aborts and deadlines are applied at step boundaries, even while the engine is paused or suspended.
- Every opened group finishes once, with its samples or with an error that gives the reason.
- The work at one step boundary is bounded: at most about `SAMPLES_AT_ONCE` new samples are queued.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext

import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import (
    ConnectionLostError,
    EngineDeadError,
    EngineStateError,
    RequestAbortedError,
    RequestTimeoutError,
)
from rollout.llm.delivery import Delivery, Group, Listener
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from rollout.threads.diagnosis import watch

_log = logging.getLogger(__name__)

SAMPLES_AT_ONCE = 256
"""The number of new samples after which no further group is queued at a step boundary, so that running samples are not
delayed for long."""
SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds that `close` waits for the thread to finish its current step."""
LOOK_S = 1.0
"""Seconds between two checks for Ctrl-C while a rank waits for the first rank of its tensor-parallel group to shut down."""
CLOSED = "the LLM was closed: build another"


class EngineLoop:
    """A thread that steps one engine while the engine is RUNNING. Any thread may control the engine and call the methods.

    Attributes:
        over: a future that is done when the thread has finished. If the engine died, the future raises the error.
        readers: the stream readers to wake when tokens arrive.
        is_primary: whether this rank accepts requests.
        world_size: the number of engines that compute the requests."""

    is_primary, world_size = True, 1

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        self.over: Future[None] = Future()
        self._delivery = Delivery(engine)
        self._groups, self.readers = self._delivery.groups, self._delivery.readers
        self._next_deadline = math.inf
        self._next_beat = 0.0
        # Guard the fields below. This is a leaf lock: its holder must not acquire the engine's lock.
        self._changed = threading.Condition()
        self._arrived: deque[Group] = deque()
        self._commands: list[Callable[[], None]] = []
        self._closed = False
        self._moved = False
        engine.lifecycle.on_move = self.wake
        watch(self)
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()

    def describe_state(self) -> Iterator[str]:
        """Yield the lines that `rollout.threads.diagnosis` prints about this loop."""
        end = ", over" if self.over.done() else ", closed" if self._closed else ""
        yield (
            f"engine loop {self._thread.name!r}: {len(self._groups)} groups and {self._delivery.num_streams} streams open, "
            f"{len(self._commands)} commands waiting{end}"
        )

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._groups)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def refuse_when_over(self) -> None:
        self.engine.lifecycle.refuse_when_stopped()
        if self._closed:
            raise EngineStateError(CLOSED)
        if self.over.done():
            raise EngineStateError("the engine's thread has ended") from self.over.exception()

    def open_group(
        self,
        number: int,
        tokens: list[int],
        params: SamplingParams,
        listener: Listener,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        interval: int = 1,
    ) -> None:
        """Queue a group; the listener receives its tokens and its result.

        Args:
            number: id that the caller chose for the group.
            tokens: prompt tokens, as `DynamicInferenceEngine.check_request` returns them for `params`.
            interval: number of steps between two deliveries to a stream. First tokens are delivered at once.
            timeout_s: seconds after which the group fails with `RequestTimeoutError`; if None, there is no limit.
        """
        ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        group = Group(number, tokens, params, listener, priority, interval, time.time(), ends_at)
        with self._changed:
            self.refuse_when_over()
            self._groups[number] = group
            self._arrived.append(group)
            self._next_deadline = min(self._next_deadline, ends_at)
            self._notify()

    def abort(self, numbers: Iterable[int] | None = None) -> Future[int]:
        aborted: Future[int] = Future()

        def act() -> None:
            found = [self._groups.get(number) for number in (list(self._groups) if numbers is None else numbers)]
            groups = [group for group in found if group is not None]
            for group in groups:
                self._delivery.fail(group, RequestAbortedError(f"request {group.number} was aborted", group.number))
            aborted.set_result(len(groups))

        with self._changed:
            if self._closed:
                raise EngineStateError(CLOSED)
            if self.over.done():
                aborted.set_result(0)
            else:
                self._commands.append(act)
                self._notify()
        return aborted

    def wake(self) -> None:
        """Make the thread check the engine again, because its state has changed or it has new work."""
        with self._changed:
            self._moved = True
            self._notify()

    def _notify(self) -> None:
        """Interrupt the loop's thread while it waits or runs steps. The caller must hold the lock `_changed`."""
        self._changed.notify_all()
        self.engine.ask_for_boundary()

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        device = self.engine.controller.layout.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        failure: BaseException | None = None
        try:
            self._compute()
        except EngineDeadError as exc:
            failure = exc
        except EngineStateError:
            pass
        except BaseException as exc:  # noqa: BLE001 - the thread ends here, and later calls raise this error
            failure = exc
        if failure is not None and not self._closed:
            _log.error("the engine's thread has ended: %s: %s", type(failure).__name__, failure)
        self._end(failure)

    def _compute(self) -> None:
        leader = self.engine.peers.leader
        with nullcontext() if leader is None else leader.leading(lambda failed: None):
            while self._wait():
                if leader is not None:
                    leader.beat()
                    self._next_beat = time.monotonic() + self.engine.config.advanced.control_timeout_s
                self._steps()
            self.engine.lifecycle.refuse_when_stopped()

    def _wait(self) -> bool:
        """Wait for work or a deadline. Return False if the engine has stopped or the loop was closed."""
        with self._changed:
            while not (self._commands or self._arrived or self._moved or self._closed or self._has_work()):
                due = self._due()
                if due <= 0:
                    break
                self._changed.wait(None if due == math.inf else due)
            self._moved = False
            return not self._closed and self.engine.state is not EngineState.STOPPED

    def _due(self) -> float:
        """Return the seconds until the next group deadline or heartbeat to other ranks; infinity if there is neither."""
        beat = math.inf if self.engine.peers.leader is None else self._next_beat
        return min(self._next_deadline, beat) - time.monotonic()

    def _has_work(self) -> bool:
        engine = self.engine
        return not engine.holds.forbid_steps and engine.state is EngineState.RUNNING and engine.has_unfinished

    def _steps(self) -> None:
        """Apply commands, and run steps until there is no work or another thread waits for the engine.

        The engine checks whether the model was changed only before the first of these steps."""
        engine = self.engine
        with engine.locked():
            self._apply()
            if not self._has_work():
                self._delivery.tell(engine.take_ended(), everything=True)
                return
            with ExitStack() as installed:
                installed.enter_context(engine.stepping())
                while True:
                    ended = engine.step(ahead=True)
                    self._apply()
                    going_on = self._has_work() and not engine.lifecycle.lock.wanted and not self._closed
                    if not going_on:
                        installed.close()
                    self._delivery.tell(ended, everything=not self._has_work())
                    if not going_on:
                        return

    def _apply(self) -> None:
        for late in self._late_groups():
            why = f"not finished after {time.time() - late.arrival_time:.3g} s; raise timeout_s (server: request_timeout_s)"
            self._delivery.fail(late, RequestTimeoutError(f"request {late.number}: {why}", late.number))
        if self._commands:
            with self._changed:
                commands, self._commands = self._commands, []
            for command in commands:
                command()
        if self._arrived:
            for group in self._next_arrived():
                self._queue(group)

    def _late_groups(self) -> list[Group]:
        now = time.monotonic()
        if now < self._next_deadline:
            return []
        with self._changed:
            self._next_deadline = min((g.ends_at for g in self._groups.values() if g.ends_at > now), default=math.inf)
            return [group for group in self._groups.values() if group.ends_at <= now]

    def _next_arrived(self) -> list[Group]:
        taken: list[Group] = []
        samples = 0
        with self._changed:
            while self._arrived and samples < SAMPLES_AT_ONCE:
                group = self._arrived.popleft()
                if group.number in self._groups:
                    taken.append(group)
                    samples += group.params.n
        return taken

    def _queue(self, group: Group) -> None:
        # Let the engine choose the request id if the group's number is taken: other callers may use the engine too.
        number = None if group.number in self.engine.parts.ledger.live else group.number
        try:
            group.in_engine = self.engine.add_request(
                group.tokens, group.params, request_id=number, priority=group.priority, arrival_time=group.arrival_time
            )
        except Exception as exc:  # noqa: BLE001 - pass any error to the waiting caller
            self._delivery.fail(group, exc)
            return
        self._delivery.queued(group)

    # --- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail open groups, stop the engine and wait for the thread to finish. Idempotent."""
        with self._changed:
            self._closed = True
            self._notify()
        if self.engine.state is not EngineState.STOPPED:
            self.engine.pause()
            self.engine.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(SHUTDOWN_TIMEOUT_S)
        self._end(None)
        self._leave_group()

    def _leave_group(self) -> None:
        if self.engine.peers.group is not None:
            self.engine.peers.group.close()

    def _end(self, failure: BaseException | None) -> None:
        why = "the engine was stopped" if failure is None else f"{type(failure).__name__}: {failure}"
        with self._changed:
            if self.over.done():
                return
            if failure is None:
                self.over.set_result(None)
            else:
                self.over.set_exception(failure)
            commands, self._commands = self._commands, []
        self.engine.lifecycle.on_move = None
        for group in list(self._groups.values()):
            self._groups.pop(group.number, None)
            group.listener.fail(ConnectionLostError(f"request {group.number}: {why}", final=True))
        for command in commands:
            command()
        self.readers.flush()


class FollowerLoop(EngineLoop):
    """The loop on every rank of a tensor-parallel group but the first. It repeats the first rank's steps."""

    is_primary = False

    def _compute(self) -> None:
        self.engine.parts.stepper.follow()

    def close(self) -> None:
        """Wait until the group's first rank, which cannot compute without this rank, has shut down. Idempotent."""
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
        self._closed = True
        if self.engine.state is not EngineState.STOPPED:
            self.engine.pause()
            self.engine.stop()
        self._leave_group()
