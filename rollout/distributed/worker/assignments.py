"""The samples assigned to a rank: the assignment (attempt) of each sample, and the number of its tokens already sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout.distributed.protocol.messages import Assign, Stretch
from rollout.distributed.protocol.outcome import outcome, pack
from rollout.requests.delta import TOKEN_BYTES, SampleDelta, growth
from rollout.requests.record import DynamicInferenceRequestRecord

Key = tuple[int, int]
"""The key of a sample: (engine request id, sample index)."""
Known = tuple[int, int, int]
"""The part of a sample that the coordinator already has: (token count, prompt's policy version, number of events)."""
UNKNOWN: Known = (0, 0, 0)


@dataclass(eq=False, slots=True)
class Assignment:
    """The samples of one request that one `Assign` message, with the id `attempt`, assigns to this rank."""

    request_id: int
    attempt: int
    number: int
    """The engine request id."""
    interval: int
    """The number of tokens per sample between two reports."""
    open: set[int]
    """The indices of the samples that have not finished."""


@dataclass(eq=False, slots=True)
class _Pace:
    """The samples that share a reporting interval. It is counted in steps, which add at most one token per sample."""

    steps: int = 0
    """The number of steps since the last report."""
    known: dict[Key, Known] = field(default_factory=dict)


class Assignments:
    """The unfinished samples assigned to this rank, indexed by attempt, by engine request id and by sample."""

    def __init__(self) -> None:
        self.of_attempt: dict[int, Assignment] = {}
        self.of_number: dict[int, Assignment] = {}
        self.of_sample: dict[tuple[int, int], Assignment] = {}
        self._paces: dict[int, _Pace] = {}

    def __len__(self) -> int:
        return len(self.of_sample)

    def clear(self) -> None:
        for table in (self.of_attempt, self.of_number, self.of_sample, self._paces):
            table.clear()

    def open(self, message: Assign, number: int, wanted: list[int], known: dict[int, Known]) -> None:
        """Register the samples of an assignment that this rank will compute.

        Args:
            message: the assignment.
            number: engine request id of the samples.
            wanted: indices of the samples.
            known: sample index → the part of the sample that the coordinator already has; new samples are left out.
        """
        assignment = Assignment(message.request_id, message.attempt, number, message.interval, set(wanted))
        self.of_attempt[message.attempt] = self.of_number[number] = assignment
        pace = self._paces.setdefault(message.interval, _Pace())
        for index in wanted:
            self.of_sample[message.request_id, index] = assignment
            pace.known[number, index] = known.get(index, UNKNOWN)

    def close(self, assignment: Assignment, index: int) -> None:
        assignment.open.discard(index)
        pace = self._paces[assignment.interval]
        del pace.known[assignment.number, index]
        if not pace.known:
            del self._paces[assignment.interval]
        del self.of_sample[assignment.request_id, index]
        if not assignment.open:
            del self.of_attempt[assignment.attempt]
            del self.of_number[assignment.number]

    def due(self, steps: int) -> dict[Key, Known]:
        """Count `steps` further steps. Return the samples whose interval has passed: key → the part already sent."""
        due: dict[Key, Known] = {}
        for interval, pace in self._paces.items():
            pace.steps += steps
            if pace.steps >= interval:
                due |= pace.known
                pace.steps = 0
        return due

    def all_due(self) -> dict[Key, Known]:
        """Return all samples (key → the part already sent), and restart their reporting intervals."""
        due: dict[Key, Known] = {}
        for pace in self._paces.values():
            due |= pace.known
            pace.steps = 0
        return due

    def last_deltas(
        self, ended: Iterable[DynamicInferenceRequestRecord], due: dict[Key, Known]
    ) -> dict[int, list[SampleDelta]]:
        """Return the last deltas (new tokens) of finished samples by engine request id, and remove the samples from `due`.

        Records of requests that the coordinator has not assigned are ignored.
        """
        grown: dict[int, list[SampleDelta]] = {}
        for record in ended:
            assignment = self.of_number.get(record.request_id)
            if assignment is None or record.sample_index not in assignment.open:
                continue
            key = (record.request_id, record.sample_index)
            due.pop(key, None)
            delta = growth(record, *self._paces[assignment.interval].known[key])
            delta.text, delta.outcome = record.completion_text, pack(outcome(record))
            grown.setdefault(record.request_id, []).append(delta)
        return grown

    def stretch(self, number: int, deltas: list[SampleDelta]) -> Stretch:
        """Collect an assignment's `deltas` (new tokens) in a `Stretch`. Count them as sent; remove finished samples.

        Args:
            number: engine request id of the assignment.
        """
        assignment = self.of_number[number]
        known = self._paces[assignment.interval].known
        for delta in deltas:
            if delta.outcome is None:
                end = delta.start + len(delta.token_ids) // TOKEN_BYTES
                known[number, delta.sample_index] = (end, delta.prompt_version, delta.num_events)
            else:
                self.close(assignment, delta.sample_index)
        return Stretch.of(assignment.request_id, assignment.attempt, deltas)
