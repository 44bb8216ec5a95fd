"""The loop that steps a manager's backend until groups have finished, and records every finished sample."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tqdm import tqdm

from rollout.distributed.job.meeting import Gathering
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import DeadlineError
from rollout.manager.backend import Backend
from rollout.manager.episodes.samples import OpenSamples
from rollout.manager.groups import GroupJournal, GroupLedger
from rollout.manager.telemetry import RolloutMetrics
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from rollout.threads.interrupts import uninterrupted

PATIENCE_S = 0.1
"""Longest single wait of a run with `patient=True`, in seconds. After each wait, episode deadlines are checked."""
BAR_AFTER_S = 2.0
"""Seconds after which a call with `progress=None` shows a progress bar."""
NEWEST_SHARE = 0.5
"""The weight of the newest length in a prompt's running mean; large, because lengths change as the policy changes."""


class LengthBook:
    """The running mean of completion lengths, per prompt and over all prompts.

    A batch takes as long as its longest sample, and a long sample that starts last is computed nearly alone. Prompts repeat
    every epoch, so earlier lengths decide which prompt starts first. The order never changes the samples.

    Args:
        capacity: maximum number of prompts; the least recently sampled prompts are forgotten.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._means: OrderedDict[Hashable, float] = OrderedDict()
        self._overall: float | None = None

    def observe(self, prompt: Hashable, length: int) -> None:
        """Add the completion length of a finished sample to the mean of its prompt."""
        before = self._means.pop(prompt, None)
        self._means[prompt] = length if before is None else before + NEWEST_SHARE * (length - before)
        self._overall = length if self._overall is None else self._overall + 0.01 * (length - self._overall)
        if len(self._means) > self._capacity:
            self._means.popitem(last=False)

    def longest_first(self, prompts: Sequence[Hashable]) -> list[int]:
        """Return the positions of prompts, longest expected completion first; ties keep their order.

        The expected length of a new prompt is the running mean over all prompts.
        """
        overall = self._overall or 0.0
        expected = np.array([self._means.get(prompt, overall) for prompt in prompts], dtype=float)
        order: list[int] = np.argsort(-expected, kind="stable").tolist()
        return order


class Goal(Protocol):
    """The goal of one `RunLoop.run`. Checking it may start new groups and drop others."""

    @property
    def number(self) -> int:
        """The number of groups to wait for, for the progress bar."""

    def ended(self) -> int:
        """Return how many of the groups that count towards `number` have finished."""

    def reached(self) -> bool:
        """Return whether enough groups have finished; called before every step."""


@dataclass(eq=False)
class GroupGoal:
    """The goal that at least `number` groups out of `among` and all groups whose ids `awaited` returns have finished."""

    unfinished: set[int]
    """Ids of unfinished groups; a set that the `GroupLedger` keeps up to date."""
    among: set[int]
    """Ids of the groups that count towards `number`."""
    number: int
    awaited: Callable[[], set[int] | None]
    """A function that returns the ids of groups that must also have finished; None means not known yet. Once `number` groups
    have finished, it is called before every step until it returns ids."""
    _must: set[int] | None = None

    def ended(self) -> int:
        return len(self.among) - len(self.among & self.unfinished)

    def reached(self) -> bool:
        if self.ended() < self.number:
            return False
        if self._must is None:
            self._must = self.awaited()
        return self._must is not None and self._must.isdisjoint(self.unfinished)


class RunLoop:
    """The loop of one manager, with its groups, their journal, and the single completions that environments request.

    Attributes:
        gathering: the object that gathers sharded weights for the duration of a run.
        attended: whether every run involves other ranks, so that this rank has to run even if it has no work.
    """

    attended = False

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        backend: Backend,
        metrics: RolloutMetrics,
        journal: GroupJournal,
        gathering: Gathering,
        ensure_running: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.groups = GroupLedger()
        self.journal = journal
        self.lengths = LengthBook()
        self.gathering = gathering
        self.samples = OpenSamples(backend.wake)
        self._engine = engine
        self._backend = backend
        self._metrics = metrics
        self._ensure_running = ensure_running
        self._clock = clock

    def run(
        self,
        goal: Goal,
        *,
        call: str = "generate",
        progress: bool | None = False,
        timeout_s: float | None = None,
        alone: bool = False,
        patient: bool = False,
    ) -> None:
        """Run engine steps until the goal is reached, and then for the other ranks until all of them have finished.

        Args:
            goal: the goal; it is checked before every step.
            call: name of the manager method that is running, for messages.
            progress: whether to show a progress bar; None shows it only on a terminal, after `BAR_AFTER_S`.
            timeout_s: upper bound on the duration, in seconds, or None for no bound.
            alone: whether to return as soon as the goal is reached, without stepping for other ranks. If so, the engine
                first checks whether the model has changed, because the caller may have used it since `Rounds.follow_model`.
            patient: whether to wait instead of raising while environments or rewards run and nothing can be sampled.

        Raises:
            DeadlineError: `timeout_s` has passed; unfinished groups stay in flight.
        """
        deadline = math.inf if timeout_s is None else self._clock() + timeout_s
        self._metrics.enter_phase("generate")
        try:
            with self.gathering.held(), ExitStack() as phase:
                self.gathering.ensure()
                disable, delay = (None, BAR_AFTER_S) if progress is None else (not progress, 0.0)
                bar = phase.enter_context(
                    tqdm(total=goal.number, desc="rollout", unit="group", leave=False, disable=disable, delay=delay)
                )
                phase.enter_context(self._engine.stepping(follow=alone))

                def left() -> float:
                    if (left := deadline - self._clock()) < 0:
                        raise DeadlineError(
                            f"{call}() passed timeout_s={timeout_s} after {goal.ended()} of {goal.number} groups had "
                            "finished here (other ranks may have more); the rest stays in flight, and the next "
                            f"manager.{call}() continues it"
                        )
                    return left

                def step(longest_s: float) -> None:
                    self._step(min(longest_s, left()), patient)
                    if not bar.disable:
                        bar.set_postfix(running=self._engine.load[0], refresh=False)
                        bar.update(min(goal.ended(), bar.total) - bar.n)

                # Step until the backend agrees to finish: this rank may still have to compute for other ranks.
                self._steps(lambda: goal.reached() and (alone or self._backend.try_finish()), step, left)
        finally:
            self._backend.report_idle()
            self._metrics.enter_phase("train")
            self.sync_metrics()

    def _steps(self, finished: Callable[[], bool], step: Callable[[float], None], left: Callable[[], float]) -> None:
        """Run engine steps until `finished` returns True.

        Args:
            step: function that runs one step, after waiting at most the given number of seconds for work.
            left: function that returns the seconds left until the run's deadline, for waits outside `step`. Once the
                deadline has passed, the function raises `DeadlineError`.
        """
        while not finished():
            step(math.inf)

    def call(self) -> AbstractContextManager[None]:
        """Return a context manager that encloses a manager call, from submitting prompts to returning results."""
        return nullcontext()

    def submitted(self, first: int, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """Record queued prompts, whose groups have the ids `first`, `first + 1`, …"""

    def book(self, samples: Iterable[DynamicInferenceRequest]) -> None:
        """Record samples that were not generated now, because the journal of an earlier run already contained them."""
        for sample in samples:
            self.groups.take(sample)

    def take_ended(self) -> None:
        """Record samples that finished outside of a step. After a `JournalError` the next call writes them again."""
        with uninterrupted(), self._engine.locked():
            self._take(self._backend.take_ended())

    def abort(self, group_ids: Iterable[int]) -> None:
        """Abort groups now, without returning them. Unknown ids are ignored.

        When this returns, the groups' KV blocks on this rank are free. Other ranks free theirs when the abort reaches them.
        """
        with uninterrupted(), self._engine.locked():
            for each in list(group_ids):
                self.groups.drop([each])
                self._backend.abort(each)
            self.take_ended()

    def sync_metrics(self) -> None:
        """Update the manager's counters and gauges from the engine."""
        self._metrics.sync(self._local_samples(), len(self.groups))

    def _local_samples(self) -> int:
        return self._backend.local_samples(self.groups.samples_missing + len(self.samples))

    def _step(self, timeout_s: float, patient: bool) -> None:
        if self.samples:
            with self._engine.locked():
                self.samples.apply(self._backend)
        if patient and self._backend.idle:
            self.samples.wait(min(timeout_s, PATIENCE_S))
            return
        self._backend.wait(min(timeout_s, PATIENCE_S) if patient else timeout_s)
        if self._engine.state is EngineState.SUSPENDED:
            # Resume the engine if the coordinator has released it during the wait. This raises if a user's hold remains.
            self._ensure_running()
        with uninterrupted(), self._engine.locked():
            self._take(self._backend.step())
        self._metrics.step(self._local_samples())

    def _take(self, results: list[DynamicInferenceRequest]) -> None:
        taken = []
        for result in results:
            if self.samples.take(result):
                self._metrics.result(result)
            elif self.groups.take(result):
                taken.append(result)
        for result in taken:
            self._metrics.result(result)
            if result.error is None:
                self.lengths.observe(self.groups[result.request_id].prompt, len(result.generated_tokens))
        self.journal.write(taken, self.groups)
