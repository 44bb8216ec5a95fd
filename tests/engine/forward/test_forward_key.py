"""Tests of the forward key: changes that affect a forward separate the prefix cache, others do not."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from rollout.engine.forward.forward_key import ForwardKey
from tests.engines import assert_greedy, finish, greedily, make_engine, steps, token_ids
from tests.models import make_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

PROMPT = token_ids(18, 3)


@contextmanager
def hooked(model: Any) -> Iterator[None]:
    with model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.5):
        yield


@contextmanager
def steered(model: Any) -> Iterator[None]:
    with model.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:])):
        yield


@contextmanager
def replaced(model: Any) -> Iterator[None]:
    mlp = model.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = types.MethodType(lambda self, x: 1.5 * before(x), mlp)
    try:
        yield
    finally:
        del mlp.forward


@contextmanager
def replaced_on_the_class(model: Any) -> Iterator[None]:
    kind = type(model.model.layers[0].mlp)
    before = kind.forward
    kind.forward = lambda self, x: 1.5 * before(self, x)
    try:
        yield
    finally:
        kind.forward = before


@contextmanager
def scaled(model: Any) -> Iterator[None]:
    attention = model.model.layers[0].self_attn
    attention.scaling *= 2
    try:
        yield
    finally:
        attention.scaling /= 2


@contextmanager
def globally_hooked(model: Any) -> Iterator[None]:
    with nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 1.5 if type(module).__name__ == "Qwen3MLP" else None
    ):
        yield


WAYS: dict[str, Callable[[Any], Any]] = {
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "a hook": hooked,
    "a pre-hook": steered,
    "a hook on every module": globally_hooked,
    "a replaced forward": replaced,
    "a forward replaced on its class": replaced_on_the_class,
    "another scaling": scaled,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_cached_in_one_way_is_not_used_in_another(way: str) -> None:
    model = make_model("qwen3", num_hidden_layers=2)
    # What the fused forward looks at is not the subject here.
    engine = make_engine(model, fused_forward=False)

    def ask() -> tuple[float, list[float]]:
        before = engine.stats()["prefill_tokens_saved"]
        (request,) = engine.generate([PROMPT], greedily(3))
        return engine.stats()["prefill_tokens_saved"] - before, request.generated_log_probs

    plain = ask()[1]
    close = 0.05 if way == "autocast" else 1e-5
    with WAYS[way](model):
        saved, other = ask()
        assert saved == 0
        assert other != plain, "a way that shows"
        assert ask() == (16, pytest.approx(other, abs=close)), "but its own is used again"
    assert ask() == (16, pytest.approx(plain, abs=1e-5)), "and so is the one of before"


def test_a_request_that_goes_on_under_autocast_lends_none_of_its_kv() -> None:
    engine = make_engine("qwen3", max_requests=4)
    engine.add_request(PROMPT, greedily(30))
    ended = steps(engine, 3)
    with torch.autocast("cpu", torch.bfloat16):
        ended += steps(engine, 10)
    ended += steps(engine, 40)
    first = ended[0].merge()
    engine.add_request(first.prompt_tokens + first.generated_tokens, greedily(4))
    assert_greedy("qwen3", finish(engine)[1, 0])


def test_a_configured_autocast_is_one_way_whatever_the_caller_has_set() -> None:
    engine = make_engine(make_model("qwen3", num_hidden_layers=1), autocast_dtype="bfloat16")
    engine.generate([PROMPT], greedily(2))
    with torch.autocast("cpu", torch.float16):
        engine.generate([PROMPT], greedily(2))
    assert engine.stats()["prefill_tokens_saved"] == len(PROMPT) - 1


def test_how_float32_is_multiplied_is_in_the_key() -> None:
    key = ForwardKey(nn.Linear(2, 2), torch.device("cpu"))
    before = key.look(0)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert key.look(0) != before
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert key.look(0) == before == key.look(1)


def test_ways_that_come_and_go_leave_nothing_behind() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=8)
    for number in range(16):
        engine.context.scheduler.switch((), number)
        (request,) = engine.generate([PROMPT], greedily(2))
        assert_greedy("qwen3", request)
    assert len(engine.context.allocator.index._indexes) <= 4, "as many as there are blocks for"
