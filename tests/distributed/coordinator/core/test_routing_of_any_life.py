"""Tests of routing in random lives: every decision is that of a plain argmax over all ranks.

Replay one failing seed: ROLLOUT_ROUTING_SEED=1234 pytest tests/distributed/coordinator/core/test_routing_of_any_life.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Sequence

import pytest

from rollout.distributed.coordinator.core.routing import Claim, Placement, Router
from rollout.state import PrefixCachingCoordinatorPolicy
from tests.distributed.coordinator.core.routers import (
    BALANCED,
    BY_PREFIX,
    FIRST,
    LIVES,
    LONGEST,
    ROBIN,
    check,
    chosen,
    held,
    make,
    send,
)


class PlainRank:
    """The state of one rank by the rules, as lists."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.pending = self.total = 0
        self.stamp = -1
        self.claims: list[tuple[int, ...]] = []
        self.listed: list[int] = []

    @property
    def held(self) -> set[int]:
        return {*self.listed, *(each for claim in self.claims for each in claim)}

    def use(self, hashes: Sequence[int], add: bool, limit: int) -> None:
        for each in reversed(hashes):
            if each in self.listed:
                self.listed.remove(each)
                self.listed.append(each)
            elif add:
                self.listed.append(each)
        del self.listed[: max(0, len(self.listed) - limit)]


