"""Tests of the state that a hang leaves behind: in every `DeadlineError`, and on SIGUSR1."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
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
        "1 running, 1 waiting, 0 finished and not returned; 1 steps",
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
        assert "manager: 1 groups not returned, 1 of them unfinished [0]" in raised.value.__notes__[0]
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
import os, signal, sys
{before}
from rollout.threads.diagnosis import answer_signal
answer_signal()
answer_signal()
os.kill(os.getpid(), signal.SIGUSR1)
print("continues")
"""


@pytest.mark.parametrize(
    ("before", "heard"),
    [("", "Current thread"), ("signal.signal(signal.SIGUSR1, lambda *_: os.write(2, b'handled'))", "handled")],
)
def test_sigusr1_writes_the_stacks_unless_the_program_handles_it(before: str, heard: str) -> None:
    program = [sys.executable, "-c", STUCK.format(before=before)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout == "continues\n"
    assert done.stderr.startswith(heard)


def test_no_wait_ends_in_an_error_without_the_state():
    """A plain `TimeoutError` would carry none; a `DeadlineError` does."""
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
