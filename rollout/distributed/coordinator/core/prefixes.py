"""Index from block hash to the set of ranks that cache the block.

Always true: a rank holds a hash if an open assignment will cache it there (*expected*, reference-counted) or the rank has
reported it (*listed*, bounded LRU); `Prefixes.holders` is exactly the union of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout.distributed.coordinator.core.ranks import Levels, Rank


class Claim:
    """Handle of the hashes that one assignment is expected to cache on its rank, until `Router.released`. Opaque."""

    __slots__ = ("expected", "hashes", "rank")

    def __init__(self, rank: Rank, hashes: tuple[int, ...]) -> None:
        self.rank = rank
        self.hashes = hashes
        self.expected = rank.expected
        """The rank's counter table at that time; a version change replaces it, which voids the claim."""


class Prefixes:
    """Index from block hash to the bit set of ranks that hold it.

    Optimised for prompts with dozens of blocks, most of them held by one rank: loops over hashes are inlined, and a set
    of one rank is that rank's `bit` object itself.
    """

    def __init__(self, max_listed: int) -> None:
        self.holders: dict[int, int] = {}
        self._max_listed = max_listed

    def expect(self, rank: Rank, hashes: Sequence[int]) -> Claim:
        """Count an assignment's hashes as expected, and refresh the listed ones in the LRU order."""
        claim = Claim(rank, tuple(hashes))
        expected, listed, holders, bit = rank.expected, rank.listed, self.holders, rank.bit
        # Backwards, here and in `add`: the last block of a prompt is evicted first, so that the rest can still match.
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
        """Undo `expect`, unless a version change or the rank's removal already did."""
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

    def add(self, rank: Rank, hashes: Iterable[int]) -> None:
        """Add hashes reported by the rank; beyond the limit the least recently used are dropped."""
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

    def discard(self, rank: Rank, hashes: Iterable[int]) -> None:
        """Remove hashes that the rank has evicted; those of open assignments stay expected."""
        for each in hashes:
            if each in rank.listed:
                del rank.listed[each]
                if each not in rank.expected:
                    self._drop(rank, each)

    def forget(self, rank: Rank) -> None:
        """Remove all hashes of the rank and void its claims."""
        for each in rank.held:
            self._drop(rank, each)
        rank.expected = {}
        rank.listed.clear()

    def levels(self, hashes: Sequence[int], ranks: int) -> Levels:
        """Group a non-empty set of ranks by matched blocks; the cost is one step per block, independent of their number."""
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

    def _drop(self, rank: Rank, each: int) -> None:
        ranks = self.holders[each]
        if ranks == rank.bit:
            del self.holders[each]
        else:
            self.holders[each] = ranks ^ rank.bit

    def check(self, ranks: Iterable[Rank]) -> None:
        """Assert that the index equals the union of the ranks' hashes."""
        union: dict[int, int] = {}
        for rank in ranks:
            assert all(count > 0 for count in rank.expected.values()), rank.name
            assert len(rank.listed) <= self._max_listed, rank.name
            for each in rank.held:
                union[each] = union.get(each, 0) | rank.bit
        assert self.holders == union
