"""Tests of CUDA graphs of decode steps: on a fake device that records operations, and on a GPU.

The pretended device traces a forward down to the operations it is made of, on the tensors it touched, and a replay runs
those and no line of Python of the model or of ours. What was read from Python while recording is fixed in it, as it would
be in a CUDA graph; attention alone is one operation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.forward.trial_forwards import verify_model
from rollout.engine.graphs import cuda_graphs
from rollout.engine.graphs.cuda_graphs import (
    MAX_WASTED,
    WORTHWHILE,
    GraphedDecode,
)
from rollout.engine.graphs.decode_step import DecodeState, TritonDecode
from rollout.engine.kernels import decode_parts
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.arena import Arena
from rollout.engine.memory.kv_cache import KVCache, LayerShape
from tests.engine.graphs.recorded_graphs import Plain, Recorder
from tests.engine.memory.test_arena import Driver
from tests.engines import (
    assert_greedy,
    finish,
    greedily,
    in_one_piece,
    make_engine,
    pass_suspended,
    steps,
    suspended,
    token_ids,
)
from tests.interpreter import on_a_gpu
from tests.models import make_model, scale_weights

CPU = torch.device("cpu")


class FailingDevice:
    """A device that fails in the captures of some numbers of rows."""

    def __init__(self, engine: DynamicInferenceEngine, recorder: Recorder, broken: dict[int, Exception]) -> None:
        self.broken = broken
        self.asked: list[int] = []
        self.graph_bytes = 0
        self.forget = recorder.forget
        self._recorder = recorder
        self._graphs = engine.controller.runner.graphs
        self._graphs._device = self

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        replay = self._recorder.capture(work)
        self.asked.append(self._graphs._kernels.rows)
        if self.asked[-1] in self.broken:
            self._recorder.captures -= 1
            raise self.broken[self.asked[-1]]
        return replay


SIZES = 4
"""The number of graph sizes of the engines here, whose steps have up to 8 rows: 1, 2, 4 and 8."""


def graphed(model: Any, **options: Any) -> tuple[DynamicInferenceEngine, Recorder]:
    """An engine whose decode steps are recorded on a pretended device."""
    engine = make_engine(model, fused_forward=False, **options)
    runner, recorder = engine.controller.runner, Recorder()
    runner.graphs = GraphedDecode(
        runner.model, runner.layout, engine.cache, engine.config.max_requests, recorder, Plain(engine.cache)
    )
    runner.graphs.watched = engine.parts.watch.modules
    return engine, recorder


def start(engine: DynamicInferenceEngine, requests: int = 3, tokens: int = 8) -> None:
    for seed in range(requests):
        engine.add_request(token_ids(5 + 3 * seed, seed), greedily(tokens))


def finish_exact(engine: DynamicInferenceEngine, name: Any, count: int = 3) -> None:
    done = finish(engine)
    assert len(done) == count
    for request in done.values():
        assert_greedy(name, request)


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "gpt2", "qwen3_moe", "gpt_oss"])
def test_replayed_steps_give_the_tokens_of_generate(name: str) -> None:
    """Also of models that ask for values of their own: GPT-2 for padding among the ids, experts for tokens of each."""
    engine, recorder = graphed(name)
    start(engine)
    finish_exact(engine, name)
    if name in ("qwen3", "gemma2", "gemma3"):
        assert recorder.captures == SIZES
        assert recorder.replays == 7, "the first token of each comes from its prompt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("off", [0, 0.01])
def test_a_captured_step_is_verified_against_the_same_forward_without_a_graph(
    off: float, dtype: torch.dtype, caplog: Any
) -> None:
    """A step that was wrong by 5 % of the largest logit passed in 16 bits: it was compared with dense attention alone."""

    class Kernels(Plain):
        def __call__(self, *given: Any, **rules: Any) -> Tensor:
            return super().__call__(*given, **rules) + off

    model = make_model("qwen3").to(dtype)
    engine, recorder = graphed(model)
    engine.controller.runner.graphs._kernels = Kernels(engine.cache)
    with engine.installation:
        verify_model(engine.controller.runner, 12)
    assert recorder.captures == SIZES
    assert ("differs from the same forward without one" in engine.controller.runner.graphs.why_not) == (off > 0)
    assert ("differs from the same forward" in caplog.text) == (off > 0)
    start(engine)
    finish(engine)
    assert (recorder.replays == 1) == (off > 0)


def test_all_sizes_are_captured_in_the_first_decode_step_the_largest_first() -> None:
    engine, recorder = graphed("qwen3")
    device = FailingDevice(engine, recorder, {})
    for seed, tokens in enumerate((3, 6, 9, 9, 9)):
        engine.add_request(token_ids(5, seed), greedily(tokens))
    steps(engine, 1)
    assert device.asked == []
    steps(engine, 1)
    assert device.asked == [8, 4, 2, 1]
    finish_exact(engine, "qwen3", 5)
    start(engine)
    finish_exact(engine, "qwen3")
    assert recorder.captures == SIZES


def test_rows_with_more_parts_of_keys_than_graphs_have_room_for_cost_a_window(monkeypatch) -> None:
    monkeypatch.setattr(decode_parts, "SPLIT", 8)
    monkeypatch.setattr(cuda_graphs, "LEAST_WORKSPACE", 0)
    engine, recorder = graphed(make_model("qwen3", num_hidden_layers=1))
    engine.add_request(token_ids(6, 1), greedily(20))
    (request,) = finish(engine).values()
    assert len(request.generated_tokens) == 20
    assert engine.controller.runner.graphs._parts == 4
    assert recorder.captures == 3 * SIZES, "for 1, 2 and 4 parts"


def test_a_step_with_a_chunk_in_it_runs_the_forward_of_the_module() -> None:
    engine, recorder = graphed("qwen3", max_tokens_per_step=8)
    engine.add_request(token_ids(3), greedily(12))
    steps(engine, 2)
    engine.add_request(token_ids(30, 1), greedily(4))
    replays = recorder.replays
    steps(engine, 4)
    assert recorder.replays == replays, "of a decode beside a chunk too"
    finish_exact(engine, "qwen3", 2)
    assert recorder.replays > replays


# --- what a graph outlives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("fixed", [True, False])
def test_graphs_survive_a_suspend_if_the_pool_comes_back_at_its_addresses(mode: str, *, fixed: bool) -> None:
    held: list[Tensor] = []

    @in_one_piece
    def elsewhere(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held.append(torch.zeros(numel, dtype=dtype))
        return held[-1]

    arena = Arena(Driver(2**24))
    engine, recorder = graphed("qwen3", allocate=arena.allocate if fixed else elsewhere)
    start(engine)
    steps(engine, 3)
    assert recorder.captures == SIZES
    for _ in range(2):
        pass_suspended(engine, mode)
        steps(engine, 2)
    finish_exact(engine, "qwen3")
    assert recorder.captures == SIZES * (1 if fixed or mode == "persist" else 3)


def test_graphs_are_counted_kept_through_suspends_and_released_on_request() -> None:
    engine, recorder = graphed("qwen3")
    graphs = engine.controller.runner.graphs
    kernels = graphs._kernels
    arena = Arena(Driver(2**24))
    engine.cache.drop()
    engine.cache._allocate, engine.cache._release = arena.allocate, arena.release
    engine.cache.materialize(engine.cache.num_blocks)
    start(engine)
    steps(engine, 3)
    recorder.graph_bytes = 10**6
    logits = 8 * engine.controller.layout.vocab_size * 4
    assert engine.stats()["graph_bytes"] == 10**6 + kernels.nbytes + logits + graphs._state.nbytes
    before = recorder.forgotten, kernels.released
    pass_suspended(engine, "offload")
    assert (recorder.forgotten, kernels.released) == before
    engine.controller.runner.release_workspace(graphs=True)
    assert recorder.forgotten - before[0] == kernels.released - before[1] == 1
    finish_exact(engine, "qwen3")
    assert recorder.captures == 2 * SIZES


# --- what makes them anew ---------------------------------------------------------------------------------------------


def replace_a_weight(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(1.5 * model.model.norm.weight.detach())


def add_a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: 0.5 * output)


@pytest.mark.parametrize("change", [replace_a_weight, add_a_hook])
def test_a_model_that_was_changed_is_captured_anew(change: Callable[[Any], None]) -> None:
    model = make_model("qwen3")
    engine, recorder = graphed(model)
    start(engine)
    steps(engine, 3)
    scale_weights(model, 1.05)
    engine.weights_updated()
    finish(engine)
    start(engine)
    finish_exact(engine, model)
    assert recorder.captures == SIZES, "weights that are changed in place are read as they are"
    change(model)
    start(engine)
    engine.weights_updated()
    with engine.stepping():
        finish_exact(engine, model)
    assert recorder.captures == 2 * SIZES
    assert recorder.forgotten >= 1


def test_what_a_captured_forward_has_read_in_python_costs_the_graphs_when_it_changes() -> None:
    model = make_model("qwen3")
    model.model.norm.register_forward_hook(lambda module, inputs, output: model.config.some_scale * output)
    model.config.some_scale = 1
    engine, recorder = graphed(model)
    for captures in (SIZES, 2 * SIZES):
        with engine.stepping():
            start(engine)
            finish_exact(engine, model)
        assert recorder.captures == captures
        model.config.some_scale = 2


@pytest.mark.parametrize("served", [0, WORTHWHILE])
def test_a_model_that_changes_every_few_steps_is_captured_so_many_times_and_no_more(served: int, caplog) -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    engine, recorder = graphed(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(MAX_WASTED + 2):
            replace_a_weight(model)
            start(engine, 1, 3)
            finish(engine)
            engine.controller.runner.graphs._replays += served
    assert recorder.captures == SIZES * (MAX_WASTED + 2 if served else MAX_WASTED)
    assert len(caplog.records) == (0 if served else 1)
    assert ("change every few steps" in caplog.text) == (not served)


# --- what is not captured ---------------------------------------------------------------------------------------------


def test_a_forward_that_cannot_be_captured_runs_every_step() -> None:
    model = make_model("qwen3")
    # A number that the host waits for: no record can hold what it decides.
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * (1.0 + 0 * float(output.max())))
    engine, recorder = graphed(model)
    start(engine)
    finish_exact(engine, model)
    assert recorder.captures == recorder.replays == 0


@pytest.mark.parametrize("why", ["not permitted when stream is capturing", "due to a previous error during capture"])
def test_a_failed_capture_is_tried_again_after_a_suspend(why: str, caplog) -> None:
    """One wait for the device in a reward model's thread cost the engine its graphs for good."""
    engine, recorder = graphed("qwen3")
    failing = FailingDevice(engine, recorder, {4: RuntimeError(why)})
    graphs = engine.controller.runner.graphs
    start(engine, 3, 12)
    with caplog.at_level(logging.WARNING):
        steps(engine, 5)
        assert failing.asked == [8, 4], "not in every step"
        assert why in graphs.why_not
        assert recorder.replays == 4, "padded to eight rows"
        failing.broken.clear()
        pass_suspended(engine, "persist")
        graphs.retry()
        steps(engine, 1)
        assert failing.asked == [8, 4, 4, 2, 1]
    assert not caplog.records
    assert not graphs.why_not
    finish_exact(engine, "qwen3")


