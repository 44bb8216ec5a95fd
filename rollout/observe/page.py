"""`report` writes one HTML page about a run, with charts, samples, and a chart of the engine's slots from a trace."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from rollout.observe import charts
from rollout.observe.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from rollout.observe.run_log import read_log
from rollout.observe.timeline import read

AGES = ("#ffffff", "#fdf3d0", "#fbdf9d", "#f7b96f", "#ee8a5c", "#d95f5f")
"""The background colours of tokens sampled 0, 1, 2 … weight updates ago; the last colour is for all older tokens."""
AGE_AREAS = ("#dbe7f3", "#fbdf9d", "#f7b96f", "#ee8a5c", "#d95f5f", "#a33a3a")
SHOWN = 6
"""How many of the run's slowest samples, and of its most stale samples, are shown."""


def report(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    trace: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a page about a run that `RunLog` has logged.

    Args:
        folder: folder of the run.
        out: file to write. None means `report.html` in the folder.
        trace: trace file of the step whose slots are drawn. None means the last trace in the folder or its subfolder
            `traces`; without a trace, the page has no slots.

    Returns:
        The path of the written file.

    Raises:
        ConfigError: there is no log in the folder, the trace cannot be read, or the page cannot be written.
    """
    title, rows = read_log(folder)
    drawn = _last_trace(Path(folder)) if trace is None else Path(trace)
    target = Path(folder) / "report.html" if out is None else Path(out)
    try:
        target.write_text(_page(title, rows, drawn), encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"report({str(target)!r}): cannot be written: {exc}") from exc
    return target


def _last_trace(folder: Path) -> Path | None:
    patterns = ("*.json.gz", "step*.json", "traces/*.json.gz", "traces/step*.json")
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    return max(found, key=lambda path: (path.name.partition(".")[0], path.stat().st_mtime), default=None)


def _page(title: str, rows: list[dict[str, Any]], trace: Path | None) -> str:
    panels = "".join(f"<section><h2>{escape(name)}</h2>{chart}</section>" for name, chart in _charts(rows))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{_headline(rows)}<main>{panels}</main>"
        f"{'' if trace is None else _slots(trace)}{_samples(rows)}</body></html>\n"
    )


def _headline(rows: list[dict[str, Any]]) -> str:
    def total(name: str) -> float:
        return sum(row["metrics"].get(f"rollout/{name}") or 0.0 for row in rows)

    seconds = sum(total(f"{phase}_s") for phase in ("generate", "suspend", "train", "resume"))
    facts = [
        (f"{len(rows)}", "steps"),
        (f"{seconds:,.0f} s", "measured"),
        (f"{total('requests_finished'):,.0f}", "samples"),
        (f"{total('generated_tokens'):,.0f}", "tokens sampled"),
    ]
    if total("generate_s"):
        facts.append((f"{total('generated_tokens') / total('generate_s'):,.0f}", "tokens per second of generating"))
    rewards = [row["reward"][0] for row in rows if "reward" in row]
    if rewards:
        facts.append((f"{rewards[0]:.3g} → {rewards[-1]:.3g}", "mean reward"))
    return '<div class="facts">' + "".join(f"<div><b>{a}</b>{b}</div>" for a, b in facts) + "</div>"


def _charts(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    steps = [row["step"] for row in rows]

    def metric(name: str) -> list[float | None]:
        return [row["metrics"].get(f"rollout/{name}") for row in rows]

    def reward(index: int) -> list[float | None]:
        return [row["reward"][index] if "reward" in row else None for row in rows]

    oldest = max((len(row.get("ages", ())) for row in rows), default=0)
    shown = min(oldest, len(AGE_AREAS))
    ages = []
    for age in range(shown):
        last = age == shown - 1 and oldest > shown
        counts = [float(sum(row.get("ages", [])[age:] if last else row.get("ages", [])[age : age + 1])) for row in rows]
        ages.append((f"{age}" + " or more updates" * last, AGE_AREAS[age], counts))
    length = "completion_length"
    return [
        ("Reward", charts.lines(
            steps, [("mean", BLUE, reward(0))], band=("10th to 90th percentile", BLUE, reward(1), reward(2)))),
        ("Completion length (tokens)", charts.lines(
            steps, [("mean", BLUE, metric(f"{length}_mean")), ("longest", GREY, metric(f"{length}_max"))],
            band=("median to 99th percentile", BLUE, metric(f"{length}_p50"), metric(f"{length}_p99")))),
        ("Where the seconds of a step went", charts.areas(steps, [
            ("generate", BLUE, metric("generate_s")), ("train", ORANGE, metric("train_s")),
            ("suspend", PURPLE, metric("suspend_s")), ("resume", GREEN, metric("resume_s"))])),
        ("Sampled tokens per second of generating", charts.lines(
            steps, [("tokens per second", BLUE, metric("tokens_per_second"))])),
        ("Staleness of trained tokens (share by updates since sampling)", charts.areas(steps, ages, shares=True)),
        ("Log-prob gap between sampler and trainer (nats)", charts.lines(
            steps, [("mean", BLUE, metric("logprob_diff_mean")), ("99th percentile", ORANGE, metric("logprob_diff_p99")),
                    ("largest", RED, metric("logprob_diff_max"))], log=True)),
        ("KV blocks", charts.lines(steps, [
            ("used, peak", BLUE, metric("kv_blocks_used_peak")), ("cached", ORANGE, metric("kv_blocks_cached")),
            ("free", GREY, metric("kv_blocks_free"))])),
        ("Prompt positions served by the prefix cache or a fork", charts.lines(
            steps, [("share", GREEN, metric("prefix_hit_rate"))], top=1.0)),
        ("Time to first token and of a whole request (s)", charts.lines(
            steps, [("first token, p99", ORANGE, metric("ttft_s_p99")), ("request, median", BLUE, metric("request_s_p50")),
                    ("request, p99", RED, metric("request_s_p99"))])),
        ("Requests: preempted, failed, stale", charts.lines(steps, [
            ("preempted", ORANGE, metric("preemptions")), ("failed", RED, metric("requests_failed")),
            ("stale", GREY, metric("requests_stale"))])),
    ]  # fmt: skip


def _slots(trace: Path) -> str:
    duration_s, engines = read(trace)
    parts = [f"<h2>Slots of a traced step <small>{escape(trace.name)}</small></h2>"]
    parts += [f"<h3>{escape(engine.name)}</h3>{charts.slots(engine, duration_s)}" for engine in engines]
    return f'<section class="wide">{"".join(parts)}</section>'


def _samples(rows: list[dict[str, Any]]) -> str:
    every = [(row["step"], sample) for row in rows for sample in row.get("samples", ())]
    parts = []

    def age(sample: dict[str, Any]) -> int:
        return max((sample["version"] - version for version, _, _ in sample["runs"]), default=0)

    for why, size in (("slowest", lambda sample: sample["seconds"] or 0), ("most stale", age)):
        chosen = sorted((each for each in every if why in each[1]["why"]), key=lambda each: -size(each[1]))
        if chosen:
            parts.append(f"<h2>{why.capitalize()} samples</h2>")
            parts += [_sample(step, sample) for step, sample in chosen[:SHOWN]]
    if not parts:
        return ""
    key = charts.legend([(f"{age}" + " or more" * (age == len(AGES) - 1), color) for age, color in enumerate(AGES)])
    caption = "<p>Background of a token: weight updates since it was sampled</p>"
    return f'<section class="wide">{caption}{key}{"".join(parts)}</section>'


def _sample(step: int, sample: dict[str, Any]) -> str:
    facts = [f"step {step}", f"group {sample['group']}/{sample['sample']}"]
    facts += [f"{sample['seconds']:.2f} s"] if sample["seconds"] is not None else []
    facts += [f"reward {sample['reward']:.3g}"] if sample["reward"] is not None else []
    facts += [f"{sum(tokens for _, tokens, _ in sample['runs'])} tokens", sample["finish"]]
    facts += ["versions " + " → ".join(str(version) for version, _, _ in sample["runs"])]
    return (
        f'<article><header>{escape(" · ".join(facts))}</header><div class="prompt">{escape(sample["prompt"])}</div>'
        f'<div class="text">{colored(sample["runs"], sample["version"])}</div></article>'
    )


def colored(runs: Iterable[tuple[int, int, str]], now: int) -> str:
    """Return the text of `version_runs` as HTML; background colours show each run's age at policy version `now`."""
    spans = []
    for version, count, text in runs:
        age = max(0, now - version)
        told = f"version {version}, {age} update{'s' * (age != 1)} ago, {count} token{'s' * (count != 1)}"
        spans.append(f'<span style="background:{AGES[min(age, len(AGES) - 1)]}" title="{told}">{escape(text)}</span>')
    return "".join(spans)


_STYLE = """
:root{color-scheme:light}body{font:14px/1.45 system-ui,"DejaVu Sans",sans-serif;color:#1f2933;background:#f4f6f8;
margin:0 auto;max-width:1180px;padding:24px}h1{font-size:24px;margin:0 0 12px}h2{font-size:15px;margin:0 0 8px}
h3{font-size:13px;margin:8px 0 4px;color:#52606d}small{font-weight:400;color:#616e7c}p{margin:0}
.facts{display:flex;flex-wrap:wrap;gap:10px;margin-bottom:16px}.facts div{background:#fff;border:1px solid #e1e6eb;
border-radius:6px;padding:8px 14px;color:#52606d;font-size:12px}.facts b{display:block;font-size:19px;color:#1f2933}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:14px}
section{background:#fff;border:1px solid #e1e6eb;border-radius:6px;padding:14px;min-width:0}
section.wide{margin-top:14px}svg{width:100%;height:auto;display:block}main svg{overflow:visible}
.slots{overflow-x:auto}.slots svg{min-width:700px}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:12px;color:#52606d;margin:6px 0}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px;
border:1px solid #0003}.none{color:#616e7c;text-align:center;padding:30px 0}
article{border:1px solid #e1e6eb;border-radius:4px;margin:0 0 10px}header{background:#f8fafb;padding:5px 10px;
font-size:12px;color:#52606d;border-bottom:1px solid #e1e6eb}.prompt{padding:6px 10px;color:#616e7c;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:90px;overflow:auto}.text{padding:2px 10px 8px;white-space:pre-wrap;overflow-wrap:anywhere;
max-height:260px;overflow:auto;font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:12.5px}
@media(max-width:600px){body{padding:10px}main svg text{font-size:13px!important}}
"""
