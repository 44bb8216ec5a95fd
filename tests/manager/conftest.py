"""Models and a manager for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rollout.manager.manager import RolloutManager
from tests.models import make_model, make_tokenizer
from tests.rollouts import closed, make_rollout


@pytest.fixture(scope="module")
def frozen() -> PreTrainedModel:
    """A model whose weights no test changes."""
    return make_model("qwen3")


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("qwen3", num_hidden_layers=1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def rollout(frozen: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Iterator[RolloutManager]:
    manager = make_rollout(frozen, tokenizer)
    yield manager
    closed(manager)


@pytest.fixture
def small(model: PreTrainedModel) -> Iterator[RolloutManager]:
    manager = make_rollout(model)
    yield manager
    closed(manager)
