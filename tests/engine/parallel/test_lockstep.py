"""Tests of the rounds of ranks that exchange tokens, with a group that is not there."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout.config import Advanced, InferenceConfig
from rollout.engine.parallel.group import TensorParallelGroup
from rollout.engine.parallel.lockstep import DONE, IDLE, LEFT, Lockstep
from rollout.engine.weights.tensor_parallel import expert_parallel_mesh
from rollout.errors import DeadlineError, EngineDeadError, EngineStateError, UnsupportedModelError
from rollout.manager.parallel import LockstepLoop
from rollout.state import EngineState


class FakeGroup(TensorParallelGroup):
    """A group without a channel."""

    def __init__(self) -> None:
        self.ranks, self.place, self.kind = (0, 1), 0, "expert-parallel"
        self._lost, self._channel = None, None


class Experts(nn.Module):
    """Notes how many tokens come, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[int] = []
        self.fails = False

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("connection closed")
        self.came.append(len(hidden))
        return hidden


class Decoder(nn.Module):
    """Three layers, registered in another order than they are called in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, tokens: int, layers: tuple[int, ...] = (2, 0, 1)) -> None:
        for layer in layers:
            self.layers[layer](torch.ones(tokens, 4), torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2))

    def came(self) -> list[list[int]]:
        """How many tokens each layer got, and forget it."""
        told = [layer.came[:] for layer in self.layers]
        for layer in self.layers:
            layer.came.clear()
        return told


def learned() -> tuple[Decoder, Lockstep]:
    """A model whose order is known."""
    model = Decoder()
    lockstep = Lockstep(FakeGroup(), list(model.layers))
    lockstep.learn(lambda: model(1))
    model.came()
    return model, lockstep


def test_a_round_computes_without_tokens_what_the_step_has_left_out():
    model, lockstep = learned()
    with lockstep.watching():
        with lockstep.round():
            model(5)
        assert model.came() == [[5], [5], [5]]
        with lockstep.round():
            pass
        assert model.came() == [[0], [0], [0]]
        with suppress(ArithmeticError), lockstep.round():
            model(5, (2,))
            raise ArithmeticError
        assert model.came() == [[0], [0], [5]]
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.layers), "it is as it was"


@pytest.mark.parametrize("layers", [(2, 0, 1, 2), (0,), (2, 1)], ids=["twice", "another first", "one left out"])
def test_a_second_forward_in_a_round_is_refused_before_the_others_would_wait(layers):
    model, lockstep = learned()
    with lockstep.watching():
        with pytest.raises(EngineStateError, match="a step calls a module of experts twice"), lockstep.round():
            model(5, layers)
        assert [len(each) for each in model.came()] == [1, 1, 1]
        with pytest.raises(EngineStateError, match="step\\(\\) in the expert-parallel group of ranks 0, 1"):
            model(5)


def test_a_failure_inside_of_experts_ends_the_group():
    model, lockstep = learned()
    model.layers[0].fails = True
    with lockstep.watching():
        ended = pytest.raises(EngineDeadError, match="expert-parallel group of ranks 0, 1 has ended on rank 0")
        with ended, lockstep.round():
            lockstep.run(None, lambda work: model(5))
        with pytest.raises(EngineDeadError), lockstep.round():
            pass
    assert model.came() == [[], [], [5]]


def test_a_model_that_does_not_call_all_its_experts_is_refused():
    model = Decoder()
    with pytest.raises(UnsupportedModelError, match="a forward calls 2 of 3 modules of experts"):
        Lockstep(FakeGroup(), list(model.layers)).learn(lambda: model(1, (0, 1)))


def meshes(tensor: list[int], experts: list[int]) -> Any:
    """A model that transformers has split, seen from one of its ranks."""

    def mesh(ranks: list[int]) -> Any:
        return SimpleNamespace(mesh=torch.tensor(ranks), size=lambda: len(ranks))

    manager = SimpleNamespace(
        _expert_mesh=SimpleNamespace(mesh_dim_names=("efsdp", "ep"), shape=(1, len(experts))),
        get_mesh=lambda name: mesh(experts if name == "ep" else tensor),
    )
    return SimpleNamespace(_mesh_manager=manager)


def test_experts_are_exchanged_where_their_ranks_are_not_those_of_a_tensor_parallel_group():
    assert expert_parallel_mesh(meshes([0, 1], [0, 1])) is None
    assert expert_parallel_mesh(meshes([1], [1])) is None
    assert expert_parallel_mesh(meshes([1], [0, 1])).mesh.tolist() == [0, 1]
    with pytest.raises(UnsupportedModelError, match="ep_size=4 with tp_size=2"):
        expert_parallel_mesh(meshes([0, 1], [0, 1, 2, 3]))


def loop_that_agrees(agree: Callable[[int], int]) -> LockstepLoop:
    """The loop of a rank whose engine is paused."""
    engine = SimpleNamespace(
        peers=SimpleNamespace(lockstep=learned()[1]),
        parts=SimpleNamespace(stepper=SimpleNamespace(agree=agree)), has_unfinished=True, state=EngineState.PAUSED,
        config=InferenceConfig(advanced=Advanced(control_timeout_s=60.0)),
    )  # fmt: skip
    backend = SimpleNamespace(wake=lambda: None)
    return LockstepLoop(engine, backend, None, None, None, lambda: None, lambda: 0.0)


def test_a_rank_that_is_interrupted_in_the_last_round_does_not_wait_for_ranks_that_have_returned():
    told = []

    def agree(state: int) -> int:
        told.append(state)
        signal.raise_signal(signal.SIGINT)
        return state

    with pytest.raises(KeyboardInterrupt):
        loop_that_agrees(agree)._steps(lambda: True, lambda longest_s: None, lambda: 1.0)
    assert told == [DONE]


def test_a_deadline_ends_a_run_in_which_no_rank_can_compute():
    told = []

    def agree(state: int) -> int:
        told.append(state)
        return state

    def left() -> float:
        raise DeadlineError("generate() passed timeout_s=5")

    with pytest.raises(DeadlineError):
        loop_that_agrees(agree)._steps(lambda: False, lambda longest_s: None, left)
    assert told == [IDLE, LEFT]
