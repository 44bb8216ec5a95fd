"""`Stretch`: new tokens of several samples of one request, stored as columns; `PartialGroup`: a group's tokens so far.

A stretch is the form in which messages carry a batch of `SampleDelta`s. Its lists are parallel to `indices`, and the token
ids and log-probs of all samples are concatenated to one buffer each. The coordinator forwards most stretches unsplit. A
buffer is split only when it is read. A sample's known tokens are contiguous from token 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import add, attrgetter
from typing import Annotated, Any

from rollout.distributed.protocol.fields import (
    Columns,
    Count,
    Counts,
    LogProbs,
    LostFramesError,
    Rule,
    Tokens,
    Versions,
)
from rollout.errors import SerializationError
from rollout.requests.codec import refuse
from rollout.requests.delta import COLUMNS, TOKEN_BYTES, DeltaJoin, SampleDelta, growth
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.spans import VersionSpans

_OPTIONAL = attrgetter(*COLUMNS)
_ABSENT = (None,) * len(COLUMNS)


@dataclass(slots=True)
class Stretch:
    """A batch of sample deltas of one request, stored as columns. Lists are parallel to `indices`."""

    request_id: Count
    """The request id that the coordinator chose; in messages to clients, the id that the client chose."""
    attempt: Count
    """The `Assign.attempt` of the assignment for which a rank computed the tokens; 0 in messages to clients."""
    indices: Counts
    """The indices of the samples within the group."""
    starts: Counts
    """The completion index of each sample's first new token. It is 0 for a new or restarted sample."""
    counts: Counts
    """The number of new tokens of each sample."""
    token_ids: Tokens
    """The new tokens of all samples, concatenated, as int32."""
    log_probs: LogProbs
    """The log-probs of the tokens in `token_ids`, as float32."""
    versions: Versions
    """One flat list per sample: the prompt's policy version, then version and length of each run of equal versions."""
    columns: Columns = field(default_factory=dict)
    """The optional `SampleDelta` fields that at least one sample has: name → list with a value or None per sample."""

    @classmethod
    def of(cls, request_id: int, attempt: int, deltas: Sequence[SampleDelta]) -> Stretch:
        """Build a stretch from deltas of different samples of one request."""
        if len(deltas) == 1:
            # Handle a single delta separately: this takes a third of the time, and a step of many one-sample groups
            # builds one stretch per token.
            (delta,) = deltas
            optional, tokens = _OPTIONAL(delta), delta.token_ids
            values = () if optional == _ABSENT else zip(COLUMNS, optional, strict=True)
            columns = {name: [value] for name, value in values if value is not None}
            return cls(
                request_id, attempt, [delta.sample_index], [delta.start], [len(tokens) // TOKEN_BYTES], tokens,
                delta.log_probs, [[delta.prompt_version, *delta.versions.serialize()]], columns,
            )  # fmt: skip
        columns = dict(zip(COLUMNS, map(list, zip(*map(_OPTIONAL, deltas), strict=True)), strict=False))
        return cls(
            request_id,
            attempt,
            [delta.sample_index for delta in deltas],
            [delta.start for delta in deltas],
            [len(delta.token_ids) // TOKEN_BYTES for delta in deltas],
            b"".join([delta.token_ids for delta in deltas]),
            b"".join([delta.log_probs for delta in deltas]),
            [[delta.prompt_version, *delta.versions.serialize()] for delta in deltas],
            {name: values for name, values in columns.items() if values.count(None) < len(values)},
        )

    def check(self) -> None:
        """Check the lengths of the columns and the optional values; raise a `SerializationError` that names a bad column."""
        samples = len(self.indices)
        for name in ("starts", "counts", "versions"):
            _check_length(name, getattr(self, name), samples)
        for name, values in self.columns.items():
            if name not in COLUMNS:
                raise SerializationError(f"Stretch.{name}: unknown; the optional columns are {', '.join(COLUMNS)}")
            if type(values) is not list or not COLUMNS[name].holds(values):
                refuse(f"Stretch.{name}", values, f"per sample None or {COLUMNS[name].rule}")
            _check_length(name, values, samples)
        total = sum(self.counts) * TOKEN_BYTES
        if len(self.token_ids) != total or len(self.log_probs) != total:
            refuse(
                "Stretch.counts",
                (self.counts, len(self.token_ids), len(self.log_probs)),
                "as many tokens and log-probs as counted",
            )
        for count, runs in zip(self.counts, self.versions, strict=True):
            if sum(runs[2::2]) != count:
                refuse("Stretch.versions", runs, f"runs that cover {count} tokens")
        if len(set(self.indices)) != samples:
            refuse("Stretch.indices", self.indices, "different samples")

    def join_into(self, joins: dict[int, DeltaJoin], samples: Collection[int]) -> None:
        """Add the deltas of these samples to `joins` (sample index → join). Missing joins are created."""
        high = 0
        for column, index in enumerate(self.indices):
            low, high = high, high + TOKEN_BYTES * self.counts[column]
            if index not in samples:
                continue
            join = joins.get(index)
            if join is None:
                join = joins[index] = DeltaJoin(self.request_id, index)
            runs = self.versions[column]
            spans = join.add(self.starts[column], runs[0], self.token_ids[low:high], self.log_probs[low:high])
            for at in range(1, len(runs), 2):
                spans.extend(runs[at + 1], runs[at])
            for name, values in self.columns.items():
                join.put(name, values[column])

    def deltas(self, samples: Collection[int] | None = None) -> list[SampleDelta]:
        """Return the deltas of these samples, or of all samples by default, in the order of `indices`."""
        made, high = [], 0
        for column, index in enumerate(self.indices):
            low, high = high, high + TOKEN_BYTES * self.counts[column]
            if samples is not None and index not in samples:
                continue
            version, *runs = self.versions[column]
            spans = (
                VersionSpans.of_run(*runs) if len(runs) == 2 else VersionSpans(zip(runs[::2], runs[1::2], strict=True))
            )
            tokens, log_probs = self.token_ids[low:high], self.log_probs[low:high]
            delta = SampleDelta(self.request_id, index, self.starts[column], tokens, log_probs, spans, version)
            for name, values in self.columns.items():
                setattr(delta, name, values[column])
            made.append(delta)
        return made

    def only(self, samples: Collection[int]) -> Stretch:
        """Return a stretch that contains only these samples."""
        if set(samples).issuperset(self.indices):
            return self
        return Stretch.of(self.request_id, self.attempt, self.deltas(samples))

    def ended(self) -> list[int]:
        """Return the indices of the samples that have finished, i.e. those with an outcome in this stretch."""
        if "outcome" not in self.columns:
            return []
        outcomes = self.columns["outcome"]
        return [index for index, outcome in zip(self.indices, outcomes, strict=True) if outcome is not None]

    def newest_version(self) -> int:
        """Return the highest policy version of any prompt or token, or 0 if there are no samples."""
        # Read only the last run of each sample: versions only rise from the prompt to the last token.
        newest = 0
        for runs in self.versions:
            version: int = runs[-2] if len(runs) > 1 else runs[0]
            if version > newest:
                newest = version
        return newest

    @property
    def buffer_bytes(self) -> int:
        """The total size, in bytes, of the tokens, the log-probs, and the optional values that are bytes or text."""
        size = len(self.token_ids) + len(self.log_probs)
        for values in self.columns.values():
            for value in values:
                if type(value) is bytes or type(value) is str:
                    size += len(value)
        return size


ROWS = Rule("a list of stretches", lambda value: type(value) is list and all(type(row) is list for row in value))
"""The rule for a field with a list of stretches. A stretch's own fields are checked when it is read."""
Stretches = Annotated[list[Stretch], ROWS]


def _check_length(name: str, values: list[Any], samples: int) -> None:
    if len(values) != samples:
        refuse(f"Stretch.{name}", values, f"one entry for each of {samples} samples")


ENTRIES_TOGETHER = 64
"""The average number of deltas per sample at which a `PartialGroup` joins each sample's deltas into one. A streamed
sample receives one delta per token, and every delta object costs memory."""


class PartialGroup:
    """The tokens received so far for the samples of one group.

    Attributes:
        lengths: sample index → number of completion tokens, for each sample that has received a delta.
        rows: the stretches received since the last `compact`, in order.
    """

    __slots__ = ("_joined", "_next_look", "lengths", "rows")

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.rows: list[Stretch] = []
        self._joined: dict[int, SampleDelta] = {}
        self._next_look = ENTRIES_TOGETHER

    def take(self, stretch: Stretch) -> None:
        """Add a stretch, which is a batch of new tokens of several samples.

        Raises:
            LostFramesError: some tokens that precede those in the stretch are missing. Nothing was added.
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
        """Join the received deltas of each sample into one delta, to save memory."""
        if self.rows:
            self._joined = self.deltas(self.lengths)
            self.rows = []
            self._next_look = ENTRIES_TOGETHER

    def forget(self, samples: Collection[int]) -> None:
        """Drop the tokens of these samples, because they are not needed again."""
        for index in samples:
            del self.lengths[index]
            self._joined.pop(index, None)
        if self.rows and self.lengths.keys().isdisjoint(self.rows[-1].indices):
            self.rows.pop()

    def deltas(self, samples: Collection[int]) -> dict[int, SampleDelta]:
        """Return all known tokens of these samples, as one delta per sample; samples without tokens are left out."""
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
        """Return all known tokens of these samples as a list of one stretch, or an empty list if there are no tokens."""
        deltas = list(self.deltas(sorted(samples)).values()) if self.lengths else []
        return [Stretch.of(0, 0, deltas)] if deltas else []


def oldest_version(deltas: Iterable[SampleDelta]) -> int | None:
    """Return the lowest policy version of any token in `deltas`, or None if they contain no tokens."""
    return min((oldest for delta in deltas if (oldest := delta.versions.oldest()) is not None), default=None)


def stretch_of(record: DynamicInferenceRequestRecord) -> Stretch:
    """Return all tokens in the record of an unfinished sample as a stretch, for the rank that continues the sample."""
    return Stretch.of(0, 0, [growth(record, 0, 0)])
