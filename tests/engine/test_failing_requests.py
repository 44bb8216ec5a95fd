"""Tests of failures inside a step: results of other requests do not depend on them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.stepper import MAX_FAILED_STEPS
from rollout.errors import EngineDeadError, InvalidRequestError, RequestError
from rollout.requests.events import DynamicInferenceEventType
from rollout.state import EngineState, FinishReason, Status
from tests.engines import (
    assert_greedy,
    at_random,
    expected,
    finish,
    greedily,
    make_engine,
    pass_suspended,
    steps,
    token_ids,
)
from tests.models import VOCAB, make_model

# --- a step that raises -----------------------------------------------------------------------------------------------


class BoomError(Exception):
    """Raised inside the model."""


class Fuse:
    """Makes the forward of one layer raise, so many times."""

    def __init__(self, engine: DynamicInferenceEngine, layer: int = 1) -> None:
        self.error: BaseException = BoomError("inside the model")
        self.left = 0
        engine.model.model.layers[layer].register_forward_pre_hook(self._burn)

    def _burn(self, *_: Any) -> None:
        if self.left:
            self.left -= 1
            raise self.error


def test_an_exception_in_a_step_fails_the_requests_of_that_step_with_its_cause_and_no_other() -> None:
    engine = make_engine(make_model("qwen3"), max_requests=2)
    fuse = Fuse(engine)
    for seed in range(2):
        engine.add_request(token_ids(5, seed), greedily(8))
    steps(engine, 2)
    engine.add_request(token_ids(5, 2), greedily(8))
    fuse.left = 1
    failed = steps(engine, 1)
    assert [record.request_id for record in failed] == [0, 1]
    for record in failed:
        request = record.merge()
        assert request.status is Status.FAILED
        assert request.finish_reason is FinishReason.ERROR
        assert request.error == "BoomError: inside the model"
        assert request.events[-2].type is DynamicInferenceEventType.ERROR_NONTRANSIENT
        assert request.events[-2].payload is fuse.error
        assert request.generated_tokens == expected("qwen3", request.prompt_tokens, 2), "what it had is not lost"
    assert engine.state is EngineState.RUNNING
    assert engine.stats()["requests_failed"] == 2
    (request,) = finish(engine).values()
    assert_greedy("qwen3", request)


def test_generate_raises_with_the_name_of_the_request_that_failed() -> None:
    engine = make_engine(make_model("qwen3"))
    Fuse(engine).left = 1
    with pytest.raises(RequestError, match=r"request 0: BoomError: inside the model") as caught:
        engine.generate([token_ids(5)], greedily(3))
    assert caught.value.request_id == 0
    assert_greedy("qwen3", engine.generate([token_ids(5)], greedily(3))[0])


def test_after_three_failed_steps_in_a_row_the_engine_is_dead_and_says_of_what() -> None:
    engine = make_engine(make_model("qwen3"), max_requests=1)
    fuse = Fuse(engine)
    for seed in range(5):
        engine.add_request(token_ids(5, seed), greedily(8))
    fuse.left = MAX_FAILED_STEPS
    ended = []
    for _ in range(MAX_FAILED_STEPS):
        ended += engine.step()
    assert sorted(record.request_id for record in ended) == list(range(5)), "nobody is left hanging"
    assert all(record[-1].error == "BoomError: inside the model" for record in ended)
    assert engine.state is EngineState.STOPPED
    assert engine.cache.device_bytes == 0
    for call in (engine.step, engine.pause, lambda: engine.add_request(token_ids(5)), engine.weights_updated):
        with pytest.raises(EngineDeadError, match="BoomError: inside the model; build another") as caught:
            call()
        assert caught.value.__cause__ is fuse.error


def test_failed_steps_count_only_in_a_row() -> None:
    engine = make_engine(make_model("qwen3"), max_requests=1)
    fuse = Fuse(engine)
    for round_ in range(2 * MAX_FAILED_STEPS):
        engine.add_request(token_ids(5, round_), greedily(2))
        fuse.left = 1
        assert engine.step()[0][-1].failed()
        assert_greedy("qwen3", engine.generate([token_ids(5, round_)], greedily(2))[0])
    assert engine.state is EngineState.RUNNING


def test_ctrl_c_inside_generate_loses_neither_what_has_ended_nor_what_has_not() -> None:
    engine = make_engine(make_model("qwen3"))
    fuse = Fuse(engine)
    fuse.error = KeyboardInterrupt()
    engine.add_request(token_ids(5, 9), greedily(1))
    calls = 0
    step = engine.context.scheduler.schedule

    def count() -> Any:
        nonlocal calls
        calls += 1
        fuse.left = int(calls == 4)
        return step()

    engine.context.scheduler.schedule = count  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([token_ids(5, seed) for seed in range(3)], greedily(6))
    done = finish(engine)
    assert sorted(done) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for request in done.values():
        assert_greedy("qwen3", request)


@contextmanager
def ctrl_c_at_lines(*numbers: int) -> Iterator[None]:
    """Ctrl-C is pressed whenever the engine has executed so many lines."""
    left, count = sorted(numbers), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if f"rollout{os.sep}engine" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if left and count >= left[0]:
                del left[0]
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("line", [*range(3, 1500, 149), *range(1500, 11000, 977)])
def test_ctrl_c_at_any_line_of_the_engine_loses_nothing(line: int) -> None:
    after = (5, 40) if line % 2 else ()
    engine = make_engine("qwen3", kv_cache_blocks=14, max_tokens_per_step=16)
    ended, handler = [], signal.getsignal(signal.SIGINT)
    with suppress(KeyboardInterrupt), ctrl_c_at_lines(line, *(line + more for more in after)):
        for seed in range(4):
            engine.add_request(token_ids(3 + 2 * seed, seed), greedily(6), request_id=seed)
        engine.add_request(token_ids(6, 7), at_random(5, n=2), request_id=9)
        ended += engine.step()
        pass_suspended(engine, "offload")
        while engine.has_unfinished:
            ended += engine.step()
    assert signal.getsignal(signal.SIGINT) is handler
    if engine.state is EngineState.SUSPENDED:
        engine.resume()
    if engine.state is EngineState.PAUSED:
        engine.unpause()
    added = {sample.key for sample in engine.context.scheduler}
    added |= {(record.request_id, record.sample_index) for record in (*ended, *engine.parts.ledger.ended)}
    done = finish(engine, ended)
    assert set(done) == added
    for (number, _), request in done.items():
        if number < 4:
            assert_greedy("qwen3", request)
    assert_greedy("qwen3", engine.generate([token_ids(9, 5)], greedily(4))[0])


# --- NaN --------------------------------------------------------------------------------------------------------------


def with_a_bad_token() -> PreTrainedModel:
    """Token 7 has no finite embedding."""
    model = make_model("qwen3")
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    return model


def good(length: int, seed: int) -> list[int]:
    return [8 if token == 7 else token for token in token_ids(length, seed)]


@pytest.mark.parametrize("bad_length", [1, 6, 14])
@pytest.mark.parametrize("budget", [8, 64])
def test_nan_of_one_request_harms_neither_its_neighbours_nor_who_gets_its_blocks(bad_length: int, budget: int) -> None:
    model = with_a_bad_token()
    engine = make_engine(model, kv_cache_blocks=16, max_tokens_per_step=budget)
    engine.add_request([7, *good(bad_length - 1, 1)], greedily(5, n=2))
    neighbours = [good(length, 30 + length) for length in (2, 5, 7)]
    for prompt in neighbours:
        engine.add_request(prompt, greedily(3, logit_bias={7: -1e9}))
    done = finish(engine)
    for index in range(2):
        assert done[0, index].finish_reason is FinishReason.ERROR
        assert "no finite value" in str(done[0, index].error)
        assert done[0, index].generated_tokens == []
    for number, prompt in enumerate(neighbours, 1):
        assert done[number, 0].generated_tokens == expected(model, prompt, 3)
    for seed in range(6):
        prompt = good(3 + 7 * seed, 40 + seed)
        (request,) = engine.generate([prompt], greedily(3, logit_bias={7: -1e9}))
        assert request.generated_tokens == expected(model, prompt, 3)


@pytest.mark.parametrize("extreme", [
    {"logit_bias": {9: 3e38}, "temperature": 0.5}, {"repetition_penalty": 2e-38, "temperature": 0.01},
    {"logit_bias": {9: 1e34}, "temperature": 1e-6},
])  # fmt: skip
def test_parameters_that_lead_beyond_float32_fail_alone(extreme: dict[str, Any]) -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(5, 1), at_random(3, **extreme))
    engine.add_request(token_ids(5, 1), greedily(3))
    done = finish(engine)
    assert done[0, 0].finish_reason is FinishReason.ERROR
    assert "extreme sampling parameters" in str(done[0, 0].error)
    assert_greedy("qwen3", done[1, 0])


def test_a_request_that_may_draw_no_token_before_min_tokens_is_refused() -> None:
    engine = make_engine("qwen3")
    with pytest.raises(InvalidRequestError, match="min_tokens=2: every one of"):
        engine.add_request(token_ids(5, 1), greedily(3, min_tokens=2, stop_token_ids=range(VOCAB)))
    (request,) = engine.generate([token_ids(5, 1)], greedily(3, min_tokens=2, stop_token_ids=range(1, VOCAB)))
    assert request.generated_tokens[:2] == [0, 0]


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the decode kernel, which never looks behind the end of a sequence."""
    monkeypatch.setattr("rollout.engine.forward.module_forward.cpu_library.load", lambda: None)


@pytest.mark.usefixtures("plain_torch")
def test_nan_written_by_a_step_that_then_raises_harms_nobody_later() -> None:
    model = make_model("qwen3")
    engine = make_engine(model, kv_cache_blocks=8)
    fuse = Fuse(engine)
    poison = model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *args: args[2] * torch.nan)
    fuse.left = 1
    engine.add_request(token_ids(30, 3), greedily(2))
    assert steps(engine, 1)[0][-1].failed()
    poison.remove()
    assert_greedy(model, engine.generate([token_ids(6, 4)], greedily(5))[0])


@pytest.mark.usefixtures("plain_torch")
def test_nan_of_an_aborted_prefill_harms_nobody_later() -> None:
    model = with_a_bad_token()
    engine = make_engine(model, kv_cache_blocks=8, max_tokens_per_step=8)
    engine.add_request([8, 9, 7, *good(20, 1)], greedily(2))
    steps(engine, 1)
    engine.abort_request(0)
    finish(engine)
    prompt = good(6, 2)
    (request,) = engine.generate([prompt], greedily(3, logit_bias={7: -1e9}))
    assert request.generated_tokens == expected(model, prompt, 3)
