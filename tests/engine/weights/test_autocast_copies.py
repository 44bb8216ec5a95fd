"""Tests of copies of weights in autocast's dtype: never stale, to the bit what autocast computes, freed by a suspend."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard

from rollout.config import Advanced, InferenceConfig
from rollout.engine import build as build_module
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.graphs.cuda_graphs import GraphedDecode
from rollout.engine.memory.arena import Arena, PoolMemory
from rollout.engine.weights import fsdp_mapped, source
from rollout.engine.weights.autocast_copies import NO_COPIES, AutocastCopies, autocast_copies
from rollout.engine.weights.base import GatheredWeights, Weights
from rollout.engine.weights.fsdp import ShardedWeights
from rollout.engine.weights.fsdp_mapped import MappedWeights
from rollout.errors import ConfigError
from tests.configs import engine_config
from tests.engine.graphs.recorded_graphs import Plain, Record, Recorder
from tests.engine.memory.test_arena import PAGE, Driver
from tests.engines import greedily, in_one_piece, make_engine, pass_suspended, token_ids
from tests.models import make_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def copies_of(model: nn.Module, driver: Driver, room: Callable[[], float] | None = lambda: math.inf) -> AutocastCopies:
    arena = Arena(driver)
    return AutocastCopies(model, CPU, PoolMemory(arena.take, arena.release), room)


def small() -> Any:
    return make_model("qwen3", num_hidden_layers=1)


# --- one module ---------------------------------------------------------------------------------------------------------


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)


def set_data(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    model.lm_head.weight.data = change(model.lm_head.weight.data)


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": in_place,
    # The parameter's version does not change.
    "by data": lambda model: model.lm_head.weight.data.mul_(1.3),
    "swapped": lambda model: set_data(model, lambda data: 1.3 * data),
    "another shape": lambda model: set_data(model, lambda data: data[:40].clone()),
    "another dtype": lambda model: set_data(model, lambda data: data.to(BF16)),
    "loaded": lambda model: model.load_state_dict({name: 1.3 * each for name, each in model.state_dict().items()}),
    "replaced": lambda model: setattr(model.lm_head, "weight", nn.Parameter(1.3 * model.lm_head.weight.detach())),
}


@pytest.mark.parametrize("what", CHANGES)
def test_after_any_change_a_copy_is_the_cast_of_what_its_parameter_is_now(what: str) -> None:
    model = small()
    copies = copies_of(model, Driver(2**22))
    names = ("lm_head", "model.layers.0.mlp.up_proj")
    linears = [model.get_submodule(name) for name in names]
    for epoch in range(1, 4):
        if epoch > 1:
            CHANGES[what](model)
        for _ in range(2):
            copies.refresh(epoch)
            for each in linears:
                found = copies.cast(each.weight, BF16)
                copied = found is not each.weight
                assert torch.equal(found.to(BF16), each.weight.to(BF16))
        assert copied
    assert (copies.cast(model.lm_head.weight, BF16) is not model.lm_head.weight) == (what != "another dtype")


def test_copies_that_a_failure_left_stale_are_filled_by_the_next_step_of_the_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small()
    copies, weight = copies_of(model, Driver(2**22)), model.lm_head.weight
    copies.cast(weight, BF16)
    copies.refresh(1)
    in_place(model)

    def failing(*_: Any) -> None:
        raise RuntimeError("the device is in trouble")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", failing)
        with pytest.raises(RuntimeError, match="in trouble"):
            copies.refresh(2)
    copies.refresh(2)
    assert torch.equal(copies.cast(weight, BF16), weight.to(BF16))


def test_adapters_merged_into_the_weights_are_in_the_copies_and_after_an_unmerge_are_not() -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(small(), options)
    layer = tuned.base_model.model.model.layers[0].mlp.up_proj
    copies = copies_of(tuned, Driver(2**22))
    weight, seen = layer.base_layer.weight, []
    copies.cast(weight, BF16)
    for epoch, act in enumerate((lambda: None, tuned.merge_adapter, tuned.unmerge_adapter)):
        act()
        copies.refresh(epoch)
        seen.append(copies.cast(weight, BF16).clone())
        assert seen[-1].dtype == BF16
        assert torch.equal(seen[-1], weight.to(BF16))
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w, b: nn.functional.linear(x, w, b),
        lambda x, w, b: nn.functional.linear(x, weight=w, bias=b),
        lambda x, w, b: torch.addmm(b, x, w),
        lambda x, w, b: x @ w,
        lambda x, w, b: x.matmul(w),
        lambda x, w, b: torch.mm(x, w),
    ],
)
def test_products_read_copies_where_autocast_would_cast_and_nowhere_else(product: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    weight, bias = model.weight, model.bias
    copies = copies_of(model, Driver(2**20))
    with torch.no_grad():
        plain = product(x, weight, bias)
        with copies.substituted():
            assert torch.equal(product(x, weight, bias), plain)
        assert copies.layout is None
        with torch.autocast("cpu", BF16):
            expected = product(x, weight, bias)
            with copies.substituted():
                product(x, weight, bias)
            copies.refresh(1)
            assert copies.layout is not None
            # As if they were other weights, so that it shows which are read.
            with torch.no_grad():
                kept = weight.clone()
                weight.zero_()
            with copies.substituted():
                found = product(x, weight, bias)
            weight.copy_(kept)
        with copies.substituted():
            assert torch.equal(product(x, weight, bias), plain), "autocast is off"
    assert torch.equal(found, expected)


# --- engines ------------------------------------------------------------------------------------------------------------


class Watching(Recorder):
    """Keeps what was recorded."""

    record: Record

    def _replay(self, record: Record) -> None:
        self.record = record
        super()._replay(record)

    @property
    def casts(self) -> int:
        """Matrices that a replay casts."""
        calls = [args[0] for func, args, _ in self.record._calls if func is torch.ops.aten._to_copy.default]
        return sum(isinstance(each, nn.Parameter) and each.dim() == 2 for each in calls)


def graphed(
    model: Any, *, driver: Driver | None, room: Callable[[], float] | None = lambda: math.inf, **options: Any
) -> tuple[DynamicInferenceEngine, Watching]:
    """An engine whose decode steps are recorded on a pretended device, with copies in the memory of `driver`."""
    # With a cached prefix the first step has other positions, and in bfloat16 other bits.
    engine = make_engine(
        model, fused_forward=False, enable_prefix_caching=False, allocate=Arena(Driver(2**24)).allocate, **options
    )
    runner, recorder = engine.controller.runner, Watching()
    runner.copies = NO_COPIES if driver is None else copies_of(model, driver, room)
    runner.graphs = GraphedDecode(
        runner.model, runner.layout, engine.cache, 8, recorder, Plain(engine.cache), copies=runner.copies
    )
    return engine, recorder


def sampled(engine: DynamicInferenceEngine) -> list[list[float]]:
    requests = engine.generate([token_ids(9, 1), token_ids(4, 2)], greedily(6))
    assert all(request.error is None for request in requests)
    return [request.generated_log_probs for request in requests]


@pytest.mark.parametrize("where", ["around", "option", "inside"])
def test_graphs_that_read_copies_give_the_bits_of_those_that_cast_before_and_after_an_update(where: str) -> None:
    """TRL generates under autocast, accelerate puts it into the forward."""
    found: list[list[list[float]]] = []
    for driver in (Driver(2**22), None):
        model = small()
        if where == "inside":
            model.forward = torch.autocast("cpu", BF16)(model.forward)
        with torch.autocast("cpu", BF16, enabled=where == "around"):
            options = {"autocast_dtype": "bfloat16"} if where == "option" else {}
            engine, recorder = graphed(model, driver=driver, **options)
            for _ in range(2):
                found.append(sampled(engine))
                model.lm_head.weight.data.mul_(1.5)
                with torch.no_grad():
                    model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
                engine.weights_updated()
            assert recorder.casts == (0 if driver else 8), "seven projections and the head"
            assert recorder.windows == 1, "the warm-up of the first capture makes the copies"
            assert (engine.stats()["autocast_copy_bytes"] > 0) == (driver is not None)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] != found[1]


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_a_suspend_frees_the_copies_and_the_graphs_find_them_where_they_were(mode: str) -> None:
    driver = Driver(2**22)
    engine, recorder = graphed(small(), driver=driver, autocast_dtype="bfloat16")
    first = sampled(engine)
    used, windows = driver.used, recorder.windows
    assert used == -(-engine.stats()["autocast_copy_bytes"] // PAGE) * PAGE > 0
    for _ in range(2):
        engine.pause()
        engine.suspend(mode)
        assert driver.used == engine.stats()["autocast_copy_bytes"] == 0
        engine.resume()
        engine.unpause()
        assert sampled(engine) == first
        assert driver.used == used
    assert recorder.windows == windows


@pytest.mark.parametrize("insists", [False, True])
def test_without_room_steps_cast_until_the_next_suspend_and_a_pool_that_is_told_leaves_it(
    insists: bool, caplog: pytest.LogCaptureFixture
) -> None:
    driver, room = Driver(PAGE), -1.0
    engine, recorder = graphed(
        small(), driver=driver, room=None if insists else lambda: room, autocast_dtype="bfloat16"
    )
    copies = engine.controller.runner.copies
    with caplog.at_level(logging.INFO):
        first = sampled(engine)
        assert sampled(engine) == first
    assert (recorder.casts, driver.used) == (8, 0)
    (said,) = (record for record in caplog.records if "no copies of the weights" in record.message)
    assert said.levelno == (logging.WARNING if insists else logging.INFO)
    wanted = copies.bytes_to_come
    assert wanted > PAGE
    assert engine.context.to_come() == engine.controller.runner.graphs.bytes_to_come + wanted
    driver.total, room = 2**22, math.inf
    pass_suspended(engine, "offload")
    assert sampled(engine) == first
    assert recorder.casts == 0
    assert copies.bytes_to_come == 0


def test_copies_in_memory_that_comes_back_elsewhere_are_captured_anew() -> None:
    engine, recorder = graphed(small(), driver=Driver(2**22), autocast_dtype="bfloat16")
    copies, held = engine.controller.runner.copies, []

    @in_one_piece
    def elsewhere(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held.append(torch.full((numel,), 255, dtype=dtype))
        return held[-1]

    copies._memory = PoolMemory(elsewhere, lambda: held[-1].fill_(255))
    first = sampled(engine)
    windows = recorder.windows
    pass_suspended(engine, "offload")
    assert sampled(engine) == first
    assert (len(held), recorder.windows) == (2, windows + 1)


def test_copies_and_graphs_give_way_to_the_parts_of_a_rebuild_which_measure_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(2**22)
    engine, _ = graphed(small(), driver=driver, autocast_dtype="bfloat16")
    sampled(engine)
    graphs, build, seen = engine.controller.runner.graphs, build_module.build, list[tuple[int, int]]()
    assert graphs is not None
    assert driver.used
    assert graphs.captured

    def building(base: build_module.EngineBase) -> build_module.EngineParts:
        seen.append((driver.used, len(graphs.captured)))
        return build(base)

    monkeypatch.setattr(build_module, "build", building)
    engine.rebuild()
    assert seen == [(0, 0)]
    assert len(sampled(engine)) > 0


def test_weights_loaded_between_two_steps_are_in_the_copies_of_the_next(tmp_path: Path) -> None:
    """Also where the announcement of the load comes later, and the attention stays installed meanwhile."""
    model = small()
    engine, _ = graphed(model, driver=Driver(2**22), autocast_dtype="bfloat16", weight_fingerprints="off")
    sampled(engine)
    save_file({name: -each for name, each in model.state_dict().items()}, tmp_path / "model.safetensors")
    copies = engine.controller.runner.copies
    with engine.installation:
        sampled(engine)
        engine.load_weights(tmp_path)
        sampled(engine)
        weight = model.lm_head.weight
        assert torch.equal(copies.cast(weight, BF16), weight.to(BF16))
        assert copies.cast(weight, BF16) is not weight


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_copies_of_weights_that_fsdp2_gathers_follow_each_gathering(
    one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(2**24)
    arena = Arena(driver)
    monkeypatch.setattr(source, "fixed_memory", lambda device: PoolMemory(arena.take, arena.release))
    gathered: list[object] = []
    monkeypatch.setattr(
        fsdp_mapped, "_coalescing_manager", lambda **options: gathered.append(1) or _coalescing_manager(**options)
    )
    found = []
    for copied in (True, False):
        model = make_model("qwen3", num_hidden_layers=2)
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=one_rank)
        engine, recorder = graphed(model, driver=Driver(2**22) if copied else None, autocast_dtype="bfloat16")
        assert isinstance(engine.weights, MappedWeights)
        copies, gathered[:] = engine.controller.runner.copies, []
        for _ in range(3):
            with engine.guard.whole():
                found.append(sampled(engine))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            engine.weights_updated()
            pass_suspended(engine, "offload")
        assert len(gathered) == 3 * 3, "a collective for each unit"
        assert recorder.casts == (0 if copied else 15)
        assert recorder.windows == 1
        assert copies.nbytes == 0
    assert found[:3] == found[3:]
    assert found[0] != found[1] != found[2]


def test_fsdp2_of_a_torch_that_was_not_tried_is_gathered_by_itself_and_explain_says_so(
    one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(Driver(2**24))
    monkeypatch.setattr(source, "fixed_memory", lambda device: PoolMemory(arena.take, arena.release))
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu140")
    model = fully_shard(small(), mesh=one_rank)
    engine = make_engine(model)
    assert type(engine.weights) is ShardedWeights
    moved = "to other addresses each time: tried with torch 2.11, 2.12, 2.13, and this is 2.99.0+cu140"
    assert moved in str(engine.explain())


# --- the option ---------------------------------------------------------------------------------------------------------


def test_what_asks_for_copies_where_there_are_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="autocast_weight_copies=True: Qwen3ForCausalLM: the model is on cpu"):
        make_engine(small(), autocast_weight_copies=True)
    assert make_engine(small()).controller.runner.copies is NO_COPIES
    wanted, device = InferenceConfig(advanced=Advanced(autocast_weight_copies=True)), torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="gathered to other addresses each time"):
        autocast_copies(wanted, GatheredWeights(small()), device, lambda: 0)
    for options in (
        {"exact": True}, {"inference_dtype": "bfloat16"}, {"cuda_graphs": False, "fused_forward": False},
        {"record_routes": True},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="autocast_weight_copies"):
            engine_config(autocast_weight_copies=True, **options)
    off = InferenceConfig(advanced=Advanced(autocast_weight_copies=False))
    assert autocast_copies(off, Weights(small()), device, lambda: 0) is NO_COPIES
