"""Reads traces back: the samples, steps and phases of each engine, as the summary and the report need them."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rollout.errors import ConfigError
from rollout.tracing.timeline import FORMAT, merged

Interval = tuple[str, float, float]
"""Name, start and end; seconds since the start of the trace."""


class TracedSample(NamedTuple):
    """One sample.

    Attributes:
        start: its arrival, or the start of the trace.
        states: see `rollout.tracing.lives.STATES`.
        versions: of its tokens, in order, each change once.
    """

    request: int
    sample: int
    start: float
    end: float
    states: tuple[Interval, ...]
    versions: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    cached_tokens: int
    finish: str


@dataclass
class TracedEngine:
    """One engine of a trace.

    Attributes:
        steps: arguments of the step events, with `start` and `end`, in seconds.
        kv: (seconds, blocks by kind) after each step.
    """

    name: str = ""
    steps: list[dict[str, float]] = field(default_factory=list)
    samples: list[TracedSample] = field(default_factory=list)
    phases: list[Interval] = field(default_factory=list)
    controls: list[Interval] = field(default_factory=list)
    kv: list[tuple[float, dict[str, float]]] = field(default_factory=list)


class ReadTrace(NamedTuple):
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
    twice = [rank for rank in ranks if ranks.count(rank) > 1]
    if twice:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: several are of rank {twice[0]}; give the files of one step, one of each rank"
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
    samples: list[tuple[tuple[int, int], dict[str, Any], float, float]] = []
    states: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    try:
        for event in trace["traceEvents"]:
            engine, args, start = engines[event["pid"]], event.get("args", {}), event.get("ts", 0.0) / 1e6
            end, track = start + event.get("dur", 0.0) / 1e6, (event["pid"], event.get("tid", 0))
            match event.get("cat"), event["name"]:
                case None, "process_name":
                    engine.name = args["name"]
                case None, "KV blocks":
                    engine.kv.append((start, args))
                case "step", _:
                    engine.steps.append(args | {"start": start, "end": end})
                case "sample", _:
                    samples.append((track, args, start, end))
                case "state", state:
                    states[track].append((state, start, end))
                case "phases", phase:
                    engine.phases.append((phase, start, end))
                case "engine", control:
                    engine.controls.append((control, start, end))
        for track, args, start, end in samples:
            engines[track[0]].samples.append(
                TracedSample(
                    args["request"], args["sample"], start, end, tuple(states[track]), tuple(args["versions"]),
                    args["prompt_tokens"], args["tokens"], args["cached_tokens"], args["finish"],
                )
            )  # fmt: skip
        about = trace["otherData"]
        return ReadTrace(float(about["duration_s"]), tuple(engines[pid] for pid in sorted(engines)), about["dropped"])
    except (KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{name!r}: damaged trace: {type(exc).__name__}: {exc}") from exc
