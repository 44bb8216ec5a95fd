"""Tests of routing: the score of a rank, room, what ranks hold, deterministic mode."""

from __future__ import annotations

import heapq
import random
from collections import deque

import pytest

from rollout.distributed.coordinator.core.routing import Claim, Placement, Router
from rollout.state import PrefixCachingCoordinatorPolicy
from tests.distributed.coordinator.core.routers import (
    BALANCED,
    FIRST,
    LONGEST,
    OTHER,
    PROMPT,
    ROBIN,
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


@pytest.mark.parametrize("policy", [LONGEST, FIRST, BALANCED])
@pytest.mark.parametrize(("loads", "expected"), [((3, 1, 2), "1"), ((2, 1, 1), None), ((0, 0, 0), "0")])
def test_without_hashes_the_largest_free_share_wins(
    policy: PrefixCachingCoordinatorPolicy, loads: tuple[int, ...], expected: str | None
) -> None:
    router = make(*loads, policy=policy, alpha=1.0)
    latest = "1" if policy is BALANCED else "2"
    assert chosen(router, []) == (expected or latest)


def test_a_match_counts_from_the_first_block_on_and_ends_at_the_first_gap() -> None:
    router = make(0, 0)
    holds(router, "1", [2, 3, 4])
    assert router.match("1", PROMPT) == 0
    holds(router, "1", [1])
    assert router.match("1", PROMPT) == 4
    router.reported("1", (), [3], flushed=False)
    assert router.match("1", PROMPT) == 2
    assert router.match("1", []) == 0


def test_the_first_block_policy_does_not_look_at_depth() -> None:
    router = make(0, 2, policy=FIRST, slots=16)
    holds(router, "0", PROMPT[:1])
    holds(router, "1", PROMPT)
    assert router.place(PROMPT, 1) == [Placement("0", 1, 1)]
    router.assigned("0", PROMPT, 2)
    router.assigned("1", OTHER, 1)
    router.ended("1", 1)
    assert router.place(PROMPT, 1) == [Placement("1", 1, 1)], "equal match and load: the latest"
    assert router.held("0") == {1}


def test_three_ranks_that_hold_the_prompt_share_its_requests() -> None:
    router = make(0, 0, 0)
    for name in router.ranks:
        holds(router, name, PROMPT)
    for _ in range(6):
        send(router, PROMPT)
    assert [router.pending(name) for name in router.ranks] == [2, 2, 2]


def test_load_beats_recency_and_recency_breaks_equal_load() -> None:
    router = make(0, 0, 0)
    for name in router.ranks:
        holds(router, name, PROMPT)
    for name in ("2", "0", "1"):
        router.assigned(name, PROMPT, 1)
    assert chosen(router, PROMPT) == "1"
    router.assigned("1", PROMPT, 1)
    assert chosen(router, PROMPT) == "0"
    router.ended("2", 1)
    assert chosen(router, PROMPT) == "2"


def test_an_identical_prompt_follows_the_first_one_before_any_report() -> None:
    router = make(0, 0, 0)
    router.assigned("1", PROMPT, 1)
    assert router.place(PROMPT, 1) == [Placement("1", 1, 4)]
    assert router.place([*PROMPT[:2], 98, 99], 1) == [Placement("1", 1, 2)]
    assert chosen(router, OTHER) == "0"


def test_round_robin_takes_the_next_name_that_has_room_and_no_notice_of_hashes() -> None:
    router = make(0, 0, 0, policy=ROBIN, slots=4)
    holds(router, "2", PROMPT)
    taken = []
    for _ in range(4):
        ((placement, _),) = send(router, PROMPT)
        taken.append(placement.rank)
    assert taken == ["0", "1", "2", "0"]
    router.assigned("1", [], 4)
    assert chosen(router, PROMPT) == "2"
    assert chosen(router, PROMPT, exclude=["2"]) == "0"
    router.remove_rank("1")
    router.add_rank("0b", 4)
    assert chosen(router, PROMPT) == "2", "the one after the name that has left"
    assert router.held("2") == set()
    router.check()


def test_load_balanced_takes_the_lowest_name_of_the_freest_and_no_notice_of_hashes() -> None:
    router = make(1, 1, 1, policy=BALANCED)
    holds(router, "2", PROMPT)
    assert [send(router, PROMPT, 3)[0][0].rank for _ in range(4)] == ["0", "1", "2", "0"]


def test_ranks_are_as_free_as_their_share_of_slots_says() -> None:
    router = Router(LONGEST)
    router.add_rank("large", 100)
    router.add_rank("small", 10)
    router.assigned("large", [], 30)
    router.assigned("small", [], 2)
    assert chosen(router, PROMPT) == "small"
    router.assigned("small", [], 2)
    assert chosen(router, PROMPT) == "large"


@pytest.mark.parametrize(
    ("policy", "alpha", "ranks", "size", "wanted"),
    [
        (LONGEST, 0.5, 2, 1, True),
        (FIRST, 0.5, 2, 1, True),
        (LONGEST, 0.5, 1, 1, False),
        (LONGEST, 0.5, 1, 2, True),
        (LONGEST, 0.0, 2, 2, False),
        (BALANCED, 0.5, 2, 2, False),
        (ROBIN, 0.5, 2, 2, False),
    ],
)
def test_hashes_are_wanted_only_where_a_decision_depends_on_them(
    policy: PrefixCachingCoordinatorPolicy, alpha: float, ranks: int, size: int, wanted: bool
) -> None:
    router = Router(policy, alpha=alpha, data_parallel_size=size)
    for name in range(ranks):
        router.add_rank(str(name), 8)
    assert router.hashes_wanted() is wanted


# --- room and groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "load", "samples", "room"),
    [
        (16, 0, 16, True), (16, 2, 16, True), (16, 3, 16, False), (16, 10, 8, True), (16, 11, 8, False),
        (16, 17, 1, True), (16, 18, 1, False), (16, 2, 500, True), (16, 3, 500, False), (1, 0, 1, True), (1, 1, 1, True),
        (1, 2, 1, False), (1, 1, 7, True),
    ],
)  # fmt: skip
def test_a_rank_has_room_up_to_its_slots_and_an_eighth(slots: int, load: int, samples: int, room: bool) -> None:
    assert chosen(make(load, slots=slots), [], samples) == ("0" if room else None)


