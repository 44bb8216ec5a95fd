"""Tests of exceptions at any line of a step: its requests fail with the cause, nothing leaks, the next step is correct.

Every line, instead of a few: ROLLOUT_FAULT_STRIDE=1 pytest tests/engine/test_step_failures.py
"""

from __future__ import annotations

import os
import sys
from itertools import count
from types import FrameType
from typing import Any

from rollout.engine.engine import DynamicInferenceEngine
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.state import EngineState
from tests.engines import assert_greedy, finish, greedily, make_engine, steps, token_ids
from tests.invariants import check_scheduler
from tests.models import make_tokenizer

PLACES = "engine/scheduling/"


class Raising:
    """Raises at the chosen line, counted from 0, that runs inside `schedule` or `update`."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.fired = False

    def __enter__(self) -> Raising:
        sys.settrace(self._calls)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _calls(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_name in ("schedule", "update") and code.co_filename.endswith("scheduling/scheduler.py"):
            return self._lines
        outer = frame.f_back
        inside = outer is not None and outer.f_trace is not None
        return self._lines if inside and PLACES in code.co_filename else None

    def _lines(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.fired:
            self.left -= 1
            if self.left < 0:
                self.fired = True
                raise MemoryError("drawn")
        return self._lines


def busy(engine: DynamicInferenceEngine) -> list[DynamicInferenceRequestRecord]:
    """Requests that prefill, fork, decode, evict each other, wait, and end, with every kind of log-prob."""
    engine.add_request(token_ids(9, 1), greedily(7, n=2, logprobs=2))
    engine.add_request(token_ids(9, 2), greedily(6, prompt_logprobs=1))
    ended = steps(engine, 3)
    engine.add_request(token_ids(9, 1), greedily(5, stop="zz"))
    engine.add_request(token_ids(5, 3), greedily(1))
    return ended


def test_an_exception_at_any_line_of_scheduling_leaks_nothing_and_the_next_request_is_right() -> None:
    options: dict[str, Any] = {"kv_cache_blocks": 11, "max_requests": 4, "max_tokens_per_step": 12}
    options["track_generated_token_events"] = True
    fired, stride = 0, int(os.environ.get("ROLLOUT_FAULT_STRIDE", "131"))
    engine = make_engine("qwen3", make_tokenizer(), **options)
    for line in count(stride // 2, stride):
        raised: list[DynamicInferenceRequestRecord] = busy(engine)
        with Raising(line) as raising:
            for _ in range(8):
                raised += engine.step()
        fired += raising.fired
        assert engine.state is EngineState.RUNNING
        done = finish(engine, raised)
        assert len(done) == 5, f"line {line}: every sample ends once"
        check_scheduler(engine.context.scheduler)
        for request in done.values():
            assert len(request.generated_tokens) == len(request.generated_log_probs)
            if request.error is None:
                assert_greedy("qwen3", request)
            else:
                assert request.error == "MemoryError: drawn"
                assert request.events[-2].type.name == "ERROR_NONTRANSIENT"
        (request,) = engine.generate([token_ids(10, 7)], greedily(3))
        assert_greedy("qwen3", request)
        if not raising.fired:
            break
    assert fired >= 4


def test_one_that_cannot_be_admitted_fails_with_what_runs_and_stops_no_engine() -> None:
    engine = make_engine("qwen3")
    for seed in range(2):
        engine.add_request(token_ids(9, seed), greedily(6))
    ended = steps(engine, 3)
    # More often than the engine would forgive a step that fails.
    bad = [engine.add_request(token_ids(9, 9 + each), greedily(6)) for each in range(5)]
    for sample in engine.context.scheduler.waiting:
        sample.hashes = sample.hashes * 3
    done = finish(engine, ended)
    for number in (0, 1, *bad):
        assert "reshape" in str(done[number, 0].error)
    assert engine.state is EngineState.RUNNING
    assert_greedy("qwen3", engine.generate([token_ids(9)], greedily(4))[0])
