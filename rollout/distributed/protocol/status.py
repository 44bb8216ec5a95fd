"""Typed view of a `Status` table: the fields of the job and its ranks that a training loop's decisions depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from rollout.distributed.protocol.fields import CoordinatorStateName, Count, Name, Names, Rule, Seconds
from rollout.errors import SerializationError
from rollout.requests.codec import refuse


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank as the coordinator sees it."""

    name: Name
    policy_version: Count
    """Version that the rank has reported."""
    assigned_samples: Count
    """Samples assigned to the rank that have not ended."""
    running: Count
    """Samples that its engine computes at present."""
    since_progress_s: Seconds
    """Seconds since its last progress report."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of the job, its ranks, and the members that the furthest barrier waits for."""

    state: CoordinatorStateName
    barrier_waits_for: Names
    """Names of connected members; the last entry may count those that have not connected."""
    ranks: Annotated[list[RankStatus], Rule("a list of ranks", lambda value: type(value) is list)]


def parse_status(table: object) -> JobStatus:
    """Read the table of a `Status` message; fields that `JobStatus` and `RankStatus` lack are ignored.

    Raises:
        SerializationError: a field is missing or malformed; names it.
    """
    job = _checked(JobStatus, table)
    job["ranks"] = [RankStatus(**_checked(RankStatus, each)) for each in job["ranks"]]
    return JobStatus(**job)


def _checked(kind: type, table: object) -> dict[str, Any]:
    if type(table) is not dict:
        refuse(kind.__name__, table, "a table")
    values = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in table:
            raise SerializationError(f"{kind.__name__}.{name}: missing")
        rule: Rule = hint.__metadata__[0]
        if not rule.holds(table[name]):
            refuse(f"{kind.__name__}.{name}", table[name], rule.text)
        values[name] = table[name]
    return values
