"""Routing: scores every rank by cached prefix and free slots, and picks one for a group.

    score(rank) = α · matched leading blocks / blocks asked + (1 - α) · max(0, slots - load) / slots

Ties go to the rank that was assigned something last, then to the lowest name. A rank is a candidate for a group of n
while it has *room*: load + min(n, slots) <= slots + lookahead, lookahead = max(1, slots // 8). Without a candidate the
group stays queued with the caller, and goes to the rank that is free first, not to the one that scored best earlier.

Always true (asserted by `check()`):
- held hashes are those of `rollout.distributed.coordinator.core.prefixes`;
- the load of a rank is the exact number of its assigned samples that have not ended.

The cost of a decision does not grow with the number of ranks: a set of ranks is one integer with a bit per rank, and all
queries operate on sets. No clock, no randomness, no I/O, no request ids.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from math import gcd

from rollout.distributed.coordinator.core.prefixes import Claim, Prefixes
from rollout.distributed.coordinator.core.ranks import Levels, Order, Rank
from rollout.state import PrefixCachingCoordinatorPolicy

RENUMBER_AFTER = 1 << 16
"""Assignments after which recency stamps are renumbered, so that they stay short."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Part of a group placed on one rank."""

    rank: str
    samples: int
    matched: int
    """Leading blocks of the prompt cached there."""


