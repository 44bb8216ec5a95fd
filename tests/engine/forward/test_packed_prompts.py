"""Tests of prompts of different lengths in one row, with stand-ins for the kernels that keep their states apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.engines import assert_greedy, finish, greedily, make_engine, token_ids
from tests.models import make_model, require_recurrent_cache

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

RAGGED = [token_ids(length, seed) for seed, length in enumerate((2, 3, 9, 17))]
MODULES = {"qwen3_next": modeling_qwen3_next, "lfm2": modeling_lfm2}


def convolution(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """causal-conv1d's `causal_conv1d_fn`: no position sees one of another sequence."""

    def call(inputs: Tensor, *args: Any, seq_idx: Tensor | None = None, **kwargs: Any) -> Tensor:
        kwargs.pop("cu_seq_lens_q", None)
        if seq_idx is None:
            return own(inputs, *args, **kwargs)
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == (1, inputs.shape[-1])
        counts = torch.bincount(seq_idx[0]).tolist()
        return torch.cat([own(each, *args, **kwargs) for each in inputs.split(counts, -1)], -1)

    return call


def delta_rule(own: Callable[..., Any]) -> Callable[..., Any]:
    """flash-linear-attention's `chunk_gated_delta_rule`: a state for each sequence."""

    def call(*inputs: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        kwargs.pop("seq_idx", None)
        if cu_seqlens is None:
            return own(*inputs, g=g, beta=beta, **kwargs)
        assert kwargs.pop("initial_state") is None
        counts = cu_seqlens.diff().tolist()
        parts = zip(*(each.split(counts, 1) for each in (*inputs, g, beta)), strict=True)
        done = [own(*rest, g=decay, beta=rate, **kwargs) for *rest, decay, rate in parts]
        return torch.cat([out for out, _ in done], 1), torch.cat([state for _, state in done])

    return call


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    require_recurrent_cache()
    for module in MODULES.values():
        monkeypatch.setattr(module, "causal_conv1d_fn", convolution(module.causal_conv1d_fn))
    own = modeling_qwen3_next.torch_chunk_gated_delta_rule
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", delta_rule(own))


def shapes_of(name: str, **options: Any) -> list[tuple[int, ...]]:
    """Shapes of the token ids of each forward that serves `RAGGED`, whose tokens are checked."""
    model, shapes = make_model(name), []
    engine = make_engine(model, fused_forward=False, verify_model=True, **options)
    for prompt in RAGGED:
        engine.add_request(prompt, greedily(4))
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    done = finish(engine)
    served = list(shapes)
    for request in done.values():
        assert_greedy(model, request)
    return served


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", MODULES)
def test_prompts_of_different_lengths_begin_in_one_forward(name: str) -> None:
    assert shapes_of(name, enable_prefix_caching=False) == [(1, sum(map(len, RAGGED))), (4, 1), (4, 1), (4, 1)]
    # A prompt's step ends at its last block boundary, where its state is kept; what follows goes on from there.
    assert shapes_of(name)[0] == (1, 2 + 3 + 8 + 16)


@pytest.mark.usefixtures("kernels")
def test_kernels_that_mix_the_states_of_packed_prompts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_qwen3_next.torch_chunk_gated_delta_rule

    def mixes(*inputs: Tensor, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        out, state = own(*inputs, **kwargs)
        return out, state if cu_seqlens is None else state.repeat(len(cu_seqlens) - 1, 1, 1, 1)

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", mixes)
    assert not make_engine("qwen3_next").controller.layout.packs


def test_without_the_kernels_each_length_is_a_forward() -> None:
    assert shapes_of("lfm2", enable_prefix_caching=False)[:4] == [(1, 2), (1, 3), (1, 9), (1, 17)]
