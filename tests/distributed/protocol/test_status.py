"""`parse_status`: the coordinator's own table, and tables with a missing or malformed field."""

from __future__ import annotations

import pytest

from rollout.distributed.protocol.messages import JobStatus, RankStatus, parse_status
from rollout.errors import SerializationError

RANK = {"name": "rank-1", "policy_version": 3, "assigned_samples": 4, "running": 2, "since_progress_s": 0.5}
TABLE = {"state": "running", "barrier_waits_for": ["rank-0"], "ranks": [{**RANK, "max_requests": 8}], "instance": "a"}


def test_a_table_is_read_and_unknown_fields_are_ignored():
    rank = RankStatus("rank-1", policy_version=3, assigned_samples=4, running=2, since_progress_s=0.5)
    assert parse_status(TABLE) == JobStatus("running", ["rank-0"], [rank])


@pytest.mark.parametrize("name", [*RANK])
def test_a_missing_field_of_a_rank_is_named(name: str):
    table = {**TABLE, "ranks": [{key: value for key, value in RANK.items() if key != name}]}
    with pytest.raises(SerializationError, match=f"RankStatus.{name}: missing"):
        parse_status(table)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (None, "JobStatus"),
        ({**TABLE, "state": "asleep"}, "JobStatus.state"),
        ({**TABLE, "ranks": None}, "JobStatus.ranks"),
        ({**TABLE, "ranks": [7]}, "RankStatus"),
        ({**TABLE, "ranks": [{**RANK, "running": True}]}, "RankStatus.running"),
        ({**TABLE, "barrier_waits_for": [1]}, "JobStatus.barrier_waits_for"),
    ],
)
def test_a_malformed_field_is_named(table: object, name: str):
    with pytest.raises(SerializationError, match=f"^{name}: "):
        parse_status(table)
