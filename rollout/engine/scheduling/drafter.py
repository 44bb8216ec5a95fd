"""Speculative decoding without a draft model: proposes draft tokens for decoding sequences and learns what became of them.

The next forward computes the drafts behind each sequence's last token, and the sampler draws the sequence's own token at
each of these positions, with that position's own random number. A draft that equals the token drawn is accepted, and the
first that does not ends the step for its sequence: the tokens are those of plain decoding. No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from rollout.engine.scheduling.draft_budget import MAX_DRAFT, TRIAL, DraftBudget, StepCost
from rollout.engine.scheduling.draft_sources import MAX_MATCH, CompletionHistory, continuation, joined, matches
from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.sequences import IntArray, Sequence

SEARCHES = 32
"""Most sequences that a step looks for drafts for."""
PATIENCE, LAST_PAUSE = 4, 8
"""A sequence is passed over for one step more for every `PATIENCE` failures in a row, and for at most `LAST_PAUSE` steps."""


@dataclass(eq=False)
class _Pause:
    """Back-off of one sequence."""

    failures: int = 0
    until: int = 0
    """Number of the step from which on it is looked at again."""


@dataclass(frozen=True, eq=False)
class _Draft:
    sequence: Sequence
    row: int
    matched: int
    tokens: list[int]
    shares: list[float]


class Drafter:
    """Drafts of one scheduler's sequences.

    Attributes:
        history: completions by prompt.
        budget: how long drafts may be.
    """

    def __init__(self, queues: Queues, cost: StepCost) -> None:
        self._queues = queues
        self.history = CompletionHistory()
        self.budget = DraftBudget(cost)
        self._pauses: WeakKeyDictionary[Sequence, _Pause] = WeakKeyDictionary()
        self._prompts: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._made: list[_Draft] = []
        self._trial = False
        self._step = 0

    def draft(self, rows: IntArray, room: int) -> IntArray | None:
        """Write drafts for a step of decodes behind the tokens of their rows and reserve their blocks.

        Args:
            rows: the decoding rows.
            room: most draft tokens of all together.

        Returns:
            [len(rows)] int32 draft tokens of each row; None where there is none at all.
        """
        self._made, self._step = [], self._step + 1
        if room <= 0 or not self.budget.start(len(rows)):
            return None
        self._trial = self.budget.trial_due
        table, counts = self._queues.table, np.zeros(len(rows), np.int32)
        due = self._due(rows)
        live = self._live_by_prompt() if due else {}
        for index in due:
            found = self._find(rows.item(index), room, live)
            if found is None or not self._reserve(found):
                continue
            length = table.length.item(found.row)
            table.tokens[found.row, length : length + len(found.tokens)] = found.tokens
            counts[index] = len(found.tokens)
            room -= len(found.tokens)
            self._made.append(found)
            if room <= 0 or self._trial:
                break
        if not self._made:
            return None
        self.budget.made(trial=self._trial)
        return counts

    def idle_steps(self, rows: IntArray) -> int:
        """How many steps of these rows, the present one included, can be made before drafts are looked for again."""
        if self.budget.idle_steps:
            return 1 + self.budget.idle_steps
        by_row = self._queues.by_row
        sequences = [each for row in rows.tolist() if (each := by_row[row]).params.structured is None]
        pauses = [self._pauses.get(sequence) for sequence in sequences]
        return max(1, min((1 if pause is None else pause.until - self._step for pause in pauses), default=1))

    def skip(self, steps: int) -> None:
        """Note steps that were made without a look for drafts."""
        self._step += steps
        self.budget.skip(steps)

    def learn(self, accepted: dict[int, int]) -> None:
        """Take in how many draft tokens of each row the last step accepted."""
        counters = self._queues.counters
        for made in self._made:
            kept = accepted[made.row]
            counters["draft_tokens"] += len(made.tokens)
            counters["draft_tokens_accepted"] += kept
            counters["drafts"] += 1
            self.budget.acceptance.learn(made.matched, made.shares, kept)
            self._pause(made.sequence, failed=not kept)
        if self._trial and self._made and not any(accepted[made.row] for made in self._made):
            self.budget.failed_trial()
        self._made = []

    def keep(self, sequence: Sequence) -> None:
        """Keep the completion of an active sequence that ends, for later requests with its prompt."""
        self.history.add(self._prompt(sequence), self._piece(sequence.row))

    # --- drafts of one sequence ---------------------------------------------------------------------------------

    def _due(self, rows: IntArray) -> list[int]:
        by_row, due = self._queues.by_row, []
        for index, row in enumerate(rows.tolist()):
            sequence = by_row[row]
            if sequence.params.structured is not None:
                # Its mask at a position would need the drafts before it to be taken, and taken back.
                continue
            pause = self._pauses.get(sequence)
            if pause is None or pause.until <= self._step:
                due.append(index)
                if len(due) == SEARCHES:
                    break
        return due

    def _live_by_prompt(self) -> dict[int, list[Sequence]]:
        live: dict[int, list[Sequence]] = {}
        for sequence in self._queues.decoding:
            live.setdefault(self._prompt(sequence), []).append(sequence)
        return live

    def _find(self, row: int, room: int, live: dict[int, list[Sequence]]) -> _Draft | None:
        table, sequence = self._queues.table, self._queues.by_row[row]
        length = table.length.item(row)
        # A row that accepts all of its drafts gets one token more.
        most = min(MAX_DRAFT, room, table.max_length.item(row) - length - 1)
        if most <= 0:
            return None
        context = table.tokens[row, :length]
        prompt = self._prompt(sequence)
        siblings = [self._piece(each.row) for each in live[prompt] if each is not sequence]
        corpus = np.concatenate([joined([context, *siblings]), self.history.of(prompt)])
        after, matched = matches(corpus, context)
        tokens, shares = continuation(corpus, after, most) if matched else ([], [])
        # An image of the prompt may be what followed; its keys are no tokens.
        real = next((place for place, token in enumerate(tokens) if token < 0), len(tokens))
        tokens, shares = tokens[:real], shares[:real]
        count = self.budget.length(matched, shares)
        if not count and self._trial:
            count = min(TRIAL, len(tokens))
        elif count:
            self._trial = False
        if not count:
            self._pause(sequence, failed=True)
            return None
        return _Draft(sequence, row, matched, tokens[:count], shares[:count])

    def _piece(self, row: int) -> IntArray:
        table = self._queues.table
        return table.tokens[row, max(0, table.origin.item(row) - MAX_MATCH) : table.length.item(row)]

    def _prompt(self, sequence: Sequence) -> int:
        if sequence not in self._prompts:
            table = self._queues.table
            self._prompts[sequence] = hash(table.tokens[sequence.row, : table.origin.item(sequence.row)].tobytes())
        return self._prompts[sequence]

    def _reserve(self, found: _Draft) -> bool:
        """Reserve blocks for the drafts where enough are free, one of them left to each sequence."""
        queues = self._queues
        size, count = queues.table.block_size, 1 + len(found.tokens)
        fresh = -(-count // size) + queues.num_active
        return queues.allocator.can_allocate(fresh) and queues.blocks.reserve(found.row, count)

    def _pause(self, sequence: Sequence, *, failed: bool) -> None:
        if not failed:
            self._pauses.pop(sequence, None)
            return
        pause = self._pauses.setdefault(sequence, _Pause())
        pause.failures += 1
        pause.until = self._step + 1 + min(LAST_PAUSE, pause.failures // PATIENCE)
