"""Tests of `kill -9` at any moment of an asynchronous training run: restored and finished groups are exactly the whole.

Twenty processes die one after another, each at a random point before or after a forward or a save, five of them while they
write a checkpoint. Each continues from the last checkpoint of the process before it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest

from tests.distributed.job.nursery import Nursery
from tests.manager.restart_jobs import ENDED, GROUP, SAVING, Life, Sample, prompts, read, train

KILLS = 20
MANY = 10**6


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("tests.manager.restart_jobs")
    yield nursery
    nursery.close()


def run_to_its_end(nursery: Nursery, folder: Path, life: int, steps: int, with_journal: bool) -> None:
    with nursery.children() as family:
        family.append(nursery.child(train, folder=folder, life=life, steps=steps, with_journal=with_journal))
        while family[0].hear_bytes() != ENDED:
            pass


def run_and_kill(nursery: Nursery, folder: Path, with_journal: bool) -> list[Life]:
    """Twenty lives that are killed, and one that ends four steps after the last checkpoint."""
    rng = random.Random(f"{with_journal}")
    for life in range(KILLS):
        with nursery.children() as family:
            family.append(nursery.child(train, folder=folder, life=life, steps=MANY, with_journal=with_journal))
            words = [family[0].hear_bytes() for _ in range(rng.randint(1, 60))]
            # A checkpoint is written so fast that some have to aim at it.
            while life % 4 == 3 and words[-1] != SAVING:
                words.append(family[0].hear_bytes())
    steps = max(life.start for life in read(folder)) + 4
    run_to_its_end(nursery, folder, KILLS, steps, with_journal)
    return list(read(folder))


def history(lives: list[Life]) -> dict[int, list[Sample]]:
    """Return, by step, the samples that were returned and not undone by a later life that began before the step."""
    steps: dict[int, list[Sample]] = {}
    for life in lives:
        steps = {step: samples for step, samples in steps.items() if step <= life.start} | life.batches
    return steps


def assert_each_once(steps: dict[int, list[Sample]]) -> None:
    """Every sample of every prompt that was asked for, and each in one batch only."""
    samples = list(chain.from_iterable(steps.values()))
    asked = prompts(len(samples) // GROUP)
    assert len(set(asked)) == len(asked)
    expected = {(prompt, index): 1 for prompt in asked for index in range(GROUP)}
    assert Counter((each.prompt, each.sample_index) for each in samples) == expected
    assert len({(each.group_id, each.sample_index) for each in samples}) == len(samples)
    assert sorted(steps) == list(range(1, len(steps) + 1))


def test_a_run_killed_twenty_times_is_the_run_that_nobody_disturbed(nursery, tmp_path):
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    killed.mkdir()
    undisturbed.mkdir()
    lives = run_and_kill(nursery, killed, with_journal=False)
    ours = history(lives)
    assert_each_once(ours)
    assert len({life.start for life in lives}) > 3
    assert sum(len(life.batches) for life in lives) > len(ours)
    run_to_its_end(nursery, undisturbed, 0, max(ours) - 1, with_journal=False)
    ((_, theirs),) = read(undisturbed)
    assert list(theirs) == list(ours)
    for step, expected in theirs.items():
        for mine, its in zip(ours[step], expected, strict=True):
            assert mine._replace(log_probs=[]) == its._replace(log_probs=[]), step
            assert mine.log_probs == pytest.approx(its.log_probs, abs=1e-5), step
    # Requests do continue across updates, and across the ends of processes.
    assert any(len(set(each.versions)) > 2 for each in chain.from_iterable(ours.values()))


def test_with_a_journal_nothing_that_was_finished_is_computed_again(nursery, tmp_path):
    lives = run_and_kill(nursery, tmp_path, with_journal=True)
    assert_each_once(history(lives))
    survived = 0
    for before, after in pairwise(lives):
        again = {(each.prompt, each.sample_index): each for each in chain.from_iterable(after.batches.values())}
        for step, samples in before.batches.items():
            for each in samples if step > after.start else ():
                # What was handed out after the checkpoint was finished: in the journal, with the versions known there.
                if copy := again.get((each.prompt, each.sample_index)):
                    assert (copy.tokens, copy.log_probs) == (each.tokens, each.log_probs)
                    assert all(ours <= its for ours, its in zip(copy.versions, each.versions, strict=True))
                    survived += 1
    assert survived > 20
