"""Control calls that no rank may miss wait until every rank has joined."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.errors import DeadlineError
from rollout.llm.service import _joined


class Client:
    """Answers with one rank more at each look, up to `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.looks = 0

    async def status(self) -> dict[str, Any]:
        self.looks += 1
        rank = {"policy_version": 0, "assigned_samples": 0, "running": 0, "since_progress_s": 0.0}
        names = [f"rank-{index:04d}" for index in range(min(self.looks, self.most))]
        return {"state": "running", "barrier_waits_for": [], "ranks": [rank | {"name": name} for name in names]}


def test_it_looks_until_all_have_joined() -> None:
    client = Client(3)
    asyncio.run(_joined(client, 3, 100.0))  # type: ignore[arg-type]
    assert client.looks == 3


def test_a_rank_that_does_not_come_is_told_with_those_that_are_there() -> None:
    with pytest.raises(
        DeadlineError, match=r"3 ranks: 2 have joined .*\(rank-0000, rank-0001\); every rank builds an LLM"
    ):
        asyncio.run(_joined(Client(2), 3, 0.2))  # type: ignore[arg-type]
