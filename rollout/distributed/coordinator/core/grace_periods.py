"""Grace periods of the job: without a ready rank, of ranks that are idle or behind, of requests that no rank is new enough
for. No I/O; the clock is passed in.
"""

from __future__ import annotations

from typing import cast

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.control import MAX_NAMES
from rollout.distributed.coordinator.core.dispatch import Dispatcher
from rollout.distributed.coordinator.core.peers import Peers
from rollout.distributed.coordinator.core.request_table import RequestTable

EXPECTED_INTERVALS = 2
"""Grace period, in heartbeat intervals, of a rank that is idle or has older weights while others compute. In
deterministic mode it is `heartbeat_timeout_s`."""


class GracePeriods:
    """Measures what is missing since when, and acts when it has been missing for too long."""

    def __init__(self, config: CoordinatorConfig, peers: Peers, dispatcher: Dispatcher, requests: RequestTable) -> None:
        self._config = config
        self._peers = peers
        self._dispatcher = dispatcher
        self._requests = requests
        self._without_rank_since: float | None = None

    def look(self, now: float) -> None:
        """Start or end the period without a ready rank."""
        self._without_rank_since = _since(self._without_rank_since, not self._dispatcher.any_rank_ready, now)

    def give_up_requests(self, now: float) -> None:
        """Fail the requests that have waited `no_rank_timeout_s` for any rank, or for one of a newer version."""
        limit = self._config.no_rank_timeout_s
        if self._without_rank_since is not None and now - self._without_rank_since >= limit:
            here = f"{len(self._peers.ranks)} of data_parallel_size={self._config.data_parallel_size} are here"
            why = f"there has been no rank that is ready for {limit} s (no_rank_timeout_s); {here}"
            for request in self._requests:
                if request.queued:
                    self._requests.fail(request, "RequestTimeoutError", why)
        for request in list(self._dispatcher.too_new):
            request.too_new_since = _since(request.too_new_since, True, now)
            if not request.closed and now - cast(float, request.too_new_since) >= limit:
                version = request.newest_version
                missing = f"no rank has reached policy version {version}, of its tokens or its asker,"
                if any(rank.policy_version >= version for rank in self._peers.ranks.values()):
                    missing = f"all ranks are ahead of policy version {version} of its asker, which catches up,"
                why = f"{missing} for {limit} s (no_rank_timeout_s); {self._versions()}"
                self._requests.fail(request, "RequestTimeoutError", why)
        self._dispatcher.too_new = [request for request in self._dispatcher.too_new if not request.closed]

    def _versions(self) -> str:
        ranks = sorted((rank.name, rank.policy_version) for rank in self._peers.ranks.values())
        named = ", ".join(f"{name} has {version}" for name, version in ranks[:MAX_NAMES])
        return named + (f" and {len(ranks) - MAX_NAMES} more ranks have others" if len(ranks) > MAX_NAMES else "")

    def set_away(self, now: float) -> None:
        """Update the ranks that are away: idle or behind while others compute, for longer than the grace period."""
        ranks = list(self._peers.ranks.values())
        computing = [rank.policy_version for rank in ranks if rank.ready and not rank.resting]
        newest = max(computing, default=0)
        for rank in ranks:
            behind = rank.resting or rank.policy_version < newest
            rank.waited_for_since = _since(rank.waited_for_since, bool(computing) and behind, now)
        config = self._config
        patience = EXPECTED_INTERVALS * config.heartbeat_interval_s
        before = now - (config.heartbeat_timeout_s if config.deterministic_mode else patience)
        self._dispatcher.set_away(
            [rank for rank in ranks if rank.waited_for_since is not None and rank.waited_for_since <= before]
        )


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before
