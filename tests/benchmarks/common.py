"""Common parts of benchmarks: command line, rounds, clock, processes and their memory, tables, the file of figures."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.markdown import Markdown
from transformers.utils import logging

from tests.benchmarks.subject import DTYPES, SIZES

T = TypeVar("T")
KNOWN: dict[str, dict[str, Any]] = {
    "size": {"choices": list(SIZES), "help": "parameters"},
    "sizes": {"choices": list(SIZES), "help": "parameters"},
    "dtype": {"choices": DTYPES},
    "dtypes": {"choices": DTYPES},
    "device": {"help": "cpu, or cuda"},
    "scale": {"help": "multiplies all token counts, for a quick look"},
    "limit": {"metavar": "SECONDS", "help": "a peer that is slower runs no further round; cut off at twice as long"},
    "vllm_python": {"metavar": "PATH", "help": "interpreter of an environment with vLLM (default: RACE_VLLM_PYTHON)"},
    "openvino_python": {"metavar": "PATH", "help": "of one with OpenVINO GenAI (default: RACE_OPENVINO_PYTHON)"},
    "cell": {"metavar": "JSON", "help": "other options; measure only what they say, here, and print it as JSON"},
}
"""Options that mean the same in every benchmark that takes them."""


def parse(doc: str | None, arguments: Sequence[str] | None, **options: Any) -> argparse.Namespace:
    """The command line: `--json`, and an option by each keyword. Numbers must be above 0.

    Args:
        options: the default, whose type the option has (a list: one or more), or a dict of `add_argument`'s arguments.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in options.items():
        asked = KNOWN.get(name, {}) | (given if isinstance(given, dict) else {"default": given})
        default = asked["default"]
        if name in ("vllm_python", "openvino_python"):
            asked["default"] = os.environ.get(f"RACE_{name.upper()}")
        elif isinstance(default, bool):
            asked["action"] = "store_true"
        elif default is not None:
            one = default[0] if isinstance(default, list) else default
            asked |= {"type": type(one)} | ({"nargs": "+"} if isinstance(default, list) else {})
        parser.add_argument(f"--{name.replace('_', '-')}", **asked)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parsed = parser.parse_args(arguments)
    for name, value in vars(parsed).items():
        numbers = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int | float)]
        if not isinstance(value, bool) and any(each <= 0 for each in numbers):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if getattr(parsed, "cell", None):
        vars(parsed).update(json.loads(parsed.cell))
    return parsed


def in_process(module: str, **cell: Any) -> Any:
    """Measure one cell of a benchmark in a process of its own, and return what it prints last, read as JSON.

    Raises:
        RuntimeError: it failed; the message is what it wrote.
    """
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", "--cell", json.dumps(cell)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def peak_of(work: Callable[[], Any]) -> int:
    """Peak of this process's resident memory during `work`, in MB above what it held before."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts here
    before = resident("VmRSS")
    work()
    return (resident("VmHWM") - before) * 1024 // 10**6


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name): everybody once a round, each round beginning with the next one."""
    order = list(names)
    for number in range(rounds):
        turn = number % max(1, len(order))
        for name in order[turn:] + order[:turn]:
            yield number, name


def alternating(works: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return the results of each work in each of `rounds` rounds, after one round to warm up."""
    found: dict[str, list[T]] = {name: [] for name in works}
    for number, name in turns(works, rounds + 1):
        result = works[name]()
        if number:
            found[name].append(result)
    return found


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def settle(device: torch.device) -> None:
    """Wait until a device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: torch.device | None = None) -> float:
    """Wall time of one call, the device's work included."""
    start = time.perf_counter()
    work()
    if device is not None:
        settle(device)
    return time.perf_counter() - start


def number(value: float | None) -> str:
    """Three digits that matter, thousands apart."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def finish(path: Path | None, found: Any, *tables: str) -> None:
    """Write figures where `--json` says, if it does, and print their tables."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for each in tables:
        Console(width=None if sys.stdout.isatty() else 140).print(Markdown(each))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings and no progress bars of transformers inside the block."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
