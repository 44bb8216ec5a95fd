"""Tests of FlashAttention prefill: used for whole prompts only.

It is not installed here: a stand-in with its signature does what its documentation says, in plain torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.kernels import flash_prefill
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention, Workspace
from rollout.engine.kernels.triton_attention import TritonPagedAttention

BLOCK = 16


class Flash(ModuleType):
    """`flash_attn`, of which each call is counted."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.calls = 0

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        assert causal
        assert dropout_p == 0.0
        assert softmax_scale is not None
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert all(part.stride(-1) == 1 for part in (q, k, v))
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        parts = []
        for begin, end in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False):
            groups = q.shape[1] // k.shape[1]
            queries, keys, values = (part[begin:end].double().transpose(0, 1) for part in (q, k, v))
            scores = queries @ keys.repeat_interleave(groups, 0).transpose(1, 2) * softmax_scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            seen = distance >= 0
            if window_size[0] >= 0:
                seen &= distance <= window_size[0]
            assert window_size[1] in (0, -1)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            parts.append((weights @ values.repeat_interleave(groups, 0)).transpose(0, 1).to(q.dtype))
        return torch.cat(parts)


class NotAsked:
    """Triton's kernels, of which nothing may be asked but decoding."""

    chunks = True

    def __init__(self) -> None:
        self.prefilled = 0

    def decode_with_lse(self, query: Tensor, *arguments: object, **options: object) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(query), torch.zeros(0)

    def prefill(self, query: Tensor, *arguments: object, **options: object) -> Tensor:
        self.prefilled += 1
        return torch.zeros_like(query)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flash]:
    installed = Flash()
    monkeypatch.setitem(sys.modules, "flash_attn", installed)
    flash_prefill.load.cache_clear()
    yield installed
    flash_prefill.load.cache_clear()


def attend(
    counts: list[int], ends: list[int], *, dtype: torch.dtype = torch.bfloat16, window: int | None = None,
    softcap: float | None = None, value_dim: int = 32, **more: Any,
) -> tuple[Tensor, Tensor, NotAsked]:  # fmt: skip
    """What the step gives, what plain torch gives, and what Triton was asked."""
    generator = torch.Generator().manual_seed(0)
    width = -(-max(ends) // BLOCK)
    tables = np.arange(len(ends) * width).reshape(-1, width)
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
    rows = PagedRows(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), positions, tables, BLOCK)
    keys = torch.randn(tables.size, BLOCK, 2, 32, generator=generator).to(dtype)
    values = torch.randn(tables.size, BLOCK, 2, value_dim, generator=generator).to(dtype)
    query = torch.randn(len(positions), 6, 32, generator=generator).to(dtype)
    slots = torch.from_numpy(rows.slots)
    given = query, keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots], keys, values
    plain, kernels = TorchPagedAttention(rows, torch.device("cpu"), Workspace()), NotAsked()
    ours = TritonPagedAttention(kernels, rows, torch.device("cpu"), plain)  # type: ignore[arg-type]
    options = {"scaling": 0.2, "window": window, "softcap": softcap, **more}
    return ours(*given, **options), plain(*given, **options), kernels


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_whole_prompts_are_prefilled_by_it(flash: Flash, window: int | None, softcap: float | None) -> None:
    ours, plain, kernels = attend([1, 1, 40, 5, 33], [9, 50, 40, 5, 33], window=window, softcap=softcap)
    assert (flash.calls, kernels.prefilled) == (1, 0)
    torch.testing.assert_close(ours[2:], plain[2:], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("counts", "ends", "options"),
    [
        ([9, 5], [9, 6], {}),
        ([9], [9], {"dtype": torch.float32}),
        ([9], [9], {"value_dim": 16}),
        ([9], [9], {"chunk": 4}),
        ([9], [9], {"sinks": torch.zeros(6)}),
    ],
    ids=["a chunk with a past", "32 bits", "two head sizes", "chunks", "sinks"],
)
def test_what_it_cannot_do_is_not_asked_of_it(
    flash: Flash, counts: list[int], ends: list[int], options: dict[str, object]
) -> None:
    _, _, kernels = attend(counts, ends, **options)  # type: ignore[arg-type]
    assert (flash.calls, kernels.prefilled) == (0, 1)


def test_where_it_is_not_installed_triton_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash_prefill.load.cache_clear()
    assert flash_prefill.load() is None
    assert attend([9], [9])[2].prefilled == 1
    flash_prefill.load.cache_clear()


def test_where_it_does_not_load_that_is_said_and_triton_prefills(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    flash_prefill.load.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert flash_prefill.load() is None
        assert attend([9], [9])[2].prefilled == 1
    flash_prefill.load.cache_clear()
    assert len(caplog.records) == 1
    assert "does not load" in caplog.text
