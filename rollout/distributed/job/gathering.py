"""Gathers sharded weights on all ranks for the length of a `generate`, or on none.

Gathering is a collective operation: a rank that entered it alone would block in the process group until its timeout. So
the ranks agree before: first at the coordinator's barrier, if there is one, where waiting is cheap; then by one atomic
decision in the store (`Meeting`). (The barrier alone is not enough: a rank that has arrived and given up still counts as
arrived.) Always true: after a refusal every waiting rank raises `DeadlineError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout.distributed.job.meeting import GO, Meeting
from rollout.distributed.job.world import World
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import DeadlineError
from rollout.threads.interrupts import interrupt_deferred, interrupt_pending


class Gathering:
    """Gathered weights of one manager's engine, held by nested `held` blocks.

    Args:
        meet: barrier of all ranks, called with the name of the call; a no-op without a coordinator.
        world: the ranks; None: a single rank, or weights that are gathered without the others.
        calls: what every rank must call, for messages.
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
        """Context manager: weights gathered inside are kept until the outermost such block ends."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._engine.guard.release()

    def ensure(self) -> None:
        """Gather the weights if they are not, together with all other ranks if that is collective.

        Raises:
            DeadlineError: some ranks did not arrive within `control_timeout_s`; names them. Raised on all that did.
            EngineStateError: some ranks are at the barrier of another call; raised on all.
        """
        if self._engine.weights.ready:
            return
        if self._meeting is not None:
            self._meet_at_barrier("generate(): gather_weights")
        with interrupt_deferred():
            if self._meeting is None or self._meet(self._meeting, self._engine.config.advanced.control_timeout_s):
                self._engine.guard.gather()

    def _meet(self, meeting: Meeting, timeout_s: float) -> bool:
        """Agree with the other ranks to gather; False: interrupted by Ctrl-C."""
        decision = meeting.meet(timeout_s)
        if decision == GO:
            return True
        if interrupt_pending():
            return False
        raise DeadlineError(
            f"rank {meeting.world.rank}: the weights are sharded and were not gathered, for {decision.decode()}; every rank "
            f"must call {self._calls} (where it only needs longer: Advanced.control_timeout_s)"
        )