@pytest.mark.parametrize(
    ("mode", "error"),
    [("offload", torch.OutOfMemoryError("full")), ("recompute", RuntimeError("CUDA error: out of memory"))],
)
def test_a_size_for_which_memory_was_short_is_captured_after_the_next_suspend(mode: str, error, caplog) -> None:
    """The allocator's error, and that of the driver, which makes a graph of what was captured."""
    engine, recorder = graphed("qwen3")
    failing = FailingDevice(engine, recorder, {4: error})
    with caplog.at_level(logging.WARNING):
        start(engine, 3, 12)
        steps(engine, 4)
    assert failing.asked == [8, 4, 2, 1], "not in every step"
    assert "no memory to capture decode steps of 4 rows" in caplog.text
    failing.broken.clear()
    pass_suspended(engine, mode)
    finish_exact(engine, "qwen3")
    assert 4 in engine.controller.runner.graphs.captured


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["around", "option", "inside", "both"])
def test_under_autocast_a_graph_reads_the_weights_as_they_are(where: str) -> None:
    """TRL generates under autocast, accelerate puts it into the forward; fp32 weights change in place between steps."""
    logprobs = []
    for graphs in (True, False):
        model = make_model("qwen3")
        if where in ("inside", "both"):
            # accelerate makes one context at `prepare`, whose cache of casts stays enabled.
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        around = torch.autocast("cpu", torch.bfloat16, enabled=where in ("around", "both"))
        options = {"autocast_dtype": "bfloat16"} if where == "option" else {}
        with around:
            engine, recorder = graphed(model, **options)
            if not graphs:
                engine.controller.runner.graphs = None
            for _ in range(2):
                requests = engine.generate([token_ids(9, 1), token_ids(4, 2)], greedily(6))
                logprobs.append([value for request in requests for value in request.generated_log_probs])
                scale_weights(model, 1.3)
                engine.weights_updated()
        assert recorder.captures == (SIZES if graphs else 0)
        assert not graphs or recorder.replays == 10
    graphed_before, graphed_after, before, after = map(np.array, logprobs)
    np.testing.assert_allclose(graphed_before, before, atol=0.05)
    np.testing.assert_allclose(graphed_after, after, atol=0.05)
    assert np.abs(after - before).max() > 0.2, "the update is large enough to be seen"


