"""The choice of a rank for a group, by the length of the cached prefix and the number of free slots of each rank.

    score(rank) = α · matched leading blocks / blocks of the prompt + (1 - α) · (slots - load) / slots

A rank has `max_requests` slots. Its load is the number of its assigned samples that have not finished. If several ranks have
the best score, the rank with the latest assignment is chosen, then the lowest name. A rank is a candidate for a group of n
samples while it has *room*: load + min(n, slots) <= slots + max(1, slots // 8). If there is no candidate, the caller keeps
the group queued until a rank has room.

The router keeps two sets of block hashes per rank. *Expected* hashes belong to blocks that open assignments will cache on
the rank; they are reference-counted. *Listed* hashes are those that the rank has reported, in a bounded LRU. Decisions use
no clock, no randomness, no I/O and no request ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import NamedTuple

from rollout.state import PrefixCachingCoordinatorPolicy

LOOKAHEAD_SHARE = 8
"""The number of slots per extra sample: a rank may have max(1, slots // 8) assigned samples beyond its slots."""
MAX_HASHES_PER_RANK = 1 << 18
"""The maximum number of listed (reported) block hashes per rank; the least recently used hashes are dropped."""

Claim = tuple[dict[int, int], Sequence[int]]
"""The expected hashes of one assignment: the rank's dict of counters, and the hashes that the assignment has counted there.
A version change gives the rank a new dict of counters. Releasing an older claim then changes only the old dict."""


class Placement(NamedTuple):
    """The part of a group that is placed on one rank."""

    rank: str
    samples: int
    matched: int
    """The number of leading blocks of the prompt that the rank has cached or is expected to cache."""


@dataclass(eq=False, slots=True)
class _Rank:
    """The load and the block hashes of one rank."""

    name: str
    max_requests: int
    limit: int
    """The maximum load: a few more than the slots, so that a sample is waiting when a slot becomes free."""
    load: int = 0
    """The number of assigned samples that have not finished. In deterministic mode, it is the number of samples ever
    assigned, of which only the differences between ranks matter."""
    stamp: int = -1
    """The number of the rank's latest assignment, counted over all ranks; -1 if the rank has had no assignment."""
    expected: dict[int, int] = field(default_factory=dict)
    """The hashes of blocks that open assignments will cache on the rank: hash → number of these assignments."""
    listed: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """The hashes that the rank has reported (in deterministic mode: was assigned), the least recently used first."""

    def free(self, more: int = 0) -> float:
        """Return the share of slots that is free after `more` further samples; negative for more samples than slots."""
        return (self.max_requests - self.load - more) / self.max_requests

    def has_room(self, samples: int) -> bool:
        return self.load + min(samples, self.max_requests) <= self.limit

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of leading hashes that the rank has cached or is expected to cache."""
        expected, listed = self.expected, self.listed
        for depth, each in enumerate(hashes):
            if each not in expected and each not in listed:
                return depth
        return len(hashes)

    def use(self, hashes: Iterable[int], *, limit: int | None) -> None:
        """Mark those of the `hashes` that are already listed as recently used. With a `limit`, also add the others to
        the list. Then drop the least recently used hashes until the list has at most `limit` entries."""
        # Refresh from the last block to the first: the last block is then evicted first, and a shorter prefix still matches.
        for each in reversed(tuple(hashes)):
            if limit is not None:
                self.listed[each] = None
            if each in self.listed:
                self.listed.move_to_end(each)
        while limit is not None and len(self.listed) > limit:
            self.listed.popitem(last=False)


class Router:
    """A router that chooses ranks for the samples of a group.

    Args:
        policy: LONGEST_PREFIX scores all blocks of the prompt, FIRST_PREFIX_BLOCK only the first block. If there are no
            hashes, both choose the rank with the largest share of free slots. LOAD_BALANCED always chooses such a
            rank, the lowest name if there are several. ROUND_ROBIN chooses the next rank by name. These two use no hashes.
        alpha: weight α of the cached prefix in the score, in [0, 1].
        max_hashes_per_rank: maximum number of listed hashes per rank.
        deterministic: whether decisions depend only on the sorted names of the ranks and on the order of the calls of
            `place` and `assigned`. If so, nothing is placed before `data_parallel_size` ranks are connected, load is the
            number of samples ever assigned, and hashes are taken from past assignments instead of the ranks' reports.
        data_parallel_size: number of ranks of the job.
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
        """Whether groups may be placed. In deterministic mode, it is False until all ranks have connected."""
        self._ranks: dict[str, _Rank] = {}
        """The connected ranks, sorted by name."""
        self._clock = 0
        self._last = ""
        """The name of the rank with the latest assignment, after which ROUND_ROBIN continues. The rank may have left."""

    # --- ranks --------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[str, ...]:
        """The names of the connected ranks, sorted."""
        return tuple(self._ranks)

    def add_rank(self, name: str, max_requests: int) -> None:
        """Add a rank with `max_requests` slots and no cached blocks."""
        rank = _Rank(name, max_requests, max_requests + max(1, max_requests // LOOKAHEAD_SHARE))
        if self._deterministic:
            # Start a late rank at the load of the least loaded rank. Starting at 0, it would get all new work until its
            # load had reached that of the other ranks.
            rank.load = int(max_requests * min((1 - each.free() for each in self._ranks.values()), default=0))
        self._ranks = dict(sorted([*self._ranks.items(), (name, rank)]))
        self.complete = self.complete or len(self._ranks) >= self._data_parallel_size

    def remove_rank(self, name: str) -> None:
        """Remove a rank and its hashes. The claims of its assignments may still be released afterwards."""
        del self._ranks[name]

    # --- decisions ----------------------------------------------------------------------------------------------

    def hashes_wanted(self) -> bool:
        """Return whether decisions depend on hashes. If not, the caller need not compute them."""
        return self._by_prefix and self._alpha > 0 and max(len(self._ranks), self._data_parallel_size) > 1

    def place(self, hashes: Sequence[int], samples: int, *, exclude: Collection[str] = ()) -> list[Placement]:
        """Choose the ranks for a group. The caller then records the decision with `assigned`.

        A prefix policy places the samples one by one and may split the group. After each placement, the chosen rank is
        scored as if it had cached the whole prompt and had one free slot less. The other policies choose one rank for the
        group. Every chosen rank has room for the whole group.

        Args:
            hashes: hashes of the prompt's complete blocks, from the first block on.
            samples: number of samples in the group, at least 1.
            exclude: names of ranks that are not candidates.

        Returns:
            The parts of the group, in the order in which to assign them; empty if no rank has room.
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
        # Order by score, then by latest assignment, then by name. Comparing indices is comparing names, because the
        # candidates are sorted by name.
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
        """Record that some samples of a group were assigned to a rank, which will therefore cache the prompt's blocks.

        Args:
            name: name of the rank.
            hashes: hashes of the prompt's complete blocks.
            samples: number of assigned samples.

        Returns:
            The claim, which must be passed to `released` when the assignment has ended.
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
        """Record that `samples` samples have finished on a rank or were withdrawn from it."""
        if not self._deterministic:
            self._ranks[name].load -= samples

    def released(self, claim: Claim) -> None:
        """Release an ended assignment's claim on its hashes. A hash without another claim is no longer expected."""
        expected, hashes = claim
        for each in hashes:
            expected[each] -= 1
            if not expected[each]:
                del expected[each]

    def reported(self, name: str, added: Iterable[int], removed: Iterable[int], flushed: bool) -> None:
        """Apply a rank's report of prefix cache changes: first `flushed`, then `removed`, then `added`.

        Args:
            name: name of the rank.
            added: hashes of newly cached blocks, in order of their positions in the prompt.
            removed: hashes of evicted blocks. Hashes of open assignments stay expected.
            flushed: whether the rank has dropped all earlier blocks.
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
        """Remove a rank's hashes and claims, because blocks of an older policy version match no new request."""
        rank = self._ranks[name]
        if not self._deterministic:
            rank.expected = {}
            rank.listed.clear()
