"""Tests of paged attention on a CPU, in C++ and in plain torch: against float64, and batch invariance."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.kernels import cpu_library, torch_paged
from rollout.engine.kernels.cpu_attention import CpuPagedAttention, serves
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention
from tests.engine.kernels.paged_step import Step, random_step

pytestmark = pytest.mark.skipif(cpu_library.load() is None, reason="no C++ compiler")

kernels = pytest.mark.parametrize("kernel", [False, True], ids=["torch", "C++"])
SINKS = torch.tensor([-30.0, -1, 0, 1, 5, 30])


def library() -> ctypes.CDLL:
    loaded = cpu_library.load()
    assert loaded is not None
    return loaded


def run(step: Step, kernel: bool = True, **rules: Any) -> Tensor:
    """Attend with the C++ kernel, or with plain torch."""
    plain = TorchPagedAttention(step.rows, torch.device("cpu"))
    attend = CpuPagedAttention(library(), step.rows, plain) if kernel else plain
    return attend(step.query, step.keys, step.values, **{"scaling": 0.3, **rules})


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 3e-2
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


RULES = [
    {}, {"window": 1}, {"window": 5}, {"softcap": 1.5}, {"window": 5, "softcap": 1.5}, {"sunk": True},
    {"window": 5, "sunk": True}, {"softcap": 1.5, "sunk": True}, {"window": 3, "softcap": 2.0, "sunk": True},
]  # fmt: skip
SIZES = [(3, 3), (3, 3), (3, 0), (0, 1), (0, 4), (1, 0), (1, 1)]
"""Rows that decode and rows of chunks."""


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_random_steps_equal_dense_attention(rules: dict[str, Any], dtype: torch.dtype, kernel: bool) -> None:
    for seed, (decodes, chunks) in enumerate(SIZES):
        step = random_step(seed, decodes=decodes, chunks=chunks, group=(1, 2, 4)[seed % 3], dtype=dtype)
        own = {name: value for name, value in rules.items() if name != "sunk"}
        own["sinks"] = torch.linspace(-2, 4, step.query.shape[1]).to(dtype) if "sunk" in rules else None
        actual = run(step, kernel, **own)
        assert actual.dtype == dtype
        assert_close(actual, step.expected(0.3, **own))


def test_many_decoding_rows_are_cut_into_tiles_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_paged, "MAX_TILE_SCORES", 30)
    step = random_step(1, decodes=6, chunks=0)
    assert len(torch_paged._tiles(step.rows, torch.device("cpu"))) > 1
    assert_close(run(step, kernel=False), step.expected(0.3))


@pytest.mark.parametrize(("dim", "value_dim"), [(12, 12), (20, 20), (24, 8), (16, 32), (64, 64), (256, 256)])
@pytest.mark.parametrize("group", [1, 3, 5, 8, 95, 96])
def test_any_head_size_and_any_number_of_heads_to_a_group(dim: int, value_dim: int, group: int) -> None:
    step = random_step(group, group=group, dim=dim, value_dim=value_dim)
    for kernel in (False, True):
        assert_close(run(step, kernel, scaling=dim**-0.5), step.expected(dim**-0.5))


@kernels
def test_nan_of_one_sequence_stays_in_it(kernel: bool) -> None:
    for seed in range(6):
        step = random_step(seed)
        sick = step.rows.tables[4, : -(-step.rows.ends[4] // step.rows.block_size)]
        step.keys[sick], step.values[sick] = torch.nan, torch.nan
        span = step.span(4)
        step.query[span] = torch.nan
        actual, expected = run(step, kernel), step.expected(0.3)
        healthy = torch.ones(len(actual), dtype=torch.bool)
        healthy[span] = False
        assert_close(actual[healthy], expected[healthy])
        assert actual[span].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_that_no_query_sees_may_hold_anything(dtype: torch.dtype) -> None:
    """Values are multiplied in pairs of positions: an odd end or beginning has a partner that does not count."""
    step = Step([1], [21], seed=3, dim=24, dtype=dtype)
    expected = step.expected(0.3, window=4)
    for cache in (step.keys, step.values):
        cache[step.rows.tables[0, 1], [0, *range(5, 16)]] = torch.nan
    assert_close(run(step, window=4), expected)


def test_bfloat16_rounds_the_weights_and_the_result_once() -> None:
    ends = [*range(30, 300, 30), 200]
    step = Step([1] * 9 + [30], ends, seed=1, group=3, kv_heads=4, dim=64, dtype=torch.bfloat16)
    ours, exact = run(step, scaling=0.125).double(), step.expected(scaling=0.125)
    step.values.abs_()
    by_weights = 2**-9 * step.expected(scaling=0.125)
    assert ((ours - exact).abs() <= by_weights + 2**-9 * (exact.abs() + by_weights) + 1e-5).all()
    assert (ours - exact).square().mean() < 2 * (exact.bfloat16() - exact).square().mean()


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_large_scores_do_not_overflow(softcap: float | None) -> None:
    step = Step([1, 20, 1], [100, 70, 40], dim=32)
    step.query[::2].mul_(1e3)
    rules = {"scaling": 1.0, "softcap": softcap}
    torch.testing.assert_close(run(step, **rules).double(), step.expected(**rules), atol=1e-4, rtol=1e-4)


def samples(shared: int, tails: list[int], **shape: Any) -> Step:
    """Rows that decode, whose first `shared` blocks are the same."""
    return Step([1] * len(tails), [shared * 16 + tail for tail in tails], dim=32, **shape).share(shared)


TAILS = [1, 16, 70, 3, 33, 17, 200, 5]
MANY = [1] * 40 + [17, 64, 100], [10 * n + 3 for n in range(40)] + [17, 300, 101]


@pytest.mark.parametrize(("make", "sinks"), [
    (lambda: Step(*MANY, seed=4, group=3, kv_heads=4, dim=32), None),
    *((lambda shared=shared, group=group: samples(shared, TAILS * 5, group=group), None)
      for shared in (4, 7, 9) for group in (1, 3, 4)),
    (lambda: samples(8, TAILS, group=3), SINKS),
    (lambda: Step([90, 1, 1], [200, 64, 49], group=3, dim=32), SINKS),
])  # fmt: skip
def test_a_sequence_gets_the_same_bits_alone_and_among_others(make: Any, sinks: Tensor | None) -> None:
    """Also samples that read their prompt together."""
    step = make()
    together = run(step, sinks=sinks)
    torch.testing.assert_close(together.double(), step.expected(0.3, sinks=sinks), atol=2e-6, rtol=2e-6)
    for row in range(len(step.rows)):
        assert torch.equal(run(step.only(row), sinks=sinks), together[step.span(row)])


def test_a_position_gets_the_same_bits_decoded_and_in_a_chunk() -> None:
    step = Step([90], [200], dim=32)
    last = step.only(0)
    last.query = step.query[-1:]
    last.rows = PagedRows(np.array([0, 1]), step.rows.positions[-1:].copy(), step.rows.tables, 16)
    assert torch.equal(run(last)[0], run(step)[-1])


def tasks(step: Step, **rules: Any) -> int:
    attend = CpuPagedAttention(library(), step.rows, TorchPagedAttention(step.rows, torch.device("cpu")))
    attend(step.query, step.keys, step.values, scaling=0.2, **rules)
    return attend.tasks


def test_what_neighbours_share_is_read_once_for_all_of_them() -> None:
    one = samples(8, [1, 16, 70, 3, 33, 17, 5, 9], group=3)
    assert tasks(one) == 1
    assert tasks(one, sinks=SINKS) == 1
    assert tasks(one, window=50) == 8
    assert tasks(samples(0, [140, 150, 160], group=3)) == 3
    assert tasks(samples(3, [5, 9], group=3)) == 2, "less than one tile of keys in common"
    two_groups = samples(4, [100] * 6, group=3).share(9, slice(0, 3)).share(9, slice(3, 6))
    assert tasks(two_groups) == 2, "each with its group, not all with the system prompt"
    assert tasks(samples(8, [1] * 65, group=3)) == 3, "at most 96 query heads of one KV head to a task"


def test_shapes_it_does_not_know_are_left_to_torch() -> None:
    keys = torch.zeros(2, 16, 1, 16)
    assert serves(torch.zeros(1, 96, 16), keys, keys)
    assert not serves(torch.zeros(1, 97, 16), keys, keys)
    assert not serves(torch.zeros(1, 4, 16, dtype=torch.float16), keys.half(), keys.half())
    assert not serves(torch.zeros(1, 4, 16, dtype=torch.bfloat16), keys, keys)
    assert not serves(torch.zeros(4, 2, 16).transpose(0, 1), keys, keys)
    step = Step([1, 5], [30, 20], dtype=torch.float16)
    torch.testing.assert_close(run(step).double(), step.expected(0.3), atol=2e-3, rtol=2e-3)


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