class Router:
    """Chooses ranks for the samples of a group.

    Args:
        policy: LONGEST_PREFIX scores all blocks, FIRST_PREFIX_BLOCK the first one only; without hashes both take the
            largest free share. LOAD_BALANCED takes the largest free share, ties to the lowest name. ROUND_ROBIN takes
            the next name. The last two keep no hashes.
        alpha: weight of the match in the score, in [0, 1].
        max_hashes_per_rank: LRU bound on the hashes listed per rank.
        deterministic: decide by the order of calls of `place` and `assigned` and by the sorted names alone. Nothing is
            placed before `data_parallel_size` ranks are connected. Load is the number of samples ever assigned, minus the
            share that all ranks have in common (some rank always has room); hashes are those of past assignments.
            `ended`, `released`, `reported` and `version_changed` have no effect on decisions.
        data_parallel_size: ranks of the job.
    """

    def __init__(
        self,
        policy: PrefixCachingCoordinatorPolicy,
        *,
        alpha: float = 0.5,
        max_hashes_per_rank: int = 1 << 18,
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
        self._deterministic = deterministic
        self._data_parallel_size = data_parallel_size
        self._complete = not deterministic
        self._ranks: dict[str, Rank] = {}
        self._names: list[str] = []
        self._seats: list[Rank | None] = []
        """Bit number → rank. Stable while a rank is connected, because `Prefixes` stores sets of ranks."""
        self._everyone = 0
        self._prefixes = Prefixes(max_hashes_per_rank)
        self._order = Order()
        self._dirty: set[Rank] = set()
        self._outdated = False
        """Whether `_order` must be rebuilt: ranks joined or left, or the stamps have grown long."""
        self._clock = 0
        self._last = ""
        """Name of the last assigned rank, which may have left: ROUND_ROBIN continues after it."""
        self._unit = 1
        """Greatest common divisor of all slots."""

    # --- ranks --------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether placement has begun; in deterministic mode False until all ranks have connected."""
        return self._complete

    @property
    def ranks(self) -> tuple[str, ...]:
        """Sorted names."""
        return tuple(self._names)

    def index(self, name: str) -> int:
        """Position in the sorted names.

        Raises:
            ValueError: no such rank.
        """
        self._rank(name)
        return bisect_left(self._names, name)

    def add_rank(self, name: str, slots: int) -> None:
        """Add a rank with `slots` concurrent samples and an empty cache.

        Raises:
            ValueError: the name is taken, or `slots` is below 1.
        """
        if name in self._ranks:
            raise ValueError(f"rank {name!r}: is here already; remove it first")
        if slots < 1:
            raise ValueError(f"rank {name!r}, slots={slots!r}: must be at least 1")
        rank = self._ranks[name] = Rank(name, slots)
        insort(self._names, name)
        seat = self._seats.index(None) if None in self._seats else len(self._seats)
        self._seats[seat : seat + 1] = [rank]
        rank.bit = 1 << seat
        self._everyone |= rank.bit
        self._outdated = True
        self._complete = self._complete or len(self._names) >= self._data_parallel_size

    def remove_rank(self, name: str) -> None:
        """Remove a rank and its hashes; claims on it may still be released.

        Raises:
            ValueError: no such rank.
        """
        rank = self._rank(name)
        self._prefixes.forget(rank)
        del self._ranks[name]
        del self._names[bisect_left(self._names, name)]
        self._seats[rank.bit.bit_length() - 1] = None
        self._everyone ^= rank.bit
        self._dirty.discard(rank)
        self._outdated = True

    # --- deciding -----------------------------------------------------------------------------------------------

    def hashes_wanted(self) -> bool:
        """Whether decisions depend on hashes; False: they need not be computed."""
        return self._by_prefix and self._alpha > 0 and max(len(self._names), self._data_parallel_size) > 1

    def place(self, hashes: Sequence[int], samples: int, *, exclude: Collection[str] = ()) -> list[Placement]:
        """Choose the ranks for a group. Changes no state; `assigned` records the decision.

        A group goes to one rank unless a prefix policy scores another rank higher for some of its samples, placed one by
        one: a rank that got one of them matches the whole prompt and has one slot less. All chosen ranks have room for
        the whole group.

        Args:
            hashes: of the prompt's complete blocks, from the first.
            samples: number of samples of the group.
            exclude: ranks that are no candidates.

        Returns:
            Parts of the group, in the order in which to assign them; empty if no rank has room.

        Raises:
            ValueError: `samples` is below 1.
        """
        if samples < 1:
            raise ValueError(f"samples={samples!r}: must be at least 1")
        if not self._complete:
            return []
        self._refresh()
        allowed = self._everyone
        for name in exclude:
            if name in self._ranks:
                allowed &= ~self._ranks[name].bit
        candidates = allowed & ~self._order.without_room(samples)
        if self._deterministic:
            candidates = candidates or allowed
        if not candidates:
            return []
        if not self._by_prefix:
            return [Placement(self._without_prefix(candidates).name, samples, 0)]
        asked = self._asked(hashes)
        levels = self._prefixes.levels(asked, candidates)
        first = self._best(levels, len(asked))
        return [
            Placement(rank.name, count, next(depth for depth, ranks in levels if ranks & rank.bit))
            for rank, count in self._split(first, levels, len(asked), samples).items()
        ]

    def _asked(self, hashes: Sequence[int]) -> Sequence[int]:
        """Return the hashes that the policy uses."""
        if not self._by_prefix:
            return ()
        return hashes[:1] if self._first_only else hashes

    def _without_prefix(self, candidates: int) -> Rank:
        """LOAD_BALANCED or ROUND_ROBIN. Their seats are in the order of the names: the lowest bit is the lowest name."""
        if self._policy is PrefixCachingCoordinatorPolicy.LOAD_BALANCED:
            _, candidates = self._order.best([(0, candidates)], 1, 0.0, 1.0)
        else:
            turn = bisect_left(self._names, self._last) + (self._last in self._ranks)
            candidates = candidates >> turn << turn or candidates
        return self._seated(candidates & -candidates)

    def _best(self, levels: Levels, blocks: int) -> Rank:
        alpha, beta = (self._alpha, 1 - self._alpha) if blocks else (0.0, 1.0)
        _, winners = self._order.best(levels, blocks or 1, alpha, beta)
        return self._seated(self._order.latest(winners))

    def _split(self, first: Rank, levels: Levels, blocks: int, samples: int) -> dict[Rank, int]:
        """Number of samples of a group per rank, in the order of their first sample."""
        alpha, beta = self._alpha, 1 - self._alpha
        blocks = blocks or 1
        counts = {first: samples}
        (depth,) = (depth for depth, ranks in levels if ranks & first.bit)
        # No other rank scores higher than the first one did, and its own score falls with every sample.
        if samples == 1 or alpha + beta * first.free(samples - 1) >= alpha * (depth / blocks) + beta * first.free():
            return counts
        counts = {first: 1}
        own = [(-(alpha + beta * first.free(1)), 0, first)]
        rest, rival, rival_score = self._rival(levels, first, blocks)
        for turn in range(1, samples):
            score, _, rank = own[0]
            # At equal scores a rank of the group wins: it was assigned something last.
            if rival is not None and rival_score > -score:
                counts[rival] = 1
                heappush(own, (-(alpha + beta * rival.free(1)), -turn, rival))
                rest, rival, rival_score = self._rival(rest, rival, blocks)
            else:
                counts[rank] += 1
                heapreplace(own, (-(alpha + beta * rank.free(counts[rank])), -turn, rank))
        return counts

    def _rival(self, levels: Levels, taken: Rank, blocks: int) -> tuple[Levels, Rank | None, float]:
        """Remove a rank from the candidates; returns them, the best remaining one and its score."""
        rest = [(depth, ranks & ~taken.bit) for depth, ranks in levels if ranks != taken.bit]
        if not rest:
            return rest, None, 0.0
        score, winners = self._order.best(rest, blocks, self._alpha, 1 - self._alpha)
        return rest, self._seated(self._order.latest(winners)), score

    def _seated(self, bit: int) -> Rank:
        rank = self._seats[bit.bit_length() - 1]
        assert rank is not None
        return rank

    # --- events -------------------------------------------------------------------------------------------------

    def assigned(self, name: str, hashes: Sequence[int], samples: int) -> Claim:
        """Record that part of a group was assigned to a rank.

        Args:
            name: the rank.
            hashes: of the prompt's complete blocks, which the rank will cache.
            samples: number of samples.

        Returns:
            Claim to pass to `released` when the assignment has ended.

        Raises:
            ValueError: no such rank, or `samples` is below 1.
        """
        rank = self._rank(name)
        if samples < 1:
            raise ValueError(f"samples={samples!r}: must be at least 1")
        rank.pending += samples
        rank.load += samples
        rank.fresh = False
        rank.stamp = self._clock
        self._clock += 1
        self._outdated = self._outdated or self._clock >= len(self._names) + RENUMBER_AFTER
        self._dirty.add(rank)
        self._last = name
        if self._deterministic:
            self._prefixes.add(rank, self._asked(hashes))
            return Claim(rank, ())
        return self._prefixes.expect(rank, self._asked(hashes))

    def ended(self, name: str, samples: int = 1) -> None:
        """Record that samples have ended on, or were withdrawn from, a rank.

        Raises:
            ValueError: no such rank, or it has fewer.
        """
        rank = self._rank(name)
        if not 0 <= samples <= rank.pending:
            raise ValueError(
                f"rank {name!r}: {samples} samples ended where {rank.pending} are pending; tell of each sample once"
            )
        rank.pending -= samples
        if not self._deterministic:
            rank.load -= samples
            self._dirty.add(rank)

    def released(self, claim: Claim) -> None:
        """Release the claim of an ended assignment: its hashes are no longer expected. Idempotent."""
        self._prefixes.release(claim)

    def reported(self, name: str, added: Iterable[int], removed: Iterable[int], flushed: bool) -> None:
        """Apply a rank's report of prefix cache changes, in this order: `flushed`, `removed`, `added`.

        Args:
            name: the rank.
            added: newly cached hashes, of one prompt from its first block on.
            removed: evicted hashes.
            flushed: whether all earlier ones were dropped.

        Raises:
            ValueError: no such rank.
        """
        rank = self._rank(name)
        if self._deterministic or not self._by_prefix:
            return
        self._prefixes.discard(rank, tuple(rank.listed) if flushed else removed)
        self._prefixes.add(rank, added)

    def version_changed(self, name: str) -> None:
        """Remove a rank's hashes and void its claims: blocks of an older policy version match no new request.

        Raises:
            ValueError: no such rank.
        """
        rank = self._rank(name)
        if not self._deterministic:
            self._prefixes.forget(rank)

    # --- queries ------------------------------------------------------------------------------------------------

    def pending(self, name: str) -> int:
        """Number of assigned samples that have not ended.

        Raises:
            ValueError: no such rank.
        """
        return self._rank(name).pending

    def held(self, name: str) -> set[int]:
        """Hashes held by a rank, expected or listed.

        Raises:
            ValueError: no such rank.
        """
        return self._rank(name).held

    def match(self, name: str, hashes: Sequence[int]) -> int:
        """Number of leading blocks of a prompt that a rank holds.

        Raises:
            ValueError: no such rank.
        """
        ((depth, _),) = self._prefixes.levels(self._asked(hashes), self._rank(name).bit)
        return depth

    def check(self) -> None:
        """Check the invariants.

        Raises:
            AssertionError: one is violated.
        """
        self._refresh()
        ranks = self._ranks.values()
        assert self._names == sorted(self._ranks)
        assert {rank.bit: rank for rank in ranks} == dict(self._taken())
        assert self._everyone == sum(rank.bit for rank in ranks)
        for rank in ranks:
            assert rank.pending >= 0, rank.name
            assert rank.load >= 0, rank.name
            assert self._deterministic or rank.load == rank.pending, rank.name
        by_recency = sorted(ranks, key=lambda rank: rank.stamp)
        fresh = [rank.name for rank in by_recency if rank.fresh]
        assert fresh == sorted(fresh, reverse=True)
        assert not any(rank.fresh for rank in by_recency[len(fresh) :])
        self._prefixes.check(ranks)
        self._order.check(ranks)

    def _taken(self) -> Iterator[tuple[int, Rank]]:
        return ((1 << seat, rank) for seat, rank in enumerate(self._seats) if rank is not None)

    # --- keeping order ------------------------------------------------------------------------------------------

    def _rank(self, name: str) -> Rank:
        try:
            return self._ranks[name]
        except KeyError:
            raise ValueError(f"rank {name!r}: is not here; add it first ({len(self._names)} are)") from None

    def _refresh(self) -> None:
        """Update `_order` from the ranks changed since the last decision."""
        if self._outdated:
            self._start_order()
        for rank in self._dirty:
            self._order.show(rank)
        self._dirty.clear()
        # If every rank has a load of at least slots // unit, subtract that common floor: only the rest matters. It was
        # assigned sample by sample, so the loop's amortised cost is constant per sample.
        if self._deterministic and self._ranks and self._order.free_shares[-1] <= (self._unit - 1) / self._unit:
            ranks = self._ranks.values()
            floors = min(rank.load // (rank.slots // self._unit) for rank in ranks)
            for rank in ranks:
                rank.load -= floors * (rank.slots // self._unit)
                self._order.show(rank)

    def _start_order(self) -> None:
        """Rebuild the index and renumber the stamps: unassigned ranks by descending name, then the others in order."""
        ranks = [self._ranks[name] for name in self._names]
        used = sorted((rank for rank in ranks if not rank.fresh), key=lambda rank: rank.stamp)
        for stamp, rank in enumerate([rank for rank in reversed(ranks) if rank.fresh] + used):
            rank.stamp = stamp
            rank.hide()
        self._clock = len(ranks)
        self._unit = gcd(*(rank.slots for rank in ranks))
        if not self._by_prefix:
            self._seats = [*ranks]
            for seat, rank in enumerate(ranks):
                rank.bit = 1 << seat
            self._everyone = (1 << len(ranks)) - 1
        self._order.clear()
        self._dirty.update(ranks)
        self._outdated = False
