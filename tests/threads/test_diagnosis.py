"""Tests of the state that a hang leaves behind: in every `DeadlineError`, and on SIGUSR1."""

from __future__ import annotations

import ast
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout.engine.parts.holds import HoldLevel
from rollout.errors import DeadlineError, EngineStateError
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from rollout.threads import diagnosis
from tests.engines import greedily, make_engine, shared_model, token_ids


class Thing:
    """Something watched."""

    def __init__(self, *lines: str) -> None:
        self._lines = lines

    def describe_state(self) -> Iterator[str]:
        yield from self._lines
        if not self._lines:
            raise RuntimeError("half built")


def test_a_report_has_what_lives_and_the_stack_of_every_thread():
    thing, gone, broken = Thing("thing: stuck", "  on a nail"), Thing("thing: gone"), Thing()
    for each in (thing, gone, broken):
        diagnosis.watch(each)
    del gone, each
    gc.collect()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="waits-for-ever")
    thread.start()
    try:
        report = diagnosis.report()
    finally:
        release.set()
        thread.join()
    assert "thing: stuck\n  on a nail" in report
    assert "thing: gone" not in report
    assert "Thing: cannot be read now (RuntimeError: half built)" in report
    assert "thread 'waits-for-ever'" in report
    assert "threading.py" in report.partition("thread 'waits-for-ever'")[2]
    assert "test_a_report_has_what_lives" in report.partition("thread 'MainThread' (reports this)")[2]


def test_a_deadline_error_says_who_holds_the_engine_and_what_waits():
    engine = make_engine("qwen3")
    engine.add_request(token_ids(6), greedily(30))
    engine.step()
    engine.add_request(token_ids(5, seed=1), greedily(9))
    engine.holds.hold("weight update", HoldLevel.PAUSED)
    with pytest.raises(DeadlineError) as raised:
        engine.wait_until(EngineState.RUNNING, timeout_s=0.01)
    assert str(raised.value) == "the engine is paused, not running, after 0.01 s"
    page = "".join(traceback.format_exception(raised.value))
    for part in (
        "engine of Qwen3ForCausalLM: paused, policy version 0",
        "holds: weight update (paused)",
        "1 running, 1 waiting, 0 ended and not handed out; 1 steps",
        "last step: 0 decodes, 1 prefills, 6 tokens",
        "request 0 sample 0: ",
        "request 1 sample 0: waiting_in_queue, 5 of at most 14 tokens",
        "thread 'MainThread'",
    ):
        assert part in page


def test_a_generate_that_ran_out_of_time_names_its_unfinished_groups():
    manager = RolloutManager(shared_model("qwen3"))
    try:
        with pytest.raises(DeadlineError) as raised:
            manager.generate([token_ids(6)], SamplingParams(max_tokens=400, ignore_eos=True), timeout_s=0.0)
        assert "manager: 1 groups not handed out, 1 of them unfinished [0]" in raised.value.__notes__[0]
        manager.abort([0])
    finally:
        manager.close()


def test_a_thread_that_holds_the_lock_is_named_and_reading_does_not_wait_for_it():
    engine = make_engine("qwen3")
    inside, release = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.locked():
            inside.set()
            release.wait()

    thread = threading.Thread(target=hold, name="holds-the-lock")
    thread.start()
    inside.wait()
    try:
        lines = list(engine.describe_state())
    finally:
        release.set()
        thread.join()
    assert "lock: held by 'holds-the-lock'" in lines[1]
    assert "lock: held by no thread" in list(engine.describe_state())[1]


def test_without_anything_to_describe_a_deadline_error_is_bare(monkeypatch):
    monkeypatch.setattr(diagnosis, "_watched", {})
    assert not hasattr(DeadlineError("late"), "__notes__")
    assert not hasattr(EngineStateError("no wait"), "__notes__")


STUCK = """
import signal, sys, threading, time
{before}
from rollout.threads import diagnosis
class Thing:
    def describe_state(self):
        yield "thing: stuck"
thing = Thing()
diagnosis.watch(thing)
diagnosis.answer_signal()
diagnosis.answer_signal()
print("ready", flush=True)
{after}
"""


