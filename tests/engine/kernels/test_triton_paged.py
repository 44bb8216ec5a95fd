"""Tests of the Triton kernels against float64: in Triton's interpreter on a CPU, and on a GPU.

The interpreter is chosen by an environment variable that Triton reads when it is first imported, so that it needs a process
of its own: tests/engine/test_in_tritons_interpreter.py starts pytest on this file again, with the variable set. There the
tests below run on the CPU; without it they are marked `gpu`.
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

from rollout.engine.kernels import decode_parts, triton_paged, triton_trial
from rollout.engine.kernels.decode_parts import SPLIT, DecodeParts
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention
from rollout.engine.kernels.triton_attention import TritonPagedAttention, num_parts
from rollout.engine.kernels.triton_paged import TritonPaged, load, serves
from rollout.engine.kernels.triton_trial import Heads, tried_out
from tests.engine.kernels.paged_step import Step
from tests.interpreter import INTERPRETED, combined, on_the_device

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16]
if not INTERPRETED:  # It multiplies the bits of bfloat16 as integers.
    DTYPES.append(torch.bfloat16)
SHAPES = [(1, 2, 16, 8), (2, 1, 64, 16), (3, 2, 80, 16), (5, 1, 96, 8), (5, 2, 64, 1), (8, 1, 128, 16), (1, 1, 256, 4),
          (40, 1, 16, 1), (2, 1, 512, 16)]  # fmt: skip
"""Query heads of a KV head, KV heads, head size, block size."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""In 16 bits: of the result, and of the weights that multiply V."""


@pytest.fixture(scope="module")
def paged() -> TritonPaged:
    kernels = load(DEVICE)
    assert kernels is not None
    return kernels


def attend(
    paged: TritonPaged, step: Step, rows: PagedRows | None = None, query: Tensor | None = None, **rules: Any
) -> Tensor:
    """Attend as an engine's step does, with `rows` and `query` instead of the step's own."""
    attention = TritonPagedAttention(paged, rows or step.rows, DEVICE, TorchPagedAttention(step.rows, DEVICE))
    given = [tensor.to(DEVICE) for tensor in (step.query if query is None else query, step.keys, step.values)]
    return attention(*given, **{"scaling": 0.3, **rules})


def check(paged: TritonPaged, step: Step, tolerance: float | None = None, **rules: Any) -> None:
    out = attend(paged, step, **rules)
    assert out.dtype == step.query.dtype
    tolerance = tolerance or TOLERANCE[out.dtype]
    exact = step.expected(**{"scaling": 0.3, **rules})
    torch.testing.assert_close(out.cpu().double(), exact, atol=tolerance, rtol=tolerance)


def strict(counts: list[int], ends: list[int], **options: Any) -> Step:
    return Step(counts, ends, strict=True, **options)


@on_the_device
@pytest.mark.parametrize(("shape", "dtype"), combined(SHAPES, DTYPES))
def test_every_head_size_and_grouping_equals_float64(paged, shape, dtype):
    group, kv_heads, dim, block_size = shape
    sizes = {"group": group, "kv_heads": kv_heads, "dim": dim, "block_size": block_size, "dtype": dtype}
    # Rows that decode, padding among them, and chunks: of a whole prompt, of one token, and behind other tokens.
    check(paged, strict([1, 1, 1, 1, 19, 1, 6], [1, 38, 0, 65, 19, 22, 46], **sizes), scaling=dim**-0.5)


LAYOUTS = {
    "decodes": ([1] * 6, [1, 20, 21, 64, 331, 0]),
    "chunks": ([45, 20, 1], [45, 150, 4]),
    "both": ([1, 1, 1, 37, 1], [700, 40, 300, 100, 1]),
}
"""Tokens of the step, and lengths of its rows."""
RULES: list[dict[str, Any]] = [
    {}, {"window": 1, "softcap": 2.0}, {"window": 20, "sinks": True}, {"window": 300},
    {"window": 1000, "softcap": 2.0, "sinks": True}, {"softcap": 2.0}, {"window": 50, "softcap": 2.0, "sinks": True},
]  # fmt: skip


@on_the_device
@pytest.mark.parametrize(("layout", "rules"), combined(list(LAYOUTS), RULES))
def test_windows_caps_and_sinks_equal_float64(paged, layout, rules):
    step = strict(*LAYOUTS[layout], group=3, dim=48, value_dim=32, window=rules.get("window"))
    sinks = torch.linspace(-2, 4, step.query.shape[1]) if rules.get("sinks") else None
    out = attend(paged, step, **rules | {"sinks": None if sinks is None else sinks.to(DEVICE)})
    exact = step.expected(0.3, **rules | {"sinks": sinks})
    torch.testing.assert_close(out.cpu().double(), exact, atol=1e-5, rtol=1e-5)


@on_the_device
def test_a_decode_is_right_at_every_edge_of_a_part_and_merges_more_parts_than_it_takes_at_once(paged, monkeypatch):
    split = 64 if INTERPRETED else SPLIT
    monkeypatch.setattr(decode_parts, "SPLIT", split)
    ends = [split - 1, split, split + 1, 2 * split, 2 * split + 1, 9 * split + 6]
    check(paged, strict([1] * 6, ends, kv_heads=1))


