"""Tests of CUDA graphs of decode steps: on a fake device that records operations, and on a GPU.

The pretended device traces a forward down to the operations it is made of, on the tensors it touched, and a replay runs
those and no line of Python of the model or of ours. What was read from Python while recording is fixed in it, as it would
be in a CUDA graph; attention alone is one operation, which finds the KV pool as the kernels do, by its address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.config import InferenceConfig
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.forward import chunk_state, cuda_graphs, prefix_sharing
from rollout.engine.forward.cuda_capture import Uncapturable
from rollout.engine.forward.cuda_graphs import (
    LEAST_LENGTH,
    MAX_FAILED,
    MAX_WASTED,
    WORTHWHILE,
    GraphedDecode,
    padded_length,
    padded_rows,
)
from rollout.engine.forward.cuda_switches import VARIABLE
from rollout.engine.forward.decode_kernels import TritonDecode
from rollout.engine.forward.decode_state import DecodeState
from rollout.engine.forward.graph_signature import signature_of
from rollout.engine.kernels import decode_parts
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.kv_cache import KVCache, LayerShape
from rollout.engine.weights.base import GatheredWeights, Weights
from rollout.engine.weights.copied import CopiedWeights
from rollout.errors import ConfigError
from tests.engine.forward.recorded_graphs import Plain, Recorder
from tests.engines import (
    assert_greedy,
    at_random,
    finish,
    greedily,
    make_engine,
    pass_suspended,
    shared_model,
    steps,
    token_ids,
)
from tests.models import make_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

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


def graphed(
    model: Any, *, shares: bool = False, chunked: bool = False, **options: Any
) -> tuple[DynamicInferenceEngine, Recorder]:
    """An engine whose decode steps are recorded on a pretended device, and its prefill chunks if `chunked`."""
    engine = make_engine(model, fused_forward=False, **options)
    runner = engine.controller.runner
    recorder = Recorder(engine.cache)
    runner.graphs = GraphedDecode(
        runner.model, runner.layout, engine.cache, engine.config.max_requests, recorder,
        Plain(engine.cache, shares=shares), chunked=chunked,
    )  # fmt: skip
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


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "gemma2", "gemma3", "mistral"])
def test_replayed_steps_give_the_tokens_of_generate(name: str) -> None:
    engine, recorder = graphed(name)
    start(engine)
    finish_exact(engine, name)
    assert recorder.captures == 1, "three rows, padded to four, to the end"
    assert recorder.replays == 7, "the first token of each comes from its prompt"


def test_each_size_is_captured_when_it_is_first_needed_and_only_then() -> None:
    engine, recorder = graphed("qwen3")
    for seed, tokens in enumerate((3, 6, 9, 9, 9)):
        engine.add_request(token_ids(5, seed), greedily(tokens))
    finish_exact(engine, "qwen3", 5)
    sizes = engine.controller.runner.graphs._graphs
    assert sorted((size.rows, size.columns) for size in sizes) == [(4, 4096), (8, 4096)], "one length"
    assert recorder.captures == 2
    start(engine)
    finish_exact(engine, "qwen3")
    assert recorder.captures == 2


@pytest.mark.parametrize("off", ["", "parts"])
def test_a_row_that_grows_needs_another_graph_only_for_twice_the_parts(off: str, monkeypatch) -> None:
    monkeypatch.setattr(decode_parts, "SPLIT", 8)
    monkeypatch.setattr(cuda_graphs, "LEAST_WORKSPACE", 0)
    monkeypatch.setattr(cuda_graphs, "LEAST_LENGTH", 64)
    monkeypatch.setenv(VARIABLE, off)
    engine, _ = graphed(make_model("qwen3", num_hidden_layers=1))
    engine.add_request(token_ids(6, 1), greedily(20))
    (request,) = finish(engine).values()
    assert len(request.generated_tokens) == 20
    sizes = [(size.columns, size.parts) for size in engine.controller.runner.graphs._graphs]
    assert sizes == ([(16, 8)] if off else [(4096, 1), (4096, 2), (4096, 4)])


def test_samples_drawn_at_random_are_those_of_an_engine_without_graphs() -> None:
    results = []
    for engine in (graphed("qwen3")[0], make_engine("qwen3", fused_forward=False)):
        requests = engine.generate([token_ids(9, 1), token_ids(4, 2)], at_random(6, n=3))
        results.append([request.generated_tokens for request in requests])
    assert results[0] == results[1]


def test_a_step_with_a_chunk_in_it_runs_the_forward_of_the_module() -> None:
    engine, recorder = graphed("qwen3", max_tokens_per_step=8)
    engine.add_request(token_ids(3), greedily(12))
    steps(engine, 2)
    engine.add_request(token_ids(30, 1), greedily(4))
    replays = recorder.replays
    steps(engine, 4)
    assert recorder.replays == replays
    finish_exact(engine, "qwen3", 2)
    assert recorder.replays > replays


@pytest.mark.parametrize(("name", "off"), [("qwen3", ""), ("gemma2", ""), ("qwen3", "prefixes")])
def test_steps_whose_rows_share_a_prefix_have_a_graph_that_reads_it_once(name: str, off: str, monkeypatch) -> None:
    """The samples of a prompt share it from their first token on; alone, a sample is replayed by the other graph."""
    monkeypatch.setattr(decode_parts, "SPLIT", 8)
    monkeypatch.setattr(prefix_sharing, "WORTHWHILE", 1)
    monkeypatch.setenv(VARIABLE, off)
    engine, _ = graphed(name, shares=True)
    common = token_ids(17, 1)
    for tail in range(2):
        engine.add_request([*common, *token_ids(3 + tail, tail)], greedily(5 + tail, n=2))
    finish_exact(engine, name, 4)
    assert {size.shares for size in engine.controller.runner.graphs._graphs} == {not off}
    start(engine, 2)
    finish_exact(engine, name, 2)
    assert not list(engine.controller.runner.graphs._graphs)[-1].shares


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_prefill_chunks_are_replayed_padded_beside_the_decodes_of_their_step(name: str, monkeypatch) -> None:
    monkeypatch.setattr(chunk_state, "SIZES", (16, 40))
    engine, recorder = graphed(name, chunked=True, max_tokens_per_step=24)
    engine.add_request(token_ids(3), greedily(12))
    steps(engine, 2)
    assert recorder.replays == 1, "until a decode step was captured, chunks run eagerly"
    for seed, length in enumerate((30, 7, 1)):
        engine.add_request(token_ids(length, seed + 1), greedily(3 + seed))
    steps(engine, 2)
    assert recorder.replays == 1 + 2 * 2, "a graph of decodes and one of chunks"
    finish_exact(engine, name, 4)
    graphs = engine.controller.runner.graphs
    assert {size.tokens for size in graphs._graphs} == {0, 16, 40}
    captures = recorder.captures
    pass_suspended(engine, "recompute")
    start(engine)
    finish_exact(engine, name)
    assert recorder.captures == captures


def test_decodes_of_a_step_are_its_leading_rows_whose_logits_come_first() -> None:
    def decodes(counts: list[int], keep: list[int]) -> int:
        offsets = np.cumsum([0, *counts])
        rows = PagedRows(offsets, np.zeros(offsets[-1], np.int64), np.zeros((len(counts), 1), np.int64), 4)
        return cuda_graphs._decodes(rows, np.array(keep, np.int64))

    assert decodes([1, 1, 1], [0, 1, 2]) == 3
    assert decodes([1, 1, 5], [0, 1, 6]) == decodes([1, 1, 5, 1], [0, 1, 6, 7, 3]) == 2
    assert decodes([5], [4]) == decodes([5], []) == decodes([1], []) == 0
    assert decodes([1, 1], [0]) == 1, "the last chunk of a prompt but one, of a token"
    assert decodes([1, 1], [1]) == 0
    assert decodes([1, 4], [0, 3, 0]) == -1


def test_chunks_that_cannot_be_captured_run_eagerly_and_decodes_stay_graphs(monkeypatch, caplog) -> None:
    monkeypatch.setattr(chunk_state, "SIZES", (16, 40))
    engine, recorder = graphed("qwen3", chunked=True)
    failing = FailingDevice(engine, recorder, {16: RuntimeError("operation not permitted")})
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            engine.add_request(token_ids(6, seed), greedily(3))
            engine.add_request(token_ids(7, 10 + seed), greedily(3))
            finish_exact(engine, "qwen3", 2)
    assert failing.asked == [2, 16, 2]
    assert len(caplog.records) == 1
    assert "prefill steps of 16 tokens cannot be captured" in caplog.text


def test_a_step_whose_chunks_run_eagerly_captures_and_sends_nothing(monkeypatch) -> None:
    monkeypatch.setattr(chunk_state, "SIZES", (16,))
    engine, recorder = graphed("qwen3", chunked=True)
    engine.add_request(token_ids(3), greedily(4))
    steps(engine, 1)
    engine.add_request(token_ids(17, 1), greedily(4))
    steps(engine, 1)
    assert recorder.captures == 0
    assert engine.controller.runner.graphs._state is None
    finish_exact(engine, "qwen3", 2)
    assert recorder.captures > 0


def test_chunks_beside_decodes_that_cannot_be_captured_are_not_captured_either(monkeypatch) -> None:
    monkeypatch.setattr(chunk_state, "SIZES", (16,))
    engine, recorder = graphed("qwen3", chunked=True)
    failing = FailingDevice(engine, recorder, {2: RuntimeError("operation not permitted")})
    start(engine, 1, 3)
    finish_exact(engine, "qwen3", 1)
    for seed in range(2):
        engine.add_request(token_ids(17, seed), greedily(6))
    steps(engine, 1)
    engine.add_request(token_ids(5, 3), greedily(3))
    steps(engine, 1)
    assert failing.asked == [1, 2], "no chunks, in a step that runs eagerly"
    finish_exact(engine, "qwen3", 3)


# --- what a graph outlives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_graphs_survive_a_suspend_although_the_pool_comes_back_elsewhere(mode: str) -> None:
    held: list[Tensor] = []

    def elsewhere(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held.append(torch.zeros(numel, dtype=dtype))
        return held[-1]

    engine, recorder = graphed("qwen3", allocate=elsewhere)
    start(engine)
    steps(engine, 3)
    assert recorder.captures == 1
    for _ in range(2):
        pass_suspended(engine, mode)
        steps(engine, 2)
    finish_exact(engine, "qwen3")
    assert len(held) == (1 if mode == "persist" else 3)
    assert recorder.captures == 1


def test_graphs_survive_a_pool_that_comes_back_smaller() -> None:
    room = 10**9

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if numel > room:
            raise torch.OutOfMemoryError("taken")
        return torch.zeros(numel, dtype=dtype)

    engine, recorder = graphed("qwen3", allocate=allocate)
    start(engine)
    steps(engine, 3)
    engine.pause()
    engine.suspend("offload")
    room = 20 * engine.cache.block_bytes // 4
    assert engine.resume().shrunk_by_blocks == 44
    engine.unpause()
    finish_exact(engine, "qwen3")
    assert recorder.captures == 1


@pytest.mark.parametrize("release", [True, False])
def test_graphs_are_counted_and_released_at_a_suspend_where_the_option_says_so(release: bool) -> None:
    engine, recorder = graphed("qwen3", release_cuda_graphs=release)
    graphs = engine.controller.runner.graphs
    kernels = graphs._kernels
    start(engine)
    steps(engine, 3)
    recorder.graph_bytes = 10**6
    logits = 8 * engine.controller.layout.vocab_size * 4
    assert engine.stats()["graph_bytes"] == 10**6 + kernels.nbytes + logits + graphs._state.nbytes
    before = recorder.forgotten, kernels.released
    pass_suspended(engine, "persist")
    assert (recorder.forgotten, kernels.released) == before
    pass_suspended(engine, "offload")
    assert recorder.forgotten - before[0] == kernels.released - before[1] == release
    finish_exact(engine, "qwen3")
    assert recorder.captures == 1 + release


def test_weights_that_are_changed_in_place_are_read_as_they_are() -> None:
    model = make_model("qwen3")
    engine, recorder = graphed(model)
    start(engine)
    steps(engine, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    engine.weights_updated()
    finish(engine)
    start(engine)
    finish_exact(engine, model)
    assert recorder.captures == 1


# --- what makes them anew ---------------------------------------------------------------------------------------------


def replace_a_weight(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(1.5 * model.model.norm.weight.detach())


def replace_a_module(model: Any) -> None:
    layer = torch.nn.Linear(48, 96, bias=False)
    with torch.no_grad():
        layer.weight.mul_(4)
    model.model.layers[1].mlp.up_proj = layer


def add_a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: 0.5 * output)


def replace_a_forward(model: Any) -> None:
    forward = model.model.norm.forward
    model.model.norm.forward = lambda hidden: 2 * forward(hidden)


@pytest.mark.parametrize("change", [replace_a_weight, replace_a_module, add_a_hook, replace_a_forward])
def test_a_model_that_was_changed_is_captured_anew(change: Callable[[Any], None]) -> None:
    model = make_model("qwen3")
    engine, recorder = graphed(model)
    start(engine)
    finish_exact(engine, model)
    change(model)
    start(engine)
    engine.weights_updated()
    finish_exact(engine, model)
    assert recorder.captures == 2
    assert recorder.forgotten >= 1


def test_what_a_graph_fixes_is_in_the_signature_and_what_it_reads_is_not() -> None:
    model = make_model("qwen3")
    before = signature_of(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.model.layers[0].calls = 7
    assert [each for each in signature_of(model) if each != ("calls", None)] == before
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing, module._gradient_checkpointing_func = True, print
    assert [each for each in signature_of(model) if each != ("calls", None)] == before, "it acts in training alone"
    adapter = model.model.layers[0].mlp.up_proj
    for name, values in {
        "merged": (False, True),
        "scaling": ({"a": 1.0}, {"a": 2.0}),
        "active": (["a"], ["b"]),
    }.items():
        signatures = []
        for value in values:
            setattr(adapter, name, value)
            signatures.append(signature_of(model))
        assert signatures[0] != signatures[1]


def test_a_forward_replaced_on_its_class_is_in_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    before = signature_of(model)
    kind = type(model.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args: own(*args))
    assert signature_of(model) != before
    monkeypatch.undo()
    assert signature_of(model) == before


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
    assert recorder.captures == (MAX_WASTED + 2 if served else MAX_WASTED)
    assert len(caplog.records) == (0 if served else 1)
    assert ("change every few steps" in caplog.text) == (not served)


# --- what is not captured ---------------------------------------------------------------------------------------------


def test_a_forward_that_cannot_be_captured_runs_every_step_and_says_so_once(caplog) -> None:
    model = make_model("qwen3")
    # A number that the host waits for: no record can hold what it decides.
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * (1.0 + 0 * float(output.max())))
    engine, recorder = graphed(model)
    with caplog.at_level(logging.WARNING):
        start(engine)
        finish_exact(engine, model)
        start(engine)
        finish_exact(engine, model)
    assert recorder.captures == recorder.replays == 0
    assert len(caplog.records) == 1
    assert "runs its forward every step, and not as a CUDA graph" in caplog.text


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", "gpt_oss", "llama4"])
def test_a_model_that_asks_for_values_of_its_own_runs_right_all_the_same(name: str) -> None:
    """GPT-2 of transformers looks for padding among the token ids; experts look at how many tokens each has."""
    engine, _ = graphed(name)
    start(engine)
    finish_exact(engine, name)


def test_a_size_that_cannot_be_captured_runs_the_forward_and_the_others_stay_graphs(caplog) -> None:
    engine, recorder = graphed("qwen3")
    failing = FailingDevice(engine, recorder, {8: RuntimeError("operation not permitted")})
    with caplog.at_level(logging.WARNING):
        for requests in (2, 6, 2, 6):
            start(engine, requests, 4)
            finish_exact(engine, "qwen3", requests)
    assert failing.asked == [2, 8, 2]
    assert recorder.forgotten == 2, "at the first step, and because a failed capture's pool is released with its graphs"
    assert not engine.controller.runner.graphs.why_not
    assert "8 rows cannot be captured" in caplog.text


def test_many_sizes_that_cannot_be_captured_end_the_attempt(caplog) -> None:
    engine, recorder = graphed("qwen3")
    broken = {rows: RuntimeError("operation not permitted") for rows in (2, 4, 8, 16)}
    failing = FailingDevice(engine, recorder, broken)
    for requests in (1, 2, 3, 5, 9, 1):
        start(engine, requests, 3)
        finish_exact(engine, "qwen3", requests)
    assert failing.asked == [1, 2, 4, 8][: 1 + MAX_FAILED]
    assert "operation not permitted" in engine.controller.runner.graphs.why_not


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
    assert failing.asked == [4], "not in every step"
    assert "no memory to capture decode steps of 4 rows" in caplog.text
    failing.broken.clear()
    pass_suspended(engine, mode)
    finish_exact(engine, "qwen3")
    assert recorder.captures == 1


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
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.3)
                engine.weights_updated()
        assert recorder.captures == (1 if graphs else 0)
        assert not graphs or recorder.replays == 10
    graphed_before, graphed_after, before, after = map(np.array, logprobs)
    np.testing.assert_allclose(graphed_before, before, atol=0.05)
    np.testing.assert_allclose(graphed_after, after, atol=0.05)
    assert np.abs(after - before).max() > 0.2, "the update is large enough to be seen"


def test_graphs_of_each_precision_are_apart() -> None:
    engine, recorder = graphed("qwen3")
    start(engine)
    finish_exact(engine, "qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        start(engine)
        finish(engine)
    start(engine)
    finish_exact(engine, "qwen3")
    assert recorder.captures == 2


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
            assert recorder.captures == 1
            with torch.no_grad():
                linear.weight.mul_(2)
            assert torch.equal(linear(hidden), torch.nn.functional.linear(hidden.bfloat16(), linear.weight.bfloat16()))
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_copy_of_gathered_weights_is_where_it_was() -> None:
    model = make_model("qwen3")
    gathered = GatheredWeights(model)
    assert not gathered.fixed_addresses
    copied = CopiedWeights(Weights(model), torch.bfloat16, None)
    before = [parameter.data_ptr() for parameter in copied.sampled.parameters()]
    for _ in range(2):
        copied.changed()
        copied.gather()
    assert copied.fixed_addresses
    assert before == [parameter.data_ptr() for parameter in copied.sampled.parameters()]


def test_the_modules_own_forward_of_gathered_weights_is_not_captured() -> None:
    engine, recorder = graphed("qwen3")
    runner = engine.controller.runner
    runner.graphs = GraphedDecode(
        runner.model, runner.layout, engine.cache, 8, recorder, Plain(engine.cache), alone=True
    )
    start(engine, 1, 3)
    finish_exact(engine, "qwen3", 1)
    assert recorder.captures == 0


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
        recorder._find_pool()
        work()
        raise KeyboardInterrupt

    recorder.capture = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    recorder.capture = capture
    finish_exact(engine, "qwen3")
    assert recorder.captures >= 1


@pytest.mark.parametrize(("dim", "dtype", "why"), [(8, torch.float32, "heads"), (18, torch.float16, "16 does not")])
def test_pools_the_kernels_cannot_find_or_read_are_refused_by_name(dim: int, dtype: torch.dtype, why: str) -> None:
    cache = KVCache([LayerShape(1, dim, dim)], 2, 1, dtype, CPU)
    kernels = TritonDecode(None, cache)  # type: ignore[arg-type]
    one = torch.zeros(1, 1, dim, dtype=dtype)
    with pytest.raises(Uncapturable, match=why):
        kernels(0, DecodeState(1, 16, 1, CPU).inputs(1, 16), one, one, one, scaling=1.0, window=None, softcap=None)


# --- sizes and buffers ------------------------------------------------------------------------------------------------


def test_sizes_are_few_and_waste_little() -> None:
    sizes = sorted({padded_rows(count) for count in range(1, 257)})
    assert sizes == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256]
    assert all(padded_rows(count) >= count for count in range(1, 1000))
    lengths = [padded_length(tokens) for tokens in (1, LEAST_LENGTH, LEAST_LENGTH + 1, 5000)]
    assert lengths == [LEAST_LENGTH, LEAST_LENGTH, 2 * LEAST_LENGTH, 8192]


def test_a_sequence_longer_than_the_tables_on_the_device_gets_wider_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "STATE_LENGTH", 64)
    monkeypatch.setattr(cuda_graphs, "LEAST_LENGTH", 64)
    engine, recorder = graphed("qwen3")
    engine.add_request(token_ids(60, 1), greedily(12))
    finish_exact(engine, "qwen3", 1)
    columns = [size.columns for size in engine.controller.runner.graphs._graphs]
    assert columns == [32], "the graph of 64 tokens read other tables"
    assert recorder.captures == 2
    engine.controller.runner.graphs.release()
    engine.add_request(token_ids(60, 2), greedily(12))
    finish_exact(engine, "qwen3", 1)
    assert recorder.captures == 3, "the tables are as wide again from the start"


def test_the_addresses_of_a_pool_follow_it() -> None:
    cache = KVCache([LayerShape(1, 16, 8), LayerShape(2, 16, 16)], 5, 4, torch.float32, CPU)
    cells = cache.addresses
    for blocks in (5, 3):
        cache.drop()
        cache.materialize(blocks)
        assert cache.addresses is cells
        assert cells.tolist() == [part.data_ptr() for index in range(2) for part in cache.layer(index)]


def test_the_option_is_true_or_false() -> None:
    assert InferenceConfig().cuda_graphs
    with pytest.raises(ConfigError, match="cuda_graphs"):
        InferenceConfig(cuda_graphs=1)  # type: ignore[arg-type]


def test_a_wrong_name_of_a_part_to_switch_off_is_refused_where_nothing_is_captured(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "prefixes, table")
    with pytest.raises(ConfigError, match=r"ROLLOUT_CUDA_WITHOUT=table: there is no such part; did you mean tables\?"):
        make_engine("qwen3")


# --- on a device ------------------------------------------------------------------------------------------------------


def on_a_gpu(function: Any) -> Any:
    function = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(function)
    return pytest.mark.gpu(function)


def device_engine(name: str = "qwen3", model: Any = None, **options: Any) -> DynamicInferenceEngine:
    return make_engine(make_model(name).cuda() if model is None else model, block_size_tokens=16, **options)


@on_a_gpu
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2"])
def test_on_a_device_the_tokens_are_those_of_the_cpu_with_and_without_graphs(name: str) -> None:
    # The kernels serve heads of 16 and more.
    cpu = make_engine(make_model(name, head_dim=16))
    start(cpu, 5, 40)
    expected = finish(cpu)
    for graphs in (True, False):
        engine = device_engine(model=make_model(name, head_dim=16).cuda(), cuda_graphs=graphs)
        start(engine, 5, 40)
        done = finish(engine)
        runner = engine.controller.runner
        assert (runner.graphs is not None and len(runner.graphs._graphs) > 0) == graphs
        for key, request in expected.items():
            assert done[key].generated_tokens == request.generated_tokens


@on_a_gpu
@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_on_a_device_graphs_survive_suspends_and_weights_changed_in_place(mode: str) -> None:
    model = make_model("qwen3").cuda()
    engine = device_engine(model=model)
    start(engine, 4, 30)
    steps(engine, 5)
    graphs = engine.controller.runner.graphs
    assert graphs is not None
    captured = dict(graphs._graphs)
    assert captured
    for _ in range(3):
        engine.pause()
        engine.suspend(mode)
        # The training step takes the memory, and so the pool comes back elsewhere.
        taken = torch.empty(engine.cache.block_bytes * 64, dtype=torch.uint8, device="cuda")
        engine.resume()
        engine.unpause()
        steps(engine, 3)
        del taken
    for request in finish(engine).values():
        assert_greedy("qwen3", request, tolerance=1e-3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    engine.weights_updated()
    start(engine, 4, 30)
    for request in finish(engine).values():
        assert_greedy(model, request, tolerance=1e-3)
    assert all(graphs._graphs[key] is graph for key, graph in captured.items())


@on_a_gpu
def test_on_a_device_a_forward_that_waits_for_the_host_is_not_captured_and_loses_no_step(caplog) -> None:
    model = make_model("qwen3").cuda()
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * (1.0 + 0 * float(output.max())))
    engine = device_engine(model=model)
    with caplog.at_level(logging.WARNING):
        start(engine, 3, 10)
        for request in finish(engine).values():
            assert_greedy("qwen3", request, tolerance=1e-3)
    assert sum("not as a CUDA graph" in record.message for record in caplog.records) == 1
    # Neither the stream nor the allocator believes that a capture is still running.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.ones(1000, device="cuda").sum().item()
    assert not torch.cuda.is_current_stream_capturing()
    assert shared_model("qwen3") is not model
