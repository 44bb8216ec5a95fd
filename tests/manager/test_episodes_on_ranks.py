"""Tests of episodes on several ranks: shared work, a common end, versions."""

from __future__ import annotations

import pytest

from tests.distributed.job.nursery import Nursery
from tests.manager import episode_jobs
from tests.ranks import run_together

pytestmark = pytest.mark.distributed


def test_ranks_play_their_episodes_together_and_each_gets_its_own(nursery: Nursery) -> None:
    busy, helping = run_together(nursery, 2, episode_jobs.plays)
    assert busy["rewards"] == [1.0] * 12
    assert helping["rewards"] == []
    assert busy["sampled"] == 12 * 3 * 4
    assert helping["steps"] > 0
    for answer in (busy, helping):
        assert answer["error"] < 1e-4
        assert answer["versions"] == [1]
