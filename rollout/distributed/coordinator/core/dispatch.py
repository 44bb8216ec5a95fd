"""The assignment of queued samples to ranks: queue order, routing, requeueing of a lost rank's samples. No I/O, no clock.

- An open sample is queued or in exactly one assignment. Every assignment has a new attempt number.
- A rank never receives a request that needs newer weights than the rank has.
- While a member catches up with the other members, ranks with newer weights than the member's do not compute its requests.

Ranks update their weights and enter `generate` one after the other. If a rank's weights are still too old for an assignment,
the coordinator does not send the assignment yet (it is *held*). If the rank does not update its weights within a grace
period, the coordinator declares the rank *away* and moves the held assignments to ranks with room.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import NamedTuple, cast

import numpy as np

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.peers import Peers
from rollout.distributed.coordinator.core.requests import Assignment, OpenRequest, RankPeer
from rollout.distributed.coordinator.core.routing import Placement, Router
from rollout.distributed.protocol.messages import Assign, Cancel
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.requests.delta import TOKEN_BYTES
from rollout.state import EngineState, PrefixCachingCoordinatorPolicy

MAX_BLOCKS = 1 << 13
"""The maximum number of hashed blocks per prompt. Further blocks hardly affect routing, but their hashes take memory."""
MAX_HASHES = 1 << 16
"""The maximum number of hashes processed per message, about a tenth of a second of work. Further hashes are ignored: the
first hashes of a prompt matter most for routing."""
HASH_BYTES = 8
AWAY_INTERVALS = 2
"""The grace period, in heartbeat intervals. A rank that is idle or has older weights for longer, while others compute,
is *away*: assignments that wait for it move. In deterministic mode the grace period is `heartbeat_timeout_s`
instead."""


class ScheduleRecord(NamedTuple):
    """A routing decision. `rank_index` is the index of the rank's name among the sorted names of the connected ranks."""

    request_id: int
    rank_index: int
    num_hashes: int
    """The number of blocks of the prompt that are hashed for routing."""
    num_matched: int
    """The number of leading blocks of the prompt that the rank has cached or is expected to cache."""
    rank: str = ""
    first: bool = True
    """Whether this is the request's first decision. A request that is split or reassigned has several decisions."""