def test_a_group_waits_for_a_rank_with_room_and_goes_to_the_first_that_has_some() -> None:
    router = make(9, 9, slots=8)
    assert router.place(PROMPT, 4) == []
    router.ended("1", 3)
    assert router.place(PROMPT, 4) == []
    router.ended("1", 1)
    assert chosen(router, PROMPT, 4) == "1"
    assert chosen(router, PROMPT, 4, exclude=["1"]) is None
    assert chosen(router, PROMPT, 4, exclude=["0", "gone"]) == "1"


def test_a_full_rank_is_no_candidate_however_much_it_holds() -> None:
    router = make(9, 0, slots=8, alpha=1.0)
    holds(router, "0", PROMPT)
    assert chosen(router, PROMPT) == "1"
    router.ended("0", 1)
    assert chosen(router, PROMPT) == "0"


@pytest.mark.parametrize("samples", [1, 2, 7, 16, 18])
@pytest.mark.parametrize("policy", list(PrefixCachingCoordinatorPolicy))
def test_a_new_group_stays_whole(policy: PrefixCachingCoordinatorPolicy, samples: int) -> None:
    router = make(0, 0, 0, policy=policy, slots=16)
    for prompt in (PROMPT, OTHER, []):
        assert [part.samples for part, _ in send(router, prompt, samples)] in ([samples], [])


def test_a_group_is_split_where_the_prompt_is_held_twice() -> None:
    router = make(0, 0, 0, slots=16)
    holds(router, "0", PROMPT)
    holds(router, "2", PROMPT)
    assert router.place(PROMPT, 8) == [Placement("0", 4, 4), Placement("2", 4, 4)]


def test_a_group_is_split_once_a_sample_more_costs_more_than_a_longer_prefill() -> None:
    router = make(0, 0, slots=16)
    holds(router, "0", PROMPT)
    holds(router, "1", PROMPT[:3])
    # 0.5 + 0.5 * (16 - k) / 16 falls below 0.5 * 3 / 4 + 0.5 after four samples; then both hold the prompt.
    assert router.place(PROMPT, 5) == [Placement("0", 5, 4)]
    assert router.place(PROMPT, 6) == [Placement("0", 5, 4), Placement("1", 1, 3)]
    assert router.place(PROMPT, 12) == [Placement("0", 6, 4), Placement("1", 6, 3)]


def test_a_group_is_spread_evenly_where_only_the_load_counts_and_kept_where_only_the_match_does() -> None:
    spread = make(0, 0, 0, 0, alpha=0.0, slots=16)
    assert [part.samples for part in spread.place(PROMPT, 16)] == [4, 4, 4, 4]
    kept = make(0, 0, 0, 0, alpha=1.0, slots=16)
    assert [part.samples for part in kept.place(PROMPT, 16)] == [16]


