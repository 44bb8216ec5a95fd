"""Values of the hidden states that tokens are drawn from, through every forward and every cut of a request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout.errors import ConfigError, UnsupportedModelError
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from tests.models import make_model
from tests.rollouts import batches_of_cut_requests, make_rollout, update, value_error

PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [12, 13, 14]]
PARAMS = SamplingParams(n=3, max_tokens=12, ignore_eos=True)
FILTERED = PARAMS.replace(top_p=0.8, logprobs=2, return_kept_tokens=True)


def probe(model: nn.Module, k: int = 2) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(model.config.hidden_size, k, dtype=model.dtype)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "module"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "qwen3_5", "lfm2"])
def test_values_are_of_the_trainers_hidden_state_before_each_token(name: str, fused: bool) -> None:
    """Runs of decode steps, prefixes from the cache, chunks of prompts and forks are all in it."""
    model = make_model(name).eval()
    function = probe(model)
    with make_rollout(
        model, token_values=function, fused_forward=fused, max_tokens_per_step=8, max_requests=8
    ) as manager:
        for params in (PARAMS, FILTERED, PARAMS.replace(prompt_logprobs=1)):
            batch = manager.generate(PROMPTS, params, progress=False)
            assert value_error(model, batch, function) < 1e-5 * max(1.0, float(batch.token_values.abs().max()))


@pytest.mark.parametrize("cut", ["preempted", "suspended", "restarted"])
def test_values_of_earlier_tokens_survive_whatever_cuts_a_request(cut: str) -> None:
    """The function changes with every version; a token keeps the number of the version that sampled it."""
    model = make_model("qwen3", num_hidden_layers=1)
    options: dict[str, Any] = {"kv_cache_blocks": 10} if cut == "preempted" else {}
    version = 0.0

    def versioned(hidden: Tensor) -> Tensor:
        return hidden[:, 0] * 0 + version

    def step(manager: RolloutManager) -> None:
        nonlocal version
        version += 1
        update(model, manager, size=0)

    short = PARAMS.replace(max_tokens=3)
    batches = batches_of_cut_requests(
        cut, lambda: make_rollout(model, token_values=versioned, **options), [short, PARAMS, PARAMS], short, step
    )
    for batch in batches:
        assert batch.token_values is not None
        mask = batch.response_mask
        torch.testing.assert_close(batch.token_values[..., 0][mask], batch.policy_versions[mask].float())
    assert any(len(batch.policy_versions[batch.response_mask].unique()) > 1 for batch in batches)


UNFIT = [
    (nn.Linear(7, 1), r"token_values raised .* hidden states \[2, 48\] of torch.float32"),
    (lambda hidden: hidden.mean(0, keepdim=True), r"token_values returned shape \[1, 48\]"),
]


@pytest.mark.parametrize(("function", "message"), UNFIT)
def test_functions_that_give_no_values_are_refused_at_construction(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rollout(make_model("qwen3", num_hidden_layers=1), token_values=function)


@pytest.mark.parametrize(("head", "message"), [
    (None, r"get_output_embeddings\(\) is None"), (nn.Linear(48, 97), "does not call the module"),
])  # fmt: skip
def test_models_whose_head_is_not_run_are_refused_at_construction(head: nn.Module | None, message: str) -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    model.get_output_embeddings = lambda: head
    with pytest.raises(UnsupportedModelError, match=message):
        make_rollout(model, token_values=nn.Linear(48, 1))


def test_a_function_that_fails_in_a_step_fails_its_requests_and_no_more() -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    answers = iter([torch.zeros(2)])
    with make_rollout(model, token_values=lambda hidden: next(answers, torch.zeros(len(hidden)))) as manager:
        answers = iter([torch.zeros(99)])
        batch = manager.generate([PROMPTS[0]], PARAMS, progress=False, on_error="mask")
        assert all("token_values returned shape [99, 1]" in str(error) for error in batch.errors)
        assert manager.generate([PROMPTS[0]], PARAMS, progress=False).errors == [None] * 3
