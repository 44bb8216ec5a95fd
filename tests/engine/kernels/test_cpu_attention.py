"""Tests of the C++ attention kernel: against float64, batch invariance, and the fallback without a compiler."""

from __future__ import annotations

import ctypes
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.kernels import cpu_library
from rollout.engine.kernels.cpu_attention import CpuPagedAttention, serves
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

BLOCK = 16


@dataclass(frozen=True)
class Case:
    """R sequences of which each computes its last positions."""

    query: Tensor
    keys: Tensor
    values: Tensor
    rows: PagedRows

    def run(self, window: int | None = None, scaling: float = 0.2, softcap: float | None = None, **more: Any) -> Tensor:
        attend = CpuPagedAttention(library(), self.rows, self.plain())
        return attend(*self._arguments(), scaling=scaling, window=window, softcap=softcap, **more)

    def exactly(
        self, window: int | None = None, scaling: float = 0.2, softcap: float | None = None, **more: Any
    ) -> Tensor:
        wide = replace(self, query=self.query.double(), keys=self.keys.double(), values=self.values.double())
        return self.plain()(*wide._arguments(), scaling=scaling, window=window, softcap=softcap, **more)

    def only(self, row: int) -> Case:
        span = slice(int(self.rows.offsets[row]), int(self.rows.offsets[row + 1]))
        rows = PagedRows(
            np.array([0, span.stop - span.start]), self.rows.positions[span].copy(), self.rows.tables[row : row + 1].copy(),
            BLOCK,
        )  # fmt: skip
        return replace(self, query=self.query[span].contiguous(), rows=rows)

    def plain(self) -> TorchPagedAttention:
        return TorchPagedAttention(self.rows, torch.device("cpu"))

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.keys, self.values


def library() -> ctypes.CDLL:
    loaded = cpu_library.load()
    assert loaded is not None
    return loaded


def case(
    counts: list[int], ends: list[int], *, heads: int = 6, kv_heads: int = 2, dim: int = 32, seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(ends) // BLOCK)
    pool = len(counts) * width + 3
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
    tables = torch.randperm(pool, generator=generator)[: len(counts) * width].view(-1, width).numpy().copy()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return Case(
        normal(int(offsets[-1]), heads, dim), normal(pool, BLOCK, kv_heads, dim), normal(pool, BLOCK, kv_heads, dim),
        PagedRows(offsets, positions, tables, BLOCK),
    )  # fmt: skip


def decoding(ends: list[int], **options: int) -> Case:
    return case([1] * len(ends), ends, **options)


def group(shared: int, tails: list[int], **options: int) -> Case:
    """Samples whose first `shared` blocks are the same."""
    made = decoding([shared * BLOCK + tail for tail in tails], **options)
    made.rows.tables[:, :shared] = made.rows.tables[0, :shared]
    return made


def test_bfloat16_is_rounded_once_at_the_end() -> None:
    made = case([1] * 9 + [30], [*range(30, 300, 30), 200], heads=12, kv_heads=4, dim=64, seed=1, dtype=torch.bfloat16)
    ours, exact = made.run(scaling=0.125), made.exactly(scaling=0.125)
    torch.testing.assert_close(ours.float(), exact.float(), atol=2e-3, rtol=2**-8)
    assert (ours == exact.bfloat16()).float().mean() > 0.98


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_large_scores_do_not_overflow(softcap: float | None) -> None:
    large = case([1, 20, 1], [100, 70, 40])
    large.query[::2].mul_(1e3)
    ours, exact = (run(scaling=1.0, softcap=softcap) for run in (large.run, large.exactly))
    torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-4)


def test_a_sequence_gets_the_same_bits_alone_and_among_many() -> None:
    made = case(
        [1] * 40 + [17, 64, 100], [10 * n + 3 for n in range(40)] + [17, 300, 101], heads=12, kv_heads=4, seed=4
    )
    together = made.run()
    for row in (0, 17, 39, 40, 41, 42):
        span = slice(int(made.rows.offsets[row]), int(made.rows.offsets[row + 1]))
        assert torch.equal(made.only(row).run(), together[span])


