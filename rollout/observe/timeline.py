"""The conversion of recorded rows to the JSON trace events that Perfetto and Chrome open, and the trace files.

The timeline has one "process" per engine, with tracks for the trainer, the engine's control calls and its steps, with
counters, and with one track per sample. Times in the file are microseconds since the start of rank 0's trace.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rollout.errors import ConfigError
from rollout.observe.recorder import DECODE, HELD, PREFILL, EngineLog, Life, Span, StepRow, TraceRecorder

FORMAT = "rollout-trace-1"
Event = dict[str, Any]
TRAINER, ENGINE, STEPS, PARTS, OTHER, SAMPLES = 1, 2, 3, 4, 5, 100
"""The track numbers within a trace's "process". Further tracks start at number `OTHER`, samples at `SAMPLES`."""
RANKS_FROM = 10
ENGINES_PER_RANK = 100


def timeline(recorder: TraceRecorder, rank: int = 0) -> dict[str, Any]:
    """Return the trace of a finished recorder as plain values, ready for `json`."""
    base = recorder.started
    engines = recorder.engines or [EngineLog(recorder.clock, "none")]
    events: list[Event] = []
    for index, log in enumerate(engines):
        pid = RANKS_FROM + rank * ENGINES_PER_RANK + index
        title = f"rank {rank}" + (f", engine {index}" if index else "")
        around = recorder.spans if index == 0 else []
        events += _process(pid, title, log, around, base, recorder.ended)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT, "rank": rank, "started_s": base, "duration_s": recorder.ended - base,
            "dropped": sum(log.dropped for log in engines),
        },
    }  # fmt: skip


def merged(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the traces of all ranks into one, aligned by the clocks of their hosts. Time 0 is the start of `traces[0]`."""
    first = traces[0]["otherData"]
    events: list[Event] = []
    end_s = 0.0
    for trace in traces:
        late_s = trace["otherData"]["started_s"] - first["started_s"]
        end_s = max(end_s, late_s + trace["otherData"]["duration_s"])
        for event in trace["traceEvents"]:
            events.append(event if event["ph"] == "M" else event | {"ts": round(event["ts"] + late_s * 1e6, 1)})
    about = first | {
        "duration_s": end_s,
        "dropped": sum(trace["otherData"]["dropped"] for trace in traces),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write(trace: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a trace atomically, compressed if the name ends in `.gz`; raise `ConfigError` if it cannot be written."""
    target = Path(path)
    data = json.dumps(trace, separators=(",", ":")).encode()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(gzip.compress(data, 5) if target.suffix == ".gz" else data)
        partial.replace(target)
    except OSError as exc:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"trace({str(path)!r}): cannot be written: {exc}") from exc
    return target


# --- events of one process ----------------------------------------------------------------------------------------------


def _process(pid: int, title: str, log: EngineLog, around: list[Span], base: float, end: float) -> Iterator[Event]:
    yield _name(pid, 0, "process_name", title)
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    yield from _spans(pid, around, log.controls, base)
    yield _name(pid, STEPS, "thread_name", "steps")
    yield _name(pid, PARTS, "thread_name", "schedule, execute, update")
    before = log.steps[0]._replace(prefill_tokens_saved=log.saved_before) if log.steps else None
    for row in log.steps:
        yield from _step(pid, row, before or row, base)
        before = row
    held = _held(log, around, end)
    for number, life in enumerate(sorted(log.lives, key=lambda life: (life.start, life.request_id, life.sample_index))):
        yield from _sample(pid, SAMPLES + number, life, held, base)


def _spans(pid: int, around: list[Span], controls: list[Span], base: float) -> Iterator[Event]:
    tracks = {"trainer": TRAINER, "engine": ENGINE}
    for span in (*around, *controls):
        if span.track not in tracks:
            tracks[span.track] = OTHER + len(tracks) - 2
        tid = tracks[span.track]
        if span.end > span.start:
            yield _slice(pid, tid, span.name, span.start, span.end, base, span.args, cat=span.track)
        else:
            yield {
                "ph": "i", "s": "t", "pid": pid, "tid": tid, "name": span.name, "ts": _us(span.start, base),
                "cat": span.track, "args": span.args,
            }  # fmt: skip
    for track, tid in tracks.items():
        yield _name(pid, tid, "thread_name", track)


def _step(pid: int, row: StepRow, before: StepRow, base: float) -> Iterator[Event]:
    saved = row.prefill_tokens_saved - before.prefill_tokens_saved
    name = f"{row.decodes} decode" + (f" + {row.prefill_tokens} prefill" if row.prefills else "")
    args = {
        "decodes": row.decodes, "prefills": row.prefills, "prefill_tokens": row.prefill_tokens, "sampled": row.sampled,
        "running": row.running, "prefix_tokens_saved": saved, "preemptions": row.preemptions, "version": row.version,
        "kv_blocks_offloaded": row.kv_offloaded - before.kv_offloaded, "kv_blocks_loaded": row.kv_loaded - before.kv_loaded,
    }  # fmt: skip
    yield _slice(pid, STEPS, name, row.start, row.end, base, args, cat="step")
    for part, start, end in (
        ("schedule", row.start, row.scheduled),
        ("execute", row.scheduled, row.executed),
        ("update", row.executed, row.end),
    ):
        yield _slice(pid, PARTS, part, start, end, base, {}, cat="part")
    counters = {
        "KV blocks": {"used": row.kv_used, "cached": row.kv_cached, "free": row.kv_free},
        **({"KV blocks on the host": {"kept": row.kv_on_host}} if row.kv_offloaded else {}),
        "samples": {"running": row.running, "waiting": row.waiting},
        "prefix cache hits (tokens)": {"tokens": saved},
    }
    for counter, values in counters.items():
        yield {"ph": "C", "pid": pid, "name": counter, "ts": _us(row.end, base), "args": values}


