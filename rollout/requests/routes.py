"""Expert routes of a mixture of experts: which experts every router chose for a token.

Routes are integers [positions, layers, k] of the positions 0 … T-2 of a sequence of T tokens: row t belongs to the forward
that token t was the input of and token t+1 was sampled from. The last sampled token has no row.

Always true: the routes of a record are those of the KV that its last token was sampled on. KV that was dropped is computed
again, perhaps under other weights, and the first token after that replaces the routes of all positions before it. The
segments of a record hold consecutive rows: a later segment begins where the one before it ended, so that merging
concatenates them. A stretch of packed rows says where it begins, and what comes later replaces what came earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollout.errors import SerializationError
from rollout.requests.codec import INT_ARRAY, refuse
from rollout.requests.request import DynamicInferenceRequest

Routes = NDArray[np.integer[Any]]
"""[positions, layers, k] of uint8 or int16."""


def route_rows(segments: Iterable[DynamicInferenceRequest]) -> int:
    """Number of positions whose routes these segments hold."""
    return sum(len(each.routing_indices) for each in segments if each.routing_indices is not None)


def check_routes(name: str, routes: Any, positions: int) -> None:
    """Refuse routes that are not integers [positions, layers, k].

    Raises:
        SerializationError: names their dtype and shape.
    """
    if routes.ndim != 3 or routes.dtype.kind not in "iu" or len(routes) != positions:
        refuse(name, f"{routes.dtype} {list(routes.shape)}", f"integers [{positions}, layers, k]")


def set_routes(segments: Sequence[DynamicInferenceRequest], routes: Routes) -> None:
    """Make `routes`, of the positions from 0 on, those of the segments; the last one gets all that are left."""
    start = 0
    for segment in segments[:-1]:
        stop = max(start, segment.total_length - 1) if segment.generated_tokens else start
        segment.routing_indices, start = routes[start:stop], stop
    segments[-1].routing_indices = routes[start:]


def first_unread(computed: int, position: int) -> int:
    """First position of the routes that go with the tokens from `position` on, to a reader of all tokens before them.

    Args:
        computed: length of the prompt that was computed (again) before the newest tokens were sampled. The first token after
            it comes with the routes of all positions.
    """
    return 0 if position <= computed else position - 1


def overlaid(parts: Sequence[tuple[int, Routes]]) -> tuple[int, Routes]:
    """(first position, routes) of stretches of one sample that are given so: a later one replaces what it covers.

    Raises:
        ValueError: positions between two of them are missing, or they are of different [layers, k].
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
    """Encode the routes of the positions from `first` on. Packed routes may be joined as bytes: see `overlaid`."""
    packed: bytes = msgpack.packb([first, INT_ARRAY.encode(routes)])
    return packed


def unpack_routes(packed: bytes) -> tuple[int, Routes]:
    """(first position, routes); the inverse of `pack_routes`, also of several that were joined.

    Raises:
        SerializationError: malformed, or positions are missing.
    """
    values = msgpack.Unpacker(max_buffer_size=max(1, len(packed)))
    values.feed(packed)
    parts: list[tuple[int, Routes]] = []
    try:
        while values.tell() < len(packed):
            first, array = values.unpack()
            routes = INT_ARRAY.decode(array)
            check_routes("routes", routes, len(routes) if routes.ndim else 0)
            if type(first) is not int or first < 0:
                refuse("routes", first, "a position from 0 on")
            parts.append((first, routes))
        if not parts:
            refuse("routes", f"{len(packed)} bytes", "one or more packed stretches")
        return overlaid(parts)
    except SerializationError:
        raise
    # All other msgpack errors are ValueErrors, as are arrays of different shapes; a list as a map key is a TypeError.
    except (msgpack.OutOfData, ValueError, TypeError, RecursionError) as exc:
        raise SerializationError(f"routes: {len(packed)} malformed bytes ({type(exc).__name__}: {exc})") from exc


def cut_routes(packed: bytes, start: int, stop: int, count: int) -> bytes:
    """Routes of tokens `start` … `stop` - 1 of `count`, each of the position before; all earlier ones with token 0."""
    first, routes = unpack_routes(packed)
    before = len(routes) - count
    low = before + start if start else 0
    return pack_routes(first + low, routes[low : before + stop])