@on_the_device
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_large_scores_do_not_overflow(paged, softcap):
    # Scores are thousands: float32 holds them to a thousandth, which is what a weight is off by.
    check(paged, strict([1], [301], kv_heads=1), 1e-2, scaling=300.0, softcap=softcap)


@on_the_device
def test_nan_stays_with_the_sequence_that_has_it(paged):
    step = strict([1] * 3, [300] * 3)
    step.keys[step.rows.tables[1, 2]] = torch.nan
    out = attend(paged, step)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@on_the_device
@pytest.mark.parametrize("dtype", DTYPES[-1:])
def test_a_sequence_gets_the_same_bits_alone_and_among_many(paged, dtype):
    step = strict([1] * 5, [301, 4, 0, 271, 256], dtype=dtype)
    together = attend(paged, step)
    for row in (0, 3, 4):
        assert torch.equal(attend(paged, step.only(row))[0], together[row])


def decode(paged: TritonPaged, step: Step, positions: Tensor, room: int = 0) -> Tensor:
    """Decode as a captured step does, with `room` for parts, whatever the positions are."""
    parts = DecodeParts(positions.to(DEVICE), room or num_parts(step.rows.positions))
    tables = torch.from_numpy(step.rows.tables).int()
    given = (tensor.to(DEVICE) for tensor in (step.query, step.keys, step.values, tables))
    return paged.decode(*given, parts, scaling=0.3)


@on_the_device
def test_bits_depend_neither_on_the_number_of_programs_nor_on_room_in_the_list(paged, monkeypatch):
    monkeypatch.setattr(decode_parts, "SPLIT", 16)
    step = strict([1] * 4, [28, 0, 61, 17])
    positions = torch.from_numpy(step.rows.positions)
    expected = decode(paged, step, positions)
    for room, programs in ((8, 3), (8, 100), (30, 5)):
        monkeypatch.setattr(triton_paged, "_programs", lambda _, count=programs: count)
        assert torch.equal(decode(paged, step, positions, room), expected)


# --- prefill ----------------------------------------------------------------------------------------------------------


@on_the_device
@pytest.mark.parametrize("window", [30] if INTERPRETED else [None, 30])
def test_a_query_gets_the_same_bits_however_the_prompt_is_cut(paged, window):
    step = Step([30, 90], [30, 90], group=3, kv_heads=1)
    tables, query = step.rows.tables, step.query
    whole = attend(paged, step.only(1), window=window)
    # Tiles of 10 tokens here: numpy's matrix product, but no GPU's, rounds a row differently in another place of the matrix.
    for cut in (20, 50) if INTERPRETED else (7, 20, 50):
        first = PagedRows(np.array([0, cut]), np.arange(cut), tables[1:].copy(), 16)
        positions = np.concatenate([np.arange(30), np.arange(cut, 90)])
        rest = PagedRows(np.array([0, 30, 120 - cut]), positions, tables, 16)
        head = attend(paged, step, first, query[30 : 30 + cut], window=window)
        tail = attend(paged, step, rest, torch.cat([query[:30], query[30 + cut :]]), window=window)
        assert torch.equal(torch.cat([head, tail[30:]]), whole)


@on_the_device
def test_prefill_leaves_what_is_behind_the_last_chunk_alone(paged):
    step = strict([10, 2], [10, 2])
    begins, starts = torch.tensor([0, 10, 10]), torch.tensor([0, 0])
    arguments = (step.query, step.keys, step.values, torch.from_numpy(step.rows.tables), begins, starts)
    padded = paged.prefill(*[argument.to(DEVICE) for argument in arguments], scaling=0.3)
    assert padded.shape[0] == 12
    assert torch.equal(padded[:10], attend(paged, step.only(0)))


# --- the cache write --------------------------------------------------------------------------------------------------


@on_the_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "dim", "value_dim"), [(3, 80, 96), (1, 128, 64)])
def test_the_write_fills_its_slots_in_the_type_of_the_cache_and_touches_no_other(
    paged, kv_heads, dim, value_dim, dtype
):
    step = strict([1], [0], kv_heads=kv_heads, dim=dim, value_dim=value_dim, dtype=dtype, block_size=4)
    # As the model makes them: heads first.
    key, value = (torch.randn(kv_heads, 5, size).transpose(0, 1) for size in (dim, value_dim))
    if INTERPRETED and dtype == torch.bfloat16:
        # The interpreter cuts float32 off where a GPU rounds it.
        key, value = key.bfloat16(), value.bfloat16()
    index = torch.tensor([9, 0, -1, 6, 3])
    keys, values = step.keys.to(DEVICE), step.values.to(DEVICE)
    paged.write(key.to(DEVICE), value.to(DEVICE), keys, values, index.to(DEVICE))
    for cache, new in ((keys, key), (values, value)):
        expected = torch.full(cache.shape, torch.nan, dtype=dtype).flatten(0, 1)
        expected[index[index >= 0]] = new[index >= 0].to(dtype)
        torch.testing.assert_close(cache.cpu().flatten(0, 1), expected, equal_nan=True, atol=0, rtol=0)


