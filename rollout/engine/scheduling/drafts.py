"""Speculative decoding without a draft model: proposes draft tokens and learns what became of them.

Drafts are what followed the end of a sequence wherever the same tokens stood before: in itself, its siblings, and finished
completions of its prompt. The next forward computes them behind the sequence's last token, and the sampler draws the
sequence's own token at each position. A draft equal to the token drawn is accepted; the first other one ends the step for
its sequence, so the tokens are those of plain decoding. No tensors, no clock.

With R rows and steps of a + b·positions seconds a token takes (a + b·R) / R without drafts, which an accepted draft saves,
and each draft costs b. A draft is made while

    probability that it and those before it are accepted · (a + b·R) / R  ≥  MARGIN · b
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.run_ahead import StepCost
from rollout.engine.scheduling.sequences import IntArray, Sequence

MAX_MATCH = 16
"""Most tokens compared; longer matches count as this long."""
CANDIDATES = 32
"""Most places that vote on a continuation."""
PER_PROMPT = 2**15
"""Most tokens kept of the completions of one prompt."""
ALL_PROMPTS = 2**22
"""Most tokens kept of the completions of all prompts: 16 MiB."""
MARGIN = 1.3
"""Gain that a draft must promise over its cost: finding and checking it takes time outside the forward."""
MAX_DRAFT = 24
"""Most draft tokens of a sequence in one step."""
TRIAL = 2
"""Draft tokens of a trial."""
FIRST_WAIT, LAST_WAIT = 16, 1024
"""Steps without drafts until a trial; each trial that fails doubles it."""
SEARCHES = 32
"""Most sequences that a step looks for drafts for."""
PATIENCE, LAST_PAUSE = 4, 8
"""Every `PATIENCE` failures in a row a sequence is passed over for one step more, at most for `LAST_PAUSE` steps."""

_KEPT_OF_TRIES = 0.98
_PRIOR_TRIES = 2.0
_END = np.full(1, -1, np.int32)


class CompletionHistory:
    """Finished completions by prompt, the newest of each prompt and the prompts last used; bounded in tokens."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[int, deque[IntArray]] = OrderedDict()
        self._joined: dict[int, IntArray] = {}
        self.num_tokens = 0

    def add(self, prompt: int, tokens: IntArray) -> None:
        """Keep a completion.

        Args:
            prompt: hash of the prompt's tokens.
            tokens: the completion after the last `MAX_MATCH` tokens of the prompt; its last `PER_PROMPT` tokens are kept.
        """
        tokens = tokens[-PER_PROMPT:].copy()
        pieces = self._pieces.setdefault(prompt, deque())
        self._pieces.move_to_end(prompt)
        self._joined.pop(prompt, None)
        pieces.appendleft(tokens)
        self.num_tokens += len(tokens)
        while sum(map(len, pieces)) > PER_PROMPT:
            self.num_tokens -= len(pieces.pop())
        while self.num_tokens > ALL_PROMPTS:
            oldest, forgotten = self._pieces.popitem(last=False)
            self.num_tokens -= sum(map(len, forgotten))
            self._joined.pop(oldest, None)

    def of(self, prompt: int) -> IntArray:
        """Completions of a prompt, the newest first, as `joined`."""
        if prompt not in self._pieces:
            return _END
        self._pieces.move_to_end(prompt)
        if prompt not in self._joined:
            self._joined[prompt] = joined(self._pieces[prompt])
        return self._joined[prompt]


def joined(pieces: Iterable[IntArray]) -> IntArray:
    """Pieces one after the other, -1 behind each."""
    return np.concatenate([part for piece in pieces for part in (piece, _END)])


def matches(corpus: IntArray, context: IntArray) -> tuple[IntArray, int]:
    """Find the longest suffix of `context` in `corpus`, an array as `joined` makes it.

    Returns:
        Indices in `corpus` of the tokens that follow it, at most `CANDIDATES`; and its length, 0 to `MAX_MATCH`.
    """
    after = np.flatnonzero(corpus[:-1] == context[-1]) + 1
    after = after[corpus[after] >= 0]
    length, most = min(1, len(after)), min(MAX_MATCH, len(context))
    while 0 < length < most:
        longer = after[corpus[after - length - 1] == context[-length - 1]]
        if not len(longer):
            break
        after, length = longer, length + 1
    return after[:CANDIDATES].astype(np.int32), length