def _sample(pid: int, tid: int, life: Life, held: list[tuple[float, float]], base: float) -> Iterator[Event]:
    yield _name(pid, tid, "thread_name", f"request {life.request_id} sample {life.sample_index}")
    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    start = max(life.start, base)
    args = {
        "request": life.request_id, "sample": life.sample_index, "prompt_tokens": life.prompt_tokens,
        "tokens": life.tokens, "cached_tokens": life.cached_tokens, "finish": life.finish,
        "versions": [version for _, version in life.versions], "arrived_s_before_trace": max(0.0, base - life.start),
    }  # fmt: skip
    name = f"request {life.request_id}/{life.sample_index}: {life.finish}"
    yield _slice(pid, tid, name, start, max(start, life.end), base, args, cat="sample")
    for state, begin, end in life.states:
        for part, a, b in _without(state, max(begin, base), end, held):
            yield _slice(pid, tid, part, a, b, base, {}, cat="state")
    for time, version in life.versions[1:]:
        if time >= base:
            yield {
                "ph": "i", "s": "t", "pid": pid, "tid": tid, "name": f"version {version}", "ts": _us(time, base),
                "cat": "version", "args": {"version": version},
            }  # fmt: skip


# --- intervals ----------------------------------------------------------------------------------------------------------


def _held(log: EngineLog, around: Iterable[Span], end: float) -> list[tuple[float, float]]:
    """Return (start, end) of the spans in which samples with KV get no tokens.

    In these spans the engine does not run, or the manager is in a phase other than generating.
    """
    found = [(span.start, span.end) for span in around if span.args.get("phase") not in (None, "generate")]
    for (time, state), (until, _) in zip(log.states, [*log.states[1:], (end, "")], strict=True):
        if state != "running":
            found.append((time, until))
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(found):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _without(
    state: str, start: float, end: float, held: list[tuple[float, float]]
) -> Iterator[tuple[str, float, float]]:
    """Yield a sample's interval in parts: if its state is prefill or decode, parts inside `held` become `HELD`."""
    if end <= start:
        return
    if state in (PREFILL, DECODE):
        for a, b in held:
            a, b = max(a, start), min(b, end)
            if a >= b:
                continue
            if start < a:
                yield state, start, a
            yield HELD, a, b
            start = b
    if start < end:
        yield state, start, end


# --- building events ----------------------------------------------------------------------------------------------------


def _us(time: float, base: float) -> float:
    return round((time - base) * 1e6, 1)


def _name(pid: int, tid: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _slice(
    pid: int, tid: int, name: str, start: float, end: float, base: float, args: dict[str, Any], *, cat: str
) -> Event:
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": cat, "ts": _us(start, base),
        "dur": max(0.0, round((end - start) * 1e6, 1)), "args": args,
    }  # fmt: skip


Interval = tuple[str, float, float]
"""A named interval (name, start, end), in seconds since the start of the trace."""


class TracedSample(NamedTuple):
    """A sample in a trace; `rollout.observe.recorder` lists the possible states."""

    request: int
    sample: int
    states: list[Interval]
    tokens: int
    finish: str


@dataclass
class TracedEngine:
    """The samples and control calls of one engine in a trace."""

    name: str = ""
    samples: list[TracedSample] = field(default_factory=list)
    controls: list[Interval] = field(default_factory=list)


class ReadTrace(NamedTuple):
    """The content of a trace file."""

    duration_s: float
    engines: tuple[TracedEngine, ...]


def read(path: str | os.PathLike[str]) -> ReadTrace:
    """Read a trace file; raise `ConfigError` if it is missing, damaged or not a trace from this package."""
    try:
        data = Path(path).read_bytes()
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, ValueError, EOFError) as exc:
        raise ConfigError(f"{str(path)!r}: cannot be read as a trace: {exc}") from exc
    engines: dict[int, TracedEngine] = defaultdict(TracedEngine)
    states: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    try:
        if trace["otherData"]["format"] != FORMAT:
            raise KeyError(FORMAT)
        for event in trace["traceEvents"]:
            engine, args, start = engines[event["pid"]], event.get("args", {}), event.get("ts", 0.0) / 1e6
            end, track = start + event.get("dur", 0.0) / 1e6, (event["pid"], event.get("tid", 0))
            match event.get("cat"), event["name"]:
                case None, "process_name":
                    engine.name = args["name"]
                case "sample", _:
                    named = (args["request"], args["sample"], states[track], args["tokens"], args["finish"])
                    engine.samples.append(TracedSample(*named))
                case "state", state:
                    states[track].append((state, start, end))
                case "engine", control:
                    engine.controls.append((control, start, end))
        return ReadTrace(float(trace["otherData"]["duration_s"]), tuple(engines[pid] for pid in sorted(engines)))
    except (KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(
            f"{str(path)!r}: is not a trace of this package ({FORMAT}), which rollout.trace() writes, or damaged ({exc})"
        ) from exc
