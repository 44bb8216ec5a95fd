"""Ragged columns of a completion: the ids that each token was drawn from, its top log-probs, and its expert routes.

Packed columns may be concatenated as bytes: unpacking the result gives the concatenated columns. If two parts have
routes for the same position, the later part's routes are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollout.errors import SerializationError
from rollout.requests.codec import INT_ARRAY, TOP_N, Codec, refuse, unpack_joined

IntArray = NDArray[np.int32]

# --- kept tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class KeptTokens:
    """The ids that top_k, top_p and min_p kept for each of G sampled tokens, as one flat array.

    The ids in a token's set ascend and include the token itself.
    """

    ids: IntArray
    """The ids of all sets, one set after another, int32 [sum of counts]."""
    counts: IntArray
    """The size of each token's set, int32 [G]."""

    @classmethod
    def of(cls, sets: Iterable[Any]) -> KeptTokens:
        """Build the object from the ids in each token's set, given as integers or as an int32 array."""
        rows = [np.asarray(ids, np.int32) for ids in sets]
        counts = np.fromiter(map(len, rows), np.int32, len(rows))
        return cls(np.concatenate(rows) if rows else np.zeros(0, np.int32), counts)

    @classmethod
    def join(cls, parts: Iterable[KeptTokens]) -> KeptTokens:
        """Join the sets of consecutive tokens into one object."""
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
        """Return the ids in one token's set, or the sets of a slice of tokens."""
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
        """Return the ids in the set of each token, as lists."""
        return [ids.tolist() for ids in self]

    def wrong_for(self, tokens: list[int]) -> str | None:
        """Return why `tokens` cannot have been drawn from these sets, or None if they can. The vocabulary is not checked."""
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
    """Encode sets as little-endian int32: for each token, the size of its set, then the set's ids."""
    starts = np.cumsum(sets.counts) - sets.counts
    return np.insert(sets.ids, starts, sets.counts).astype("<i4", copy=False).tobytes()


def packed_sets(sets: KeptTokens) -> list[bytes]:
    """Encode each token's set separately, in the format of `pack_kept`."""
    packed, ends = pack_kept(sets), (4 * np.cumsum(sets.counts + 1)).tolist()
    return [packed[start:end] for start, end in zip([0, *ends], ends, strict=False)]


NO_SET = pack_kept(KeptTokens(np.zeros(0, np.int32), np.zeros(1, np.int32)))
"""The packed empty set of ids, for a token whose request does not return the ids that it was drawn from."""


def joined_sets(packed: list[bytes]) -> KeptTokens:
    """Decode the sets of consecutive tokens; the inverse of `packed_sets`."""
    counts = np.fromiter(map(len, packed), np.int64, len(packed)) // 4 - 1
    numbers = np.frombuffer(b"".join(packed), "<i4")
    return KeptTokens(np.delete(numbers, np.cumsum(counts + 1) - counts - 1).astype(np.int32), counts.astype(np.int32))


def unpack_kept(packed: bytes) -> KeptTokens:
    """Decode one or more concatenated results of `pack_kept`; raise `SerializationError` if they are malformed."""
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

# --- top log-probs --------------------------------------------------------------------------------------------------------

TopN = list[list[tuple[int, float]]]
"""The top (token id, log-prob) pairs of each token, most likely first."""


def pack_top_n(rows: TopN) -> bytes:
    """Encode the top log-probs of tokens as one msgpack value."""
    packed: bytes = msgpack.packb(TOP_N.encode(rows))
    return packed


def unpack_top_n(packed: bytes) -> TopN:
    """Decode one or more concatenated results of `pack_top_n`; raise `SerializationError` if they are malformed."""
    return [row for rows in unpack_joined("top_n", packed) for row in TOP_N.decode(rows)]


# --- expert routes --------------------------------------------------------------------------------------------------------

Routes = NDArray[np.integer[Any]]
"""The k experts that each router of a mixture of experts chose, uint8 or int16 [positions, layers, k].

In a sequence of T tokens, row t belongs to the forward pass whose input was token t and from which token t+1 was sampled.
The last sampled token has no row, because it was never an input. Dropped KV is computed again, perhaps under other weights.
The first token sampled afterwards comes with the routes of all positions, which replace the earlier routes.
"""


def check_routes(name: str, routes: Any, positions: int) -> None:
    """Raise `SerializationError` unless `routes` are integers [positions, layers, k]; `name` begins the message."""
    if routes.ndim != 3 or routes.dtype.kind not in "iu" or len(routes) != positions:
        refuse(name, f"{routes.dtype} {list(routes.shape)}", f"integers [{positions}, layers, k]")


def first_unread(computed: int, position: int) -> int:
    """Return the first position whose expert routes must be sent along with the tokens from `position` on.

    Args:
        computed: length of the prompt that was computed, or computed again, before the newest tokens were sampled.
        position: position of the first token that is sent.
    """
    return 0 if position <= computed else position - 1


def overlaid(parts: Sequence[tuple[int, Routes]]) -> tuple[int, Routes]:
    """Join parts of one sample's expert routes; return (first position, routes). Where parts overlap, the later one counts.

    Raises:
        ValueError: positions between two parts are missing, or the parts differ in the number of layers or in k.
    """
    end = parts[0][0]
    for first, routes in parts:
        if first > end:
            raise ValueError(f"routes of positions {end} to {first - 1} are missing")
        end = first + len(routes)
    begin, kept = end, [parts[0][1][:0]]
    for first, routes in reversed(parts):
        if first < begin:
            kept.append(routes[: begin - first])
            begin = first
    return begin, np.concatenate(kept[::-1])


def pack_routes(first: int, routes: Routes) -> bytes:
    """Encode the expert routes of the positions from `first` on."""
    packed: bytes = msgpack.packb([first, INT_ARRAY.encode(routes)])
    return packed


def unpack_routes(packed: bytes) -> tuple[int, Routes]:
    """Decode one or more concatenated results of `pack_routes` to (first position, expert routes).

    Raises:
        SerializationError: a part is malformed, or positions between two parts are missing.
    """
    parts: list[tuple[int, Routes]] = []
    for value in unpack_joined("routes", packed):
        if type(value) is not list or len(value) != 2 or type(value[0]) is not int or value[0] < 0:
            refuse("routes", value, "[a position from 0 on, routes]")
        routes = INT_ARRAY.decode(value[1])
        check_routes("routes", routes, len(routes) if routes.ndim else 0)
        parts.append((value[0], routes))
    try:
        return overlaid(parts)
    except ValueError as exc:
        raise SerializationError(f"routes: {exc}") from exc
