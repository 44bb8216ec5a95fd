"""Tests of paged attention against a plain float64 reference, over random steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.kernels import cpu_library, torch_paged
from rollout.engine.kernels.cpu_attention import CpuPagedAttention
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention

BLOCKS = 40


@dataclass
class Row:
    """One sequence of a step: it computes positions `start` to `start + count - 1`."""

    start: int
    count: int
    blocks: list[int]


class Step:
    """Random rows over a random cache; blocks that belong to nobody hold NaN."""

    def __init__(
        self,
        seed: int,
        *,
        groups: int,
        head_dim: int = 16,
        value_dim: int | None = None,
        decodes: int = 3,
        chunks: int = 3,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.block_size = int(self.random.choice([1, 3, 4, 8]))
        self.groups = groups
        self.kv_heads = int(self.random.choice([1, 2]))
        free = self.random.permutation(BLOCKS).tolist()
        longest = 6 * self.block_size
        self.rows: list[Row] = []
        for index in range(decodes + chunks):
            count = 1 if index < decodes else int(self.random.integers(1, longest // 2 + 2))
            start = int(self.random.integers(0, longest - count + 1)) if self.random.random() < 0.7 else 0
            used = -(-(start + count) // self.block_size)
            self.rows.append(Row(start, count, [free.pop() for _ in range(min(used, len(free)))]))
            assert len(self.rows[-1].blocks) == used
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        value_dim = head_dim if value_dim is None else value_dim
        self.keys = normal(BLOCKS, self.block_size, self.kv_heads, head_dim)
        self.values = normal(BLOCKS, self.block_size, self.kv_heads, value_dim)
        nobodys = torch.tensor(free, dtype=torch.int64)
        self.keys[nobodys], self.values[nobodys] = torch.nan, torch.nan
        total = sum(row.count for row in self.rows)
        self.query = normal(total, self.kv_heads * groups, head_dim)
        self.offsets = np.concatenate([[0], np.cumsum([row.count for row in self.rows])])

    def _slots(self, row: Row) -> np.ndarray:
        positions = np.arange(row.start + row.count)
        return np.array(row.blocks)[positions // self.block_size] * self.block_size + positions % self.block_size

    def expected(
        self,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[P, H, Dv] float64, one query at a time."""
        out = []
        for row, offset in zip(self.rows, self.offsets, strict=False):
            slots = self._slots(row)
            for step in range(row.count):
                position = row.start + step
                first = max(0, position + 1 - window) if window else 0
                seen = slots[first : position + 1]
                keys = self.keys.flatten(0, 1)[seen].double().repeat_interleave(self.groups, 1)
                values = self.values.flatten(0, 1)[seen].double().repeat_interleave(self.groups, 1)
                scores = torch.einsum("hd,shd->hs", self.query[offset + step].double(), keys) * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
                out.append(torch.einsum("hs,shd->hd", scores.softmax(-1)[:, : len(seen)], values))
        return torch.stack(out)

    def paged_rows(self) -> PagedRows:
        width = max(len(row.blocks) for row in self.rows)
        # Whatever stands behind a sequence's blocks is not read: an id that does not exist would show it.
        tables = np.array([row.blocks + [10**9] * (width - len(row.blocks)) for row in self.rows])
        positions = np.concatenate([np.arange(row.start, row.start + row.count) for row in self.rows])
        return PagedRows(self.offsets.astype(np.int64), positions, tables, self.block_size)

    def run(self, *, kernel: bool, **rules: Any) -> Tensor:
        """Compute the attention by the C++ kernel, or by plain torch."""
        rows = self.paged_rows()
        plain = TorchPagedAttention(rows, torch.device("cpu"))
        library = cpu_library.load()
        assert library is not None
        attend = CpuPagedAttention(library, rows, plain) if kernel else plain
        return attend(self.query, self.keys, self.values, **rules)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 3e-2
    assert actual.shape == expected.shape
    assert torch.allclose(actual.double(), expected, atol=tolerance, rtol=tolerance)


RULES = [
    {}, {"window": 1}, {"window": 5}, {"softcap": 1.5}, {"window": 5, "softcap": 1.5}, {"sunk": True},
    {"window": 5, "sunk": True}, {"softcap": 1.5, "sunk": True}, {"window": 3, "softcap": 2.0, "sunk": True},
]  # fmt: skip


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "C++"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_random_steps_equal_dense_attention(rules: dict[str, Any], dtype: torch.dtype, kernel: bool) -> None:
    for seed, groups in enumerate((1, 2, 4, 1, 4)):
        step = Step(seed, groups=groups, dtype=dtype)
        own = {name: value for name, value in rules.items() if name != "sunk"}
        sinks = torch.linspace(-2, 4, step.query.shape[1]).to(dtype) if "sunk" in rules else None
        actual = step.run(kernel=kernel, scaling=0.3, sinks=sinks, **own)
        assert actual.dtype == dtype
        assert_close(actual, step.expected(0.3, sinks=sinks, **own))


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "C++"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 1), (0, 4), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 4])
def test_steps_of_decodes_alone_and_of_prefill_alone(shape: tuple[int, int], window: int | None, kernel: bool) -> None:
    decodes, chunks = shape
    for seed in range(6):
        step = Step(seed, groups=2, decodes=decodes, chunks=chunks)
        assert_close(step.run(kernel=kernel, scaling=0.25, window=window), step.expected(0.25, window))


def test_many_decoding_rows_are_cut_into_tiles_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_paged, "MAX_TILE_SCORES", 30)
    step = Step(1, groups=2, decodes=6, chunks=0)
    assert len(torch_paged._tiles(step.paged_rows(), torch.device("cpu"))) > 1
    assert_close(step.run(kernel=False, scaling=0.3), step.expected(0.3))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(12, 12), (20, 20), (24, 8), (16, 32), (64, 64), (256, 256)])
@pytest.mark.parametrize("groups", [1, 3, 5, 8, 63, 64])
def test_any_head_size_and_any_number_of_heads_to_a_group(head_dim: int, value_dim: int, groups: int) -> None:
    step = Step(groups, groups=groups, head_dim=head_dim, value_dim=value_dim)
    for kernel in (False, True):
        assert_close(step.run(kernel=kernel, scaling=head_dim**-0.5), step.expected(head_dim**-0.5))


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "C++"])
def test_nan_of_one_sequence_stays_in_it(kernel: bool) -> None:
    for seed in range(6):
        step = Step(seed, groups=2)
        sick = step.rows[4]
        step.keys[sick.blocks], step.values[sick.blocks] = torch.nan, torch.nan
        span = slice(int(step.offsets[4]), int(step.offsets[5]))
        step.query[span] = torch.nan
        actual, expected = step.run(kernel=kernel, scaling=0.3), step.expected(0.3)
        healthy = torch.ones(len(actual), dtype=torch.bool)
        healthy[span] = False
        assert_close(actual[healthy], expected[healthy])
        assert actual[span].isnan().all()
