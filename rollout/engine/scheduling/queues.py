"""The queues of one engine's sequences (waiting, parked, prefilling, decoding), and the table rows of active sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.blocks.states import NO_SLOT
from rollout.engine.scheduling.adapters import NO_ADAPTER, Variant
from rollout.engine.scheduling.block_tables import BlockTables
from rollout.engine.scheduling.sequences import IntArray, Sequence, SequenceTable, discard, insert, rank
from rollout.engine.scheduling.step import ScheduledStep
from rollout.observe.metric_table import ENGINE_STATS


class Queues:
    """The queues and rows of one engine. Every queue holds group leaders, sorted by *rank*: (priority, arrival).

    A *leader* also stands for the other samples of its group, its `siblings`, until they are forked after prefill.

    Attributes:
        table: the active sequences as arrays.
        blocks: the block tables of the active sequences.
        waiting: the leaders that may be admitted.
        parked: the leaders that cannot run now, because they were accepted under another variant than the current one.
        prefilling, decoding: the leaders that hold KV.
        by_row: the sequence that owns each row, by row index. Unforked siblings of an active leader own rows, too.
        variant: the current variant, that is, the model's active adapters.
        clock: function that returns the time in seconds.
        counters: the counters that the scheduler updates, by their names in `ENGINE_STATS`.
    """

    def __init__(self, allocator: BlockAllocator, clock: Callable[[], float], max_requests: int) -> None:
        self.clock = clock
        self._max_requests = max_requests
        self.counters = {name: 0 for name, metric in ENGINE_STATS.items() if metric.read.startswith("queues.")}
        self.allocator = allocator
        self.table = SequenceTable(allocator.block_size, allocator.pages)
        self.blocks = BlockTables(allocator, self.table)
        self.variant: Variant = NO_ADAPTER
        self.waiting: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.reset_active()

    def reset_active(self) -> None:
        """Remove every active sequence from its queue. The caller must also free all table rows and blocks."""
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.by_row: dict[int, Sequence] = {}
        self._decode_rows: IntArray | None = None

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_places(self) -> int:
        """The maximum number of active sequences: `max_requests`, but not more than the state slots of a recurrent model."""
        return min(self._max_requests, self.allocator.states.num_slots or self._max_requests)

    @property
    def num_free_places(self) -> int:
        """The number of further sequences for which a row and, in a model with recurrent layers, a state slot are free."""
        states, free = self.allocator.states, self._max_requests - self.num_active
        if not states.num_slots:
            return free
        without = sum(self.table.state.item(row) == NO_SLOT for row in self.by_row)
        return min(free, states.num_slots - states.num_held - without)

    @property
    def num_active(self) -> int:
        """The number of sequences that own a table row, including samples whose prompt another sample is computing."""
        return len(self.by_row)

    @property
    def num_waiting(self) -> int:
        """The number of sequences without a table row, which wait to be admitted or are parked."""
        return sum(1 + len(sequence.siblings) for sequence in (*self.waiting, *self.parked))

    def active(self) -> list[Sequence]:
        """Return the sequences that hold KV, by rank. Samples whose prompt one of them computes are in its `siblings`."""
        return sorted([*self.decoding, *self.prefilling], key=rank)

    def leaders(self) -> list[Sequence]:
        """Return every sequence that is not in another sequence's `siblings`, in no particular order."""
        return [*self.waiting, *self.parked, *self.decoding, *self.prefilling]

    def __iter__(self) -> Iterator[Sequence]:
        """Yield every sequence, one per sample, in order of (priority, arrival, sample)."""
        for leader in sorted(self.leaders(), key=rank):
            yield leader
            yield from leader.siblings

    def sequences_of(self, step: ScheduledStep) -> list[Sequence]:
        """Return every sequence that `step` computes, including samples that share the prompt of a prefill (`siblings`)."""
        owners = [self.by_row[row] for row in step.rows.tolist()]
        return [each for owner in owners for each in (owner, *owner.siblings)]

    def decode_rows(self) -> IntArray:
        """Return the table rows of the D sequences in `decoding`, int32 [D]."""
        if self._decode_rows is None:
            self._decode_rows = np.fromiter((s.row for s in self.decoding), np.int32, len(self.decoding))
        return self._decode_rows

    def queue_of(self, sequence: Sequence) -> list[Sequence]:
        """Return the queue for a sequence without a row: `waiting`, or `parked` if its adapters are not the active ones."""
        return self.waiting if sequence.variant == self.variant else self.parked

    # --- changes of queue ---------------------------------------------------------------------------------------

    def start_prefill(self, leader: Sequence) -> None:
        """Add to `prefilling` the leader of a group, which owns a table row, and give rows to the group's other samples."""
        for sibling in leader.siblings:
            self.table.add(sibling)
            self.by_row[sibling.row] = sibling
        self.by_row[leader.row] = leader
        insert(self.prefilling, leader)

    def start_decode(self, sequence: Sequence) -> None:
        """Add to `decoding` a sequence whose prompt has been computed."""
        insert(self.decoding, sequence)
        self._decode_rows = None

    def deactivate(self, sequence: Sequence) -> None:
        """Remove an active sequence from its queue, and free its row and blocks."""
        row = sequence.row
        if not discard(self.prefilling, sequence) and discard(self.decoding, sequence):
            self._decode_rows = None
        del self.by_row[row]
        self.blocks.release(row)
        self.table.remove(sequence)

    def put_back(self, group: list[Sequence]) -> None:
        """Insert a group that owns no rows into its queue, with its first sequence as the leader. Ignore an empty group."""
        if group:
            leader, *siblings = group
            leader.siblings = siblings
            for each in siblings:
                each.siblings = []
            insert(self.queue_of(leader), leader)
