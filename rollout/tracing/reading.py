"""Reads traces back: the samples, steps and phases of each engine, as the summary and the report need them."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from rollout.tracing.timeline import FORMAT, merged


@dataclass(frozen=True)
class TracedSample:
    """One sample; times are seconds since the start of the trace.

    Attributes:
        states: (state, start, end), see `rollout.tracing.lives.STATES`.
        versions: of its tokens, in order, each change once.
    """

    request: int
    sample: int
    start: float
    end: float
    states: tuple[tuple[str, float, float], ...]
    versions: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    cached_tokens: int
    finish: str

    @property
    def seconds(self) -> float:
        """From its arrival, or the start of the trace, to its end."""
        return self.end - self.start

    def seconds_in(self) -> dict[str, float]:
        """Seconds by state."""
        spent: dict[str, float] = {}
        for state, start, end in self.states:
            spent[state] = spent.get(state, 0.0) + end - start
        return spent


@dataclass
class TracedEngine:
    """One engine of a trace.

    Attributes:
        steps: arguments of the step events, with `start` and `end`, in seconds.
        phases, controls: (name, start, end).
    """

    name: str = ""
    steps: list[dict[str, float]] = field(default_factory=list)
    samples: list[TracedSample] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    controls: list[tuple[str, float, float]] = field(default_factory=list)
    kv: list[tuple[float, dict[str, float]]] = field(default_factory=list)


@dataclass(frozen=True)
class ReadTrace:
    """A trace file, or several of the ranks of one job."""

    duration_s: float
    engines: tuple[TracedEngine, ...]
    dropped: int


def read(paths: Sequence[str | os.PathLike[str]]) -> ReadTrace:
    """Read one trace file, or those of several ranks; see `merged`.

    Raises:
        ConfigError: a file is missing, no trace of this package, or damaged; names it. Or two are of the same rank.
    """
    return parse(load(paths), str(paths[0]))


def load(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """The trace events of one file, or of several merged; raises as `read`."""
    traces = sorted(map(_load, paths), key=lambda trace: trace["otherData"]["rank"])
    ranks = [rank for trace in traces for rank in trace["otherData"].get("ranks", [trace["otherData"]["rank"]])]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise ConfigError(
            f"{', '.join(map(str, paths))}: several are of rank {twice}; give the files of one step, one of each rank"
        )
    return traces[0] if len(traces) == 1 else merged(traces)


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        data = Path(path).read_bytes()
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, ValueError, EOFError) as exc:
        raise ConfigError(f"{str(path)!r}: cannot be read as a trace: {exc}") from exc
    about = trace.get("otherData") if isinstance(trace, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ConfigError(f"{str(path)!r}: is no trace of this package ({FORMAT}); rollout.trace() writes them")
    return dict(trace)


def parse(trace: dict[str, Any], name: str = "trace") -> ReadTrace:
    """Group the events of a trace by engine and sample.

    Raises:
        ConfigError: an event lacks a field.
    """
    engines: dict[int, TracedEngine] = defaultdict(TracedEngine)
    parents: dict[tuple[int, int], dict[str, Any]] = {}
    states: dict[tuple[int, int], list[tuple[str, float, float]]] = defaultdict(list)
    try:
        for event in trace["traceEvents"]:
            _take(event, engines, parents, states)
        for (pid, tid), event in parents.items():
            engines[pid].samples.append(_sample(event, states[pid, tid]))
        about = trace["otherData"]
        return ReadTrace(float(about["duration_s"]), tuple(engines[pid] for pid in sorted(engines)), about["dropped"])
    except (KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{name!r}: damaged trace: {type(exc).__name__}: {exc}") from exc


def _take(
    event: dict[str, Any],
    engines: dict[int, TracedEngine],
    parents: dict[tuple[int, int], dict[str, Any]],
    states: dict[tuple[int, int], list[tuple[str, float, float]]],
) -> None:
    engine = engines[event["pid"]]
    if event["ph"] == "M":
        if event["name"] == "process_name":
            engine.name = event["args"]["name"]
        return
    start = event["ts"] / 1e6
    end = start + event.get("dur", 0.0) / 1e6
    key = event["pid"], event.get("tid", 0)
    match event.get("cat"):
        case "step":
            engine.steps.append(event["args"] | {"start": start, "end": end})
        case "sample":
            parents[key] = event
        case "state":
            states[key].append((event["name"], start, end))
        case "phases":
            engine.phases.append((event["name"], start, end))
        case "engine":
            engine.controls.append((event["name"], start, end))
        case None if event["ph"] == "C" and event["name"] == "KV blocks":
            engine.kv.append((start, event["args"]))
        case _:
            pass


def _sample(event: dict[str, Any], states: list[tuple[str, float, float]]) -> TracedSample:
    args, start = event["args"], event["ts"] / 1e6
    return TracedSample(
        args["request"], args["sample"], start, start + event["dur"] / 1e6, tuple(states), tuple(args["versions"]),
        args["prompt_tokens"], args["tokens"], args["cached_tokens"], args["finish"],
    )  # fmt: skip