@pytest.mark.parametrize("policy", [BALANCED, ROBIN])
def test_policies_that_ignore_the_prefix_never_split(policy: PrefixCachingCoordinatorPolicy) -> None:
    router = make(0, 0, policy=policy, alpha=0.0, slots=4)
    assert [part.samples for part in router.place(PROMPT, 4)] == [4]


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
    assert sum(router.pending(name) for name in router.ranks) == samples
    assert (samples - parts) / samples >= (n - 1) / n


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [LONGEST, BALANCED])
def test_long_tailed_lengths_are_balanced_over_the_ranks(policy: PrefixCachingCoordinatorPolicy, seed: int) -> None:
    """Ranks make one token of each of 32 samples at a time; a group that finds no room waits for the first that has."""
    chance = random.Random(seed)
    ranks, slots, n = 4, 32, 8
    router = make(*[0] * ranks, policy=policy, slots=slots)
    waiting = deque([0, *(1000 * (group + 1) + block for block in range(20))] for group in range(400))
    tokens = dict.fromkeys(router.ranks, 0)
    running = dict.fromkeys(router.ranks, 0)
    behind: dict[str, deque[tuple[int, list[Claim]]]] = {name: deque() for name in router.ranks}
    ends: list[tuple[int, int, str, list[Claim]]] = []
    now = count = 0

    def start(name: str) -> None:
        nonlocal count
        while behind[name] and running[name] < slots:
            length, claims = behind[name].popleft()
            running[name] += 1
            count += 1
            heapq.heappush(ends, (now + length, count, name, claims))

    while waiting or ends:
        while waiting and (placed := send(router, waiting[0], n)):
            waiting.popleft()
            for part, claim in placed:
                # The claim is released with the last of these.
                claims = [claim] * part.samples
                for _ in range(part.samples):
                    length = 1 + int(chance.lognormvariate(5.0, 1.0))
                    tokens[part.rank] += length
                    behind[part.rank].append((length, claims))
                start(part.rank)
        now, _, name, claims = heapq.heappop(ends)
        running[name] -= 1
        router.ended(name)
        claim = claims.pop()
        if not claims:
            router.released(claim)
        start(name)
    router.check()
    assert not any(router.pending(name) or router.held(name) for name in router.ranks)
    assert max(tokens.values()) <= 1.2 * sum(tokens.values()) / ranks


# --- what ranks hold --------------------------------------------------------------------------------------------------


def test_a_rank_holds_what_it_reports_and_what_it_is_expected_to() -> None:
    router = make(0, 0)
    first, second = router.assigned("0", PROMPT, 1), router.assigned("0", PROMPT[:2], 1)
    assert router.held("0") == {1, 2, 3, 4}
    router.released(first)
    assert router.held("0") == {1, 2}
    router.reported("0", [1, 9], (), flushed=False)
    router.released(second)
    assert router.held("0") == {1, 9}
    router.reported("0", [7], [1], flushed=False)
    assert router.held("0") == {7, 9}
    router.reported("0", [5], (), flushed=True)
    assert router.held("0") == {5}
    assert router.held("1") == set()
    router.check()


def test_an_eviction_does_not_take_back_what_an_open_assignment_will_bring() -> None:
    router = make(0, 0)
    holds(router, "0", PROMPT)
    claim = router.assigned("0", PROMPT, 1)
    router.reported("0", (), PROMPT, flushed=False)
    assert router.match("0", PROMPT) == 4
    router.released(claim)
    assert router.match("0", PROMPT) == 0


def test_what_a_rank_reports_removed_without_having_it_is_harmless() -> None:
    router = make(0, 0)
    holds(router, "1", PROMPT)
    router.reported("0", (), PROMPT, flushed=False)
    assert router.held("1") == set(PROMPT)
    router.check()


def test_releasing_twice_takes_back_once() -> None:
    router = make(0)
    first, second = router.assigned("0", PROMPT, 1), router.assigned("0", PROMPT, 1)
    router.released(first)
    router.released(first)
    assert router.held("0") == set(PROMPT)
    router.released(second)
    assert router.held("0") == set()
    router.check()


def test_after_a_version_change_nothing_old_matches_and_old_claims_take_nothing_new_away() -> None:
    router = make(0, 0)
    old = router.assigned("0", PROMPT, 1)
    holds(router, "0", OTHER)
    router.version_changed("0")
    assert router.held("0") == set()
    assert router.pending("0") == 1
    new = router.assigned("0", PROMPT, 1)
    router.released(old)
    assert router.held("0") == set(PROMPT)
    router.check()
    router.released(new)
    assert router.held("0") == set()


def test_a_removed_rank_is_forgotten_and_its_name_starts_afresh() -> None:
    router = make(3, 0, 0)
    claim = router.assigned("0", PROMPT, 1)
    holds(router, "0", OTHER)
    router.remove_rank("0")
    assert router.ranks == ("1", "2")
    assert router.index("2") == 1
    router.check()
    router.add_rank("3", 10)
    assert router.held("3") == set(), "it sits where the removed one sat"
    assert chosen(router, PROMPT) == "1"
    router.add_rank("0", 10)
    router.assigned("0", PROMPT, 2)
    router.released(claim)
    assert router.held("0") == set(PROMPT)
    assert router.pending("0") == 2
    router.check()


