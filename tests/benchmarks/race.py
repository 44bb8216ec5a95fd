"""Race of this engine against its peers in one run: same weights, prompts and forced tokens, in alternation.

    python -m tests.benchmarks.race --vllm-python V/bin/python --openvino-python O/bin/python --json race.json

Quote ratios, not seconds, and keep the machine quiet: a second busy process costs OpenMP programs far more than half. A
quick look: --sizes 10m --dtypes float32 --rounds 1 --scale 0.1 --peers ours generate. Ctrl-C prints and saves what there
is.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from tests.benchmarks import step_profile, tables
from tests.benchmarks.common import finish, parse, quiet_transformers
from tests.benchmarks.field import PEERS, Field, Rules
from tests.benchmarks.ledger import Row
from tests.benchmarks.remote import Interpreters
from tests.benchmarks.subject import DTYPES, SIZES, Subject, make_subject
from tests.benchmarks.workloads import CONVERSATIONS, Room, Scale, Workload


class Race:
    """One run of the command: what it was asked, what it has measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.profiles: list[dict[str, Any]] = []
        self.versions: dict[str, dict[str, str]] = {}
        self._interrupted = False
        self._scale = Scale(options.scale)
        self._progress = Console(stderr=True, highlight=False)
        self._rules = Rules(options.rounds, options.limit, self._say)
        self._interpreters = Interpreters(options.vllm_python, options.openvino_python)

    def run(self, folder: Path) -> None:
        """Everything, model by model."""
        for size in self.options.sizes:
            for dtype in self.options.dtypes:
                self._model(size, dtype, folder)
        if "steady" in self.options.workloads:
            self._say("scheduling without a model")
            self.profiles.append(step_profile.scheduling())

    def _model(self, size: str, dtype: str, folder: Path) -> None:
        workloads = self._workloads(SIZES[size]["vocab_size"])
        room = Room.of(workloads)
        subject = make_subject(size, dtype, room.longest, folder, self.options.device)
        with Field(subject, self.options.peers, room, self._interpreters, self._rules) as field:
            try:
                for workload in workloads:
                    field.race(workload, self._rows(subject, workload))
            finally:
                self.versions |= field.versions
        for workload in workloads:
            if workload.name == "steady" and "ours" in self.options.peers:
                self._say(f"{size} {dtype} · profile, {workload.case}")
                self.profiles.append(step_profile.decode_step(subject, workload))

    def _workloads(self, vocab: int) -> list[Workload]:
        chosen = [make for name, make in CONVERSATIONS.items() if name in self.options.workloads]
        return [each for make in chosen for each in make(vocab, self._scale, self.options.sequences)]

    def _rows(self, subject: Subject, workload: Workload) -> dict[str, Row]:
        rows = {each: Row(subject.size, subject.dtype, workload.name, workload.case, each) for each in workload.metrics}
        self.rows += rows.values()
        return rows

    def found(self) -> dict[str, Any]:
        """Return the commands, machine, versions and measurements of the race."""
        asked = ("workloads", "sizes", "dtypes", "device", "sequences", "peers", "rounds", "scale", "limit")
        options = {name: getattr(self.options, name) for name in asked}
        return {
            "options": options,
            "machine": {
                "platform": platform.platform(),
                "cores": len(os.sched_getaffinity(0)),
                "threads": torch.get_num_threads(),
                "python": platform.python_version(),
            },
            "versions": self.versions,
            "rows": [row.as_dict() for row in self.rows],
            "profiles": self.profiles,
        }

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C raises at once, and again before the next peer: a library's finalizer may have swallowed the first."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _say(self, line: str) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._progress.print(line, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, save. Returns the exit status: 130 after Ctrl-C."""
    options = parse(
        __doc__, arguments, workloads={"default": list(CONVERSATIONS), "choices": list(CONVERSATIONS)},
        sizes=["10m", "100m"], dtypes=list(DTYPES),
        device="cpu", sequences={"default": [1, 16, 64], "help": "of the workload steady"},
        peers={"default": list(PEERS), "choices": PEERS}, rounds=3, scale=1.0, limit=120.0, vllm_python=None,
        openvino_python=None,
    )  # fmt: skip
    race = Race(options)
    status = 0
    try:
        with race.interruptible(), quiet_transformers(), tempfile.TemporaryDirectory(prefix="race-") as folder:
            race.run(Path(folder))
    except KeyboardInterrupt:
        status = 130
    found = race.found()
    finish(options.json, found, tables.race(found), *[tables.bookkeeping(found)] * bool(race.profiles))
    print(*tables.problems(found), sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
