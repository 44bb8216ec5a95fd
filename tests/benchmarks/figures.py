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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.benchmarks.common import number

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "figures.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "explanation" / "performance.md")
QUIET = 1.5
"""Load of the machine from which on nothing is measured."""
DIGITS = 5
"""Significant digits that are stored: more than any figure has."""
MARKED = re.compile(r"<!-- figures: (?P<name>[a-z0-9-]+) -->\n.*?<!-- end -->", re.DOTALL)
Found = Any
"""What a benchmark wrote with `--json`, or an entry of the file."""

PEERS = {
    "ours": "ours", "generate": "`model.generate`", "cb": "`generate_batch`", "vllm": "vLLM (CPU)",
    "openvino": "OpenVINO GenAI",
}  # fmt: skip
README_ROWS = {
    ("steady", "16 sequences", "decode"): "decode, 16 sequences",
    ("grpo", "8 × 8 samples", "all tokens"): "GRPO: 8 prompts of 512 × 8 samples, long tail",
    ("prefix", "64 questions", "all tokens"): "64 questions after one prompt of 1,024 tokens",
}
FAMILIES = {
    "llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma 2", "gemma3": "Gemma 3", "olmo2": "OLMo 2", "olmo3": "OLMo 3",
    "phi3": "Phi-3", "glm": "GLM", "glm4": "GLM-4", "qwen3_moe": "Qwen3-MoE, 2 of 8 experts",
    "mixtral": "Mixtral, 2 of 8 experts", "qwen3_5": "Qwen3.5", "qwen3_next": "Qwen3-Next, 2 of 8 experts",
    "gpt2": "GPT-2", "llama, lora": "Llama with live LoRA, r = 16 everywhere",
}  # fmt: skip


# --- tables: each takes what one benchmark wrote with --json ----------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def _against(row: Found, peer: str, times: str = "") -> str:
    """Median, and how many times the peer's figure ours is."""
    cell = row["peers"].get(peer)
    if cell is None or cell["median"] is None:
        return "" if cell is None else "not run"
    if peer == row["reference"]:
        return number(cell["median"])
    ratio = row["ratios"][peer]
    better = ratio if row["higher_is_better"] else 1 / ratio
    digits = 2 if better < 2 else 1 if better < 10 else 0
    return f"{number(cell['median'])} ({better:.{digits}f}{times})"


def _floor(row: Found) -> str:
    reached = row["peers"].get("ours", {}).get("of_floor")
    return "" if reached is None else f"{reached:.0%}"


def race(found: Found) -> str:
    """Tokens per second by model, workload and peer, ours over the peer's in brackets, and our share of the floor."""
    rows = [row for row in found["rows"] if row["peers"]["ours"]["median"]]
    peers = [peer for peer in PEERS if any(peer in row["peers"] for row in rows)]
    metrics = {"all tokens": "with prefill", "decode": "decode"}
    several = len({row["size"] for row in rows}) > 1

    def label(row: Found) -> str:
        size = f"{row['size'][:-1]} {row['size'][-1].upper()}, " if several else ""
        return f"{size}{row['workload']}, {row['case']}: {metrics[row['metric']]}"

    return table(
        ["workload", *(PEERS[peer] for peer in peers), "of the floor"],
        [[label(row), *(_against(row, peer) for peer in peers), _floor(row)] for row in rows],
    )


def readme(found: Found) -> str:
    """Three workloads of the race."""
    rows = {(row["workload"], row["case"], row["metric"]): row for row in found["rows"]}
    peers = ["ours", "generate", "vllm"]
    return table(
        ["workload", *(PEERS[peer] for peer in peers)],
        [[label, *(_against(rows[key], peer, "×") for peer in peers)] for key, label in README_ROWS.items()],
    )


def bookkeeping(found: Found) -> str:
    """Where a decode step goes."""
    steps = [profile for profile in found["profiles"] if profile["kind"] == "decode step"]
    names = list(dict.fromkeys(name for step in steps for name in step["ms"]))
    return table(
        ["a decode step, ms", *names, "Python and bookkeeping"],
        [[f"{step['sequences']} sequence{'s' * (step['sequences'] > 1)}",
          *(f"{step['ms'].get(name, 0):.2f}" for name in names), f"{step['bookkeeping_share']:.1%}"] for step in steps],
    )  # fmt: skip


def families(found: Found) -> str:
    """Tokens per second by family and peer that ran, with the prompts and of the decode alone, and ours of the floor."""
    rows = {(row["workload"], row["metric"]): row for row in found["rows"]}
    ran = {name for row in rows.values() for name, cell in row["peers"].items() if cell["median"] is not None}
    metrics = ("all tokens", "decode")
    columns = [(metric, peer) for metric in metrics for peer in PEERS if peer in ran]
    return table(
        ["", *(metric if peer == "ours" else PEERS[peer] for metric, peer in columns),
         *(f"{metric}: of the floor" for metric in metrics)],
        [[FAMILIES[family], *(_against(rows[family, metric], peer) for metric, peer in columns),
          *(_floor(rows[family, metric]) for metric in metrics)] for family in dict.fromkeys(name for name, _ in rows)],
    )  # fmt: skip


