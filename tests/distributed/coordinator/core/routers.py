"""Routers of the tests: with ranks of given loads, and what they choose."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from rollout.distributed.coordinator.core.routing import Claim, Placement, Router
from rollout.state import PrefixCachingCoordinatorPolicy

LONGEST = PrefixCachingCoordinatorPolicy.LONGEST_PREFIX
FIRST = PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK
BALANCED = PrefixCachingCoordinatorPolicy.LOAD_BALANCED
ROBIN = PrefixCachingCoordinatorPolicy.ROUND_ROBIN
BY_PREFIX = (LONGEST, FIRST)

LIVES = int(os.environ.get("ROLLOUT_ROUTING_LIVES", "600"))


def make(*loads: int, policy: PrefixCachingCoordinatorPolicy = LONGEST, alpha: float = 0.5, slots: int = 10) -> Router:
    """Ranks "0", "1", … with so many pending samples; the last was assigned work last, and no rank has a cached block."""
    router = Router(policy, alpha=alpha)
    for name in map(str, range(len(loads))):
        router.add_rank(name, slots)
    for name, load in enumerate(loads):
        if load:
            router.assigned(str(name), [], load)
    return router


def held(router: Router, name: str) -> set[int]:
    rank = router._ranks[name]
    return {*rank.expected, *rank.listed}


def check(router: Router) -> None:
    assert list(router.ranks) == sorted(router.ranks)
    for name in router.ranks:
        rank = router._ranks[name]
        assert rank.load >= 0, name
        assert all(count > 0 for count in rank.expected.values()), name
        assert len(rank.listed) <= router._max_hashes, name


def chosen(router: Router, hashes: Sequence[int], samples: int = 1, exclude: Collection[str] = ()) -> str | None:
    """Name of the rank that the request would be routed to; None: no rank has room."""
    placements = router.place(hashes, samples, exclude=exclude)
    assert len(placements) <= 1
    return placements[0].rank if placements else None


def send(router: Router, hashes: Sequence[int], samples: int = 1) -> list[tuple[Placement, Claim]]:
    return [
        (placement, router.assigned(placement.rank, hashes, placement.samples))
        for placement in router.place(hashes, samples)
    ]
