"""Which rank gets a group of samples: the score, the load of every rank, and who holds which block hash.

    score(rank) = α · matched leading blocks / blocks asked + (1 - α) · max(0, slots - load) / slots

Ties go to the rank that was assigned something last, then to the lowest name. A rank is a candidate for a group of n
while it has *room*: load + min(n, slots) <= slots + lookahead, lookahead = max(1, slots // 8); where nobody has, the
group waits with whoever asks, so that it goes to the rank that is free first and not to the one that looked best.

Always true here (`check()` proves it):
- a rank holds a hash if an open assignment will put it there (*expected*, counted) or the rank says so (*listed*,
  bounded, least recently used first), and `_Prefixes` knows exactly these;
- the load of a rank is its samples that were assigned and have not ended, to the sample.

The cost of a decision does not grow with the number of ranks: a set of ranks is one integer with a bit per rank, and
everything that is asked of ranks is asked of sets. No clock, no randomness, no I/O, no request ids.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from math import gcd

from rollout.state import PrefixCachingCoordinatorPolicy

LOOKAHEAD_SHARE = 8
"""A rank takes one sample beyond its slots for so many slots: the next one is there when one ends."""

RENUMBER_AFTER = 1 << 16
"""Assignments after which the marks of recency are dealt anew, so that they stay short."""

Levels = list[tuple[int, int]]
"""(matched leading blocks, set of ranks that match exactly so many), most blocks first, no set empty."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank's part of a group."""

    rank: str
    samples: int
    matched: int
    """Leading blocks of the prompt found there."""


class Claim:
    """What one assignment lets its rank be expected to hold, until `Router.released`. Opaque."""

    __slots__ = ("expected", "hashes", "rank")

    def __init__(self, rank: _Rank, hashes: tuple[int, ...]) -> None:
        self.rank = rank
        self.hashes = hashes
        self.expected = rank.expected
        """The table it is counted in: a version change gives the rank another."""


