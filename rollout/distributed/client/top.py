"""`rollout top ADDRESS`: a terminal view of a running job, asked from its coordinator.

`view_of` makes a `View` of the coordinator's status, `draw` shows one; rates are differences of two views.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.transport.keys import JobKeys
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


RANK_COLUMNS = ("rank", "state", "version", "running", "waiting", "assigned", "tokens/s", "since progress")


@dataclass(frozen=True)
class View:
    """One observation of a job.

    Attributes:
        at: seconds, monotonic.
        facts: (name, value) of the whole job, in order.
        ranks: per rank, the values of `RANK_COLUMNS` without the rate.
        tokens: sampled so far, by rank name.
    """

    at: float
    facts: tuple[tuple[str, str], ...]
    ranks: tuple[Mapping[str, str], ...]
    tokens: Mapping[str, float]


def main(arguments: Sequence[str]) -> None:
    """Run the command until Ctrl-C.

    Raises:
        ConfigError: unknown kind of address, unreadable keys, or rich is not installed.
        ConnectionLostError, DeadlineError: nothing answers at the address.
        SystemExit: --help, or arguments that cannot be parsed.
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
        # The content is secret, so the message does not quote it.
        why = exc.strerror if isinstance(exc, OSError) else type(exc).__name__
        raise ConfigError(f"--keys {path}: cannot be read as keys: {why}") from exc


def view_of(status: Mapping[str, Any], at: float) -> View:
    """View of a coordinator's status table (`InferenceClient.status`)."""
    held = [f"{rank['name']} {rank['state']}" for rank in status["ranks"] if rank["state"] != "running"]
    holder = "" if status["state"] == "running" else f"the coordinator ({status['state']})"
    waits = ", ".join(status["barrier_waits_for"])
    clients = ", ".join(f"{client['name']} {client['open_requests']}" for client in status["clients"])
    oldest = status["oldest_request_s"]
    facts = (
        ("state", status["state"]),
        ("policy version", str(status["policy_version"])),
        ("queued samples", str(status["queued_samples"])),
        ("oldest request", "none" if oldest is None else f"{oldest:.1f} s"),
        ("held by", ", ".join(filter(None, [holder, *held])) or "nothing"),
        ("barrier waits for", waits or "nothing"),
        ("open requests", clients or "no client"),
    )
    ranks = tuple(
        {
            "rank": rank["name"],
            "state": ("idle" if rank["resting"] else rank["state"]) if rank["ready"] else "joining",
            "version": str(rank["policy_version"]),
            "running": f"{rank['running']} of {rank['max_requests']}",
            "waiting": str(rank["waiting"]),
            "assigned": str(rank["assigned_samples"]),
            "since progress": f"{rank['since_progress_s']:.1f} s",
        }
        for rank in status["ranks"]
    )
    return View(at, facts, ranks, {rank["name"]: float(rank["tokens"]) for rank in status["ranks"]})


def draw(address: str, view: View, before: View | None) -> RenderableType:
    """Return the view as rich displays it; rates need the view `before`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rates = _rates(view, before)
    facts = Table.grid(padding=(0, 3))
    for name, value in view.facts:
        facts.add_row(Text(name, style="dim"), Text(value))
    facts.add_row(Text("tokens/s", style="dim"), Text(f"{sum(rates.values()):,.0f}" if rates else "", style="bold"))
    parts: list[RenderableType] = [Text(address, style="bold"), facts]
    if view.ranks:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for column in RANK_COLUMNS:
            table.add_column(column, justify="left" if column in ("rank", "state") else "right")
        for rank in view.ranks:
            rate = f"{rates[rank['rank']]:,.0f}" if rank["rank"] in rates else ""
            table.add_row(*(Text(rate if column == "tokens/s" else rank[column]) for column in RANK_COLUMNS))
        parts += [Text(""), table]
    return Group(*parts)


def _rates(view: View, before: View | None) -> dict[str, float]:
    """Tokens per second of the ranks in both views; 0 for a rank that has been restarted."""
    if before is None or view.at <= before.at:
        return {}
    seconds = view.at - before.at
    return {
        name: max(0.0, tokens - before.tokens[name]) / seconds
        for name, tokens in view.tokens.items()
        if name in before.tokens
    }


async def _watch(address: str, keys: JobKeys | None, interval_s: float, once: bool) -> None:
    """Show views until interrupted or, with `once`, only the second one."""
    from rich.console import Console
    from rich.live import Live

    async with InferenceClient(address, name="rollout top", keys=keys) as client:
        before, view = None, view_of(await client.status(), time.monotonic())
        with nullcontext() if once else Live(auto_refresh=False, screen=True) as live:
            while live is not None or before is None:
                if live is not None:
                    live.update(draw(address, view, before), refresh=True)
                await asyncio.sleep(interval_s)
                before, view = view, view_of(await client.status(), time.monotonic())
    Console().print(draw(address, view, before))