class Plain:
    """The rules without any cleverness: all ranks are scored for every sample."""

    def __init__(self, policy: PrefixCachingCoordinatorPolicy, alpha: float, limit: int, deterministic: bool) -> None:
        self.policy, self.alpha, self.limit, self.deterministic = policy, alpha, limit, deterministic
        self.ranks: dict[str, PlainRank] = {}
        self.clock = 0
        self.last = ""

    def asked(self, hashes: Sequence[int]) -> Sequence[int]:
        return hashes[:1] if self.policy is FIRST else hashes if self.policy is LONGEST else ()

    def match(self, name: str, hashes: Sequence[int]) -> int:
        held = self.ranks[name].held
        asked = self.asked(hashes)
        return next((depth for depth, each in enumerate(asked) if each not in held), len(asked))

    def load(self, name: str) -> int:
        return self.ranks[name].total if self.deterministic else self.ranks[name].pending

    def free(self, name: str, more: int = 0) -> float:
        slots = self.ranks[name].slots
        return (slots - self.load(name) - more) / slots

    def place(self, hashes: Sequence[int], samples: int, exclude: Collection[str]) -> list[Placement]:
        names = sorted(name for name in self.ranks if name not in exclude)

        def has_room(name: str) -> bool:
            slots = self.ranks[name].slots
            return self.load(name) + min(samples, slots) <= slots + max(1, slots // 8)

        candidates = names if self.deterministic else list(filter(has_room, names))
        if not candidates:
            return []
        if self.policy is BALANCED:
            return [Placement(max(candidates, key=self.free), samples, 0)]
        if self.policy is ROBIN:
            return [Placement(min(candidates, key=lambda name: (name <= self.last, name)), samples, 0)]
        blocks = len(self.asked(hashes))
        counts: dict[str, int] = {}
        latest = {name: self.ranks[name].stamp for name in candidates}
        for turn in range(samples):

            def key(name: str) -> tuple[float, int]:
                match = 1.0 if name in counts else self.match(name, hashes) / (blocks or 1)
                free = self.free(name, counts.get(name, 0))
                plain = not blocks and not counts
                return free if plain else self.alpha * match + (1 - self.alpha) * free, latest[name]

            best = max(candidates, key=key)
            counts[best] = counts.get(best, 0) + 1
            latest[best] = self.clock + turn
        return [Placement(name, count, self.match(name, hashes)) for name, count in counts.items()]


class Life:
    """One seed's ranks, and everything that can happen to them, told to a `Router` and to a `Plain`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        policy = pick([LONGEST, LONGEST, LONGEST, FIRST, BALANCED, ROBIN])
        alpha = pick([0.5, 0.5, 0.5, 0.0, 1.0, 0.1, 0.3, 0.9])
        limit = pick([3, 8, 1000])
        self.deterministic = self.random.random() < 0.2
        self.router = Router(
            policy, alpha=alpha, max_hashes_per_rank=limit, deterministic=self.deterministic, data_parallel_size=1
        )
        self.plain = Plain(policy, alpha, limit, self.deterministic)
        self.sizes = pick([[4], [8], [16], [1], [2, 8], [3, 4, 7], [20, 64]])
        self.claims: list[tuple[Claim, PlainRank, tuple[int, ...]]] = []
        for _ in range(pick([1, 2, 3, 5, 30])):
            self.add_rank()

    def name(self) -> str | None:
        return self.random.choice(sorted(self.plain.ranks)) if self.plain.ranks else None

    def prompt(self) -> list[int]:
        """Draw a prompt of one of three families, which share their first blocks; some have their own end."""
        family = 10 * self.random.randrange(3)
        depth = self.random.randrange(7)
        end = [1000 + self.random.randrange(50)] if self.random.random() < 0.3 else []
        return [family + block for block in range(depth)] + end

    def add_rank(self) -> None:
        free = [f"rank{number}" for number in range(40) if f"rank{number}" not in self.plain.ranks]
        name, slots = self.random.choice(free), self.random.choice(self.sizes)
        self.router.add_rank(name, slots)
        self.plain.ranks[name] = PlainRank(slots)

    def remove_rank(self, name: str) -> None:
        self.router.remove_rank(name)
        del self.plain.ranks[name]

    def place(self) -> None:
        hashes, samples = self.prompt(), self.random.choice([1, 1, 2, 4, 9, 30])
        exclude = {name for name in self.plain.ranks if self.random.random() < 0.05}
        wanted = self.plain.place(hashes, samples, exclude)
        assert self.router.place(hashes, samples, exclude=exclude) == wanted
        for part in wanted:
            self.assign(part.rank, hashes, part.samples)

    def assign(self, name: str, hashes: Sequence[int], samples: int) -> None:
        claim = self.router.assigned(name, hashes, samples)
        rank, asked = self.plain.ranks[name], tuple(self.plain.asked(hashes))
        rank.pending += samples
        rank.total += samples
        rank.stamp = self.plain.clock
        self.plain.clock += 1
        self.plain.last = name
        rank.use(asked, self.deterministic, self.plain.limit)
        if not self.deterministic:
            rank.claims.append(asked)
        self.claims.append((claim, rank, asked))

    def end(self, name: str) -> None:
        samples = self.random.randrange(self.plain.ranks[name].pending + 1)
        self.router.ended(name, samples)
        self.plain.ranks[name].pending -= samples

    def release(self) -> None:
        if self.claims:
            claim, rank, asked = self.claims.pop(self.random.randrange(len(self.claims)))
            self.router.released(claim)
            rank.claims = [each for each in rank.claims if each is not asked]

    def report(self, name: str) -> None:
        added, removed, flushed = self.prompt(), self.prompt(), self.random.random() < 0.1
        self.router.reported(name, added, removed, flushed)
        rank = self.plain.ranks[name]
        if not self.deterministic and self.plain.policy in BY_PREFIX:
            rank.listed = [] if flushed else [each for each in rank.listed if each not in removed]
            rank.use(added, True, self.plain.limit)

    def change_version(self, name: str) -> None:
        self.router.version_changed(name)
        if not self.deterministic:
            self.plain.ranks[name].listed = []
            self.plain.ranks[name].claims = []

    def happen(self) -> None:
        dice, name = self.random.random(), self.name()
        # Totals start at a rank's first day: a plain model of ranks that come late would only repeat the code.
        steady = self.deterministic and self.plain.clock
        if name is None or (dice < 0.02 and len(self.plain.ranks) < 40 and not steady):
            if not steady:
                self.add_rank()
        elif dice < 0.03 and not steady:
            self.remove_rank(name)
        elif dice < 0.06:
            self.change_version(name)
        elif dice < 0.2:
            self.report(name)
        elif dice < 0.35:
            self.end(name)
        elif dice < 0.5:
            self.release()
        elif dice < 0.53:
            self.assign(name, self.prompt(), self.random.choice([1, 3]))
        else:
            self.place()

    def compare(self) -> None:
        check(self.router)
        assert self.router.ranks == tuple(sorted(self.plain.ranks))
        hashes = self.prompt()
        for name in self.router.ranks:
            assert self.deterministic or self.router._ranks[name].load == self.plain.ranks[name].pending
            assert held(self.router, name) == self.plain.ranks[name].held
            assert self.router._ranks[name].match(self.router._asked(hashes)) == self.plain.match(name, hashes)


def seeds() -> list[int]:
    only = os.environ.get("ROLLOUT_ROUTING_SEED")
    return list(range(LIVES)) if only is None else [int(only)]


def test_whatever_happens_every_decision_is_the_plain_argmax() -> None:
    for seed in seeds():
        life = Life(seed)
        try:
            for step in range(80):
                life.happen()
                if step % 4 == 0:
                    life.compare()
        except Exception as exc:
            exc.add_note(f"replay: ROLLOUT_ROUTING_SEED={seed} pytest {__file__}")
            raise


@pytest.mark.parametrize("as_groups", [True, False])
def test_groups_that_arrive_at_once_are_prefilled_once(as_groups: bool) -> None:
    """Send one request of n, or n requests one after the other before any rank has answered."""
    ranks, slots, n = 4, 256, 16
    router = make(*[0] * ranks, slots=slots)
    parts = 0
    found: dict[str, set[int]] = {name: set() for name in router.ranks}
    groups = ranks * slots // n
    for group in range(groups):
        hashes = [0, 1, *(1000 * (group + 1) + block for block in range(30))]
        for part, _ in [
            each for _ in range(1 if as_groups else n) for each in send(router, hashes, n if as_groups else 1)
        ]:
            parts += hashes[-1] not in found[part.rank]
            found[part.rank].add(hashes[-1])
    samples = groups * n
    assert sum(router._ranks[name].load for name in router.ranks) == samples
    assert (samples - parts) / samples >= (n - 1) / n


def test_deterministic_routing_waits_for_all_ranks_and_goes_on_when_one_is_lost() -> None:
    router = Router(LONGEST, deterministic=True, data_parallel_size=3)
    for name in "ab":
        router.add_rank(name, 8)
    assert router.place([1, 2, 3, 4], 1) == []
    router.add_rank("c", 8)
    assert chosen(router, [1, 2, 3, 4]) == "a"
    router.remove_rank("a")
    assert chosen(router, [1, 2, 3, 4]) == "b"