def trl_step(found: Found) -> str:
    """A whole step of GRPOTrainer: seconds (and how many times ours), seconds of its sampling, and peak memory."""
    labels = {"ours": "engine", "trees": "engine, trained over prefix trees", "generate": PEERS["generate"],
              "cb": "transformers' continuous batching"}  # fmt: skip
    rows = []
    for peer, label in labels.items():
        cells = [label]
        for peers in found.values():
            each, ratio = peers[peer], peers[peer]["seconds"] / peers["ours"]["seconds"]
            cells += [f"{number(each['seconds'])} ({ratio:.2f})", number(each["sampling"]), number(each["MB"])]
        rows.append(cells)
    models = (f"{size[:-1]} {size[-1].upper()} {dtype}" for size, dtype in (model.split("-") for model in found))
    return table(["", *(f"{model}: {figure}" for model in models for figure in ("s", "of it sampling", "MB"))], rows)


def busy(found: Found) -> str:
    """Tokens per second beside busy processes, and the share of the quiet speed."""
    cells = {tuple(key.split("|")): statistics.median(values) for key, values in found.items()}
    loads, peers = (list(dict.fromkeys(key[part] for key in cells)) for part in (0, 1))
    return table(
        ["", *(PEERS[peer] for peer in peers)],
        [[load, *(f"{number(cells[load, peer])} ({cells[load, peer] / cells[loads[0], peer]:.2f})" for peer in peers)]
         for load in loads],
    )  # fmt: skip


def tree(found: Found) -> str:
    """Training on a batch of groups, by method."""
    labels = {"padded": "padded, sorted by length, sdpa", "packed": "packed, nothing shared", "tree": "trees"}
    first = found["padded"]["train seconds"]
    return table(
        ["", "tokens", "training, s", "peak memory, GiB"],
        [[label, number(each["tokens"]), f"{each['train seconds']:.1f} ({first / each['train seconds']:.1f})",
          f"{each['peak MiB'] / 1024:.1f}"] for method, label in labels.items() for each in [found[method]]],
    )  # fmt: skip


def training_memory(found: Found) -> str:
    """Peak memory by method, with whole logits and without."""
    methods = {"trl": "TRL's fused head, padded", "padded": "padded", "packed": "packed", "tree": "tree"}

    def cell(peaks: Found, method: str) -> str:
        if method not in peaks:
            return ""
        return "above 10,000" if peaks[method] is None else number(peaks[method]["MB"])

    return table(
        ["MB, at a vocabulary of", *(f"{each['vocabulary']:,}, {each['tokens']:,} tokens{kind}" for each in found
                                     for kind in (": whole", ": tiles"))],
        [[label, *(cell(each["peaks"], name) for each in found for name in (f"{method}, whole", method))]
         for method, label in methods.items()],
    )  # fmt: skip


def forked(found: Found) -> str:
    """Histories that drop earlier thinking: every turn as a row, and the tree of all."""
    return table(
        ["turns", "tokens: rows", "tree", "seconds: rows", "tree", "MB: rows one by one", "tree"],
        [[str(each["turns"]), *(f"{each['timed'][kind]:,}" for kind in ("rows", "tree")),
          *(number(each["timed"]["seconds"][kind]) for kind in ("rows", "tree")),
          *(number(each["peaks"][kind]["MB"]) for kind in ("rows", "tree"))] for each in found],
    )  # fmt: skip


def search(found: Found) -> str:
    """A long agent whose last turn has 8 branches."""
    (peaks,) = (each["peaks"] for each in found)
    one = peaks["one path"]
    rows = {
        "one row, its last turn trained": one,
        "8 rows one by one, at least": {"seconds": 8 * one["seconds"], "MB": one["MB"]},
        "tree in one forward": peaks["tree"],
        "`batch.paths`": peaks["paths"],
    }
    return table(
        ["", "seconds (of one row)", "MB (of one row)"],
        [[label, *(f"{number(each[unit])} ({each[unit] / one[unit]:.2f})" for unit in ("seconds", "MB"))]
         for label, each in rows.items()],
    )  # fmt: skip


def suspend(found: Found) -> str:
    """Suspend and resume beside plain copies and prefilling again."""
    offload, recompute = found["medians"]["offload"], found["medians"]["recompute"]
    head = f"{found['requests']} requests of {found['tokens']:,} tokens, {offload['bytes'] / 1e9:.2f} GB of KV"
    return table(
        [head, "ms", "plain copy over it"],
        [
            ["suspend", number(1e3 * offload["suspend_s"]), f"{found['suspend_of_plain']:.2f}"],
            ["resume", number(1e3 * offload["resume_s"]), f"{found['resume_of_plain']:.2f}"],
            ["until all decode again, resumed", number(1e3 * offload["back_s"]), ""],
            ["until all decode again, prefilled", number(1e3 * recompute["back_s"]), ""],
        ],
    )