def test_the_table_is_bounded_and_forgets_the_least_recently_used_first() -> None:
    router = Router(LONGEST, max_hashes_per_rank=6)
    router.add_rank("0", 10)
    holds(router, "0", PROMPT)
    holds(router, "0", OTHER)
    assert router.held("0") == {1, 2, *OTHER}, "of a prompt the last blocks go first, so that the rest can match"
    claim = router.assigned("0", [1, 2], 1)
    holds(router, "0", [21, 22])
    assert router.held("0") == {1, 2, 11, 12, 21, 22}
    router.released(claim)
    holds(router, "0", range(100, 200))
    assert router.held("0") == set(range(100, 106))
    router.check()


def test_what_is_expected_outlives_the_bound() -> None:
    router = Router(LONGEST, max_hashes_per_rank=1)
    router.add_rank("0", 10)
    router.assigned("0", PROMPT, 1)
    holds(router, "0", PROMPT)
    holds(router, "0", [9])
    assert router.held("0") == {1, 2, 3, 4, 9}
    router.check()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_more_samples_cannot_end_than_are_pending() -> None:
    router = make(2, 0)
    router.ended("0", 2)
    with pytest.raises(ValueError, match="rank '0': 1 samples ended where 0 are pending"):
        router.ended("0", 1)
    with pytest.raises(ValueError, match="rank '1': -1 samples"):
        router.ended("1", -1)
    router.check()


def test_what_makes_no_sense_is_refused_by_name() -> None:
    router = make(0)
    for call in (
        lambda: router.ended("x"), lambda: router.assigned("x", [], 1), lambda: router.reported("x", [], [], False),
        lambda: router.version_changed("x"), lambda: router.remove_rank("x"), lambda: router.pending("x"),
        lambda: router.index("x"), lambda: router.held("x"), lambda: router.match("x", []),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="rank 'x': is not here"):
            call()
    with pytest.raises(ValueError, match="rank '0': is here already"):
        router.add_rank("0", 4)
    with pytest.raises(ValueError, match="max_requests=0: must be at least 1"):
        router.add_rank("1", 0)
    with pytest.raises(ValueError, match="samples=0"):
        router.place([], 0)
    with pytest.raises(ValueError, match="samples=0"):
        router.assigned("0", [], 0)
    assert router.ranks == ("0",)


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


@pytest.mark.parametrize("seed", range(5))
def test_deterministic_routing_depends_on_the_order_of_arrival_alone(seed: int) -> None:
    """Two runs: ranks register in another order, samples end at other times, ranks report this or nothing."""
    arrivals = random.Random(seed)
    prompts = [arrivals.choice([PROMPT, PROMPT[:2], OTHER, [arrivals.random()]]) for _ in range(200)]
    sizes = [arrivals.choice([1, 2, 5, 20]) for _ in prompts]
    runs = []
    for run in range(2):
        timing = random.Random(100 * seed + run)
        router = deterministic(*timing.sample(["a", "b", "c"], 3))
        decisions = []
        for prompt, samples in zip(prompts, sizes, strict=True):
            placed = send(router, prompt, samples)
            assert sum(part.samples for part, _ in placed) == samples
            decisions.append([part for part, _ in placed])
            name = timing.choice("abc")
            router.ended(name, timing.randrange(router.pending(name) + 1))
            router.reported(name, [timing.randrange(20)], PROMPT, flushed=timing.random() < 0.1)
            if timing.random() < 0.1:
                router.version_changed(name)
            for _, claim in placed[: timing.randrange(2)]:
                router.released(claim)
            router.check()
        runs.append(decisions)
    assert runs[0] == runs[1]


def test_deterministic_routing_keeps_the_ranks_level_for_ever() -> None:
    router = deterministic("a", "b", "c")
    totals = dict.fromkeys(router.ranks, 0)
    for number in range(600):
        for part, _ in send(router, [number], 4):
            totals[part.rank] += part.samples
    assert max(totals.values()) - min(totals.values()) <= 9


def test_deterministic_routing_of_one_prompt_does_not_stay_on_one_rank() -> None:
    router = deterministic("a", "b", "c")
    totals = dict.fromkeys(router.ranks, 0)
    for _ in range(100):
        for part, _ in send(router, PROMPT, 4):
            totals[part.rank] += part.samples
    assert max(totals.values()) - min(totals.values()) <= 9


def test_deterministic_routing_gives_ranks_as_much_as_their_slots_say() -> None:
    router = Router(LONGEST, deterministic=True, data_parallel_size=2)
    router.add_rank("large", 24)
    router.add_rank("small", 8)
    for number in range(400):
        send(router, [number])
    assert router.pending("large") == pytest.approx(300, abs=27)