class Dispatcher:
    """A queue of requests that also assigns their samples to ranks."""

    def __init__(self, config: CoordinatorConfig, peers: Peers) -> None:
        policy = config.prefix_caching_coordinator_policy
        if not config.enable_prefix_caching and policy is not PrefixCachingCoordinatorPolicy.ROUND_ROBIN:
            policy = PrefixCachingCoordinatorPolicy.LOAD_BALANCED
        self.policy = policy
        """The effective routing policy. If prefix caching is off, LOAD_BALANCED replaces a prefix policy."""
        self.router = Router(
            policy, deterministic=config.deterministic_mode, data_parallel_size=config.data_parallel_size
        )
        self.decisions: list[ScheduleRecord] = []
        self.too_new: list[OpenRequest] = []
        """The requests for which no rank has a suitable policy version. All ranks have older weights than the request
        needs, or all have newer weights than the request's client, which is still catching up with other members."""
        self._deterministic = config.deterministic_mode
        self._grace_s = AWAY_INTERVALS * config.advanced.heartbeat_interval_s
        if config.deterministic_mode:
            self._grace_s = config.advanced.heartbeat_timeout_s
        self._block_size = config.block_size_tokens
        self._peers = peers
        self._queue: list[tuple[int, int, OpenRequest]] = []
        """A heap of requests, by priority and then arrival. It may still contain requests whose samples are all assigned."""
        self._sweep_at = 64
        self._unready: set[str] = set()
        self._away: list[RankPeer] = []
        """The ranks that have been idle or have had older weights than other ranks for longer than the grace period."""
        self._newest_version = 0
        """The highest policy version among the ready ranks."""
        self._next_attempt = 1

    @property
    def any_rank_ready(self) -> bool:
        """Whether any rank is ready for work, even if it has no room now. In deterministic mode all ranks must be ready."""
        if self._deterministic:
            # Wait until all ranks are ready. Otherwise the assignments would depend on the order in which ranks connect.
            return self.router.complete and bool(self._peers.ranks) and not self._unready
        return len(self._peers.ranks) > len(self._unready)

    # --- ranks ------------------------------------------------------------------------------------------------------

    def add_rank(self, rank: RankPeer, hashes: bytes) -> None:
        """Add a rank, which receives work once it is `ready`. `hashes` holds its cached blocks' hashes as int64 values."""
        self.router.add_rank(rank.name, rank.max_requests)
        self.router.reported(rank.name, _unpacked(hashes), (), False)
        self._look_at_ranks()

    def blocks_changed(self, rank: RankPeer, added: bytes, removed: bytes, flushed: bool) -> None:
        if added or removed or flushed:
            # Treat a very long list of removals as a flush of the rank's cache. Forgetting cached blocks is harmless: it
            # only makes routing less precise.
            flushed = flushed or len(removed) > MAX_HASHES * HASH_BYTES
            self.router.reported(rank.name, _unpacked(added), _unpacked(removed), flushed)

    def rank_moved(self, rank: RankPeer) -> None:
        """Handle a rank that became ready or reached another policy version.

        Send the rank's held assignments (not sent before, because its weights were too old) if its version now
        suffices. Requeue the requests that waited for a rank with a suitable version."""
        for assignment in list(rank.assignments.values()):
            new_enough = rank.policy_version >= assignment.request.newest_version
            if assignment.held and new_enough and rank.state is not EngineState.STOPPED:
                assignment.held = False
                self._tell(assignment)
        for assignment in list(rank.assignments.values()):
            if rank.name in self._ahead_of(assignment.request):
                self._take_back(assignment)
                self.enqueue(assignment.request)
        self._away = [each for each in self._away if each is not rank]
        self._look_at_ranks()
        self.look_at_versions()

    def look_at_versions(self) -> None:
        """Requeue all requests that waited for a rank with a suitable policy version."""
        waiting, self.too_new = self.too_new, []
        for request in waiting:
            self.enqueue(request)

    def remove_rank(self, rank: RankPeer) -> list[OpenRequest]:
        """Remove a lost rank, and put its samples back at their old places in the queue.

        Returns:
            The requests of the assignments that were sent to the rank. Held assignments were never sent.
        """
        self.router.remove_rank(rank.name)
        self._away = [each for each in self._away if each is not rank]
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

    def look_for_away(self, now: float) -> None:
        """Declare ranks away that were idle or had older weights for longer than the grace period while others computed.

        Assignments that were not sent to these ranks yet, and all assignments of idle ranks, move to ranks with room.
        """
        ranks = self._peers.ranks.values()
        computing = [rank.policy_version for rank in ranks if rank.ready and not rank.resting]
        newest = max(computing, default=0)
        for rank in ranks:
            behind = rank.resting or rank.policy_version < newest
            rank.waited_for_since = min(rank.waited_for_since, now) if computing and behind else math.inf
        self._away = [rank for rank in ranks if rank.waited_for_since <= now - self._grace_s]
        for rank in self._away:
            for assignment in [each for each in rank.assignments.values() if rank.resting or each.held]:
                request, samples = assignment.request, len(assignment.samples)
                if request.in_queue or request.newest_version > self._newest_version:
                    continue
                placements = self._placements(request, samples + len(request.queued))
                if not placements:
                    return
                self._take_back(assignment)
                self._place_all(request, placements)

    def _take_back(self, assignment: Assignment) -> None:
        self._call_off(assignment)
        self.router.ended(assignment.rank.name, len(assignment.samples))
        self._forget(assignment)
        assignment.request.queued |= assignment.samples

    def _look_at_ranks(self) -> None:
        ranks = self._peers.ranks.values()
        self._unready = {rank.name for rank in ranks if not rank.ready}
        self._newest_version = max((rank.policy_version for rank in ranks if rank.ready), default=0)

    # --- requests ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: OpenRequest) -> None:
        """Queue the unassigned samples of a request, ordered by priority and then by arrival.

        In deterministic mode only the order of arrival counts: a request waits until all earlier prompts are tokenised.
        """
        if request.queued and not request.in_queue and (request.prompt is not None or self._deterministic):
            request.in_queue = True
            if len(self._queue) >= self._sweep_at:
                self._queue = [entry for entry in self._queue if entry[2].queued]
                heapify(self._queue)
                self._sweep_at = max(64, 2 * len(self._queue))
            heappush(self._queue, (0 if self._deterministic else -request.priority, request.request_id, request))

    def dispatch(self) -> None:
        """Assign queued samples to ranks until the queue is empty or no rank has room."""
        while self._queue and self.any_rank_ready:
            request = self._queue[0][2]
            if not request.queued:
                self._take_head()
            elif request.prompt is None:
                break
            elif request.newest_version > self._newest_version or self._ahead_of(request) == self._peers.by_name.keys():
                self._take_head()
                self.too_new.append(request)
            elif placements := self._placements(request, len(request.queued)):
                self._take_head()
                self._place_all(request, placements)
            else:
                break

    def _placements(self, request: OpenRequest, samples: int) -> list[Placement]:
        """Return the ranks for a request's `samples` samples, and the number of samples for each; empty if no suitable
        rank has room."""
        version = request.newest_version
        useless = {rank.name for rank in self._away if rank.resting or rank.policy_version < version}
        exclude = self._unready.union(useless, self._ahead_of(request))
        return self.router.place(self._hashes(request), samples, exclude=exclude)

    def _ahead_of(self, request: OpenRequest) -> set[str]:
        """Return the names of the ranks whose weights are too new for a request.

        The set is empty unless the request's client is catching up with the other members (`ClientPeer.catching_up`)."""
        if not request.client.catching_up:
            return set()
        own = self._peers.by_name.get(request.client.name)
        newest = max(request.newest_version, own.policy_version if own else 0)
        return {rank.name for rank in self._peers.ranks.values() if rank.policy_version > newest}

    def _place_all(self, request: OpenRequest, placements: list[Placement]) -> None:
        samples = sorted(request.queued)
        request.queued.clear()
        request.too_new_since = math.inf
        for placement in placements:
            self._place(request, placement, samples[: placement.samples])
            del samples[: placement.samples]

    def ended(self, assignment: Assignment, samples: list[int]) -> None:
        """Remove finished samples, given by index, from an assignment."""
        assignment.samples.difference_update(samples)
        self.router.ended(assignment.rank.name, len(samples))
        if not assignment.samples:
            self._forget(assignment)

    def cancel(self, request: OpenRequest) -> None:
        """Cancel a request: remove it from the queue and from all ranks."""
        request.queued.clear()
        for assignment in list(request.assignments.values()):
            self._call_off(assignment)
            self.ended(assignment, list(assignment.samples))

    def _call_off(self, assignment: Assignment) -> None:
        if not assignment.held:
            self._peers.say(assignment.rank, Cancel(assignment.request.request_id, assignment.attempt))

    def _take_head(self) -> None:
        heappop(self._queue)[2].in_queue = False

    def _hashes(self, request: OpenRequest) -> list[int]:
        if request.hashes is None:
            if not self.router.hashes_wanted():
                return []
            if request.images and not request.keyed:
                return []
            most = MAX_BLOCKS * self._block_size * TOKEN_BYTES
            prompt = np.frombuffer((request.keyed or cast(bytes, request.prompt))[:most], "<i4")
            request.hashes = compute_block_hashes_batched(prompt, self._block_size, request.share)
        return request.hashes

    def _place(self, request: OpenRequest, placement: Placement, samples: list[int]) -> None:
        rank = self._peers.by_name[placement.rank]
        index, blocks = self.router.ranks.index(rank.name), len(request.hashes or [])
        first, request.placed = not request.placed, True
        self.decisions.append(ScheduleRecord(request.request_id, index, blocks, placement.matched, rank.name, first))
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
                request.tokens.known(assignment.samples),
                request.images,
            ),
        )

    def _forget(self, assignment: Assignment) -> None:
        del assignment.request.assignments[assignment.attempt]
        del assignment.rank.assignments[assignment.attempt]
        self.router.released(assignment.claim)


def _unpacked(packed: bytes) -> list[int]:
    count = min(len(packed) // HASH_BYTES, MAX_HASHES)
    hashes: list[int] = np.frombuffer(packed, "<i8", count).tolist()
    return hashes
