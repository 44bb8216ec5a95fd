"""Tests of routing: the score of a rank, room, what ranks hold, deterministic mode."""

from __future__ import annotations

import pytest

from rollout.distributed.coordinator.core.routing import Placement, Router
from tests.distributed.coordinator.core.routers import (
    LONGEST,
    PROMPT,
    chosen,
    holds,
    make,
    send,
)

# --- the score --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "loads", "matched", "expected"),
    [
        pytest.param(1.0, (9, 0), (4, 0), "0", id="only the match counts"),
        pytest.param(0.0, (8, 1), (4, 0), "1", id="only the load counts"),
        pytest.param(0.5, (7, 0), (4, 0), "0", id="0.65 against 0.5"),
        pytest.param(0.5, (10, 0), (4, 0), "0", id="0.5 against 0.5: the latest"),
        pytest.param(0.5, (5, 2), (0, 0), "1", id="no match: the largest free share"),
        pytest.param(0.1, (10, 0), (4, 0), "1", id="0.1 against 0.9"),
        pytest.param(0.5, (0, 0), (2, 4), "1", id="the longest match at equal load"),
        pytest.param(0.5, (0, 0, 0), (0, 1, 0), "1", id="a quarter of the prompt is a quarter of the match"),
        pytest.param(0.5, (0, 4), (2, 4), "1", id="0.75 against 0.8"),
        pytest.param(0.5, (0, 6), (2, 4), "0", id="0.75 against 0.7"),
        pytest.param(0.5, (0, 0, 0), (0, 0, 0), "0", id="nothing at all: the lowest name"),
        pytest.param(0.5, (1, 1, 0), (4, 4, 0), "1", id="equal scores: the latest"),
    ],
)
def test_the_score_weighs_the_match_against_the_free_share(
    alpha: float, loads: tuple[int, ...], matched: tuple[int, ...], expected: str
) -> None:
    router = make(*loads, alpha=alpha)
    for name, blocks in enumerate(matched):
        holds(router, str(name), PROMPT[:blocks])
    assert router.place(PROMPT, 1) == [Placement(expected, 1, matched[int(expected)])]


# --- room and groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_groups", [True, False])
def test_groups_that_arrive_at_once_are_prefilled_once(as_groups: bool) -> None:
    """As one request of n, and as n requests that are sent one after the other before anybody has answered."""
    ranks, slots, n = 4, 256, 16
    router = make(*[0] * ranks, slots=slots)
    parts = 0
    held: dict[str, set[int]] = {name: set() for name in router.ranks}
    groups = ranks * slots // n
    for group in range(groups):
        hashes = [0, 1, *(1000 * (group + 1) + block for block in range(30))]
        for part, _ in [
            each for _ in range(1 if as_groups else n) for each in send(router, hashes, n if as_groups else 1)
        ]:
            parts += hashes[-1] not in held[part.rank]
            held[part.rank].add(hashes[-1])
    samples = groups * n
    assert sum(router._ranks[name].load for name in router.ranks) == samples
    assert (samples - parts) / samples >= (n - 1) / n


def test_without_ranks_everything_waits() -> None:
    assert Router(LONGEST).place(PROMPT, 1) == []


# --- deterministic mode -----------------------------------------------------------------------------------------------


def deterministic(*names: str, slots: int = 8, size: int = 3) -> Router:
    router = Router(LONGEST, deterministic=True, data_parallel_size=size)
    for name in names:
        router.add_rank(name, slots)
    return router


def test_deterministic_routing_waits_for_all_ranks_and_goes_on_when_one_is_lost() -> None:
    router = deterministic("a", "b")
    assert router.place(PROMPT, 1) == []
    router.add_rank("c", 8)
    assert chosen(router, PROMPT) == "a"
    router.remove_rank("a")
    assert chosen(router, PROMPT) == "b"
