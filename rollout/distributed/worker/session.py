"""The worker side of the protocol as a state machine: assignments in, progress reports out. No sockets, threads or clock.

The caller must hold the engine at a step boundary (`DynamicInferenceEngine.locked`).

- Every assigned sample is closed exactly once: it is reported as finished, cancelled, declined, or dropped with the session.
- A sample's tokens are sent in order and only once. The last tokens are sent together with the sample's outcome.
- The engine's state and policy version are sent (`EngineMoved`, `CommandAck`) before any token computed under them.
- The coordinator pauses or suspends the engine through the hold `COORDINATOR`; the engine stays paused while it has a hold.
  After the session has ended, this hold remains until the next session replaces it.
- Each assignment has its own engine request id, so an older attempt's results are never taken for a newer one's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import cast

import numpy as np

from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.fields import (
    FLUSH_PREFIX_CACHE,
    LOAD_ADAPTER,
    LOAD_WEIGHTS,
    SET_VERSION,
    UNLOAD_ADAPTER,
    LostFramesError,
)
from rollout.distributed.protocol.frames import MAX_STRETCHES
from rollout.distributed.protocol.stretch import PartialGroup
from rollout.distributed.worker.assignments import Assignments, Key, Known
from rollout.engine.blocks.index import CacheChanges
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.holds import COORDINATOR, HoldLevel
from rollout.errors import EngineDeadError, EngineStateError, SerializationError
from rollout.observe.recorder import mark
from rollout.requests.codec import unpack_msgpack
from rollout.requests.images import ImageInputs, ImagePrompt
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import with_images
from rollout.sampling_params import SamplingParams
from rollout.state import COORDINATOR_TRANSITIONS, STABLE_ENGINE_STATES, ControlSignal, CoordinatorState, Mode

Records = list[DynamicInferenceRequestRecord]


class RankSession:
    """The state of one rank in one session with the coordinator.

    Args:
        engine: the engine; its methods are called only at step boundaries.
        send: a function that sends a message to the coordinator; it is called with the messages in order.
        follows_version: whether to set the engine to the policy version in `RegisterAck`. If False, the training loop
            sets the engine's version.
        idle: a function that returns whether this rank is idle, which means that no thread steps the engine.

    Attributes:
        entered: whether the engine has reached the state and version in `RegisterAck`. Until then, no report is sent.
        stopped: whether the coordinator has stopped the engine.
        changes: the changes of the engine's prefix cache that were not sent yet.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        send: Callable[[wire.Message], None],
        follows_version: bool = True,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._send = send
        self._follows_version = follows_version
        self._idle = idle
        self.changes = CacheChanges()
        self.entered = False
        self.stopped = False
        self._sent_state = (engine.state, engine.policy_version)
        self._sent_idle = False
        self._assignments = Assignments()

    @property
    def num_open(self) -> int:
        return len(self._assignments)

    # --- messages from the coordinator ------------------------------------------------------------------------------

    def receive(self, message: wire.Message) -> None:
        """Handle a message from the coordinator."""
        if isinstance(message, wire.Assign):
            self._assign(message)
        elif isinstance(message, wire.Cancel):
            self._cancel(message)
        elif isinstance(message, wire.Command):
            self._command(message)
        elif isinstance(message, wire.RegisterAck):
            self._enter(message)

    def _assign(self, message: wire.Assign) -> None:
        wanted = self._supersede(message)
        if not wanted:
            return
        number = self._engine.new_request_id()
        try:
            known = self._queue(message, number, wanted)
        except (EngineStateError, EngineDeadError) as exc:
            self._discard(number)
            # Decline only if the coordinator has stopped the engine. If the engine stopped for another reason, this
            # session ends, and the coordinator reassigns the session's samples.
            if self.stopped:
                self._decline(message, number, exc)
        except Exception as exc:  # noqa: BLE001 - an error in one request must not affect the others
            self._discard(number)
            self._decline(message, number, exc)
        else:
            self._assignments.open(message, number, wanted, known)
            mark(
                f"assign request {number}", track=COORDINATOR, of_coordinator=message.request_id, attempt=message.attempt,
                samples=wanted, tokens_known=sum(each[0] for each in known.values()),
            )  # fmt: skip

    def _decline(self, message: wire.Assign, number: int, exc: Exception) -> None:
        # Remove the engine's request id from the error text: the client has another id for the request.
        text = str(exc).removeprefix(f"request {number}: ")
        self._send(wire.Decline(message.request_id, message.attempt, type(exc).__name__, text))

    def _supersede(self, message: wire.Assign) -> list[int]:
        """Drop this rank's older assignments of the samples in a new assignment.

        Returns:
            The indices of the samples to compute; samples that already have this or a newer attempt are left out.
        """
        wanted = []
        for index in dict.fromkeys(message.indices):
            before = self._assignments.of_sample.get((message.request_id, index))
            if before is None or before.attempt < message.attempt:
                wanted.append(index)
            if before is not None and before.attempt < message.attempt:
                self._discard(before.number, index)
                self._assignments.close(before, index)
        return wanted

    def _queue(self, message: wire.Assign, number: int, wanted: list[int]) -> dict[int, Known]:
        params = _params(message.params).replace(seed=message.seed)
        prompt: list[int] = np.frombuffer(message.prompt, "<i4").tolist()
        images = ImageInputs.unpack(message.images) if message.images else None
        # Convert 0 to None (the current time): the coordinator has no wall clock and sends 0 for "now".
        arrival_time = message.arrival_time or None
        known: dict[int, Known] = {}
        partial = PartialGroup()
        try:
            for stretch in message.known:
                partial.take(stretch)
        except LostFramesError as exc:
            raise SerializationError(f"known.starts: {exc}") from exc
        for index, delta in partial.deltas(wanted).items():
            if not delta.count:
                continue
            request = delta.to_request(number, prompt, params, priority=message.priority, arrival_time=arrival_time)
            request = with_images(request, images)
            self._engine.add_record(DynamicInferenceRequestRecord.from_request(request))
            known[index] = (delta.count, delta.prompt_version, len(request.events))
        fresh = [index for index in wanted if index not in known]
        if fresh:
            asked = prompt if images is None else ImagePrompt(prompt, images)
            self._engine.add_request(
                asked, params, request_id=number, samples=fresh, priority=message.priority, arrival_time=arrival_time
            )
        return known

    def _cancel(self, message: wire.Cancel) -> None:
        assignment = self._assignments.of_attempt.get(message.attempt)
        if assignment is None or assignment.request_id != message.request_id:
            return
        self._discard(assignment.number)
        for index in list(assignment.open):
            self._assignments.close(assignment, index)

    def _discard(self, number: int, index: int | None = None) -> None:
        """Abort one sample of an engine request, or all its samples if `index` is omitted, and drop the results."""
        self._engine.abort_request(number, index)
        self._engine.take_ended(lambda key: key[0] == number and index in (None, key[1]))

    # --- control commands -------------------------------------------------------------------------------------------

    def _command(self, message: wire.Command) -> None:
        mark(message.signal, track=COORDINATOR, argument=message.argument)
        error, amount = None, 0

        def unload() -> Records:
            nonlocal amount
            amount = self._engine.unload_adapter(str(message.argument))
            return []

        try:
            if message.signal == FLUSH_PREFIX_CACHE:
                amount = self._engine.flush_prefix_cache()
                self.report((), steps=0)
            elif message.signal == LOAD_WEIGHTS:
                amount = self._engine.load_weights(str(message.argument))
            elif message.signal == LOAD_ADAPTER:
                name, _, folder = str(message.argument).partition("=")
                amount = self._engine.load_adapter(name, folder)
            elif message.signal == UNLOAD_ADAPTER:
                self._control(unload)
            else:
                self._control(lambda: self._signal(message.signal, message.argument))
        except Exception as exc:  # noqa: BLE001 - report any error to the coordinator
            error = f"{type(exc).__name__}: {exc}"
        self._note_state()
        self._send(wire.CommandAck(message.command_id, *self._said(), error, amount))

    def _signal(self, signal: str, argument: int | str | None) -> Records:
        """Apply a control signal or `set_version`; return the records of the samples that it terminated."""
        if signal == SET_VERSION:
            if type(argument) is not int:
                raise EngineStateError(f"{SET_VERSION}({argument!r}): must be an integer")
            # Apply an equal version too, because the weights may have changed without a new version number.
            if argument >= self._engine.policy_version:
                self._engine.weights_updated(argument)
            return []
        acts_in, leads_to, harmless_in = COORDINATOR_TRANSITIONS[ControlSignal(signal)]
        if leads_to is CoordinatorState.STOPPING:
            return self._stop()
        held = CoordinatorState[self._engine.holds.level(COORDINATOR).name]
        if held not in acts_in | harmless_in:
            allowed = " or ".join(sorted(state.value for state in acts_in))
            raise EngineStateError(f"{signal}() while {held.value}: allowed when {allowed}")
        level = HoldLevel[(leads_to if held in acts_in else held).name]
        self._engine.holds.hold(COORDINATOR, level, cast(Mode, argument))
        return []

    def _stop(self) -> Records:
        ended = self._engine.stop()
        self.stopped = True
        return ended

    def _enter(self, message: wire.RegisterAck) -> None:
        # Mark the current state as sent. Changes since the registration are reported at the end of this method, once the
        # engine has reached the requested state.
        self._note_state()
        # Set the version only if it is higher: setting the current version again would announce changed weights.
        if self._follows_version and message.policy_version > self._engine.policy_version:
            self._control(lambda: self._signal(SET_VERSION, message.policy_version))
        self._control(lambda: self._follow(CoordinatorState(message.state)))
        self.entered = True
        self._send_state()

    def _follow(self, state: CoordinatorState) -> Records:
        stopping = state is CoordinatorState.STOPPING
        self._engine.holds.hold(COORDINATOR, HoldLevel.PAUSED if stopping else HoldLevel[state.name])
        return self._stop() if stopping else []

    def _control(self, act: Callable[[], Records]) -> None:
        self.moved()
        ended = act()
        self._note_state()
        # Report all unsent tokens now: reports normally follow steps, but after this call there may be no step for a while.
        self._report([*ended, *self.take_ended()], self._assignments.all_due())

    # --- reports on the engine --------------------------------------------------------------------------------------

    def take_ended(self) -> Records:
        """Return the records of this rank's assigned samples that finished between two steps, so no step returned them."""
        return self._engine.take_ended(lambda key: key[0] in self._assignments.of_number)

    def report(
        self, ended: Iterable[DynamicInferenceRequestRecord], *, steps: int = 1, everything: bool = False
    ) -> None:
        """Send the tokens that are due and the finished samples, in `Progress` messages of at most `MAX_STRETCHES` requests.

        Args:
            ended: records of finished samples. Records without an assignment are ignored.
            steps: number of steps since the last call.
            everything: whether to also send tokens that are not due yet.
        """
        if self.entered:
            self.moved()
            self._report(ended, self._assignments.all_due() if everything else self._assignments.due(steps))

    def moved(self) -> None:
        """Send `EngineMoved` if the engine's current state, version or idleness has not been reported yet. Send nothing
        while the engine is in a transitional state."""
        now = (self._engine.state, self._engine.policy_version)
        same = now == self._sent_state and self._idle() is self._sent_idle
        if self.entered and not same and now[0] in STABLE_ENGINE_STATES:
            self._sent_state = now
            self._send_state()

    def report_idle(self) -> None:
        """Send all unsent tokens and report that this rank is idle, so that its waiting samples may be reassigned."""
        self.report([], everything=True)
        self._send(wire.Progress([], b"", b"", False, *self._load()))

    def lost(self) -> None:
        """End the session: abort all samples that the coordinator assigned to this rank, and send nothing more."""
        for number in self._assignments.of_number:
            self._discard(number)
        self._assignments.clear()

    def _note_state(self) -> None:
        self._sent_state = (self._engine.state, self._engine.policy_version)

    def _said(self) -> tuple[str, int]:
        state, version = self._sent_state
        return state.value, version

    def _send_state(self) -> None:
        self._sent_idle = self._idle()
        self._send(wire.EngineMoved(*self._said(), self._sent_idle))

    def _load(self) -> tuple[int, int]:
        """Return the numbers of (running, waiting) samples. While this rank is idle, all samples count as waiting."""
        running, waiting = self._engine.load
        return (0, running + waiting) if self._idle() else (running, waiting)

    def _report(self, ended: Iterable[DynamicInferenceRequestRecord], due: dict[Key, Known]) -> None:
        ended = list(ended)
        grown = self._assignments.last_deltas(ended, due)
        for delta in self._engine.progress(due) if due else ():
            grown.setdefault(delta.request_id, []).append(delta)
        stretches = [self._assignments.stretch(number, deltas) for number, deltas in grown.items()]
        changes = self.changes.take()
        if stretches or changes.added or changes.removed or changes.flushed:
            added, removed = _hashes(changes.added), _hashes(changes.removed)
            while len(stretches) > MAX_STRETCHES:
                self._send(wire.Progress(stretches[:MAX_STRETCHES], b"", b"", False, *self._load()))
                del stretches[:MAX_STRETCHES]
            last = (stretches, added, removed, changes.flushed, *self._load())
            self._send(wire.Progress(*last, b"".join(map(_seconds_of, ended))))


def _seconds_of(record: DynamicInferenceRequestRecord) -> bytes:
    if record.ttft is None or record.latency is None:
        return b""
    later = record[-1].total_length - len(record[0].prompt_tokens) - 1
    return struct.pack("<2f", record.ttft, (record.latency - record.ttft) / max(1, later))


@lru_cache(maxsize=64)
def _params(packed: bytes) -> SamplingParams:
    return SamplingParams.deserialize(unpack_msgpack("Assign.params", packed))


def _hashes(hashes: Collection[int]) -> bytes:
    return np.fromiter(hashes, "<i8", len(hashes)).tobytes()
