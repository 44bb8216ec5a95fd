"""Assignment of queued samples to ranks: queue order, routing, and return to the queue when a rank is lost.

Always true: a sample that is open is queued or in exactly one assignment; the router's count of a rank's samples is the
number of open samples assigned to it; an attempt is never used twice; no rank is told of a request that needs newer
weights than the rank has. No I/O, no clock.

Ranks update their weights and come to `generate` one after the other. One that is expected keeps its share: what it cannot
compute yet is held for it. Once it is *away*, the core having waited long enough, its share goes to whoever has room.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import numpy as np

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.heap import LazyHeap
from rollout.distributed.coordinator.core.peers import Peers
from rollout.distributed.coordinator.core.requests import Assignment, OpenRequest, RankPeer
from rollout.distributed.coordinator.core.routing import Placement, Router
from rollout.distributed.protocol.fields import TOKEN_BYTES
from rollout.distributed.protocol.messages import Assign, Cancel
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.state import EngineState, PrefixCachingCoordinatorPolicy

MAX_BLOCKS = 1 << 13
"""Of a prompt, looked at: where so many agree, the rest hardly decides, and each costs fifty times its tokens."""


class ScheduleRecord(NamedTuple):
    """One routing decision."""

    request_id: int
    rank_index: int
    """Among the ranks that are there at that moment, by name."""
    num_hashes: int
    num_matched: int
    rank: str = ""
    """Its name."""
    first: bool = True
    """Of its request: another part of the group, or samples that come back from a rank, are decided on again."""
    version: int = 0
    """Oldest policy version that could compute it when it was decided; not written to the schedule file."""


class Dispatcher:
    """The queue of requests and the ranks they go to."""

    def __init__(self, config: CoordinatorConfig, peers: Peers) -> None:
        policy = config.prefix_caching_coordinator_policy
        if not config.enable_prefix_caching and policy is not PrefixCachingCoordinatorPolicy.ROUND_ROBIN:
            policy = PrefixCachingCoordinatorPolicy.LOAD_BALANCED
        self.policy = policy
        """That decides: without prefix caching not always the one that was asked for."""
        self.router = Router(
            policy,
            alpha=config.prefix_caching_routing_alpha,
            max_hashes_per_rank=config.max_hashes_per_rank,
            deterministic=config.deterministic_mode,
            data_parallel_size=config.data_parallel_size,
        )
        self.decisions: list[ScheduleRecord] = []
        self.too_new: list[OpenRequest] = []
        """Requests that need a version that no rank has reached."""
        self._deterministic = config.deterministic_mode
        self._block_size = config.block_size_tokens
        self._peers = peers
        self._queues: dict[int, LazyHeap[OpenRequest]] = {}
        """By the version they need; 0: every rank will do. Those that must wait for a rank hold up nobody else's."""
        self._unready: set[str] = set()
        self._away: dict[str, RankPeer] = {}
        """Ranks that rest, or have older weights than others, and are not waited for any more."""
        self._oldest_version = 0
        """The lowest policy version of any rank."""
        self._newest_version = 0
        """The highest one of any rank that is ready."""
        self._next_attempt = 1

    @property
    def queued_samples(self) -> int:
        """Samples that no rank has."""
        waiting = {request for queue in self._queues.values() for request in queue}
        return sum(len(request.queued) for request in waiting.union(self.too_new))

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

    def rank_moved(self, rank: RankPeer) -> None:
        """A rank has become ready, or reached another version: it is told what was held, and more may be able to go on."""
        held = [each for each in rank.assignments.values() if each.held and rank.state is not EngineState.STOPPED]
        for assignment in held:
            if rank.policy_version >= assignment.request.newest_version:
                assignment.held = False
                self._tell(assignment)
        self._away.pop(rank.name, None)
        self._look_at_ranks()
        waiting, self.too_new = self.too_new, []
        for request in waiting:
            self.enqueue(request)

    def remove_rank(self, rank: RankPeer) -> list[OpenRequest]:
        """A rank is lost: what it had is queued again, in its old place.

        Returns:
            The requests it was told to compute.
        """
        self.router.remove_rank(rank.name)
        self._away.pop(rank.name, None)
        told: dict[int, OpenRequest] = {}
        for assignment in list(rank.assignments.values()):
            request = assignment.request
            self._forget(assignment)
            request.queued |= assignment.samples
            self.enqueue(request)
            if not assignment.held:
                told[request.request_id] = request
        self._look_at_ranks()
        for other in self._peers.ranks.values():
            for assignment in list(other.assignments.values()):
                if assignment.held and assignment.request.newest_version > self._newest_version:
                    self._take_back(assignment)
                    self.enqueue(assignment.request)
        return list(told.values())

    def set_away(self, away: Iterable[RankPeer]) -> None:
        """These ranks are not waited for: what they do not compute goes to whoever has room for it."""
        self._away = {rank.name: rank for rank in away}
        refused: dict[int, int] = {}
        for rank in list(self._away.values()):
            for assignment in [each for each in rank.assignments.values() if rank.resting or each.held]:
                request, samples = assignment.request, len(assignment.samples)
                version = request.newest_version
                if request.in_queue or version > self._newest_version or samples >= refused.get(version, samples + 1):
                    continue
                if placements := self._placements(request, samples + len(request.queued)):
                    self._take_back(assignment)
                    self._place_all(request, placements)
                else:
                    refused[version] = samples

    def _take_back(self, assignment: Assignment) -> None:
        self._call_off(assignment)
        self.router.ended(assignment.rank.name, len(assignment.samples))
        self._forget(assignment)
        assignment.request.queued |= assignment.samples

    def _look_at_ranks(self) -> None:
        ranks = self._peers.ranks.values()
        self._unready = {rank.name for rank in ranks if not rank.ready}
        self._oldest_version = min((rank.policy_version for rank in ranks), default=0)
        self._newest_version = max((rank.policy_version for rank in ranks if rank.ready), default=0)

    # --- requests ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: OpenRequest) -> None:
        """Queue the samples of a request that no rank has; higher priority first, then in order of arrival.

        In deterministic mode the order of arrival alone counts, and nobody overtakes a text that is being tokenised:
        what else waits here depends on timing.
        """
        if request.queued and not request.in_queue and (request.prompt is not None or self._deterministic):
            request.in_queue = True
            queue = self._queues.setdefault(self._queue_of(request), LazyHeap(lambda each: bool(each.queued)))
            queue.put((0 if self._deterministic else -request.priority, request.request_id), request)

    def asker_moved(self, requests: Iterable[OpenRequest], version: int) -> None:
        """Their asker has these weights now: whoever gets them from here on must have them, too."""
        for request in requests:
            request.newest_version = max(request.newest_version, version)

    def dispatch(self) -> None:
        """Give queued samples to ranks until nobody has room."""
        blocked: int | None = None
        while self.somebody_ready and (key := self._next_queue(blocked)) is not None:
            request = cast(OpenRequest, self._queues[key].head())
            if request.prompt is None:
                return
            if key != self._queue_of(request):
                self._take_head(key)
                self.enqueue(request)
            elif request.newest_version > self._newest_version:
                self._take_head(key)
                self.too_new.append(request)
            elif placements := self._placements(request, len(request.queued), blocked):
                self._take_head(key)
                self._place_all(request, placements)
            elif self._away:
                blocked = key
            else:
                return

    def _queue_of(self, request: OpenRequest) -> int:
        version = request.newest_version
        return 0 if self._deterministic or version <= self._oldest_version else version

    def _next_queue(self, blocked: int | None) -> int | None:
        """The queue whose head comes first; only what needs no version as new as `blocked` does."""
        heads = []
        for key, queue in list(self._queues.items()):
            if queue.head() is None:
                del self._queues[key]
            elif blocked is None or key < blocked:
                heads.append((queue.head_key(), key))
        return min(heads)[1] if heads else None

    def _placements(self, request: OpenRequest, samples: int, blocked: int | None = None) -> list[Placement]:
        """Where so many samples of a request may go now.

        Args:
            blocked: somebody before it waits for a rank of this version; only ranks that are no use to him are left.
        """
        exclude = self._unready
        if blocked is not None:
            useless = {name for name, rank in self._away.items() if rank.policy_version < blocked}
            exclude = exclude.union(self._peers.rank_names() - useless)
        if self._away:
            version = request.newest_version
            exclude = exclude.union(
                name for name, rank in self._away.items() if rank.resting or rank.policy_version < version
            )
        return self.router.place(self._hashes(request), samples, exclude=exclude)

    def _place_all(self, request: OpenRequest, placements: list[Placement]) -> None:
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
            self._call_off(assignment)
            self.ended(assignment, list(assignment.samples))

    def _call_off(self, assignment: Assignment) -> None:
        if not assignment.held:
            self._peers.say(assignment.rank, Cancel(assignment.request.request_id, assignment.attempt))

    def _take_head(self, key: int) -> None:
        self._queues[key].pop().in_queue = False

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
        first, request.placed = not request.placed, True
        self.decisions.append(
            ScheduleRecord(
                request.request_id, index, blocks, placement.matched, rank.name, first, request.newest_version
            )
        )
        for portion in request.portions(samples):
            self._assign(request, rank, portion)

    def _assign(self, request: OpenRequest, rank: RankPeer, samples: list[int]) -> None:
        hashes = request.hashes or []
        claim = self.router.assigned(rank.name, hashes, len(samples))
        held = rank.policy_version < request.newest_version
        assignment = Assignment(self._next_attempt, request, rank, set(samples), claim, held)
        self._next_attempt += 1
        request.assignments[assignment.attempt] = rank.assignments[assignment.attempt] = assignment
        if not held:
            self._tell(assignment)

    def _tell(self, assignment: Assignment) -> None:
        request = assignment.request
        self._peers.say(
            assignment.rank,
            Assign(
                request.request_id,
                assignment.attempt,
                sorted(assignment.samples),
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
