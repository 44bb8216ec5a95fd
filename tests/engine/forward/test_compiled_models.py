"""Tests of models that the trainer has compiled: rollouts run them uncompiled, training stays compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import compile_regions

from rollout.engine.models.model_support import devices_of
from tests.engines import assert_greedy, greedily, make_engine, token_ids
from tests.models import make_model


class Backend:
    """A backend of torch.compile that counts the graphs it is given and runs."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*arguments: Any) -> Any:
            self.ran += 1
            return graph.forward(*arguments)

        return run


def in_place(model: Any, backend: Backend) -> Any:
    model.compile(backend=backend)
    return model


def by_regions(model: Any, backend: Backend) -> Any:
    """Each decoder layer by itself, as a wrapper inside of the model."""
    return compile_regions(model, backend=backend)


@pytest.mark.parametrize("compiled", [in_place, by_regions])
def test_a_model_compiled_for_training_is_sampled_uncompiled(compiled: Callable[[Any, Backend], Any]) -> None:
    reference = make_model("qwen3", num_hidden_layers=1)
    model, backend = make_model("qwen3", num_hidden_layers=1), Backend()
    model = compiled(model, backend)
    engine = make_engine(model, verify_model=False)
    requests = engine.generate([token_ids(5, 1), token_ids(9, 2)], greedily(4))
    assert (backend.compiled, backend.ran) == (0, 0)
    for request in requests:
        assert_greedy(reference, request)
    ids = torch.tensor([token_ids(6)])
    assert torch.allclose(model(ids).logits, reference(ids).logits, atol=1e-5)
    assert backend.ran > 0, "the trainer's forward is compiled as before"
    ran = backend.ran
    engine.generate([token_ids(7, 3)], greedily(4))
    assert backend.ran == ran


def test_a_model_on_several_devices_is_refused_by_name() -> None:
    places = {"embed.weight": "cuda:0", "layers.0.weight": "cuda:0", "layers.9.weight": "cuda:1"}
    model: Any = SimpleNamespace(
        named_parameters=lambda: [(name, SimpleNamespace(device=torch.device(place))) for name, place in places.items()]
    )
    (line,) = devices_of(model)
    assert "embed.weight on cuda:0, layers.9.weight on cuda:1" in line
    places["layers.9.weight"] = "cuda:0"
    assert not list(devices_of(model))
