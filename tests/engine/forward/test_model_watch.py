"""Tests of the forward key: changes that affect a forward separate the prefix cache, others do not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from rollout import Advanced, InferenceConfig, RolloutManager
from rollout.engine.forward import model_watch
from tests.engine.changes import FOREIGN, Change, changed
from tests.engines import assert_greedy, finish, greedily, logprob_error, make_engine, steps, token_ids
from tests.models import make_model, trainer_logprobs

PROMPT = token_ids(18, 3)


@contextmanager
def filled(tensor: torch.Tensor, value: float) -> Iterator[None]:
    before = tensor.clone()
    tensor.fill_(value)
    try:
        yield
    finally:
        tensor.copy_(before)


WAYS: dict[str, Change] = {
    "autocast": lambda model, layer: torch.autocast("cpu", torch.bfloat16),
    "another scaling": lambda model, layer: changed(layer.self_attn, "scaling", 2 * layer.self_attn.scaling),
    "another activation": lambda model, layer: changed(layer.mlp, "act_fn", nn.ReLU()),
    "a frequency": lambda model, layer: filled(model.model.rotary_emb.inv_freq, 0.3),
    "a function of its file": lambda model, layer: changed(
        sys.modules[type(model).__module__], "rotate_half", nn.functional.relu
    ),
}


@pytest.mark.parametrize("way", WAYS | FOREIGN)
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
    with (WAYS | FOREIGN)[way](model, model.model.layers[0]):
        saved, other = ask()
        assert saved == 0
        assert other != plain, "a way that shows"
        again = 16 if way in WAYS else 0
        assert ask() == (again, pytest.approx(other, abs=close)), "its own is used again, unless code of others made it"
    assert ask() == (0, pytest.approx(plain, abs=1e-5)), "the other way's is not used"


class Lora(nn.Module):
    """A user's own layer, with every kind of state that its forward reads."""

    gate: torch.Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        self.enabled, self.times, self.mode, self.bias = True, 1, "add", torch.zeros(base.out_features)
        self.limits: tuple[float, ...] = (-9.0, 9.0)
        self.register_buffer("gate", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        if self.enabled:
            for _ in range(self.times):
                delta = (self.up(self.down(x)) * self.gate + self.bias).clamp(*self.limits)
                out = out + delta if self.mode == "add" else out - delta
        return out


class Strength:
    """A hook with a state of its own."""

    def __init__(self) -> None:
        self.value = 0.5

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + self.value


CHANGES: dict[str, Callable[[Lora, Strength, dict[str, float]], object]] = {
    "a flag": lambda lora, hook, closed: setattr(lora, "enabled", False),
    "an int": lambda lora, hook, closed: setattr(lora, "times", 3),
    "a string": lambda lora, hook, closed: setattr(lora, "mode", "subtract"),
    "a tuple": lambda lora, hook, closed: setattr(lora, "limits", (-0.1, 0.1)),
    "a tensor replaced": lambda lora, hook, closed: setattr(lora, "bias", torch.ones_like(lora.bias)),
    "a tensor filled": lambda lora, hook, closed: lora.bias.fill_(1.0),
    "a buffer filled": lambda lora, hook, closed: lora.gate.fill_(3.0),
    "a hook's object": lambda lora, hook, closed: setattr(hook, "value", -0.5),
    "a hook's closure": lambda lora, hook, closed: closed.update(value=-0.5),
}


# The state of a hook is in no key.
@pytest.mark.parametrize(
    ("change", "familiar"),
    [(each, False) for each in CHANGES] + [(each, True) for each in CHANGES if not each.startswith("a hook")],
)
def test_kv_of_another_function_is_never_returned(change: str, familiar: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3", num_hidden_layers=2)
    attention = model.model.layers[0].self_attn
    attention.v_proj = lora = Lora(attention.v_proj)
    hook, closed = Strength(), {"value": 0.5}
    if familiar:
        # Its attributes are in the key, whoever has defined it.
        monkeypatch.setattr(model_watch, "_KNOWN", model_watch._KNOWN | {Lora.__module__.partition(".")[0]})
        model_watch._is_familiar.cache_clear()
    else:
        attention.o_proj.register_forward_hook(hook)
        attention.o_proj.register_forward_hook(lambda module, args, out: out + closed["value"])
    manager = RolloutManager(
        model, config=InferenceConfig(kv_cache_blocks=64, max_requests=4, advanced=Advanced(block_size_tokens=4))
    )
    try:
        batch = manager.generate([PROMPT], greedily(6))
        row = batch.input_ids[0].tolist()
        manager.generate([PROMPT], greedily(6))
        assert (manager.engine.stats()["prefill_tokens_saved"] > 0) == familiar
        CHANGES[change](lora, hook, closed)
        expected = trainer_logprobs(model, row)[len(PROMPT) - 1 :]
        torch.testing.assert_close(manager.score(batch).logprobs[0, len(PROMPT) :], expected, atol=1e-5, rtol=0)
        (request,) = manager.engine.generate([PROMPT], greedily(6))
        assert logprob_error(model, request) < 1e-5
    finally:
        manager.close()
        model_watch._is_familiar.cache_clear()


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_moe", "gpt2", "qwen3_next"])
def test_what_training_does_between_two_calls_keeps_the_cache(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model, fused_forward=False)
    engine.generate([PROMPT], greedily(3))
    model.train()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    ids = torch.tensor([PROMPT])
    model(ids, labels=ids).loss.backward()
    # As DistributedDataParallel broadcasts them.
    for buffer in model.buffers():
        buffer.copy_(buffer.clone())
    model.eval()
    before = engine.stats()["prefill_tokens_saved"]
    engine.generate([PROMPT], greedily(3))
    assert engine.stats()["prefill_tokens_saved"] - before == 16


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
    assert engine.stats()["prefill_tokens_saved"] == 16


def test_how_float32_is_multiplied_is_in_the_key() -> None:
    watch = make_engine("qwen3").parts.watch
    before = watch.forward_key()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert watch.forward_key() != before
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert watch.forward_key() == before
