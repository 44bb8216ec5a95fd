"""How many draft tokens pay: measured cost of a position in a step against measured acceptance.

A step of P positions takes a + b·P seconds, fitted to the recent steps. With R rows and no drafts a token takes
(a + b·R) / R, which is what an accepted draft saves, and each draft costs b. So a draft is worth making while

    probability that it and those before it are accepted · (a + b·R) / R  ≥  MARGIN · b

Where a step is bandwidth-bound a is large and R small, and long drafts pay; in a full batch none does. No tensors, no clock.
"""

from __future__ import annotations

from rollout.engine.scheduling.draft_sources import MAX_MATCH

MARGIN = 1.3
"""How much more a draft must promise than it costs: finding and checking it takes time outside of the forward."""
MAX_DRAFT = 24
"""Most draft tokens of a sequence in one step."""
TRIAL = 2
"""Draft tokens of a trial."""
FIRST_WAIT, LAST_WAIT = 16, 1024
"""Steps without drafts until a trial; doubled by each trial that fails."""

_KEPT_OF_COSTS = 0.97
_KEPT_OF_TRIES = 0.98
_PRIOR_POSITIONS = 16.0
"""Without measurements a position beyond those of the rows costs the time of a step / (rows + 16)."""
_PRIOR_WEIGHT = 4.0
_PRIOR_TRIES = 2.0
_OUTLIER = 3.0


class StepCost:
    """Seconds of a step as a + b·positions: least squares over recent steps, forgetting, with a prior for b."""

    def __init__(self) -> None:
        self._weight = self._positions = self._seconds = 0.0
        self._variance = self._covariance = 0.0

    @property
    def known(self) -> bool:
        """Whether a step was observed."""
        return self._weight > 0

    def observe(self, positions: int, seconds: float) -> None:
        """Take in one step. One that took much longer than expected, as others used the machine, counts in part."""
        if _OUTLIER * seconds < self.step(positions):
            # What is known is of slower times: the first step may compile kernels and capture graphs.
            self._weight = self._positions = self._seconds = 0.0
        elif self._weight > 1:
            seconds = min(seconds, _OUTLIER * self.step(positions))
        kept = _KEPT_OF_COSTS
        self._weight = kept * self._weight + 1
        x, y = positions - self._positions, seconds - self._seconds
        gain = 1 / self._weight
        self._positions += gain * x
        self._seconds += gain * y
        # Of the first step the gain is 1.
        self._variance = (1 - gain) * (self._variance + gain * x * x)
        self._covariance = (1 - gain) * (self._covariance + gain * x * y)

    @property
    def position(self) -> float:
        """Seconds of one more position."""
        prior = self._seconds / (self._positions + _PRIOR_POSITIONS)
        slope = (self._covariance + _PRIOR_WEIGHT * prior) / (self._variance + _PRIOR_WEIGHT)
        most = self._seconds / max(1.0, self._positions)
        return min(most, max(0.002 * self._seconds, slope))

    def step(self, positions: int) -> float:
        """Seconds of a step of so many positions; 0 before the first observation."""
        return max(0.0, self._seconds + self.position * (positions - self._positions))


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
            accepted: how many of them were accepted; the one behind these was rejected, the others are unknown.
        """
        for depth, share in enumerate(shares[: accepted + 1]):
            at = min(matched + depth, MAX_MATCH)
            self._hits[at] = _KEPT_OF_TRIES * self._hits[at] + (depth < accepted)
            self._tries[at] = _KEPT_OF_TRIES * self._tries[at] + share


class DraftBudget:
    """Lengths of drafts, and when to try again where none paid."""

    def __init__(self, cost: StepCost | None = None) -> None:
        self.cost = cost or StepCost()
        self.acceptance = Acceptance()
        self._worth = 0.0
        self._idle = 0
        self._wait = FIRST_WAIT

    def start(self, rows: int) -> bool:
        """Start a step of so many rows; returns whether any draft could pay, or a trial is due."""
        price = MARGIN * self.cost.position
        saved = self.cost.step(rows) / rows
        # With a clock that stands still nothing costs anything, and every draft pays.
        self._worth = price / saved if saved > 0 else 0.0
        self._idle += 1
        return self._worth < 1 or self.trial_due

    @property
    def trial_due(self) -> bool:
        """Whether so long no draft was made that one is to be tried even if it promises too little."""
        return self._idle > self._wait

    @property
    def idle_steps(self) -> int:
        """How many steps with the rows of this one no draft could pay in, up to the next trial."""
        return 0 if self._worth < 1 else max(0, self._wait - self._idle)

    def skip(self, steps: int) -> None:
        """Note steps without drafts that were not started here."""
        self._idle += steps

    def length(self, matched: int, shares: list[float]) -> int:
        """How many of the draft tokens with these shares of the votes, behind a match of `matched` tokens, pay."""
        survival = 1.0
        for depth, share in enumerate(shares):
            survival *= min(1.0, self.acceptance.of(matched + depth) * share)
            if survival < self._worth:
                return depth
        return len(shares)

    def made(self, *, trial: bool) -> None:
        """Note that this step has drafts."""
        if not trial:
            self._wait = FIRST_WAIT
        self._idle = 0

    def failed_trial(self) -> None:
        """Note that nothing of a trial was accepted."""
        self._wait = min(LAST_WAIT, 2 * self._wait)