def continuation(corpus: IntArray, after: IntArray, most: int) -> tuple[list[int], list[float]]:
    """The continuation that most places agree on, token by token.

    Args:
        after: from `matches`.
        most: tokens.

    Returns:
        Up to `most` tokens; and the share of the remaining places that vote for each.
    """
    windows = corpus[np.minimum(after[:, None] + np.arange(most), len(corpus) - 1)].tolist()
    tokens: list[int] = []
    shares: list[float] = []
    for depth in range(most):
        votes: dict[int, int] = {}
        for window in windows:
            votes[window[depth]] = votes.get(window[depth], 0) + 1
        votes.pop(-1, None)
        if not votes:
            break
        token = max(votes, key=votes.__getitem__)
        tokens.append(token)
        shares.append(votes[token] / len(windows))
        if len(windows) > votes[token]:
            windows = [window for window in windows if window[depth] == token]
    return tokens, shares


# --- how many pay ---------------------------------------------------------------------------------------------------------


class Acceptance:
    """Share of the votes' promises that were kept, by length of the match; recent drafts count most."""

    def __init__(self) -> None:
        self._hits = [0.0] * (MAX_MATCH + 1)
        self._tries = [0.0] * (MAX_MATCH + 1)

    def of(self, matched: int) -> float:
        """Probability that a draft with all votes is accepted, after a match of `matched` tokens."""
        at = min(matched, MAX_MATCH)
        prior = min(0.9, 0.3 + 0.1 * at)
        return (self._hits[at] + _PRIOR_TRIES * prior) / (self._tries[at] + _PRIOR_TRIES)

    def learn(self, matched: int, shares: list[float], accepted: int) -> None:
        """Take in one checked draft.

        Args:
            matched: length of the match.
            shares: share of the votes of each draft token.
            accepted: how many were accepted; the next one was rejected, the others are unknown.
        """
        for depth, share in enumerate(shares[: accepted + 1]):
            at = min(matched + depth, MAX_MATCH)
            self._hits[at] = _KEPT_OF_TRIES * self._hits[at] + (depth < accepted)
            self._tries[at] = _KEPT_OF_TRIES * self._tries[at] + share


