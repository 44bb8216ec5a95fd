"""Tests that what differs between steps does not select another compiled kernel, on a device that is not there.

Triton compiles a kernel for the types of its arguments, for numbers that are 1 or that 16 divides, and for addresses that 16
divides. A kernel that is compiled within a step holds it up for a second, and in a capture it could not be loaded.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.graphs.decode_step import DecodeState
from rollout.engine.kernels import triton_attention, triton_paged
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention
from rollout.engine.kernels.triton_attention import TritonPagedAttention
from rollout.engine.kernels.triton_paged import TritonPaged
from rollout.engine.memory.buffers import packed
from tests.engine.kernels.test_kernels_compiled import Driver

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing"),
]

CPU, BF16 = torch.device("cpu"), torch.bfloat16
HEADS, KV_HEADS, DIM, BLOCK, COLUMNS = 4, 2, 16, 16, 64


@contextmanager
def recorded() -> Iterator[dict[str, set[str]]]:
    """Compiled kernels that launches in this block ask for, by name; the launches do nothing."""
    from triton import knobs
    from triton.runtime import driver

    asked: dict[str, set[str]] = defaultdict(set)

    def ask(*, key: str, fn: Any, **_: Any) -> bool:
        asked[fn.name].add(key)
        return True  # Not to be compiled.

    before, hook = driver._active, knobs.runtime.jit_cache_hook
    driver.set_active(Driver(90))
    knobs.runtime.jit_cache_hook = ask
    try:
        yield asked
    finally:
        driver._active, knobs.runtime.jit_cache_hook = before, hook


def variants(asked: dict[str, set[str]]) -> dict[str, int]:
    return {name: len(keys) for name, keys in asked.items()}


def pool() -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.zeros(2, 8, BLOCK, KV_HEADS, DIM, dtype=BF16)
    return keys, values


def of_heads(count: int, heads: int) -> torch.Tensor:
    """[count, heads, D], as a module makes it: a view of heads first."""
    return torch.zeros(heads, count, DIM, dtype=BF16).transpose(0, 1)


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> TritonPaged:
    found = triton_paged._kernels.__wrapped__(CPU)
    assert found is not None
    return TritonPaged(found)


def eager_step(paged: TritonPaged, counts: Sequence[int], ends: Sequence[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
    width = -(-max(ends) // BLOCK)
    rows = PagedRows(offsets, positions, np.arange(len(counts) * width).reshape(-1, width), BLOCK)
    keys, values = pool()
    attention = TritonPagedAttention(paged, rows, CPU, TorchPagedAttention(rows, CPU))
    query, own = of_heads(offsets[-1], HEADS), of_heads(offsets[-1], KV_HEADS)
    paged.write(own, own, keys, values, torch.zeros(offsets[-1], dtype=torch.int64))
    attention(query, keys, values, scaling=0.1, window=None)


def uploaded(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Upload arrays as `upload_together` does for a GPU."""
    flat, begins = packed(arrays)
    whole = torch.from_numpy(flat)
    return [whole[begin : begin + each.size].view(each.shape) for each, begin in zip(arrays, begins, strict=True)]


def test_eager_steps_of_any_rows_launch_the_same_attention(paged, monkeypatch) -> None:
    monkeypatch.setattr(triton_attention, "upload_together", uploaded)
    with recorded() as asked:
        eager_step(paged, [1], [5])
        eager_step(paged, [1, 1, 7, 16], [40, 700, 90, 16])
        assert variants(asked) == {"write": 1, "attend_parts": 1, "merge": 1, "attend_chunks": 1}
        for counts, ends in (([1] * 16, [300] * 16), ([1] * 3, [1] * 3), ([1] * 17, [9] * 17)):
            eager_step(paged, counts, ends)
        eager_step(paged, [16], [16])
        eager_step(paged, [1, 17, 1], [16, 17, 600])
        assert variants(asked) == {"write": 1, "attend_parts": 1, "merge": 1, "attend_chunks": 1}


def test_captured_steps_of_any_size_launch_the_same_attention(paged) -> None:
    keys, values = pool()
    state = DecodeState(32, COLUMNS, BLOCK, CPU)
    with recorded() as asked:
        for count, capacity in ((1, 16), (2, 16), (16, 1000), (24, 7), (32, 1)):
            inputs = state.inputs(count, capacity)
            own = of_heads(count, KV_HEADS)
            paged.write(own, own, keys, values, inputs.slots)
            paged.decode(of_heads(count, HEADS), keys, values, inputs.tables, inputs.parts, scaling=0.1)
    assert variants(asked) == {"write": 1, "attend_parts": 1, "merge": 1}
