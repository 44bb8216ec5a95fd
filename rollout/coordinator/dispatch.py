"""From queued samples to assignments: whose turn it is, where they go, what becomes of them when a rank is lost.

Always true: a sample that is open is queued or in exactly one assignment; the router's count of a rank's samples is the
number of open samples assigned to it; an attempt is never used twice. No I/O, no clock.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from rollout.block_hash import compute_block_hashes_batched
from rollout.config import CoordinatorConfig
from rollout.coordinator.lazy_heap import LazyHeap
from rollout.coordinator.open_requests import Assignment, OpenRequest, RankPeer
from rollout.coordinator.peers import Peers
from rollout.coordinator.routing import Placement, Router
from rollout.protocol import Assign, Cancel
from rollout.state import PrefixCachingCoordinatorPolicy
from rollout.wire_types import TOKEN_BYTES

MAX_BLOCKS = 1 << 13
"""Of a prompt, looked at: where so many agree, the rest hardly decides, and each costs fifty times its tokens."""


class ScheduleRecord(NamedTuple):
    """One routing decision."""

    request_id: int
    rank_index: int
    num_hashes: int
    num_matched: int


class Dispatcher:
    """The queue of requests and the ranks they go to."""

    def __init__(self, config: CoordinatorConfig, peers: Peers) -> None:
        policy = config.prefix_caching_coordinator_policy
        if not config.enable_prefix_caching and policy is not PrefixCachingCoordinatorPolicy.ROUND_ROBIN:
            policy = PrefixCachingCoordinatorPolicy.LOAD_BALANCED
        self.router = Router(
            policy,
            alpha=config.prefix_caching_routing_alpha,
            max_hashes_per_rank=config.max_hashes_per_rank,
            deterministic=config.deterministic_mode,
            data_parallel_size=config.data_parallel_size,
        )
        self.decisions: list[ScheduleRecord] = []
        self.too_new: list[OpenRequest] = []
        """Requests with tokens of a version that no rank has reached."""
        self._deterministic = config.deterministic_mode
        self._block_size = config.block_size_tokens
        self._peers = peers
        self._queue = LazyHeap[OpenRequest](lambda request: bool(request.queued))
        self._unready: set[str] = set()
        self._oldest_version = 0
        """The lowest policy version of any rank."""
        self._next_attempt = 1

    @property
    def queued_samples(self) -> int:
        """Samples that no rank has."""
        return sum(len(request.queued) for request in {*self._queue, *self.too_new})

    @property
    def somebody_ready(self) -> bool:
        """Whether anybody gets work at all, be it now or when there is room."""
        if self._deterministic:
            # Who is there already would depend on timing.
            return self.router.complete and bool(self._peers.ranks) and not self._unready
        return len(self._peers.ranks) > len(self._unready)

    # --- ranks ------------------------------------------------------------------------------------------------------

    def add_rank(self, rank: RankPeer, hashes: list[int]) -> None:
        """A rank has registered; it gets nothing until `rank_moved` says that it is ready."""
        self.router.add_rank(rank.name, rank.slots)
        self.router.reported(rank.name, hashes, (), False)
        self._look_at_ranks()

    def rank_moved(self) -> None:
        """A rank has become ready, or reached another version: more may be able to go on."""
        self._look_at_ranks()
        waiting, self.too_new = self.too_new, []
        for request in waiting:
            self.enqueue(request)

    def remove_rank(self, rank: RankPeer) -> list[OpenRequest]:
        """A rank is lost: what it had is queued again, in its old place.

        Returns:
            The requests it had samples of.
        """
        self.router.remove_rank(rank.name)
        affected: dict[int, OpenRequest] = {}
        for assignment in rank.assignments.values():
            request = assignment.request
            del request.assignments[assignment.attempt]
            request.queued |= assignment.samples
            affected[request.request_id] = request
        rank.assignments.clear()
        for request in affected.values():
            self.enqueue(request)
        self._look_at_ranks()
        return list(affected.values())

    def _look_at_ranks(self) -> None:
        ranks = self._peers.ranks.values()
        self._unready = {rank.name for rank in ranks if not rank.ready}
        self._oldest_version = min((rank.policy_version for rank in ranks), default=0)

    # --- requests ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: OpenRequest) -> None:
        """Queue the samples of a request that no rank has; higher priority first, then in order of arrival.

        In deterministic mode the order of arrival alone counts, and nobody overtakes a text that is being tokenised:
        what else waits here depends on timing.
        """
        if request.queued and not request.in_queue and (request.prompt is not None or self._deterministic):
            request.in_queue = True
            self._queue.put((0 if self._deterministic else -request.priority, request.request_id), request)

    def dispatch(self) -> None:
        """Give queued samples to ranks until nobody has room."""
        while self.somebody_ready and (request := self._queue.head()) is not None and request.prompt is not None:
            exclude = self._unready
            if request.newest_version > self._oldest_version:
                exclude = exclude | {
                    rank.name for rank in self._peers.ranks.values() if rank.policy_version < request.newest_version
                }
                if len(exclude) == len(self._peers.ranks):
                    self._take_head()
                    self.too_new.append(request)
                    continue
            placements = self.router.place(self._hashes(request), len(request.queued), exclude=exclude)
            if not placements:
                return
            self._take_head()
            samples = sorted(request.queued)
            request.queued.clear()
            request.too_new_since = None
            for placement in placements:
                self._place(request, placement, samples[: placement.samples])
                del samples[: placement.samples]

    def ended(self, assignment: Assignment, samples: list[int]) -> None:
        """Some samples of an assignment have ended."""
        assignment.samples.difference_update(samples)
        self.router.ended(assignment.rank.name, len(samples))
        if not assignment.samples:
            self._forget(assignment)

    def cancel(self, request: OpenRequest) -> None:
        """Nobody waits for this request any more."""
        request.queued.clear()
        for assignment in list(request.assignments.values()):
            self._peers.say(assignment.rank, Cancel(request.request_id, assignment.attempt))
            self.ended(assignment, list(assignment.samples))

    def _take_head(self) -> None:
        self._queue.pop().in_queue = False

    def _hashes(self, request: OpenRequest) -> list[int]:
        if request.hashes is None:
            if not self.router.hashes_wanted():
                return []
            most = MAX_BLOCKS * self._block_size * TOKEN_BYTES
            prompt = np.frombuffer(cast(bytes, request.prompt)[:most], "<i4")
            request.hashes = compute_block_hashes_batched(prompt, self._block_size)
        return request.hashes

    def _place(self, request: OpenRequest, placement: Placement, samples: list[int]) -> None:
        rank = self._peers.rank_named(placement.rank)
        index, blocks = self.router.index(rank.name), len(request.hashes or [])
        self.decisions.append(ScheduleRecord(request.request_id, index, blocks, placement.matched))
        for portion in request.portions(samples):
            self._assign(request, rank, portion)

    def _assign(self, request: OpenRequest, rank: RankPeer, samples: list[int]) -> None:
        hashes = request.hashes or []
        claim = self.router.assigned(rank.name, hashes, len(samples))
        assignment = Assignment(self._next_attempt, request, rank, set(samples), claim)
        self._next_attempt += 1
        request.assignments[assignment.attempt] = rank.assignments[assignment.attempt] = assignment
        self._peers.say(
            rank,
            Assign(
                request.request_id,
                assignment.attempt,
                samples,
                cast(bytes, request.prompt),
                request.params,
                request.seed,
                request.priority,
                request.arrival_time,
                request.interval,
                request.known(assignment.samples) if request.rows else [],
            ),
        )

    def _forget(self, assignment: Assignment) -> None:
        del assignment.request.assignments[assignment.attempt]
        del assignment.rank.assignments[assignment.attempt]
        self.router.released(assignment.claim)
