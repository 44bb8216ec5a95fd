"""Gathers sharded weights on all ranks for the length of a `generate`, or on none.

Gathering is a collective: a rank that entered it alone would wait in the process group for whatever timeout that has. So
the ranks meet before: at the coordinator's barrier, where there is one and waiting costs nothing, then in the store,
where it is decided once, by whoever is first: `go` by the last to come, or off by one that has waited too long. (The
barrier alone will not do: whoever has come to it and given up still counts as there.) Always true: what was decided holds
for all; after it is off, every rank that waited has raised a `DeadlineError`, and the next attempt is another meeting.
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
"""How soon Ctrl-C is noticed while the others are waited for."""


class Gathering:
    """Of one manager's engine.

    Args:
        meet: a barrier of all ranks where there is one; takes what the wait is for.
        world: the ranks; None: this one is alone, or its weights need nobody else.
    """

    def __init__(self, engine: DynamicInferenceEngine, meet: Callable[[str], object], world: World | None) -> None:
        self._engine = engine
        self._meet_at_barrier = meet
        self._world = world
        self._holders = 0
        self._meetings = 0

    @property
    def collective(self) -> bool:
        """Whether the ranks meet before."""
        return self._world is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Whatever `ensure` gathers inside stays until the end of the outermost such block, however that ends."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._engine.release_weights()

    def ensure(self) -> None:
        """Have whole weights, together with all other ranks where they are needed.

        Raises:
            DeadlineError: some have not come within `control_timeout_s`; names them. It is raised on all that have.
            EngineStateError: some are at the end of a call that another one has given up; raised on all.
        """
        if self._engine.weights.ready:
            return
        if self._world is not None:
            self._meet_at_barrier("generate(): gather_weights")
        with interrupt_deferred():
            if self._world is None or self._meet(self._world, self._engine.config.control_timeout_s):
                self._engine.gather_weights()

    def _meet(self, world: World, timeout_s: float) -> bool:
        """False: Ctrl-C has come instead."""
        while world.is_published(self._decision):
            # Off before this rank came.
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