class _Rank:
    """One rank: its load and its hashes, and as what it stands in `_Order`."""

    __slots__ = (
        "bit", "expected", "fresh", "listed", "load", "name", "pending", "shown_capacity", "shown_stamp", "slots",
        "stamp",
    )  # fmt: skip

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.bit = 0
        self.pending = 0
        self.load = 0
        self.fresh = True
        """Never assigned anything."""
        self.stamp = 0
        self.expected: dict[int, int] = {}
        self.listed: OrderedDict[int, None] = OrderedDict()
        self.hide()

    def hide(self) -> None:
        """Stands nowhere."""
        self.shown_capacity: int | None = None
        self.shown_stamp = 0

    def free(self, more: int = 0) -> float:
        """The free share of its slots, with `more` samples."""
        return max(0, self.slots - self.load - more) / self.slots

    @property
    def capacity(self) -> int | None:
        """The largest group it has room for. None: any, for a group counts no more than the slots."""
        lookahead = max(1, self.slots // LOOKAHEAD_SHARE)
        return None if self.load <= lookahead else max(0, self.slots + lookahead - self.load)

    @property
    def held(self) -> set[int]:
        return {*self.expected, *self.listed}


class _Prefixes:
    """Block hash → the set of ranks that hold it.

    Loops over hashes are written out, and a set of one rank is that rank's `bit` itself, one integer for all its hashes:
    a prompt has dozens of blocks, most of them held by one rank.
    """

    def __init__(self, max_listed: int) -> None:
        self.holders: dict[int, int] = {}
        self._max_listed = max_listed

    def expect(self, rank: _Rank, hashes: Sequence[int]) -> Claim:
        """Count what an assignment brings, and what the rank already lists as used."""
        claim = Claim(rank, tuple(hashes))
        expected, listed, holders, bit = rank.expected, rank.listed, self.holders, rank.bit
        # Backwards, here and in `add`: of one prompt the last block is forgotten first, and what is left can match.
        for each in reversed(claim.hashes):
            count = expected.get(each, 0)
            expected[each] = count + 1
            if each in listed:
                listed.move_to_end(each)
            elif not count:
                ranks = holders.get(each)
                holders[each] = bit if ranks is None else ranks | bit
        return claim

    def release(self, claim: Claim) -> None:
        """Take back what `expect` counted, unless a version change or the rank's removal already did."""
        rank, expected = claim.rank, claim.expected
        if expected is not rank.expected:
            return
        listed, holders, bit = rank.listed, self.holders, rank.bit
        for each in claim.hashes:
            count = expected[each]
            if count > 1:
                expected[each] = count - 1
                continue
            del expected[each]
            if each in listed:
                continue
            ranks = holders[each]
            if ranks == bit:
                del holders[each]
            else:
                holders[each] = ranks ^ bit
        claim.hashes = ()

    def add(self, rank: _Rank, hashes: Iterable[int]) -> None:
        """The rank holds these; beyond the limit its least recently used ones are forgotten."""
        listed, holders, bit = rank.listed, self.holders, rank.bit
        for each in reversed(tuple(hashes)):
            if each in listed:
                listed.move_to_end(each)
            else:
                listed[each] = None
                ranks = holders.get(each)
                holders[each] = bit if ranks is None else ranks | bit
        while len(listed) > self._max_listed:
            oldest, _ = listed.popitem(last=False)
            if oldest not in rank.expected:
                self._drop(rank, oldest)

    def discard(self, rank: _Rank, hashes: Iterable[int]) -> None:
        """The rank holds these no longer; what an assignment will bring again stays expected."""
        for each in hashes:
            if each in rank.listed:
                del rank.listed[each]
                if each not in rank.expected:
                    self._drop(rank, each)

    def forget(self, rank: _Rank) -> None:
        """The rank holds nothing, and no claim so far counts any more."""
        for each in rank.held:
            self._drop(rank, each)
        rank.expected = {}
        rank.listed.clear()

    def levels(self, hashes: Sequence[int], ranks: int) -> Levels:
        """The ranks of a non-empty set by their match: one step per block, however many ranks there are."""
        levels: Levels = []
        get = self.holders.get
        for depth, each in enumerate(hashes):
            deeper = ranks & get(each, 0)
            if deeper != ranks:
                levels.append((depth, ranks ^ deeper))
                if not deeper:
                    break
                ranks = deeper
        else:
            levels.append((len(hashes), ranks))
        levels.reverse()
        return levels

    def _drop(self, rank: _Rank, each: int) -> None:
        ranks = self.holders[each]
        if ranks == rank.bit:
            del self.holders[each]
        else:
            self.holders[each] = ranks ^ rank.bit

    def check(self, ranks: Iterable[_Rank]) -> None:
        union: dict[int, int] = {}
        for rank in ranks:
            assert all(count > 0 for count in rank.expected.values()), rank.name
            assert len(rank.listed) <= self._max_listed, rank.name
            for each in rank.held:
                union[each] = union.get(each, 0) | rank.bit
        assert self.holders == union


class _Order:
    """The free share, the capacity and the recency of ranks, as sets."""

    def __init__(self) -> None:
        self.free_shares: list[float] = []
        """Ascending, each once."""
        self._at_share: dict[float, int] = {}
        self._share_of: dict[int, float] = {}
        """By the bit of a rank, which is the set of this rank alone."""
        self._at_capacity: dict[int, int] = {}
        self._digits: list[int] = []
        """The ranks whose stamp has binary digit i."""

    def clear(self) -> None:
        """Nobody stands anywhere."""
        self.free_shares.clear()
        self._at_share.clear()
        self._share_of.clear()
        self._at_capacity.clear()
        self._digits.clear()

    def show(self, rank: _Rank) -> None:
        """Let it stand where its load and its stamp put it."""
        free, capacity, bit = rank.free(), rank.capacity, rank.bit
        before = self._share_of.get(bit)
        if free != before:
            if before is not None:
                left = self._at_share[before] ^ bit
                if left:
                    self._at_share[before] = left
                else:
                    del self._at_share[before]
                    del self.free_shares[bisect_left(self.free_shares, before)]
            if free not in self._at_share:
                insort(self.free_shares, free)
            self._at_share[free] = self._at_share.get(free, 0) | bit
            self._share_of[bit] = free
        if capacity != rank.shown_capacity:
            if rank.shown_capacity is not None:
                self._at_capacity[rank.shown_capacity] ^= bit
            if capacity is not None:
                self._at_capacity[capacity] = self._at_capacity.get(capacity, 0) | bit
            rank.shown_capacity = capacity
        changed = rank.stamp ^ rank.shown_stamp
        while changed:
            digit = changed.bit_length() - 1
            while len(self._digits) <= digit:
                self._digits.append(0)
            self._digits[digit] ^= bit
            changed ^= 1 << digit
        rank.shown_stamp = rank.stamp

    def without_room(self, samples: int) -> int:
        """The ranks that have no room for a group."""
        known = self._at_capacity
        full = 0
        for capacity in range(samples) if samples < len(known) else [each for each in known if each < samples]:
            full |= known.get(capacity, 0)
        return full

    def best(self, levels: Levels, blocks: int, alpha: float, beta: float) -> tuple[float, int]:
        """The highest score alpha · match + beta · free, and all ranks that have it.

        Both loops go downwards and stop at the first score below the best: with the share of the match or the free
        share smaller or equal, no later score is larger, for rounded products and sums are monotone, too.
        """
        best, winners = -1.0, 0
        top = self.free_shares[-1]
        for depth, ranks in levels:
            match = alpha * (depth / blocks)
            if match + beta * top < best:
                break
            only = self._share_of.get(ranks)
            for free in reversed(self.free_shares if only is None else (only,)):
                score = match + beta * free
                if score < best:
                    break
                here = ranks & self._at_share[free]
                if here:
                    winners = here if score > best else winners | here
                    best = score
        return best, winners

    def latest(self, ranks: int) -> int:
        """The bit of the rank with the largest stamp, of a non-empty set: from the highest digit on, who has it stays."""
        if ranks & (ranks - 1):
            for digit in reversed(self._digits):
                ranks = ranks & digit or ranks
        return ranks

    def check(self, ranks: Collection[_Rank]) -> None:
        shares: dict[float, int] = {}
        capacities: dict[int, int] = {}
        for rank in ranks:
            free, capacity = rank.free(), rank.capacity
            assert (capacity, rank.stamp) == (rank.shown_capacity, rank.shown_stamp), rank.name
            assert self._share_of[rank.bit] == free, rank.name
            shares[free] = shares.get(free, 0) | rank.bit
            if capacity is not None:
                capacities[capacity] = capacities.get(capacity, 0) | rank.bit
            stamp = sum(1 << index for index, digit in enumerate(self._digits) if digit & rank.bit)
            assert stamp == rank.stamp, rank.name
        assert self._at_share == shares
        assert len(self._share_of) == len(ranks)
        assert self.free_shares == sorted(shares)
        assert {key: value for key, value in self._at_capacity.items() if value} == capacities
        assert len({rank.stamp for rank in ranks}) == len(ranks)


class Router:
    """Decides which rank gets which samples.

    Args:
        policy: LONGEST_PREFIX scores all blocks, FIRST_PREFIX_BLOCK the first one only; without hashes both take the
            largest free share. LOAD_BALANCED takes the largest free share, ties to the lowest name. ROUND_ROBIN takes
            the next name. The last two keep no hashes.
        alpha: weight of the match in the score, in [0, 1].
        max_hashes_per_rank: hashes listed of one rank, the least recently used go first.
        deterministic: decide by the order of calls of `place` and `assigned` and by the sorted names alone. Nothing is
            placed before `data_parallel_size` ranks are there. Load is what was ever assigned beyond what all have been
            (room is measured against it, and somebody always has room); hashes are those of past assignments. `ended`,
            `released`, `reported` and `version_changed` decide nothing.
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
        self._ranks: dict[str, _Rank] = {}
        self._names: list[str] = []
        self._seats: list[_Rank | None] = []
        """Bit number → rank. Sets of ranks are kept in `_Prefixes`, so that a rank keeps its seat."""
        self._everyone = 0
        self._prefixes = _Prefixes(max_hashes_per_rank)
        self._order = _Order()
        self._dirty: set[_Rank] = set()
        self._outdated = False
        """Ranks came or went, or the stamps have grown long: `_order` is to be made anew."""
        self._clock = 0
        self._last = ""
        """Name of the rank assigned to last, which may have left: where ROUND_ROBIN goes on."""
        self._unit = 1
        """Greatest common divisor of all slots."""

    # --- ranks --------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[str, ...]:
        """Names, sorted."""
        return tuple(self._names)

    def index(self, name: str) -> int:
        """Position in the sorted names.

        Raises:
            ValueError: no such rank.
        """
        self._rank(name)
        return bisect_left(self._names, name)

    def add_rank(self, name: str, slots: int) -> None:
        """A rank that may run `slots` samples at once and holds nothing yet.

        Raises:
            ValueError: the name is taken, or `slots` is below 1.
        """
        if name in self._ranks:
            raise ValueError(f"rank {name!r}: is here already; remove it first")
        if slots < 1:
            raise ValueError(f"rank {name!r}, slots={slots!r}: must be at least 1")
        rank = self._ranks[name] = _Rank(name, slots)
        insort(self._names, name)
        seat = self._seats.index(None) if None in self._seats else len(self._seats)
        self._seats[seat : seat + 1] = [rank]
        rank.bit = 1 << seat
        self._everyone |= rank.bit
        self._outdated = True
        self._complete = self._complete or len(self._names) >= self._data_parallel_size

    def remove_rank(self, name: str) -> None:
        """Forget it and all it held; claims on it may still be released.

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
        """False where no decision depends on hashes, so that nobody need compute them."""
        return self._by_prefix and self._alpha > 0 and max(len(self._names), self._data_parallel_size) > 1

    def place(self, hashes: Sequence[int], samples: int, *, exclude: Collection[str] = ()) -> list[Placement]:
        """Where a group should go. Changes nothing: `assigned` says that it went there.

        A group goes to one rank, unless a prefix policy finds a better score elsewhere for some of its samples, taken
        one by one: a rank that has got one of them matches the whole prompt and has one slot less. All ranks it goes
        to have room for the whole group.

        Args:
            hashes: of the prompt's complete blocks, from the first.
            samples: of the group.
            exclude: ranks that must not get it.

        Returns:
            Parts of the group, in the order in which to assign them; empty while nobody has room.

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
        """The hashes that count."""
        if not self._by_prefix:
            return ()
        return hashes[:1] if self._first_only else hashes

    def _without_prefix(self, candidates: int) -> _Rank:
        """LOAD_BALANCED or ROUND_ROBIN. Their seats are in the order of the names: the lowest bit is the lowest name."""
        if self._policy is PrefixCachingCoordinatorPolicy.LOAD_BALANCED:
            _, candidates = self._order.best([(0, candidates)], 1, 0.0, 1.0)
        else:
            turn = bisect_left(self._names, self._last) + (self._last in self._ranks)
            candidates = candidates >> turn << turn or candidates
        return self._seated(candidates & -candidates)

    def _best(self, levels: Levels, blocks: int) -> _Rank:
        alpha, beta = (self._alpha, 1 - self._alpha) if blocks else (0.0, 1.0)
        _, winners = self._order.best(levels, blocks or 1, alpha, beta)
        return self._seated(self._order.latest(winners))

    def _split(self, first: _Rank, levels: Levels, blocks: int, samples: int) -> dict[_Rank, int]:
        """How many samples of a group each rank gets, by the order in which they get their first."""
        alpha, beta = self._alpha, 1 - self._alpha
        blocks = blocks or 1
        counts = {first: samples}
        (depth,) = (depth for depth, ranks in levels if ranks & first.bit)
        # Nobody scores higher than the first rank did, and its own score falls from sample to sample.
        if samples == 1 or alpha + beta * first.free(samples - 1) >= alpha * (depth / blocks) + beta * first.free():
            return counts
        counts = {first: 1}
        own = [(-(alpha + beta * first.free(1)), 0, first)]
        rest, rival, rival_score = self._rival(levels, first, blocks)
        for turn in range(1, samples):
            score, _, rank = own[0]
            # At equal scores it is a rank of the group: it has got something last.
            if rival is not None and rival_score > -score:
                counts[rival] = 1
                heappush(own, (-(alpha + beta * rival.free(1)), -turn, rival))
                rest, rival, rival_score = self._rival(rest, rival, blocks)
            else:
                counts[rank] += 1
                heapreplace(own, (-(alpha + beta * rank.free(counts[rank])), -turn, rank))
        return counts

    def _rival(self, levels: Levels, taken: _Rank, blocks: int) -> tuple[Levels, _Rank | None, float]:
        """The candidates without one, and the best of them with its score."""
        rest = [(depth, ranks & ~taken.bit) for depth, ranks in levels if ranks != taken.bit]
        if not rest:
            return rest, None, 0.0
        score, winners = self._order.best(rest, blocks, self._alpha, 1 - self._alpha)
        return rest, self._seated(self._order.latest(winners)), score

    def _seated(self, bit: int) -> _Rank:
        rank = self._seats[bit.bit_length() - 1]
        assert rank is not None
        return rank

    # --- what has happened --------------------------------------------------------------------------------------

    def assigned(self, name: str, hashes: Sequence[int], samples: int) -> Claim:
        """A part of a group went to a rank.

        Args:
            name: the rank.
            hashes: of the prompt's complete blocks: the rank will hold them.
            samples: how many.

        Returns:
            To be given to `released` when this assignment has ended.

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
        """Samples have left a rank.

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
        """An assignment has ended: what it was expected to bring is not expected any more. The second time does nothing."""
        self._prefixes.release(claim)

    def reported(self, name: str, added: Iterable[int], removed: Iterable[int], flushed: bool) -> None:
        """A rank's own word about its prefix cache, in this order: `flushed`, `removed`, `added`.

        Args:
            name: the rank.
            added: hashes that can be found there from now on, of one prompt from its first block on.
            removed: hashes that can no longer be found.
            flushed: all earlier ones are gone.

        Raises:
            ValueError: no such rank.
        """
        rank = self._rank(name)
        if self._deterministic or not self._by_prefix:
            return
        self._prefixes.discard(rank, tuple(rank.listed) if flushed else removed)
        self._prefixes.add(rank, added)

    def version_changed(self, name: str) -> None:
        """Nothing a rank holds, or was to hold by an assignment so far, can be met by a new request.

        Raises:
            ValueError: no such rank.
        """
        rank = self._rank(name)
        if not self._deterministic:
            self._prefixes.forget(rank)

    # --- asking -------------------------------------------------------------------------------------------------

    def pending(self, name: str) -> int:
        """Samples that were assigned and have not ended.

        Raises:
            ValueError: no such rank.
        """
        return self._rank(name).pending

    def held(self, name: str) -> set[int]:
        """Hashes that count as held: expected or listed.

        Raises:
            ValueError: no such rank.
        """
        return self._rank(name).held

    def match(self, name: str, hashes: Sequence[int]) -> int:
        """Leading blocks of a prompt that a rank holds.

        Raises:
            ValueError: no such rank.
        """
        ((depth, _),) = self._prefixes.levels(self._asked(hashes), self._rank(name).bit)
        return depth

    def check(self) -> None:
        """Prove what is always true.

        Raises:
            AssertionError: it is not.
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

    def _taken(self) -> Iterator[tuple[int, _Rank]]:
        return ((1 << seat, rank) for seat, rank in enumerate(self._seats) if rank is not None)

    # --- keeping order ------------------------------------------------------------------------------------------

    def _rank(self, name: str) -> _Rank:
        try:
            return self._ranks[name]
        except KeyError:
            raise ValueError(f"rank {name!r}: is not here; add it first ({len(self._names)} are)") from None

    def _refresh(self) -> None:
        """Bring `_order` up to date; between two decisions a rank moves once, however often its load did."""
        if self._outdated:
            self._start_order()
        for rank in self._dirty:
            self._order.show(rank)
        self._dirty.clear()
        # Every rank has a load of at least slots // unit: that much is a common floor, and only what is above it counts.
        # Each rank has been assigned some of it, so that this loop costs a constant per sample.
        if self._deterministic and self._ranks and self._order.free_shares[-1] <= (self._unit - 1) / self._unit:
            ranks = self._ranks.values()
            floors = min(rank.load // (rank.slots // self._unit) for rank in ranks)
            for rank in ranks:
                rank.load -= floors * (rank.slots // self._unit)
                self._order.show(rank)

    def _start_order(self) -> None:
        """Deal the stamps anew: ranks never assigned anything by descending name, then the others as they were."""
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