# --- nothing to do, the workspace, and graphs -------------------------------------------------------------------------


@on_the_device
def test_a_step_of_no_rows_launches_nothing(paged):
    step = strict([1], [0])
    keys, values, empty = (tensor.to(DEVICE) for tensor in (step.keys, step.values, step.query[:0]))
    ids, table = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(0, 4, dtype=torch.int32, device=DEVICE)
    assert paged.decode(empty, keys, values, table, DecodeParts(ids, 0), scaling=1.0).shape == (0, 4, 16)
    assert paged.prefill(empty, keys, values, table, torch.zeros_like(ids), ids, scaling=1.0).shape == (0, 4, 16)
    paged.write(keys[0, :0], values[0, :0], keys, values, ids)
    assert keys.isnan().all()


@on_the_device
def test_a_workspace_that_grew_keeps_the_old_one_for_graphs_until_it_is_cleared(paged):
    own, step = TritonPaged(paged._kernels), strict([1] * 3, [20] * 3)
    small = attend(own, step.only(0))
    address = own._buffers[0].data_ptr()
    decode(own, step, torch.from_numpy(step.rows.positions), room=30)
    assert torch.equal(attend(own, step.only(0)), small)
    assert len(own._buffers) > 1
    assert own._buffers[0].data_ptr() == address
    own.clear()
    assert torch.equal(attend(own, step.only(0)), small)


@on_the_device
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_captured_decode_follows_its_buffers(paged):
    step = strict([1] * 3, [301] * 3, dim=64, dtype=torch.float16)
    tables, where = torch.from_numpy(step.rows.tables).int(), torch.from_numpy(step.rows.positions)
    query, keys, values, table, where = (
        tensor.to(DEVICE) for tensor in (step.query, step.keys, step.values, tables, where)
    )

    def run() -> Tensor:
        return paged.decode(query, keys, values, table, DecodeParts(where, 30), scaling=0.2)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for moved in ([280, 300, 290], [275, -1, 290], [-1, 299, 272]):
        where.copy_(torch.tensor(moved))
        query.normal_()
        graph.replay()
        assert torch.equal(captured, run())


@on_the_device
@pytest.mark.parametrize("dtype", DTYPES[-1:])
def test_a_trial_of_these_kernels_passes(dtype, caplog, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(triton_trial, "SPLIT", 64)
    own, kind = load(DEVICE), Heads(6, 2, 24, 40)
    assert own is not None
    assert tried_out(own, [kind], dtype, 7, DEVICE) is own
    assert not caplog.records


# --- without a device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_size_the_kernels_serve_has_a_tile_that_holds_its_group_and_cuts_a_part_evenly(mode, dtype):
    for group in range(1, triton_paged.MAX_GROUP + 1):
        for dim in (16, 80, 128, 256, 512):
            plan = triton_paged._plan(mode, group, dim, dtype)
            assert plan.rows >= group
            assert plan.rows >= 16
            assert SPLIT % plan.span == 0
            if group <= 16:
                # Sums per thread. Twice as many, of float32 at dim 256, left 7 KB of registers per thread in memory.
                sums = plan.rows * triton_paged.power_of_two(dim) // (32 * plan.warps)
                assert sums <= (32 if dtype == torch.float32 else 64)


def test_shapes_it_does_not_know_are_left_to_torch() -> None:
    def asked(heads: int = 4, dim: int = 64, dtype: torch.dtype = torch.float16, **others: int) -> bool:
        keys = torch.zeros(2, 16, others.get("kv_heads", 2), others.get("key_dim", dim), dtype=dtype)
        values = torch.zeros(2, 16, others.get("kv_heads", 2), others.get("value_dim", dim), dtype=dtype)
        return serves(torch.zeros(1, heads, dim, dtype=dtype), keys, values)

    assert asked()
    assert asked(dim=80, value_dim=96, dtype=torch.bfloat16)
    assert not asked(dim=8)
    assert asked(dim=512)
    assert not asked(dim=520)
    assert not asked(value_dim=8)
    assert not asked(key_dim=32)
    assert not asked(heads=5)
    assert not asked(heads=65, kv_heads=1)
    assert not asked(dtype=torch.float64)
    keys = torch.zeros(2, 16, 2, 64)
    assert not serves(torch.zeros(1, 4, 64).half(), keys, keys)
    assert not serves(torch.zeros(1, 64, 4).transpose(1, 2), keys, keys)


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    triton_paged._kernels.cache_clear()
    yield
    triton_paged._kernels.cache_clear()


@pytest.mark.parametrize("installed", [None, ModuleType("triton")], ids=["missing", "broken"])
def test_without_a_working_triton_it_says_so_once_and_torch_serves(installed, nothing_loaded, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", installed)
    with caplog.at_level(logging.WARNING):
        assert load(DEVICE) is None
        assert load(DEVICE) is None
    assert len(caplog.records) == 1
    assert "plain torch" in caplog.text
