"""Renews the figures of the README and of `docs/explanation/performance.md`.

    python -m tests.benchmarks.figures            names pages that differ from docs/figures.json; exit status 1 if any do
    python -m tests.benchmarks.figures --write    writes the stored figures into the pages
    taskset -c 0,1 python -m tests.benchmarks.figures --renew --vllm-python V/bin/python --openvino-python O/bin/python

The last one measures all figures (or those named), stores each with its machine, versions and date as soon as it has been
measured, and writes the pages. All take about two hours on two cores. A table stands in a page between
`<!-- figures: NAME -->` and `<!-- end -->`; the rest is written by hand and names no measured number of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks import tables
from tests.benchmarks.tables import Found

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "figures.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "explanation" / "performance.md")
QUIET = 1.5
"""Load of the machine from which on nothing is measured."""
DIGITS = 5
"""Significant digits that are stored: more than any figure has."""
MARKED = re.compile(r"<!-- figures: (?P<name>[a-z0-9-]+) -->\n.*?<!-- end -->", re.DOTALL)

# --- which benchmark measures each figure -----------------------------------------------------------------------------

RACE = (
    "race --sizes 100m --dtypes bfloat16 --workloads steady grpo prefix multiturn "
    "--peers ours generate vllm openvino --rounds 2 --limit 60"
)
FIGURES: dict[str, tuple[str, dict[str, Callable[[Found], str]], tuple[str, ...]]] = {
    "race": (RACE, {"readme": tables.readme, "race": tables.race, "bookkeeping": tables.bookkeeping}, ("vllm", "openvino")),
    "race-float32": (
        "race --sizes 100m --dtypes float32 --workloads steady --peers ours vllm openvino --rounds 2",
        {"race-float32": tables.race}, ("vllm", "openvino"),
    ),
    "race-10m": (
        "race --sizes 10m --dtypes bfloat16 --workloads steady --peers ours generate vllm openvino --rounds 2",
        {"race-10m": tables.race}, ("vllm", "openvino"),
    ),
    "race-large": (
        "race --sizes 600m 1500m --dtypes bfloat16 --workloads steady --sequences 16 --peers ours vllm openvino "
        "--rounds 2 --scale 0.25",
        {"race-large": tables.race}, ("vllm", "openvino"),
    ),
    "families": ("families --scale 0.25 --rounds 3", {"families": tables.families}, ("vllm",)),
    "families-100m": ("families --size 100m --scale 0.25 --rounds 1", {"families-100m": tables.families}, ("vllm",)),
    "busy": ("busy", {"busy": tables.busy}, ("vllm",)),
    "tree": ("tree", {"tree": tables.tree}, ()),
    "training-memory": ("training_memory", {"training-memory": tables.training_memory}, ()),
    "forked": (
        "training_memory --shape forked --turns 2 4 8 16 --tokens 512 --vocabularies 32768", {"forked": tables.forked}, (),
    ),
    "search": (
        "training_memory --shape search --turns 32 --forks 1 --tokens 1024 --vocabularies 32768",
        {"search": tables.search}, (),
    ),
    "suspend": ("suspend", {"suspend": tables.suspend}, ()),
    "trl-step": ("trl_step", {"trl-step": tables.trl_step}, ()),
    "exact": ("exact --dtype bfloat16", {"exact": tables.exact}, ()),
    "episodes": ("episodes --longest 24", {"episodes": tables.episodes}, ()),
    "equivalence": ("equivalence --seeds 10 --picture docs/equivalence.png", {"equivalence": tables.equivalence}, ()),
}  # fmt: skip
"""Benchmarks by name, in the order of measuring: the module and its arguments, its tables, peers whose interpreter it
takes."""
AT_ANY_LOAD = ("training-memory", "forked", "search")
"""Figures of memory and of processor time: no quiet machine is needed."""
FRAGMENTS = {fragment: (name, draw) for name, (_, drawn, _) in FIGURES.items() for fragment, draw in drawn.items()}
"""Every table: its figure, and what draws it."""


def command(name: str) -> str:
    """Return the command that measures a figure, as a user types it."""
    return f"python -m tests.benchmarks.{FIGURES[name][0]}"


# --- the file and the pages -------------------------------------------------------------------------------------------


def load() -> dict[str, Found]:
    """All entries by figure: `command`, `date`, `commit`, `machine`, `versions`, `load` before it, and `found`."""
    entries: dict[str, Found] = json.loads(FILE.read_text(encoding="utf-8"))
    return entries


def save(entries: dict[str, Found]) -> None:
    """Replace the file, lists of numbers on one line."""
    text = json.dumps(entries, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[-+.0-9eE,\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    FILE.write_text(text + "\n", encoding="utf-8")


def rounded(found: Found) -> Found:
    """Floats cut to `DIGITS` significant digits, at any depth."""
    if isinstance(found, float):
        return float(f"{found:.{DIGITS}g}")
    if isinstance(found, dict):
        return {key: rounded(each) for key, each in found.items()}
    return [rounded(each) for each in found] if isinstance(found, list) else found


def load_when_quiet(patience_s: float = 1800.0) -> float:
    """Wait until the machine's load is below `QUIET`, and return it.

    Raises:
        TimeoutError: the machine stayed busy for so many seconds.
    """
    end = time.monotonic() + patience_s
    while (load := os.getloadavg()[0]) >= QUIET:
        if time.monotonic() > end:
            raise TimeoutError(f"load {load:.1f} for {patience_s:g} s: nothing is measured above {QUIET}")
        print(f"load {load:.1f}: waiting until it is below {QUIET}", file=sys.stderr)
        time.sleep(15)
    return round(load, 1)


def measured(name: str, options: argparse.Namespace) -> Found:
    """A new entry; None if the benchmark, whose output is shown, failed. Waits for a quiet machine."""
    words = shlex.split(command(name))[1:]
    for peer in FIGURES[name][2]:
        if (python := getattr(options, f"{peer}_python")) is not None:
            words += [f"--{peer}-python", python]
    before = round(os.getloadavg()[0], 1) if name in AT_ANY_LOAD else load_when_quiet()
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run([sys.executable, *words, "--json", str(result)], cwd=ROOT, check=False)
        if done.returncode or not result.exists():
            return None
        found = rounded(json.loads(result.read_text(encoding="utf-8")))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "command": command(name), "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "no commit",
        "machine": f"{len(os.sched_getaffinity(0))} cores of {processor[1] if processor else platform.machine()}",
        "versions": {each: version(each) for each in ("torch", "transformers")}, "load": before, "found": found,
    }  # fmt: skip


def written(page: str, entries: dict[str, Found]) -> str:
    """A page with every marked table as the entries say; a table that has never been measured stays as it is.

    Raises:
        KeyError: a mark names a table that no figure has.
    """

    def fragment(match: re.Match[str]) -> str:
        name, draw = FRAGMENTS[match["name"]]
        if name not in entries:
            return match[0]
        entry = entries[name]
        versions = ", ".join(f"{package} {each}" for package, each in entry["versions"].items())
        about = (
            f"\n`{entry['command']}`; {entry['date']}, {entry['commit']}, {entry['machine']}, load {entry['load']:.1f} "
            f"before, {versions}.\n"
        )
        # The README says elsewhere how its table was measured.
        about = "" if draw is tables.readme else about
        return f"<!-- figures: {match['name']} -->\n{draw(entry['found'])}\n{about}<!-- end -->"

    return MARKED.sub(fragment, page)


def differing(entries: dict[str, Found]) -> list[Path]:
    """Pages that do not say what the entries say."""
    return [page for page in PAGES if (text := page.read_text(encoding="utf-8")) != written(text, entries)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, store, write or compare. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)} (default: all)")
    parser.add_argument("--renew", action="store_true", help="measure")
    parser.add_argument("--write", action="store_true", help="write the pages")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--openvino-python", metavar="PATH", help="interpreter of one with OpenVINO GenAI")
    options = parser.parse_args(arguments)
    if unknown := set(options.names).difference(FIGURES):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(FIGURES)}")
    if options.names and not options.renew:
        parser.error("a NAME is what --renew measures")
    failed = []
    for name in (options.names or FIGURES) if options.renew else ():
        print(f"── {name}: {command(name)}", file=sys.stderr)
        if (entry := measured(name, options)) is None:
            failed.append(name)
        else:
            save(load() | {name: entry})
    for name in failed:
        print(f"{name}: not renewed; what it said is above", file=sys.stderr)
    writing = options.renew or options.write
    for page in (pages := differing(load())):
        if writing:
            page.write_text(written(page.read_text(encoding="utf-8"), load()), encoding="utf-8")
        says = "written" if writing else "differs from docs/figures.json: run with --write"
        print(f"{page.relative_to(ROOT)}: {says}", file=sys.stderr)
    return 1 if failed or (pages and not writing) else 0


if __name__ == "__main__":
    sys.exit(main())
