"""`rollout top ADDRESS`: a terminal view of a running job, built from its coordinator's status.

Rates such as tokens/s are computed from the differences between two readings of the status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.transport.keys import JobKeys
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


HISTORY = 40
"""The number of readings in a history bar. A line with a name, a number and the bar then fits into 80 columns."""
RANK_COLUMNS = ("rank", "state", "version", "running", "waiting", "assigned", "tokens/s", "progress")


class Reading(NamedTuple):
    """One status reply of the coordinator (`InferenceClient.status`)."""

    at: float
    """The time of the reading, in monotonic seconds."""
    status: Mapping[str, Any]


def main(arguments: Sequence[str]) -> None:
    """Run the command until Ctrl-C.

    Raises:
        ConfigError: the address does not begin with tcp://, the keys cannot be read, or rich is not installed.
        ConnectionLostError, DeadlineError: no coordinator answers at the address.
        SystemExit: the arguments contain --help or cannot be parsed.
    """
    parser = argparse.ArgumentParser("rollout top", description="Watch a running job.")
    parser.add_argument("address", help="tcp://host:port of its coordinator")
    parser.add_argument("--keys", metavar="FILE", help="JSON of a job's public keys and client secret (`JobKeys`)")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two readings (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one view, of two readings, and end")
    options = parser.parse_args(arguments)
    if not 0.1 <= options.interval <= 3600:
        parser.error(f"--interval {options.interval}: must be in [0.1, 3600] seconds")
    if find_spec("rich") is None:
        raise ConfigError("`rollout top` needs rich: pip install 'rollout-engine[top]'")
    if not options.address.startswith("tcp://"):
        raise ConfigError(f"{options.address!r}: must begin with tcp://, the address of a coordinator")
    asyncio.run(_watch(options.address, _keys(options.keys), options.interval, options.once))


def _keys(path: str | None) -> JobKeys | None:
    if path is None:
        return None
    try:
        plain = json.loads(Path(path).read_text(encoding="utf-8"))
        return JobKeys.deserialize({name: None if key is None else key.encode() for name, key in plain.items()})
    except (OSError, ValueError, AttributeError, TypeError) as exc:
        # Do not quote the file's content in the message: it is secret.
        why = exc.strerror if isinstance(exc, OSError) else type(exc).__name__
        raise ConfigError(f"--keys {path}: cannot be read as keys: {why}") from exc


def draw(address: str, readings: Sequence[Reading]) -> RenderableType:
    """Return a rich renderable of the job. Rates appear once there are two readings."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 3))
    for name, value in facts_of(readings):
        facts.add_row(Text(name, style="dim"), Text(value))
    ranks = readings[-1].status["ranks"]
    if not ranks:
        return Group(Text(address, style="bold"), facts, Text("\nno engine has joined this job yet"))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in RANK_COLUMNS:
        table.add_column(column, justify="left" if column in ("rank", "state") else "right")
    rates = rates_of(*readings[-2:])
    for rank in ranks:
        table.add_row(
            rank["name"],
            ("idle" if rank["resting"] else rank["state"]) if rank["ready"] else "joining",
            str(rank["policy_version"]),
            f"{rank['running']} of {rank['max_requests']}",
            str(rank["waiting"]),
            str(rank["assigned_samples"]),
            f"{rates[rank['name']]:,.0f}" if rank["name"] in rates else "",
            f"{rank['since_progress_s']:.1f} s ago",
        )
    return Group(Text(address, style="bold"), facts, Text(""), table)


def facts_of(readings: Sequence[Reading]) -> list[tuple[str, str]]:
    """Return (name, value) pairs for the whole job. The pairs for tokens/s, running and waiting include a history bar."""
    status = readings[-1].status
    totals = [
        {name: sum(rank[name] for rank in each.status["ranks"]) for name in ("running", "max_requests")}
        for each in readings
    ]
    speeds = [sum(rates_of(*pair).values()) for pair in pairwise(readings)]
    queues = [each.status["queued_samples"] + sum(r["waiting"] for r in each.status["ranks"]) for each in readings]
    busy = [total["running"] / max(1, total["max_requests"]) for total in totals]
    held = [f"{rank['name']} {rank['state']}" for rank in status["ranks"] if rank["state"] != "running"]
    holder = "" if status["state"] == "running" else f"the coordinator ({status['state']})"
    clients = ", ".join(f"{client['name']} {client['open_requests']}" for client in status["clients"])
    oldest = status["oldest_request_s"]
    return [
        ("state", status["state"]),
        ("policy version", str(status["policy_version"])),
        ("tokens/s", f"{speeds[-1]:<14,.0f}{sparkline(speeds)}" if speeds else ""),
        ("running", f"{totals[-1]['running']} of {totals[-1]['max_requests']}".ljust(14) + sparkline(busy, 1.0)),
        ("waiting", f"{queues[-1]:<14}{sparkline(queues)}"),
        ("first token", _seconds(status["first_token_s"])),
        ("per token", _seconds(status["per_token_s"])),
        ("oldest request", "none" if oldest is None else f"{oldest:.1f} s"),
        ("held by", ", ".join(filter(None, [holder, *held])) or "nothing"),
        ("barrier waits for", ", ".join(status["barrier_waits_for"]) or "nothing"),
        ("open requests", clients or "no client"),
    ]


def sparkline(values: Sequence[float], most: float = 0.0) -> str:
    """Return one bar character per value, scaled to the maximum of `values` and `most`; "" for fewer than 2 values."""
    most = max(most, *values) if len(values) > 1 else 0.0
    return "".join("▁▂▃▄▅▆▇█"[int(7 * value / most) if most else 0] for value in values) if len(values) > 1 else ""


def _seconds(found: Sequence[float]) -> str:
    if not found:
        return "no sample has finished yet"
    median, p99 = (f"{each:.1f} s" if each >= 1 else f"{1e3 * each:.1f} ms" for each in found)
    return f"median {median}, p99 {p99}"


def rates_of(before: Reading, after: Reading | None = None) -> dict[str, float]:
    """Return the tokens per second of each rank that is in both readings; 0 for a rank that restarted between them."""
    if after is None or after.at <= before.at:
        return {}
    tokens = {rank["name"]: rank["tokens"] for rank in before.status["ranks"]}
    return {
        rank["name"]: max(0, rank["tokens"] - tokens[rank["name"]]) / (after.at - before.at)
        for rank in after.status["ranks"]
        if rank["name"] in tokens
    }


async def _watch(address: str, keys: JobKeys | None, interval_s: float, once: bool) -> None:
    """Show the latest readings until interrupted. If `once`, print a single view after two readings."""
    from rich.console import Console
    from rich.live import Live

    readings: deque[Reading] = deque(maxlen=HISTORY + 1)
    async with InferenceClient(address, name="rollout top", keys=keys) as client:
        readings.append(Reading(time.monotonic(), await client.status()))
        with nullcontext() if once else Live(auto_refresh=False, screen=True) as live:
            while live is not None or len(readings) < 2:
                if live is not None:
                    live.update(draw(address, [*readings]), refresh=True)
                await asyncio.sleep(interval_s)
                readings.append(Reading(time.monotonic(), await client.status()))
    Console().print(draw(address, [*readings]))