def test_another_precision_is_captured_again() -> None:
    engine, recorder = graphed("qwen3")
    start(engine)
    finish_exact(engine, "qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        start(engine)
        finish(engine)
    start(engine)
    finish_exact(engine, "qwen3")
    assert recorder.captures == 3 * SIZES


def test_a_capture_leaves_no_casts_and_no_hooks_behind() -> None:
    """Casts of a capture lie in its memory pool: a training forward must not find them."""
    model = make_model("qwen3")
    linear = model.model.layers[0].mlp.up_proj
    hidden = torch.randn(2, linear.in_features)
    with torch.autocast("cpu", torch.bfloat16):
        engine, recorder = graphed(model)
        start(engine, 1, 4)
        with engine.installation:
            steps(engine, 3)
            assert recorder.captures == SIZES
            with torch.no_grad():
                linear.weight.mul_(2)
            assert torch.equal(linear(hidden), torch.nn.functional.linear(hidden.bfloat16(), linear.weight.bfloat16()))
    assert not torch.nn.modules.module._global_forward_hooks


def test_with_hooks_on_all_modules_the_forward_of_the_module_runs() -> None:
    engine, recorder = graphed("qwen3")
    start(engine, 1, 3)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        finish(engine)
    finally:
        handle.remove()
    assert recorder.captures == 0


def test_an_interrupt_in_a_capture_comes_out_and_the_next_step_captures_again() -> None:
    engine, recorder = graphed("qwen3")
    start(engine)
    steps(engine, 1)
    capture = recorder.capture

    def interrupted(work: Callable[[], None]) -> Callable[[], None]:
        work()
        raise KeyboardInterrupt

    recorder.capture = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    recorder.capture = capture
    finish_exact(engine, "qwen3")
    assert recorder.captures >= 1


def test_heads_the_kernels_do_not_take_are_refused_by_name() -> None:
    cache = KVCache([LayerShape(1, 8, 8)], 2, 1, torch.float32, CPU)
    kernels = TritonDecode(None, cache)  # type: ignore[arg-type]
    one = torch.zeros(1, 1, 8)
    with pytest.raises(RuntimeError, match="heads"):
        kernels(0, DecodeState(1, 16, 1, CPU).inputs(1), one, one, one, scaling=1.0, window=None, softcap=None)


# --- sizes and buffers ------------------------------------------------------------------------------------------------


def test_the_device_has_the_rows_of_a_step_and_padding_which_writes_nothing() -> None:
    state = DecodeState(8, 16, 4, CPU)
    addresses = [each.data_ptr() for each in (state.ids, state.positions, state.seen, state.tables)]
    rows = PagedRows(np.arange(3), np.array([9, 2]), np.arange(6).reshape(2, 3) + 5, 4)
    for rotary in (None, np.array([40, 41])):
        state.send(np.array([3, 7]), rows, rotary)
        inputs = state.inputs(4)
        assert inputs.ids.tolist() == [3, 7, 0, 0]
        assert inputs.positions.tolist() == [*(rows.positions if rotary is None else rotary), 0, 0]
        assert inputs.seen.tolist() == [9, 2, -1, -1]
        assert inputs.slots.tolist() == [*rows.slots, -1, -1]
        assert inputs.tables[:2, :3].tolist() == rows.tables.tolist()
    assert addresses == [each.data_ptr() for each in (state.ids, state.positions, state.seen, state.tables)]
    state.clear()
    assert state.inputs(4).slots.tolist() == [-1] * 4


def test_a_sequence_longer_than_the_tables_on_the_device_gets_wider_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "STATE_LENGTH", 64)
    engine, recorder = graphed("qwen3")
    engine.add_request(token_ids(60, 1), greedily(12))
    finish_exact(engine, "qwen3", 1)
    graphs = engine.controller.runner.graphs
    assert graphs._state.columns == 32, "the graphs of 64 tokens read other tables"
    assert recorder.captures == 2 * SIZES
    graphs.release()
    engine.add_request(token_ids(60, 2), greedily(12))
    finish_exact(engine, "qwen3", 1)
    assert recorder.captures == 3 * SIZES, "the tables are as wide again from the start"


# --- on a device ------------------------------------------------------------------------------------------------------


@on_a_gpu
@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_on_a_device_graphs_survive_suspends_and_weights_changed_in_place(mode: str) -> None:
    model = make_model("qwen3").cuda()
    engine = make_engine(model, block_size_tokens=16)
    start(engine, 4, 30)
    steps(engine, 5)
    graphs = engine.controller.runner.graphs
    assert graphs is not None
    captured = dict(graphs._graphs)
    assert captured
    for _ in range(3):
        with suspended(engine, mode):
            # The training step takes the memory, and so the pool comes back elsewhere.
            taken = torch.empty(engine.cache.block_bytes * 64, dtype=torch.uint8, device="cuda")
        steps(engine, 3)
        del taken
    for request in finish(engine).values():
        assert_greedy("qwen3", request, tolerance=1e-3)
    scale_weights(model, 1.05)
    engine.weights_updated()
    start(engine, 4, 30)
    for request in finish(engine).values():
        assert_greedy(model, request, tolerance=1e-3)
    assert all(graphs._graphs[key] is graph for key, graph in captured.items())
