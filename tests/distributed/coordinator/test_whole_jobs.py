"""Simulated schedules of a whole job (`ROLLOUT_SIMULATED_SCHEDULES`, 100,000 in full), each from one seed."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from tests.distributed.coordinator.simulation import World, run, run_many_for
from tests.distributed.job.nursery import Nursery

SCHEDULES = int(os.environ.get("ROLLOUT_SIMULATED_SCHEDULES", "6000"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_whatever_happens_every_request_ends_once_with_the_right_tokens_under_the_right_versions(nursery: Nursery):
    workers = os.cpu_count() or 1
    starts = [SCHEDULES * number // workers for number in range(workers + 1)]
    with nursery.children() as family:
        for start, end in pairwise(starts):
            family.append(nursery.child(run_many_for, first=start, count=end - start))
        failures = [failure for child in family for failure in child.pipe.recv()]
    assert not failures, "replay with: python -m tests.distributed.coordinator.simulation SEED\n" + "\n".join(failures)


def test_a_seed_decides_everything():
    def story(seed: int) -> list[object]:
        world = run(seed)
        return [
            (each.ends, each.group.request_id, type(each.group.error), each.group.known()) for each in world.all_wanted
        ] + [world.now, world.events, world.core.status()]

    for seed in range(40):
        assert story(seed) == story(seed)


def test_the_schedules_meet_what_they_are_for():
    """Else the invariants would be checked on a calm sea."""
    seen: dict[str, int] = {}

    class Watched(World):
        def say(self, *words: object) -> None:
            for word in words:
                if isinstance(word, str):
                    seen[word] = seen.get(word, 0) + 1
                else:
                    seen[type(word).__name__] = seen.get(type(word).__name__, 0) + 1
                    if type(word).__name__ == "Assign" and word.known:  # type: ignore[attr-defined]
                        seen["continued"] = seen.get("continued", 0) + 1

    errors = set()
    complete = 0
    for seed in range(400):
        world = Watched(seed)
        for _ in range(world.rng.choice([40, 80, 160])):
            world.event()
        world.settle()
        errors |= {type(each.group.error).__name__ for each in world.all_wanted}
        complete += sum(each.group.error is None for each in world.all_wanted)
    faults = {"dies", "hangs", "is cut off", "loses frames", "loses its session:"}
    messages = {
        "Cancel",
        "Command",
        "CommandAck",
        "ControlDone",
        "EngineMoved",
        "RequestFailed",
        "Accepted",
        "Disconnect",
    }
    rare = {what for what in faults | messages | {"continued", "BarrierDone"} if seen.get(what, 0) < 20}
    assert not rare, seen
    assert {"RequestAbortedError", "RequestTimeoutError", "RankLostError", "ConnectionLostError"} <= errors
    assert complete > 400
