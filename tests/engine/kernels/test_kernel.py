"""Tests of paged attention against a plain float64 reference, over random steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.kernels import cpu_library
from rollout.engine.kernels.cpu_attention import CpuPagedAttention
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import PagedAttention, Tile, TorchPagedAttention, Workspace, attend_tiles

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
        # The step's own K and V are in the cache already.
        own = [self._slots(row)[row.start :] for row in self.rows]
        self.key = self.keys.flatten(0, 1)[np.concatenate(own)]
        self.value = self.values.flatten(0, 1)[np.concatenate(own)]

    def _slots(self, row: Row) -> np.ndarray:
        positions = np.arange(row.start + row.count)
        return np.array(row.blocks)[positions // self.block_size] * self.block_size + positions % self.block_size

    def tile(self, members: list[int], *, plain: bool) -> Tile:
        """Rows `members` as one rectangle; `plain`: without the shortcuts for leading and fresh rows."""
        rows = [self.rows[member] for member in members]
        length, width = max(row.count for row in rows), max(len(row.blocks) for row in rows)
        index, positions, blocks, valid = [], [], [], []
        for row, member in zip(rows, members, strict=True):
            inside = np.arange(length) < row.count
            index.append(np.where(inside, self.offsets[member] + np.arange(length), 0))
            positions.append(np.where(inside, row.start + np.arange(length), 0))
            blocks.append(row.blocks + row.blocks[:1] * (width - len(row.blocks)))
            valid.append(inside)
        full = bool(np.concatenate(valid).all())
        leading = full and members == list(range(len(members)))
        return Tile(
            query_index=None if leading and not plain else torch.from_numpy(np.concatenate(index)),
            valid=None if full else torch.from_numpy(np.flatnonzero(np.concatenate(valid))),
            positions=torch.from_numpy(np.stack(positions)),
            blocks=torch.from_numpy(np.array(blocks).reshape(-1)),
            fresh=len(rows) == 1 and rows[0].start == 0 and not plain,
        )

    def tiles(self, decodes: int, *, plain: bool) -> list[Tile]:
        """The decoding rows together, the others in groups at random and in any order."""
        chunks = self.random.permutation(np.arange(decodes, len(self.rows))).tolist()
        groups = [list(range(decodes))] if decodes else []
        while chunks:
            size = int(self.random.integers(1, len(chunks) + 1))
            groups.append(chunks[:size])
            chunks = chunks[size:]
        return [self.tile(group, plain=plain) for group in groups]

    def expected(
        self,
        scaling: float,
        window: int | None,
        softcap: float | None,
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

    def attention(self, *, kernel: bool) -> PagedAttention:
        rows = self.paged_rows()
        plain = TorchPagedAttention(rows, torch.device("cpu"), Workspace())
        library = cpu_library.load()
        return plain if library is None or not kernel else CpuPagedAttention(library, rows, plain)

    def run(
        self,
        tiles: list[Tile],
        scaling: float,
        window: int | None,
        softcap: float | None,
        *,
        kernel: bool | None = None,
        **more: Any,
    ) -> Tensor:
        """By plain torch over `tiles`, or (`kernel`) by the C++ kernel or plain torch over tiles of its own choice."""
        given = self.query, self.key, self.value, self.keys, self.values
        if kernel is not None:
            return self.attention(kernel=kernel)(*given, scaling=scaling, window=window, softcap=softcap, **more)
        return attend_tiles(*given, tiles, Workspace(), scaling=scaling, window=window, softcap=softcap, **more)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 3e-2
    assert actual.shape == expected.shape
    assert torch.allclose(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("plain", [False, True], ids=["with shortcuts", "without"])
def test_random_steps_equal_dense_attention(
    groups: int, window: int | None, softcap: float | None, plain: bool
) -> None:
    for seed in range(3):
        step = Step(seed, groups=groups)
        for kernel in (None, False, True):
            actual = step.run(step.tiles(3, plain=plain), 0.3, window, softcap, kernel=kernel)
            assert_close(actual, step.expected(0.3, window, softcap))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 1.5), (3, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_equal_dense_attention(
    groups: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    for seed in range(4):
        step = Step(seed, groups=groups, dtype=dtype)
        sinks = torch.linspace(-2, 4, step.query.shape[1]).to(dtype)
        expected = step.expected(0.3, window, softcap, sinks)
        assert not torch.allclose(expected, step.expected(0.3, window, softcap))
        for kernel in (None, False, True):
            tiles = step.tiles(3, plain=bool(seed % 2))
            actual = step.run(tiles, 0.3, window, softcap, kernel=kernel, sinks=sinks)
            assert actual.dtype == dtype
            assert_close(actual, expected)


@pytest.mark.parametrize("shape", [(3, 0), (0, 1), (0, 4), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 4])
def test_steps_of_decodes_alone_and_of_prefill_alone(shape: tuple[int, int], window: int | None) -> None:
    decodes, chunks = shape
    for seed in range(6):
        step = Step(seed, groups=2, decodes=decodes, chunks=chunks)
        for kernel in (None, False, True):
            actual = step.run(step.tiles(decodes, plain=False), 0.25, window, None, kernel=kernel)
            assert_close(actual, step.expected(0.25, window, None))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(12, 12), (24, 8), (16, 32), (64, 64), (256, 256)])
@pytest.mark.parametrize("groups", [1, 3, 5, 8])
def test_any_head_size_and_any_number_of_heads_to_a_group(head_dim: int, value_dim: int, groups: int) -> None:
    step = Step(groups, groups=groups, head_dim=head_dim, value_dim=value_dim)
    scaling = head_dim**-0.5
    for kernel in (None, False, True):
        actual = step.run(step.tiles(3, plain=False), scaling, None, None, kernel=kernel)
        assert_close(actual, step.expected(scaling, None, None))


def test_nan_of_one_sequence_stays_in_it() -> None:
    for seed in range(6):
        step = Step(seed, groups=2)
        sick = step.rows[4]
        step.keys[sick.blocks], step.values[sick.blocks] = torch.nan, torch.nan
        span = slice(int(step.offsets[4]), int(step.offsets[5]))
        step.key[span], step.value[span], step.query[span] = torch.nan, torch.nan, torch.nan
        for kernel in (None, False, True):
            actual = step.run(step.tiles(3, plain=False), 0.3, None, None, kernel=kernel)
            expected = step.expected(0.3, None, None)
            healthy = torch.ones(len(actual), dtype=torch.bool)
            healthy[span] = False
            assert_close(actual[healthy], expected[healthy])
            assert actual[span].isnan().all()


def test_a_workspace_gives_the_same_whatever_it_held_before() -> None:
    workspace = Workspace()
    results = []
    for dirt in (0, 7, 3):
        other = Step(dirt, groups=1, head_dim=32)
        attend_tiles(
            other.query, other.key, other.value, other.keys, other.values, other.tiles(3, plain=True), workspace,
            scaling=0.3,
        )  # fmt: skip
        step = Step(5, groups=2)
        tiles = [step.tile([index], plain=True) for index in range(6)]
        results.append(
            attend_tiles(step.query, step.key, step.value, step.keys, step.values, tiles, workspace, scaling=0.3)
        )
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