def test_a_position_gets_the_same_bits_decoded_and_in_a_chunk() -> None:
    chunk = case([90], [200])
    decoded = Case(chunk.query[-1:].contiguous(), chunk.keys, chunk.values, PagedRows(
        np.array([0, 1]), chunk.rows.positions[-1:].copy(), chunk.rows.tables, BLOCK))  # fmt: skip
    assert torch.equal(decoded.run()[0], chunk.run()[-1])


@pytest.mark.parametrize("heads", [2, 6, 8])
@pytest.mark.parametrize("shared", [4, 7, 9])
def test_samples_that_read_their_prompt_once_get_the_bits_they_get_alone(shared: int, heads: int) -> None:
    made = group(shared, [1, 16, 70, 3, 33, 17, 200, 5] * 5, heads=heads)
    together = made.run()
    for row in range(len(made.rows)):
        assert torch.equal(made.only(row).run()[0], together[row])
    torch.testing.assert_close(together.double(), made.exactly(), atol=2e-6, rtol=2e-6)


def test_sinks_keep_the_bits_that_a_row_gets_alone() -> None:
    more = {"sinks": torch.tensor([-30.0, -1, 0, 1, 5, 30])}
    made = group(8, [1, 16, 70, 3, 33, 17, 200, 5], heads=6)
    assert tasks(made, **more) == 1
    for each in (made, case([90, 1, 1], [200, 64, 49], heads=6)):
        together = each.run(**more)
        torch.testing.assert_close(together.double(), each.exactly(**more), atol=2e-6, rtol=2e-6)
        for row in range(len(each.rows)):
            span = slice(int(each.rows.offsets[row]), int(each.rows.offsets[row + 1]))
            assert torch.equal(each.only(row).run(**more), together[span])


def tasks(made: Case, **rules: Any) -> int:
    attend = CpuPagedAttention(library(), made.rows, made.plain())
    attend(*made._arguments(), scaling=0.2, **rules)
    return attend.tasks


def test_what_neighbours_share_is_read_once_for_all_of_them() -> None:
    samples = group(8, [1, 16, 70, 3, 33, 17, 5, 9])
    assert tasks(samples) == 1
    assert tasks(samples, window=50) == 8
    assert tasks(decoding([140, 150, 160])) == 3
    assert tasks(group(3, [5, 9])) == 2, "less than one tile of keys in common"
    two_groups = group(4, [100] * 6)
    for first in (0, 3):
        two_groups.rows.tables[first : first + 3, :9] = two_groups.rows.tables[first, :9]
    assert tasks(two_groups) == 2, "each with its group, not all with the system prompt"
    assert tasks(group(8, [1] * 50)) == 3, "at most 64 query heads of one KV head to a task"


def test_shapes_it_does_not_know_are_left_to_torch() -> None:
    keys = torch.zeros(2, BLOCK, 1, 16)
    assert serves(torch.zeros(1, 64, 16), keys, keys)
    assert not serves(torch.zeros(1, 65, 16), keys, keys)
    assert not serves(torch.zeros(1, 4, 16, dtype=torch.float16), keys.half(), keys.half())
    assert not serves(torch.zeros(1, 4, 16, dtype=torch.bfloat16), keys, keys)
    assert not serves(torch.zeros(4, 2, 16).transpose(0, 1), keys, keys)
    made = case([1, 5], [30, 20])
    half = replace(made, query=made.query.half(), keys=made.keys.half(), values=made.values.half())
    torch.testing.assert_close(half.run().double(), half.exactly(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_it_says_so_once_and_torch_serves(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library.status.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert cpu_library.load() is None
            assert cpu_library.load() is None
        assert len(caplog.records) == 1
        assert "g++" in caplog.text
    finally:
        cpu_library.status.cache_clear()
