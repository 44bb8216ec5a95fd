"""Agreement of several ranks to begin something together, or not: one atomic decision in the job's store.

Always true: a decision holds for all ranks; after a refusal every rank that waits gets it, and the next attempt uses new
keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rollout.distributed.job.world import LOOK_S, World
from rollout.threads.interrupts import interrupt_pending

GO = b"go"
INTERRUPTED = " was interrupted"
"""In a decision: Ctrl-C on a rank that waited."""
Judge = Callable[[list[bytes]], str | None]


def agree(values: list[bytes]) -> str | None:
    """The judge to whom all values are right."""
    return None


class Meeting:
    """Repeated meetings of the same ranks.

    Args:
        what: of the keys in the store.
        names: of the ranks, for messages; None: "rank" and the number.
    """

    def __init__(self, world: World, what: str, names: Sequence[str] | None = None) -> None:
        self.world = world
        self._names = names or [f"rank {rank}" for rank in range(world.size)]
        self._what = what
        self._number = 0

    def meet(self, timeout_s: float, value: bytes = b"here", judge: Judge = agree) -> bytes:
        """Wait for the other ranks; returns `GO`, or why not.

        The last rank to arrive decides; one that has waited for too long, or has a Ctrl-C pending, decides against.

        Args:
            value: of this rank, for the judge.
            judge: says what is wrong with the values of all ranks, in their order; the same on all ranks.
        """
        world = self.world
        while world.is_published(self._decision):
            # Decided before this rank arrived: that attempt is over.
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
