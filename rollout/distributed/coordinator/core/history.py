"""The coordinator's latest decisions with their times, for traces: assignments, ranks, states, versions, barriers.

Always true: at most `MAX_DECISIONS` are kept, the latest. No I/O; the clock is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from rollout.distributed.coordinator.core.control import Barriers, ControlPlane
from rollout.distributed.coordinator.core.dispatch import ScheduleRecord
from rollout.distributed.coordinator.core.peers import Peers

MAX_DECISIONS = 8192


class History:
    """Reads once per turn what the core's parts have decided.

    Args:
        peers, control, barriers: of the core.
    """

    def __init__(self, peers: Peers, control: ControlPlane, barriers: Barriers) -> None:
        self._peers = peers
        self._control = control
        self._barriers = barriers
        self._kept: deque[tuple[float, ScheduleRecord | tuple[str, dict[str, Any]]]] = deque(maxlen=MAX_DECISIONS)
        self._state = control.state
        self._version = control.policy_version
        self._passed = barriers.passed

    def turn_ends(self, assigned: Sequence[ScheduleRecord], now: float) -> None:
        """Keep the decisions of a turn: its assignments, and what differs from the turn before."""
        keep = self._kept.append
        for joined, name in self._peers.take_rank_changes():
            keep((now, ("rank joined" if joined else "rank left", {"rank": name})))
        if self._control.state is not self._state:
            self._state = self._control.state
            keep((now, (f"job {self._state.value}", {})))
        if self._control.policy_version != self._version:
            self._version = self._control.policy_version
            keep((now, (f"version {self._version}", {"version": self._version})))
        # As they are: what a trace says of them is made when one is asked for.
        for each in assigned:
            keep((now, each))
        if self._barriers.passed != self._passed:
            self._passed = self._barriers.passed
            keep((now, ("barrier passed", {"barrier": self._passed})))

    def last(self, seconds: float, now: float) -> list[list[Any]]:
        """[age in seconds, name, arguments] of the decisions of that many last seconds, in order."""
        return [[now - at, *_described(kept)] for at, kept in self._kept if at >= now - seconds]


def _described(kept: ScheduleRecord | tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    if not isinstance(kept, ScheduleRecord):
        return kept
    return "assign" if kept.first else "assign more", {
        "request": kept.request_id, "rank": kept.rank, "samples": kept.samples,
        "prompt_blocks": kept.num_hashes, "cached_blocks": kept.num_matched,
    }  # fmt: skip