def exact(found: Found) -> str:
    """Exact beside plain."""
    rows = []
    for work, each in found["seconds"].items():
        plain, ours = (statistics.median(each[mode]) for mode in ("plain", "exact"))
        rows.append([work, f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.2f}"])
    differs = [f"{found['differs'][mode]:.2g}" for mode in ("plain", "exact")]
    return table(
        ["", "plain, s", "exact, s", "exact / plain"], [*rows, ["largest difference of log-probs", *differs, ""]]
    )


def equivalence(found: Found) -> str:
    """Reward at the end and seconds of a step, by what sampled."""
    rows = []
    for variant, runs in found["runs"].items():
        ends = [run["reward"][-max(1, len(run["reward"]) // 4) :] for run in runs]
        seconds = statistics.median(second for run in runs for second in run["seconds"])
        low, high = found["intervals"][variant]
        verdict = "" if variant == "generate" else "yes" if found["equivalent"][variant] else "not shown"
        rows.append([f"`{variant}`", f"{statistics.mean(map(statistics.mean, ends)):.3f}", f"{low:+.3f} to {high:+.3f}",
                     verdict, f"{seconds:.3f}"])  # fmt: skip
    head = ["sampled by", "reward, last quarter", "difference, 90 %", f"within ±{found['bound']}", "s per step"]
    return table(head, rows)


def episodes(found: Found) -> str:
    """Episodes against turns in lock step."""
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    ratio = medians["lock_step_s"] / medians["run_s"]
    return table(
        ["256 episodes of 8 turns, tools of 0 to 2 s", ""],
        [
            ["tokens per second, those of lock step = 1: a fixed set", f"{ratio:.2f}"],
            ["the same, ended episodes replaced", f"{medians['steady_ratio']:.2f}"],
            ["engine busy while it has work", f"{medians['busy']:.0%}"],
            ["tokens of earlier turns computed again", f"{medians['recomputed']:.1%}"],
        ],
    )


# --- which benchmark measures each figure -----------------------------------------------------------------------------

RACE = (
    "race --sizes 100m --dtypes bfloat16 --workloads steady grpo prefix multiturn "
    "--peers ours generate vllm openvino --rounds 2 --limit 60"
)
FIGURES: dict[str, tuple[str, dict[str, Callable[[Found], str]], tuple[str, ...]]] = {
    "race": (RACE, {"readme": readme, "race": race, "bookkeeping": bookkeeping}, ("vllm", "openvino")),
    "race-float32": (
        "race --sizes 100m --dtypes float32 --workloads steady --peers ours vllm openvino --rounds 2",
        {"race-float32": race}, ("vllm", "openvino"),
    ),
    "race-10m": (
        "race --sizes 10m --dtypes bfloat16 --workloads steady --peers ours generate vllm openvino --rounds 2",
        {"race-10m": race}, ("vllm", "openvino"),
    ),
    "race-large": (
        "race --sizes 600m 1500m --dtypes bfloat16 --workloads steady --sequences 16 --peers ours vllm openvino "
        "--rounds 2 --scale 0.25",
        {"race-large": race}, ("vllm", "openvino"),
    ),
    "families": ("families --scale 0.25 --rounds 3", {"families": families}, ("vllm",)),
    "families-100m": ("families --size 100m --scale 0.25 --rounds 1", {"families-100m": families}, ("vllm",)),
    "busy": ("busy", {"busy": busy}, ("vllm",)),
    "tree": ("tree", {"tree": tree}, ()),
    "training-memory": ("training_memory", {"training-memory": training_memory}, ()),
    "forked": (
        "training_memory --shape forked --turns 2 4 8 16 --tokens 512 --vocabularies 32768", {"forked": forked}, (),
    ),
    "search": (
        "training_memory --shape search --turns 32 --forks 1 --tokens 1024 --vocabularies 32768", {"search": search}, (),
    ),
    "suspend": ("suspend", {"suspend": suspend}, ()),
    "trl-step": ("trl_step", {"trl-step": trl_step}, ()),
    "exact": ("exact --dtype bfloat16", {"exact": exact}, ()),
    "episodes": ("episodes --longest 24", {"episodes": episodes}, ()),
    "equivalence": ("equivalence --seeds 10 --picture docs/equivalence.png", {"equivalence": equivalence}, ()),
}  # fmt: skip
"""By name, in the order in which they are measured: the benchmark and its arguments, its tables, peers whose interpreter it
takes."""
AT_ANY_LOAD = ("training-memory", "forked", "search")
"""Figures of memory and of processor time: no quiet machine is needed."""
FRAGMENTS = {fragment: (name, draw) for name, (_, tables, _) in FIGURES.items() for fragment, draw in tables.items()}
"""Every table: its figure, and what draws it."""


def command(name: str) -> str:
    """What measures a figure, as a user types it."""
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
        about = "" if draw is readme else about
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