def run_stuck(folder: Path, before: str, after: str, until: str) -> tuple[str, str, int]:
    """(stdout, stderr, exit code) of a process that gets SIGUSR1, and a line to read once `until` is on its stderr."""
    said, heard = folder / "stdout", folder / "stderr"
    with said.open("w") as out, heard.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", STUCK.format(before=before, after=after), str(heard)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
        )
        eventually(lambda: said.read_text().endswith("\n"), process)
        os.kill(process.pid, signal.SIGUSR1)
        eventually(lambda: until in heard.read_text(), process)
        process.communicate(b"\n", timeout=300)
    return said.read_text().strip(), heard.read_text(), process.returncode


def eventually(happened: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until something has happened, or the process has ended."""
    while not happened() and process.poll() is None:
        time.sleep(0.02)


def test_sigusr1_writes_the_state_although_the_main_thread_waits_in_c_and_the_process_goes_on(tmp_path):
    # In a call of C that no Python signal handler interrupts: reading a pipe by ctypes, again after a signal.
    wait = "import ctypes; b = ctypes.create_string_buffer(1); read = ctypes.CDLL(None).read\nwhile read(0, b, 1) < 0: pass"
    said, heard, code = run_stuck(tmp_path, "", wait, until="thread 'MainThread'")
    assert (said, code) == ("ready", 0)
    assert "thing: stuck" in heard
    assert "thread 'MainThread'\n" in heard


def test_a_program_that_handles_sigusr1_keeps_its_handler(tmp_path):
    before = "signal.signal(signal.SIGUSR1, lambda *_: print('signalled', file=sys.stderr, flush=True))"
    said, heard, code = run_stuck(tmp_path, before, "input()", until="signalled")
    assert (said, code) == ("ready", 0)
    assert heard == "signalled\n"


def test_a_forked_child_keeps_the_handler_that_the_program_has_set_later(tmp_path):
    # One write: the child is killed as soon as the word is there.
    after = """
import os
signal.signal(signal.SIGUSR1, lambda *_: os.write(2, b"signalled" + bytes([10])))
child = os.fork()
if not child:
    while True:
        signal.pause()
input()
os.kill(child, signal.SIGUSR1)
while "signalled" * 2 not in open(sys.argv[1]).read().replace(chr(10), "") and not os.waitpid(child, os.WNOHANG)[0]:
    time.sleep(0.02)
os.kill(child, signal.SIGKILL)
"""
    said, heard, code = run_stuck(tmp_path, "", after, until="signalled")
    assert (said, code, heard) == ("ready", 0, "signalled\nsignalled\n")


def test_a_forked_child_of_a_program_without_a_handler_has_the_systems(tmp_path):
    after = """
import os
forked, here = os.pipe()
child = os.fork()
if not child:
    os.write(here, b".")
    time.sleep(300)
os.read(forked, 1)
os.kill(child, signal.SIGUSR1)
print(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGUSR1, flush=True)
input()
"""
    said, _, code = run_stuck(tmp_path, "", after, until="thread 'MainThread'")
    assert (said, code) == ("ready\nTrue", 0)


def test_a_process_that_is_only_a_client_answers_the_signal_too(tmp_path):
    before = (
        "from rollout.distributed.client.client import InferenceClient\n"
        "client = InferenceClient('tcp://127.0.0.1:9', name='agent')"
    )
    said, heard, code = run_stuck(tmp_path, before, "input()", until="thread 'MainThread'")
    assert (said, code) == ("ready", 0)
    assert "client 'agent' of tcp://127.0.0.1:9: not connected" in heard


def test_no_wait_ends_in_an_error_without_the_state():
    """A `TimeoutError` raised by name would carry none; `DeadlineError` is one that does."""
    root = Path(diagnosis.__file__).parent
    bare = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted([*root.rglob("*.py"), *(root.parent / "trainer_hooks").rglob("*.py")])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func) == "TimeoutError"
    ]
    assert bare == []