class DraftBudget:
    """Lengths of drafts, and when to try again if none paid."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.acceptance = Acceptance()
        self._worth = 0.0
        self._idle = 0
        self._wait = FIRST_WAIT

    def start(self, rows: int) -> bool:
        """Start a step of so many rows; returns whether any draft could pay, or a trial is due."""
        price, saved = MARGIN * self.cost.position, self.cost.step(rows) / rows
        # With a clock that stands still nothing costs anything, and every draft pays.
        self._worth = price / saved if saved > 0 else 0.0
        self._idle += 1
        return self._worth < 1 or self.trial_due

    @property
    def trial_due(self) -> bool:
        """Whether there were no drafts for so long that one is tried even if it promises too little."""
        return self._idle > self._wait

    @property
    def idle_steps(self) -> int:
        """How many steps with the rows of this one no draft could pay in, up to the next trial."""
        return 0 if self._worth < 1 else max(0, self._wait - self._idle)

    def skip(self, steps: int) -> None:
        """Count steps without drafts that were not started here."""
        self._idle += steps

    def length(self, matched: int, shares: list[float]) -> int:
        """How many of the draft tokens with these shares of the votes pay, behind a match of `matched` tokens."""
        survival = 1.0
        for depth, share in enumerate(shares):
            survival *= min(1.0, self.acceptance.of(matched + depth) * share)
            if survival < self._worth:
                return depth
        return len(shares)

    def made(self, *, trial: bool) -> None:
        """Record that this step has drafts."""
        if not trial:
            self._wait = FIRST_WAIT
        self._idle = 0

    def failed_trial(self) -> None:
        """Record that nothing of a trial was accepted."""
        self._wait = min(LAST_WAIT, 2 * self._wait)


# --- drafts of sequences ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Outlook:
    """History of a sequence."""

    prompt: int
    """Hash of its prompt."""
    failures: int = 0
    paused_until: int = 0
    """Number of the step from which on it is looked at again."""


@dataclass(frozen=True, eq=False)
class _Draft:
    sequence: Sequence
    row: int
    matched: int
    tokens: list[int]
    shares: list[float]


class Drafter:
    """Drafts of one scheduler's sequences."""

    def __init__(self, queues: Queues, cost: StepCost) -> None:
        self._queues = queues
        self._history = CompletionHistory()
        self._budget = DraftBudget(cost)
        self._outlooks: WeakKeyDictionary[Sequence, _Outlook] = WeakKeyDictionary()
        self._made: list[_Draft] = []
        self._trial = False
        self._step = 0

    def draft(self, rows: IntArray, room: int) -> IntArray | None:
        """Write drafts for a step of decodes behind the tokens of their rows and reserve their blocks.

        Args:
            rows: the decoding rows.
            room: most draft tokens of all together.

        Returns:
            [len(rows)] int32 draft tokens of each row; None if there is no draft.
        """
        self._made, self._step = [], self._step + 1
        if room <= 0 or not self._budget.start(len(rows)):
            return None
        self._trial = self._budget.trial_due
        table, counts, live = self._queues.table, np.zeros(len(rows), np.int32), dict[int, list[Sequence]]()
        due = [index for index, each in self._candidates(rows) if self._outlook(each).paused_until <= self._step]
        for each in self._queues.decoding if due else ():
            live.setdefault(self._outlook(each).prompt, []).append(each)
        for index in due[:SEARCHES]:
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
        self._budget.made(trial=self._trial)
        return counts

    def idle_steps(self, rows: IntArray) -> int:
        """How many steps of these rows, the present one included, can be made before drafts are looked for again."""
        if self._budget.idle_steps:
            return 1 + self._budget.idle_steps
        until = min((self._outlook(each).paused_until for _, each in self._candidates(rows)), default=0)
        return max(1, until - self._step)

    def skip(self, steps: int) -> None:
        """Count steps that were made without a look for drafts."""
        self._step += steps
        self._budget.skip(steps)

    def learn(self, accepted: dict[int, int]) -> None:
        """Take in how many draft tokens of each row the last step accepted."""
        counters = self._queues.counters
        for made in self._made:
            kept = accepted[made.row]
            counters["draft_tokens"] += len(made.tokens)
            counters["draft_tokens_accepted"] += kept
            counters["drafts"] += 1
            self._budget.acceptance.learn(made.matched, made.shares, kept)
            if kept:
                self._outlook(made.sequence).failures = 0
            else:
                self._pause(made.sequence)
        if self._trial and self._made and not any(accepted[made.row] for made in self._made):
            self._budget.failed_trial()
        self._made = []

    def keep(self, sequence: Sequence) -> None:
        """Keep the completion of an active sequence that ends, for later requests with its prompt."""
        self._history.add(self._outlook(sequence).prompt, self._piece(sequence.row))

    def _candidates(self, rows: IntArray) -> list[tuple[int, Sequence]]:
        """Index in `rows` and sequence of each row that may have drafts.

        A constrained row has none: its mask at a position would need the drafts before it to be taken, and taken back.
        """
        sequences = map(self._queues.by_row.__getitem__, rows.tolist())
        return [(index, each) for index, each in enumerate(sequences) if each.params.structured is None]

    def _find(self, row: int, room: int, live: dict[int, list[Sequence]]) -> _Draft | None:
        table, sequence = self._queues.table, self._queues.by_row[row]
        length, prompt = table.length.item(row), self._outlook(sequence).prompt
        # A row that accepts all of its drafts gets one token more.
        most = min(MAX_DRAFT, room, table.max_length.item(row) - length - 1)
        if most <= 0:
            return None
        context = table.tokens[row, :length]
        siblings = [self._piece(each.row) for each in live[prompt] if each is not sequence]
        corpus = np.concatenate([joined([context, *siblings]), self._history.of(prompt)])
        after, matched = matches(corpus, context)
        tokens, shares = continuation(corpus, after, most) if matched else ([], [])
        # An image of the prompt may be what followed; its keys are no tokens.
        real = next((place for place, token in enumerate(tokens) if token < 0), len(tokens))
        count = self._budget.length(matched, shares[:real])
        if not count and self._trial:
            count = min(TRIAL, real)
        elif count:
            self._trial = False
        if not count:
            self._pause(sequence)
            return None
        return _Draft(sequence, row, matched, tokens[:count], shares[:count])

    def _piece(self, row: int) -> IntArray:
        table = self._queues.table
        return table.tokens[row, max(0, table.origin.item(row) - MAX_MATCH) : table.length.item(row)]

    def _outlook(self, sequence: Sequence) -> _Outlook:
        found = self._outlooks.get(sequence)
        if found is None:
            prompt = self._queues.table.tokens[sequence.row, : self._queues.table.origin.item(sequence.row)]
            found = self._outlooks[sequence] = _Outlook(hash(prompt.tobytes()))
        return found

    def _reserve(self, found: _Draft) -> bool:
        """Reserve blocks for the drafts if enough are free, one of them left to each sequence."""
        queues = self._queues
        size, count = queues.table.block_size, 1 + len(found.tokens)
        fresh = -(-count // size) + queues.num_active
        return queues.allocator.can_allocate(fresh) and queues.blocks.reserve(found.row, count)

    def _pause(self, sequence: Sequence) -> None:
        outlook = self._outlook(sequence)
        outlook.failures += 1
        outlook.paused_until = self._step + 1 + min(LAST_PAUSE, outlook.failures // PATIENCE)
