"""The findings of a run as one JSON document and as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.gpu_first_run.findings import FINDINGS


def write(out: Path) -> None:
    """Write `findings.json` and `findings.txt` in `out`, of the findings so far."""
    stages = of(out)
    (out / "findings.json").write_text(json.dumps({"stages": stages}, indent=1), encoding="utf-8")
    (out / "findings.txt").write_text("\n".join(_lines(stages)), encoding="utf-8")


def of(out: Path) -> list[dict[str, Any]]:
    """Stages in the order in which they ran: `name`, `ok` (None: it has not ended), `seconds`, `why`, `findings` of each."""
    path = out / FINDINGS
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        each = json.loads(line)
        what = each.pop("what")
        if what == "begins":
            found.append({"name": each["name"], "ok": None, "seconds": None, "why": "", "findings": []})
        elif what != "stage":
            found[-1]["findings"].append({"what": what} | each)
        elif found and found[-1]["ok"] is None and found[-1]["name"] == each["name"]:
            found[-1] |= each
        else:
            found.append(each | {"findings": []})
    return found


def _lines(stages: list[dict[str, Any]]) -> list[str]:
    lines = []
    for stage in stages:
        state = {True: "ok", False: f"FAILED: {stage['why']}", None: "has not ended"}[stage["ok"]]
        took = "" if stage["seconds"] is None else f", {stage['seconds']:.1f} s"
        lines += ["", f"== {stage['name']}{took}: {state}"]
        for finding in stage["findings"]:
            shown = ", ".join(f"{key} {_plain(value)}" for key, value in finding.items() if key != "what")
            lines.append(f"{finding['what']}: {shown}")
    return [*lines, ""]


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
