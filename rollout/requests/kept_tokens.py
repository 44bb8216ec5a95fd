"""`KeptTokens`: for each sampled token, the ids of the set that top_k, top_p and min_p left to draw it from.

Always true: a token's ids ascend and hold the token itself; `unpack_kept` is the inverse of `pack_kept`, and packed sets
joined as bytes are the sets joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rollout.requests.codec import Codec, refuse

IntArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class KeptTokens:
    """Sets of G tokens, flat."""

    ids: IntArray
    """[sum of counts] int32, of each token in order; ascending within a token."""
    counts: IntArray
    """[G] int32, the size of each token's set."""

    @classmethod
    def of(cls, sets: Iterable[Any]) -> KeptTokens:
        """From the ids of each token: integers, or int32 arrays."""
        rows = [np.asarray(ids, np.int32) for ids in sets]
        counts = np.fromiter(map(len, rows), np.int32, len(rows))
        return cls(np.concatenate(rows) if rows else np.zeros(0, np.int32), counts)

    @classmethod
    def join(cls, parts: Iterable[KeptTokens]) -> KeptTokens:
        """The sets of consecutive tokens."""
        both = [(part.ids, part.counts) for part in parts] or [(np.zeros(0, np.int32), np.zeros(0, np.int32))]
        ids, counts = zip(*both, strict=True)
        return cls(np.concatenate(ids), np.concatenate(counts))

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[IntArray]:
        return iter(np.split(self.ids, np.cumsum(self.counts)[:-1])) if len(self) else iter(())

    @overload
    def __getitem__(self, index: int) -> IntArray: ...
    @overload
    def __getitem__(self, index: slice) -> KeptTokens: ...
    def __getitem__(self, index: int | slice) -> IntArray | KeptTokens:
        """The ids of one token, or the sets of a slice (of step 1)."""
        ends = np.cumsum(self.counts)
        if not isinstance(index, slice):
            at = range(len(self))[index]
            return self.ids[ends[at] - self.counts[at] : ends[at]]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"kept tokens [{index}]: the step must be 1")
        if stop <= start:
            return KeptTokens(self.ids[:0], self.counts[:0])
        return KeptTokens(self.ids[ends[start] - self.counts[start] : ends[stop - 1]], self.counts[start:stop])

    def __repr__(self) -> str:
        return f"KeptTokens({len(self)} tokens, {len(self.ids)} ids)"

    def tolist(self) -> list[list[int]]:
        """The ids of each token."""
        return [ids.tolist() for ids in self]

    def wrong_for(self, tokens: list[int]) -> str | None:
        """Why these cannot be the sets that `tokens` were drawn from; None: they can.

        Not looked for: ids beyond a vocabulary.
        """
        if len(self) != len(tokens):
            return f"{len(self)} sets for {len(tokens)} tokens: must be one each"
        if not len(self):
            return None
        starts = np.cumsum(self.counts) - self.counts
        rising = np.diff(self.ids) > 0
        rising[starts[1:] - 1] = True
        if self.ids.min() < 0 or not rising.all():
            return "the ids of a token must be at least 0 and ascend"
        drawn = np.repeat(np.asarray(tokens, np.int64), self.counts) == self.ids
        missing = np.flatnonzero(~np.logical_or.reduceat(drawn, starts))
        if len(missing):
            return f"token {tokens[missing[0]]} at {missing[0]} is not in its own set"
        return None


def pack_kept(sets: KeptTokens) -> bytes:
    """Encode as little-endian int32: of each token the size of its set and the ids."""
    starts = np.cumsum(sets.counts) - sets.counts
    return np.insert(sets.ids, starts, sets.counts).astype("<i4", copy=False).tobytes()


def packed_sets(sets: KeptTokens) -> list[bytes]:
    """Each token's set, packed."""
    packed, ends = pack_kept(sets), (4 * np.cumsum(sets.counts + 1)).tolist()
    return [packed[start:end] for start, end in zip([0, *ends], ends, strict=False)]


NO_SET = pack_kept(KeptTokens(np.zeros(0, np.int32), np.zeros(1, np.int32)))
"""Packed, of a token whose request returns no set."""


def joined_sets(packed: list[bytes]) -> KeptTokens:
    """The sets of consecutive tokens, each packed."""
    counts = np.fromiter(map(len, packed), np.int64, len(packed)) // 4 - 1
    numbers = np.frombuffer(b"".join(packed), "<i4")
    return KeptTokens(np.delete(numbers, np.cumsum(counts + 1) - counts - 1).astype(np.int32), counts.astype(np.int32))


def unpack_kept(packed: bytes) -> KeptTokens:
    """Decode sets; the inverse of `pack_kept`, also of several that were joined.

    Raises:
        SerializationError: malformed.
    """
    if not isinstance(packed, bytes) or len(packed) % 4:
        refuse("kept_tokens", packed, "bytes of 4-byte integers")
    numbers = np.frombuffer(packed, "<i4")
    heads, at = [], 0
    while at < len(numbers):
        count = numbers.item(at)
        if not 0 < count < len(numbers) - at:
            refuse("kept_tokens", count, f"the size of a set, of which {len(numbers) - at - 1} numbers follow")
        heads.append(at)
        at += count + 1
    places = np.asarray(heads, np.int64)
    return KeptTokens(np.delete(numbers, places).astype(np.int32), numbers[places].astype(np.int32))


KEPT_TOKENS = Codec(pack_kept, unpack_kept)
