"""Random steps of paged attention, and attention over them in float64, one query at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows

NO_BLOCK = 10**6
"""Stands behind the blocks of a row in its table. The block does not exist, so a read of it fails."""


class Step:
    """Rows that compute their last positions, over a random cache; blocks without an owner hold NaN.

    Args:
        counts: positions that each row computes.
        ends: length of each row; 0, with a count of 1, is a row of padding.
        strict: slots behind a row's end and before its window hold NaN as well, and heads are apart in memory, so that no
            stride can be taken for another. Plain torch and the C++ kernel require neither.
        window: that of the test, for `strict`.
    """

    def __init__(
        self,
        counts: Sequence[int],
        ends: Sequence[int],
        *,
        seed: int = 0,
        group: int = 2,
        kv_heads: int = 2,
        dim: int = 16,
        value_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        strict: bool = False,
        window: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.group = group
        used = [-(-end // block_size) for end in ends]
        free = torch.randperm(sum(used) + 3, generator=generator).tolist()
        tables = np.full((len(ends), max(used) + 1), NO_BLOCK)
        room = 3 * strict
        caches = [
            torch.full((len(free), block_size, kv_heads + strict, size + room), torch.nan, dtype=dtype)
            for size in (dim, value_dim or dim)
        ]
        self.keys, self.values = (cache[:, :, :kv_heads, : cache.shape[3] - room] for cache in caches)
        for row, (count, end, blocks) in enumerate(zip(counts, ends, used, strict=True)):
            tables[row, :blocks] = [free.pop() for _ in range(blocks)]
            first = max(0, end - count + 1 - window) if window and strict else 0
            positions = np.arange(first, end if strict else blocks * block_size)
            for cache in (self.keys, self.values):
                at = torch.from_numpy(tables[row, positions // block_size]), torch.from_numpy(positions % block_size)
                cache[at] = normal(len(positions), *cache.shape[2:])
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
        self.rows = PagedRows(offsets, positions, tables, block_size)
        self.query = normal(len(positions), kv_heads * group, dim)
        if strict:
            # A module makes such a view, with heads first.
            self.query = self.query.transpose(0, 1).contiguous().transpose(0, 1)

    def share(self, blocks: int, rows: slice = slice(None)) -> Step:
        """Let these rows begin with the first one's blocks."""
        self.rows.tables[rows, :blocks] = self.rows.tables[rows, :blocks][0]
        return self

    def span(self, row: int) -> slice:
        """Places of a row's positions in the query."""
        return slice(int(self.rows.offsets[row]), int(self.rows.offsets[row + 1]))

    def only(self, row: int) -> Step:
        """The same row alone."""
        alone = copy.copy(self)
        alone.rows, chosen = self.rows.select(np.array([row]))
        alone.query = self.query[chosen]
        return alone

    def expected(
        self, scaling: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """[P, H, Dv] float64; zeros for padding."""
        rows, size = self.rows, self.rows.block_size
        out = torch.zeros(*self.query.shape[:2], self.values.shape[3], dtype=torch.float64)
        for place, (row, position) in enumerate(
            zip(np.repeat(np.arange(len(rows)), rows.counts), rows.positions, strict=True)
        ):
            seen = np.arange(max(0, position + 1 - window) if window else 0, position + 1)
            at = torch.from_numpy(rows.tables[row, seen // size]), torch.from_numpy(seen % size)
            keys, values = (cache[at].double().repeat_interleave(self.group, 1) for cache in (self.keys, self.values))
            scores = torch.einsum("hd,shd->hs", self.query[place].double(), keys) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            if len(seen):
                out[place] = torch.einsum("hs,shd->hd", scores.softmax(-1)[:, : len(seen)], values)
        return out


def random_step(seed: int, *, decodes: int = 3, chunks: int = 3, **shape: object) -> Step:
    """Rows that decode, and chunks of prompts, some of which begin at 0, with a random block size."""
    random = np.random.default_rng(seed)
    block_size = int(random.choice([1, 3, 4, 8]))
    counts = [1] * decodes + random.integers(1, 3 * block_size + 2, chunks).tolist()
    starts = [int(random.integers(0, 6 * block_size - count + 1)) * int(random.random() < 0.7) for count in counts]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    return Step(counts, ends, seed=seed, block_size=block_size, kv_heads=int(random.choice([1, 2])), **shape)  # type: ignore[arg-type]
