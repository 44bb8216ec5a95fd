"""Facts about this machine: processor, cores, threads, load, versions of packages.

Read from /proc and the control groups where there are some; what a system does not tell is left out.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

PACKAGES = ("torch", "transformers")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class PackageVersion:
    """An installed package, and the versions this one is tested with."""

    name: str
    installed: str
    works_with: str
    """As in the package's requirements; empty: unknown."""
    known_to_work: bool


@dataclass(frozen=True)
class Machine:
    """What the engine runs on."""

    processor: str
    cores: float
    """That this process may use: its affinity, or less by a control group's quota."""
    threads: int
    """Of torch and the C++ kernels."""
    ranks_here: int
    """Processes of this job on this machine (`LOCAL_WORLD_SIZE`)."""
    variables: dict[str, str]
    """Environment variables that set the number of threads."""
    load: float | None
    """Runnable processes and threads, mean of a minute."""
    memory_total: int | None
    memory_free: int | None
    python: str
    packages: tuple[PackageVersion, ...]

    @classmethod
    def look(cls) -> Machine:
        """Look at this machine."""
        memory = _memory()
        return cls(
            processor=_processor(),
            cores=usable_cores(),
            threads=torch.get_num_threads(),
            ranks_here=_integer(os.environ.get("LOCAL_WORLD_SIZE")),
            variables={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            memory_total=memory.get("MemTotal"),
            memory_free=memory.get("MemAvailable"),
            python=sys.version.split()[0],
            packages=versions(),
        )


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores this process may use.

    Args:
        root: of the control groups, version 2 or 1; a seam for tests.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return min(cores, int(quota) / int(period))
    with suppress(OSError, ValueError):
        allowed, every = (int((root / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return min(cores, allowed / every) if allowed > 0 else cores
    return cores


def versions() -> tuple[PackageVersion, ...]:
    """The installed packages that the engine's forward depends on."""
    try:
        wanted = {each.name: each for each in map(Requirement, requires("rollout-engine") or ())}
    except PackageNotFoundError:
        wanted = {}
    found = []
    for name in PACKAGES:
        installed = version(name)
        allowed = wanted[name].specifier if name in wanted else None
        works = "" if allowed is None else ",".join(sorted(map(str, allowed), reverse=True))
        ok = allowed is None or allowed.contains(installed, prereleases=True)
        found.append(PackageVersion(name, installed, works, ok))
    return tuple(found)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def _memory() -> dict[str, int]:
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {}


def _integer(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and int(text) else 1
