"""Gathers sharded weights on all ranks for the length of a `generate`, or on none.

Gathering is a collective operation: a rank that entered it alone would block in the process group until its timeout. So
the ranks agree before: first at the coordinator's barrier, if there is one, where waiting is cheap; then by one atomic
decision in the store: the last rank to arrive writes `go`, a rank that has waited too long writes why not. (The barrier
alone is not enough: a rank that has arrived and given up still counts as arrived.) Always true: a decision holds for all
ranks; after a refusal every waiting rank raises `DeadlineError`, and the next attempt uses a new key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout.distributed.job.world import World
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import DeadlineError
from rollout.threads.interrupts import interrupt_deferred, interrupt_pending

_GO = b"go"
LOOK_S = 5.0
"""Polling interval for Ctrl-C while waiting for the other ranks."""


class Gathering:
    """Gathered weights of one manager's engine, held by nested `held` blocks.

    Args:
        meet: barrier of all ranks, called with the name of the call; a no-op without a coordinator.
        world: the ranks; None: a single rank, or weights that are gathered without the others.
    """

    def __init__(self, engine: DynamicInferenceEngine, meet: Callable[[str], object], world: World | None) -> None:
        self._engine = engine
        self._meet_at_barrier = meet
        self._world = world
        self._holders = 0
        self._meetings = 0

    @property
    def collective(self) -> bool:
        """Whether the ranks must agree before gathering."""
        return self._world is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager: weights gathered inside are kept until the outermost such block ends."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._engine.release_weights()

    def ensure(self) -> None:
        """Gather the weights if they are not, together with all other ranks if that is collective.

        Raises:
            DeadlineError: some ranks did not arrive within `control_timeout_s`; names them. Raised on all that did.
            EngineStateError: some ranks are at the barrier of another call; raised on all.
        """
        if self._engine.weights.ready:
            return
        if self._world is not None:
            self._meet_at_barrier("generate(): gather_weights")
        with interrupt_deferred():
            if self._world is None or self._meet(self._world, self._engine.config.control_timeout_s):
                self._engine.gather_weights()

    def _meet(self, world: World, timeout_s: float) -> bool:
        """Agree with the other ranks to gather; False: interrupted by Ctrl-C."""
        while world.is_published(self._decision):
            # Decided before this rank arrived: that attempt is over.
            self._meetings += 1
        world.publish(self._place(world.rank), b"here")
        if not (late := self._late(world)):
            world.settle(self._decision, _GO)
        deadline = time.monotonic() + timeout_s
        while not world.wait_until(self._decision, min(LOOK_S, deadline - time.monotonic())):
            if interrupt_pending() or time.monotonic() >= deadline:
                late = self._late(world)
                why = f"rank {world.rank} was interrupted" if interrupt_pending() else f"{', '.join(late)} did not come"
                world.settle(self._decision, f"{why} within {timeout_s:g} s of rank {world.rank}".encode())
        decision = world.wait_for(self._decision, timeout_s)
        self._meetings += 1
        if decision == _GO:
            return True
        if interrupt_pending():
            return False
        raise DeadlineError(
            f"rank {world.rank}: the weights are sharded and were not gathered, for {decision.decode()}; every rank must "
            "call generate(), with an empty list where it has no prompts (where it only needs longer: "
            "InferenceConfig.control_timeout_s)"
        )

    @property
    def _decision(self) -> str:
        return f"gather/{self._meetings}"

    def _place(self, rank: int) -> str:
        return f"gather/{self._meetings}/rank-{rank}"

    def _late(self, world: World) -> list[str]:
        return [f"rank {rank}" for rank in range(world.size) if not world.is_published(self._place(rank))]
