"""Routing: scores every rank by cached prefix and free slots, and picks one for a group.

    score(rank) = α · matched leading blocks / blocks of the prompt + (1 - α) · (slots - load) / slots

A rank has `max_requests` slots. Ties go to the rank that was assigned something last, then to the lowest name. A rank
is a candidate for a group of n while it has *room*: load + min(n, slots) <= slots + max(1, slots // 8). Without a
candidate the group stays queued at the caller, and goes to the first rank that has room.

Always true (asserted by `check()`): a rank holds a hash if an open assignment will cache it there (*expected*,
reference-counted) or the rank has reported it (*listed*, bounded LRU). Its load is the exact number of its assigned
samples that have not ended. A decision scores every rank once. No clock, no randomness, no I/O, no request ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import NamedTuple

from rollout.state import PrefixCachingCoordinatorPolicy

LOOKAHEAD_SHARE = 8
"""One extra sample is assigned per this many slots."""
MAX_HASHES_PER_RANK = 1 << 18
"""Block hashes listed per rank; the least recently used are dropped."""

Claim = tuple[dict[int, int], Sequence[int]]
"""Hashes that one assignment is expected to cache on its rank, and the rank's counters at that time. A version change
replaces the counters, which voids the claim."""


class Placement(NamedTuple):
    """The part of a group that is placed on one rank."""

    rank: str
    samples: int
    matched: int
    """The number of leading blocks of the prompt that the rank has cached."""


@dataclass(eq=False, slots=True)
class _Rank:
    """The load and hashes of one rank."""

    name: str
    max_requests: int
    limit: int
    """The most samples assigned at a time: a few more than the slots, so that one is ready when a slot is freed."""
    load: int = 0
    """Number of assigned samples that have not ended. In deterministic mode: the samples ever assigned, of which only the
    differences between ranks matter."""
    stamp: int = -1
    """A number that rises with every assignment of the router; -1: the rank was never assigned anything."""
    expected: dict[int, int] = field(default_factory=dict)
    """Expected hashes: hash → number of claims on it."""
    listed: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Listed hashes, the least recently used first."""

    def free(self, more: int = 0) -> float:
        """Return the free share of slots after `more` further samples; negative if samples exceed slots."""
        return (self.max_requests - self.load - more) / self.max_requests

    def has_room(self, samples: int) -> bool:
        return self.load + min(samples, self.max_requests) <= self.limit

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of leading hashes that the rank has."""
        expected, listed = self.expected, self.listed
        for depth, each in enumerate(hashes):
            if each not in expected and each not in listed:
                return depth
        return len(hashes)

    def use(self, hashes: Iterable[int], *, limit: int | None) -> None:
        """Refresh listed hashes in the LRU order; with a limit, list the others too and drop the oldest beyond it."""
        # Refresh from the last block to the first: the last block is then evicted first, and the remaining prefix still
        # matches.
        for each in reversed(tuple(hashes)):
            if limit is not None:
                self.listed[each] = None
            if each in self.listed:
                self.listed.move_to_end(each)
        while limit is not None and len(self.listed) > limit:
            self.listed.popitem(last=False)


class Router:
    """The router, which chooses ranks for the samples of a group.

    Args:
        policy: LONGEST_PREFIX scores all blocks, FIRST_PREFIX_BLOCK the first one only; without hashes both take the
            largest free share. LOAD_BALANCED takes the largest free share, ties to the lowest name. ROUND_ROBIN takes
            the next name. The last two keep no hashes.
        alpha: weight of the match in the score, in [0, 1].
        deterministic: decide by the order of calls of `place` and `assigned` and by the sorted names alone. Nothing is
            placed before `data_parallel_size` ranks are connected. Load is the number of samples ever assigned; hashes
            come from past assignments; reports have no effect.
        data_parallel_size: ranks of the job.
    """

    def __init__(
        self,
        policy: PrefixCachingCoordinatorPolicy,
        *,
        alpha: float = 0.5,
        max_hashes_per_rank: int = MAX_HASHES_PER_RANK,
        deterministic: bool = False,
        data_parallel_size: int = 1,
    ) -> None:
        self._policy = policy
        self._by_prefix = policy in (
            PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
            PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK,
        )
        self._first_only = policy is PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK
        self._alpha = alpha
        self._max_hashes = max_hashes_per_rank
        self._deterministic = deterministic
        self._data_parallel_size = data_parallel_size
        self.complete = not deterministic
        """Whether placement has begun; in deterministic mode False until all ranks have connected."""
        self._ranks: dict[str, _Rank] = {}
        """Connected ranks, sorted by name."""
        self._clock = 0
        self._last = ""
        """The name of the last assigned rank, which may have left: ROUND_ROBIN continues after it."""

    # --- ranks --------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[str, ...]:
        """Names of the connected ranks, sorted."""
        return tuple(self._ranks)

    def add_rank(self, name: str, max_requests: int) -> None:
        """Add a rank with an empty cache."""
        rank = _Rank(name, max_requests, max_requests + max(1, max_requests // LOOKAHEAD_SHARE))
        if self._deterministic:
            # Start a late rank at the load of the least loaded rank: at 0 it would get all new work until it had caught
            # up.
            rank.load = int(max_requests * min((1 - each.free() for each in self._ranks.values()), default=0))
        self._ranks = dict(sorted([*self._ranks.items(), (name, rank)]))
        self.complete = self.complete or len(self._ranks) >= self._data_parallel_size

    def remove_rank(self, name: str) -> None:
        """Remove a rank and its hashes; claims on it may still be released."""
        del self._ranks[name]

    # --- decisions ----------------------------------------------------------------------------------------------

    def hashes_wanted(self) -> bool:
        """Return whether decisions depend on hashes. False: the caller need not compute hashes."""
        return self._by_prefix and self._alpha > 0 and max(len(self._ranks), self._data_parallel_size) > 1

    def place(self, hashes: Sequence[int], samples: int, *, exclude: Collection[str] = ()) -> list[Placement]:
        """Choose the ranks for a group; `assigned` records the decision.

        A group goes to one rank unless a prefix policy scores another rank higher for some of its samples, placed one
        by one: a rank that got one of them matches the whole prompt and has one slot less. All chosen ranks have room
        for the whole group.

        Args:
            hashes: hashes of the prompt's complete blocks, from the first block on.
            samples: number of samples of the group, at least 1.
            exclude: ranks that are not candidates.

        Returns:
            Parts of the group, in the order in which to assign them; empty if no rank has room.
        """
        if not self.complete:
            return []
        allowed = [rank for rank in self._ranks.values() if rank.name not in exclude]
        candidates = [rank for rank in allowed if self._deterministic or rank.has_room(samples)]
        if not candidates:
            return []
        if self._policy is PrefixCachingCoordinatorPolicy.LOAD_BALANCED:
            return [Placement(max(candidates, key=_Rank.free).name, samples, 0)]
        if self._policy is PrefixCachingCoordinatorPolicy.ROUND_ROBIN:
            return [Placement(min(candidates, key=lambda rank: rank.name <= self._last).name, samples, 0)]
        return self._by_score(candidates, self._asked(hashes), samples)

    def _by_score(self, candidates: list[_Rank], asked: Sequence[int], samples: int) -> list[Placement]:
        alpha, beta, blocks = self._alpha, 1 - self._alpha, len(asked)
        matches = [rank.match(asked) for rank in candidates]
        # Best score first, then the most recently assigned rank, then by name (the candidates are already in name
        # order).
        heap = [
            (-(alpha * (match / blocks) + beta * rank.free()) if blocks else -rank.free(), -rank.stamp, index)
            for index, (rank, match) in enumerate(zip(candidates, matches, strict=True))
        ]
        first = min(heap)[2]
        if samples == 1:
            return [Placement(candidates[first].name, 1, matches[first])]
        if not blocks:
            heap = [(beta * free, stamp, index) for free, stamp, index in heap]
        heap[first] = (-2.0, 0, first)
        heapify(heap)
        counts: dict[int, int] = {}
        for turn in range(samples):
            index = heap[0][2]
            counts[index] = counts.get(index, 0) + 1
            score = alpha + beta * candidates[index].free(counts[index])
            heapreplace(heap, (-score, -self._clock - turn, index))
        return [Placement(candidates[index].name, count, matches[index]) for index, count in counts.items()]

    def _asked(self, hashes: Sequence[int]) -> Sequence[int]:
        if not self._by_prefix:
            return ()
        return hashes[:1] if self._first_only else hashes

    # --- recorded events ----------------------------------------------------------------------------------------

    def assigned(self, name: str, hashes: Sequence[int], samples: int) -> Claim:
        """Record that `samples` of a group were assigned to a rank, which will cache the hashes of its prompt's
        complete blocks.

        Returns the claim to pass to `released` when the assignment has ended.
        """
        rank, asked = self._ranks[name], self._asked(hashes)
        rank.load += samples
        rank.stamp = self._clock
        self._clock += 1
        self._last = name
        rank.use(asked, limit=self._max_hashes if self._deterministic else None)
        claimed = () if self._deterministic else asked
        for each in claimed:
            rank.expected[each] = rank.expected.get(each, 0) + 1
        return rank.expected, claimed

    def ended(self, name: str, samples: int = 1) -> None:
        """Record that samples have ended on, or were withdrawn from, a rank."""
        if not self._deterministic:
            self._ranks[name].load -= samples

    def released(self, claim: Claim) -> None:
        """Release the claim of an ended assignment: its hashes are no longer expected."""
        expected, hashes = claim
        for each in hashes:
            expected[each] -= 1
            if not expected[each]:
                del expected[each]

    def reported(self, name: str, added: Iterable[int], removed: Iterable[int], flushed: bool) -> None:
        """Apply a rank's report of prefix cache changes.

        Args:
            name: the rank.
            flushed: whether all earlier hashes were dropped; applied first.
            removed: evicted hashes; hashes of open assignments stay expected. Applied second.
            added: newly cached hashes of one prompt, from its first block on.
        """
        rank = self._ranks[name]
        if self._deterministic or not self._by_prefix:
            return
        if flushed:
            rank.listed.clear()
        for each in removed:
            rank.listed.pop(each, None)
        rank.use(added, limit=self._max_hashes)

    def version_changed(self, name: str) -> None:
        """Remove a rank's hashes and void its claims: blocks of an older policy version match no new request."""
        rank = self._ranks[name]
        if not self._deterministic:
            rank.expected = {}
            rank.listed.clear()
