"""Time from process start to the first token, in a fresh process.

Timed from outside, from the start of the interpreter to the answer that holds the token, with files in the page cache and
compilers' caches on disk as earlier runs have left them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.benchmarks.child import Child, PeerFailed, clean_environment
from tests.benchmarks.remote import Interpreters, load
from tests.benchmarks.subject import Subject
from tests.benchmarks.workloads import Room

ROOT = Path(__file__).parents[2]
PROMPT = list(range(16))
PEERS = ("ours", "generate", "vllm", "llama.cpp")


def seconds_to_first_token(name: str, subject: Subject, interpreters: Interpreters, deadline_s: float) -> float:
    """Start a fresh process of `name`, ask for one token, end it.

    Raises:
        NotRun: it is not installed.
        PeerFailed: no token came, or none in time.
    """
    if name == "llama.cpp":
        _convert(subject, interpreters, deadline_s)
    # Written if it is not there: no part of the time.
    folder = str(subject.folder)
    start = time.perf_counter()
    child = _start(name, subject, interpreters)
    try:
        if name in ("ours", "generate"):
            device = str(subject.device)
            answer = child.ask(deadline_s, "first_token", who=name, folder=folder, prompt=PROMPT, device=device)
        else:
            load(child, name, subject, Room(sequences=1, longest=64, kv_tokens=64))
            answer = child.ask(deadline_s, "generate", prompts=[PROMPT], lengths=[1])
        seconds = time.perf_counter() - start
    finally:
        child.close()
    if [len(completion) for completion in answer["completions"]] != [1]:
        raise PeerFailed(f"one token was asked for; {answer['completions']} came")
    return seconds


def _start(name: str, subject: Subject, interpreters: Interpreters) -> Child:
    if name not in ("ours", "generate"):
        return interpreters.start(name, subject.folder)
    command = [sys.executable, str(Path(__file__).with_name("peer_here.py"))]
    # The interpreter is this process's, and so are the packages that it was given.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Child(command, clean_environment({"PYTHONPATH": path}), subject.folder / f"startup-{name}.log")


def _convert(subject: Subject, interpreters: Interpreters, deadline_s: float) -> None:
    """The weights as llama.cpp's users have them on disk; not part of the time."""
    child = interpreters.start("llama.cpp", subject.folder)
    try:
        child.ask(deadline_s, "convert", folder=str(subject.folder))
    finally:
        child.close()
