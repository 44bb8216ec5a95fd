"""The agreement of several ranks on whether to start an operation together: one atomic decision in the job's store.

Every rank gets the same decision, which may be a refusal. The next attempt uses new keys. Gathering sharded weights requires
such an agreement, because a rank that gathered alone would block in the process group until the group's timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rollout.distributed.job.world import LOOK_S, World
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import DeadlineError
from rollout.threads.interrupts import interrupt_deferred, interrupt_pending

GO = b"go"
INTERRUPTED = " was interrupted"
"""The words in a decision which report that Ctrl-C was pressed on a waiting rank."""
Judge = Callable[[list[bytes]], str | None]


def agree(values: list[bytes]) -> str | None:
    """Return None for any `values`, so that the operation starts. This is the default `judge` of `Meeting.meet`."""
    return None


class Meeting:
    """A sequence of agreements among the same ranks, each on whether to start one operation.

    Args:
        world: the ranks.
        what: prefix of the keys in the store.
        names: names of the ranks in messages; if None, "rank" and the rank's number.
    """

    def __init__(self, world: World, what: str, names: Sequence[str] | None = None) -> None:
        self.world = world
        self._names = names or [f"rank {rank}" for rank in range(world.size)]
        self._what = what
        self._number = 0

    def meet(self, timeout_s: float, value: bytes = b"here", judge: Judge = agree) -> bytes:
        """Wait for the other ranks; return the decision: `GO` to start the operation, or the reason not to start it.

        The last rank to arrive calls `judge` and publishes the decision. If there is no decision yet, a rank that has waited
        `timeout_s` or has a Ctrl-C pending decides not to start.

        Args:
            timeout_s: seconds to wait for the other ranks.
            value: this rank's value, which is passed to `judge`.
            judge: a function that is called with the values of all ranks, in rank order. It returns None to start, or the
                reason not to start. It must be the same on all ranks.
        """
        world = self.world
        while world.is_published(self._decision):
            # Join the next attempt, because this attempt was decided before this rank arrived.
            self._number += 1
        world.publish(self._place(world.rank), value)
        if not self._late():
            values = [world.wait_for(self._place(rank), timeout_s) for rank in range(world.size)]
            against = judge(values)
            world.settle(self._decision, GO if against is None else against.encode())
        deadline = time.monotonic() + timeout_s
        while not world.wait_until(self._decision, min(LOOK_S, deadline - time.monotonic())):
            if interrupt_pending() or time.monotonic() >= deadline:
                late = ", ".join(self._late())
                mine = self._names[world.rank]
                why = f"{mine}{INTERRUPTED}" if interrupt_pending() else f"{late} did not come"
                world.settle(self._decision, f"{why} within {timeout_s:g} s of {mine}".encode())
        decision = world.wait_for(self._decision, timeout_s)
        self._number += 1
        return decision

    @property
    def _decision(self) -> str:
        return f"{self._what}/{self._number}"

    def _place(self, rank: int) -> str:
        return f"{self._what}/{self._number}/rank-{rank}"

    def _late(self) -> list[str]:
        world = self.world
        return [name for rank, name in enumerate(self._names) if not world.is_published(self._place(rank))]


class Gathering:
    """One engine's weights, gathered from all ranks' shards and released at the end of the outermost `held` block.

    Args:
        engine: the engine whose weights are gathered.
        meet: a function that takes the name of a call and waits until all ranks are at this call's barrier; without a
            coordinator it does nothing. After the barrier the ranks also agree through the store, because a rank that
            timed out at the barrier still counts as arrived there.
        world: the ranks that gather together; None if this rank can gather its weights alone.
        calls: the calls that every rank must make, for error messages.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        meet: Callable[[str], object],
        world: World | None,
        calls: str = "generate(), with an empty list where it has no prompts",
    ) -> None:
        self._calls = calls
        self._engine = engine
        self._meet_at_barrier = meet
        self._meeting = None if world is None else Meeting(world, "gather")
        self._holders = 0

    @property
    def collective(self) -> bool:
        """Whether the ranks must agree before gathering."""
        return self._meeting is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep weights that are gathered inside this `with` block until the outermost `held` block ends."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._engine.guard.release()

    def ensure(self) -> None:
        """Gather the weights if they are not gathered, together with all other ranks if gathering is collective.

        Raises:
            DeadlineError: some ranks, which the message names, did not arrive within `control_timeout_s`. All ranks that
                have arrived raise this error.
            EngineStateError: some ranks are at the barrier of another call. All ranks raise this error.
        """
        if self._engine.weights.ready:
            return
        if self._meeting is not None:
            self._meet_at_barrier("generate(): gather_weights")
        with interrupt_deferred():
            if self._meeting is None or self._meet(self._meeting, self._engine.config.advanced.control_timeout_s):
                self._engine.guard.gather()

    def _meet(self, meeting: Meeting, timeout_s: float) -> bool:
        """Return True if all ranks agree to gather, False if Ctrl-C interrupted the wait; else raise `DeadlineError`."""
        decision = meeting.meet(timeout_s)
        if decision == GO:
            return True
        if interrupt_pending():
            return False
        raise DeadlineError(
            f"rank {meeting.world.rank}: the weights are sharded and were not gathered, for {decision.decode()}; every rank "
            f"must call {self._calls} (if one only needs longer: Advanced.control_timeout_s)"
        )
