"""Partial completions of a group: stretches as they arrived, joined per sample when they are read.

Always true: the tokens known of a sample are contiguous from 0. Receiving a stretch costs little for groups of many
samples: nothing is split or copied before it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import add

from rollout.distributed.protocol.frames import LostFramesError
from rollout.distributed.protocol.stretch import Stretch
from rollout.requests.delta import DeltaJoin, SampleDelta, growth
from rollout.requests.record import DynamicInferenceRequestRecord

ENTRIES_TOGETHER = 64
"""Deltas per sample, on average, after which they are joined: a stream brings one per token, and objects cost memory."""


class PartialGroup:
    """Tokens received so far of the samples of one group.

    Attributes:
        lengths: number of completion tokens per sample that has any delta.
        rows: stretches that came since the last `compact`, in order.
    """

    __slots__ = ("_joined", "_next_look", "lengths", "rows")

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.rows: list[Stretch] = []
        self._joined: dict[int, SampleDelta] = {}
        self._next_look = ENTRIES_TOGETHER

    def take(self, stretch: Stretch) -> None:
        """Add a stretch.

        Raises:
            LostFramesError: a gap to the tokens known; nothing was added.
        """
        lengths, indices, starts, counts = self.lengths, stretch.indices, stretch.starts, stretch.counts
        if starts != [*map(lengths.get, indices)]:
            for index, start in zip(indices, starts, strict=True):
                if start not in (0, length := lengths.get(index, 0)):
                    raise LostFramesError(f"sample {index} continues at token {start}: must be {length} or 0")
        if len(self.rows) >= self._next_look:
            self._compact_if_many()
        if len(indices) == 1:
            lengths[indices[0]] = starts[0] + counts[0]
        else:
            lengths.update(zip(indices, map(add, starts, counts), strict=True))
        self.rows.append(stretch)

    def _compact_if_many(self) -> None:
        if sum(len(row.indices) for row in self.rows) >= ENTRIES_TOGETHER * len(self.lengths):
            self.compact()
        self._next_look = len(self.rows) + ENTRIES_TOGETHER

    def compact(self) -> None:
        """Join what has come of each sample."""
        if self.rows:
            self._joined = self.deltas(self.lengths)
            self.rows = []
            self._next_look = ENTRIES_TOGETHER

    def forget(self, samples: Collection[int]) -> None:
        """Drop samples that are not read any more."""
        for index in samples:
            del self.lengths[index]
            self._joined.pop(index, None)
        if self.rows and self.lengths.keys().isdisjoint(self.rows[-1].indices):
            self.rows.pop()

    def deltas(self, samples: Collection[int]) -> dict[int, SampleDelta]:
        """Everything known of each of these samples as one delta, without those that have none."""
        if not self.rows:
            return {index: self._joined[index] for index in samples if index in self._joined}
        chosen = frozenset(samples)
        joins: dict[int, DeltaJoin] = {}
        for index in chosen.intersection(self._joined):
            joins[index] = DeltaJoin(0, index)
            joins[index].add_delta(self._joined[index])
        for row in self.rows:
            row.join_into(joins, chosen)
        return {index: joins[index].delta() for index in samples if index in joins}

    def known(self, samples: Collection[int]) -> list[Stretch]:
        """Everything known of these samples as at most one stretch."""
        deltas = list(self.deltas(sorted(samples)).values()) if self.lengths else []
        return [Stretch.of(0, 0, deltas)] if deltas else []


def oldest_version(deltas: Iterable[SampleDelta]) -> int | None:
    """Return the lowest policy version of any token; None: there is none."""
    return min((oldest for delta in deltas if (oldest := delta.versions.oldest()) is not None), default=None)


def stretch_of(record: DynamicInferenceRequestRecord) -> Stretch:
    """Return the completion so far of an unfinished record, for the rank that continues it."""
    return Stretch.of(0, 0, [growth(record, 0, 0)])
