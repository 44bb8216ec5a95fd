"""Summary of a trace as text: busy share, tail, prefix cache, and the slowest requests with their lives.

`rollout trace FILE...` prints it, and merges the files of several ranks.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from rollout.observe.recorder import STATES
from rollout.observe.timeline import Interval, ReadTrace, TracedEngine, TracedSample, load, parse, write

WIDTH = 120
TAIL_SHARE = 0.25
"""A step belongs to the tail where it runs at most this share of the samples that the fullest step ran."""


def main(arguments: Sequence[str]) -> None:
    """Run `rollout trace`; `ConfigError` if a file cannot be read or written."""
    parser = argparse.ArgumentParser("rollout trace", description="Summarise a timeline that rollout.trace() wrote.")
    parser.add_argument("file", nargs="+", help="a trace, or those of all ranks of a job")
    parser.add_argument("--slowest", type=int, default=5, metavar="N", help="samples whose lives are told (default: 5)")
    parser.add_argument("--merge", metavar="OUT", help="also write the files as one timeline, their clocks aligned")
    options = parser.parse_args(arguments)
    if options.slowest < 0:
        parser.error(f"--slowest {options.slowest}: must be at least 0")
    trace = load(options.file)
    if options.merge:
        write(trace, options.merge)
    print(summary(parse(trace, options.file[0]), options.slowest), end="")


def summary(trace: ReadTrace, slowest: int = 5) -> str:
    """Return the text, lines of at most 120 characters, with the lives of the `slowest` samples per engine."""
    lines = [f"{trace.duration_s:.3f} s traced"]
    if trace.dropped:
        lines.append(f"{trace.dropped} rows beyond the limit are missing: trace a shorter block")
    for engine in trace.engines:
        lines += ["", *_engine(engine, trace.duration_s, slowest)]
    wrapped = (textwrap.wrap(line, WIDTH, subsequent_indent=" " * 13) or [""] for line in lines)
    return "\n".join(chain.from_iterable(wrapped)) + "\n"


def _engine(engine: TracedEngine, duration_s: float, slowest: int) -> Iterator[str]:
    yield engine.name
    if engine.phases:
        spent = _seconds(engine.phases)
        yield "  phases     " + " · ".join(f"{name} {seconds:.3f} s" for name, seconds in spent.items())
    if not engine.steps:
        yield "  no steps"
        return
    yield from _steps(engine, duration_s)
    yield from _controls(engine)
    ranking = sorted(engine.samples, key=lambda sample: sample.start - sample.end)[:slowest]
    if ranking:
        unfinished = sum(sample.finish == "unfinished" for sample in engine.samples)
        also = f", {unfinished} of them unfinished" if unfinished else ""
        yield f"  slowest of {len(engine.samples)} samples{also}:"
        for sample in ranking:
            yield from _life(sample)


def _steps(engine: TracedEngine, duration_s: float) -> Iterator[str]:
    steps = engine.steps
    busy = sum(step["end"] - step["start"] for step in steps)
    sampled = sum(step["sampled"] for step in steps)
    computed = sum(step["prefill_tokens"] for step in steps)
    saved = sum(step["prefix_tokens_saved"] for step in steps)
    most = max(step["running"] for step in steps)
    rows = [step["decodes"] + step["prefills"] for step in steps]
    tail = sum(
        step["end"] - step["start"] for step, row in zip(steps, rows, strict=True) if row <= TAIL_SHARE * max(rows)
    )
    rate = sampled / max(busy, 1e-9)
    mean_ms = busy / len(steps) * 1e3
    yield (
        f"  busy       {busy / max(duration_s, 1e-9):.0%} of the time, in {len(steps)} steps of {mean_ms:.2f} ms; "
        f"{rate:,.0f} tokens per busy second"
    )
    yield (
        f"  tail       {tail / max(busy, 1e-9):.0%} of the busy time with at most {TAIL_SHARE:.0%} of the "
        f"{max(rows):.0f} samples of the fullest step"
    )
    required = computed + saved
    yield (
        f"  tokens     {sampled:,.0f} sampled; {required:,.0f} of prompts, {saved / max(required, 1):.0%} of them from "
        f"the prefix cache or a fork"
    )
    preemptions = steps[-1]["preemptions"] - steps[0]["preemptions"]
    yield f"  memory     {preemptions:.0f} preemptions; at most {most:.0f} samples running"


def _controls(engine: TracedEngine) -> Iterator[str]:
    spent, counts = _seconds(engine.controls), Counter(name for name, _, _ in engine.controls)
    if spent:
        told = (
            f"{counts[name]} × {name}" + f" ({seconds * 1e3:.1f} ms)" * (seconds > 0) for name, seconds in spent.items()
        )
        yield "  control    " + " · ".join(told)


def _seconds(intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds by name, in order of the first."""
    spent: dict[str, float] = {}
    for name, start, end in intervals:
        spent[name] = spent.get(name, 0.0) + end - start
    return spent


def _life(sample: TracedSample) -> Iterator[str]:
    spent = _seconds(sample.states)
    life = " · ".join(f"{state} {spent[state]:.3f}" for state in STATES if state in spent)
    versions = "" if not sample.versions else f", version {' → '.join(map(str, sample.versions))}"
    yield (
        f"    {sample.end - sample.start:8.3f} s  request {sample.request}/{sample.sample}: {sample.prompt_tokens} + "
        f"{sample.tokens} tokens, {sample.finish}{versions}"
    )
    yield f"                {life}"
