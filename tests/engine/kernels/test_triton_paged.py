"""Tests of the Triton kernels against float64: in Triton's interpreter on a CPU, and on a GPU.

The interpreter is chosen by an environment variable that Triton reads when it is first imported, so that it needs a process
of its own: tests/engine/test_in_tritons_interpreter.py starts pytest on this file again, with the variable set. There the
tests below run on the CPU; without it they are marked `gpu`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.engine.kernels import decode_parts, triton_paged, triton_trial
from rollout.engine.kernels.decode_parts import SPLIT, DecodeParts, num_splits
from rollout.engine.kernels.triton_paged import TritonPaged, load, serves
from rollout.engine.kernels.triton_trial import Heads, tried_out
from tests.interpreter import INTERPRETED, combined

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16]
if not INTERPRETED:  # It multiplies the bits of bfloat16 as integers.
    DTYPES.append(torch.bfloat16)
SHAPES = [(1, 2, 16, 8), (2, 1, 64, 16), (3, 2, 80, 16), (5, 1, 96, 8), (5, 2, 64, 1), (8, 1, 128, 16), (1, 1, 256, 4),
          (40, 1, 16, 1), (2, 1, 512, 16)]  # fmt: skip
"""Query heads of a KV head, KV heads, head size, block size."""


def on_the_device(function):
    if INTERPRETED:
        return function
    function = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(function)
    return pytest.mark.gpu(function)


@pytest.fixture(scope="module")
def paged() -> TritonPaged:
    kernels = load(DEVICE)
    assert kernels is not None
    return kernels


class Pool:
    """A paged cache in which every slot holds NaN until a row is given it."""

    def __init__(
        self,
        seed: int,
        *,
        group: int = 2,
        kv_heads: int = 2,
        dim: int = 16,
        value_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 160,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.group, self.kv_heads, self.dim, self.block_size, self.dtype = group, kv_heads, dim, block_size, dtype
        # A view with room between its heads, so that no stride can be taken for another.
        wide = torch.full(
            (2, num_blocks, block_size, kv_heads + 1, max(dim, value_dim or dim) + 3), torch.nan, dtype=dtype
        )
        self.keys = wide[0, :, :, :kv_heads, :dim]
        self.values = wide[1, :, :, :kv_heads, : value_dim or dim]
        self._free = torch.randperm(num_blocks, generator=self.random).tolist()
        self.nobodys = self._free.pop()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).to(self.dtype)

    def query(self, count: int) -> Tensor:
        """[count, H, D], as the model makes it: a view of heads first."""
        return self.normal(self.kv_heads * self.group, count, self.dim).transpose(0, 1)

    def row(self, tokens: int, *, first: int = 0, prefix: Sequence[int] = ()) -> list[int]:
        """Blocks for `tokens` tokens, behind `prefix`; slots before `first` stay NaN."""
        blocks = list(prefix)
        held = len(blocks) * self.block_size
        while len(blocks) * self.block_size < tokens:
            blocks.append(self._free.pop())
        for cache in (self.keys, self.values):
            for position in range(max(first, held), tokens):
                slot = cache[blocks[position // self.block_size], position % self.block_size]
                slot.copy_(self.normal(*slot.shape))
        return blocks

    def table(self, rows: Sequence[Sequence[int]], width: int = 0) -> Tensor:
        """[R, width] int32; behind a row's blocks, the one that belongs to nobody."""
        width = max(width, *(len(row) for row in rows), 1)
        return torch.tensor([[*row, *[self.nobodys] * (width - len(row))] for row in rows], dtype=torch.int32)

    def attention(
        self, query: Tensor, blocks: Sequence[int], position: int, window: int | None, scaling: float, cap: float | None
    ) -> Tensor:
        """[H, Dv] float64, of query [H, D] at `position`."""
        low = 0 if window is None else max(0, position + 1 - window)
        seen = torch.arange(low, position + 1)
        slots = torch.tensor(blocks)[seen // self.block_size], seen % self.block_size
        keys, values = (cache[slots].double().repeat_interleave(self.group, 1) for cache in (self.keys, self.values))
        scores = torch.einsum("hd,shd->hs", query.double(), keys) * scaling
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        return torch.einsum("hs,shd->hd", scores.softmax(-1), values)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    # 16 bits: of the result, and of the weights that multiply V.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def decode(
    paged: TritonPaged,
    pool: Pool,
    query: Tensor,
    table: Tensor,
    positions: Sequence[int],
    *,
    scaling: float = 0.3,
    room: int = 0,
    **rules: Any,
) -> Tensor:
    parts = DecodeParts(
        torch.tensor(positions, device=DEVICE), room or len(positions) * num_splits(table.shape[1] * pool.block_size)
    )
    given = (tensor.to(DEVICE) for tensor in (query, pool.keys, pool.values, table))
    return paged.decode(*given, parts, scaling=scaling, **rules)


def check_decode(
    paged: TritonPaged,
    pool: Pool,
    positions: Sequence[int],
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> None:
    rows = [pool.row(position + 1, first=position + 1 - (window or position + 1)) for position in positions]
    query = pool.query(len(positions))
    out = decode(paged, pool, query, pool.table(rows), positions, window=window, scaling=scaling, softcap=softcap)
    assert out.dtype == pool.dtype
    for row, position in enumerate(positions):
        if position < 0:
            assert not out[row].any()
        else:
            exact = pool.attention(query[row], rows[row], position, window, scaling, softcap)
            assert_close(out[row], exact, pool.dtype)


@on_the_device
@pytest.mark.parametrize(("shape", "dtype"), combined(SHAPES, DTYPES))
def test_decode_equals_float64_for_every_head_size_and_grouping(paged, shape, dtype):
    group, kv_heads, dim, block_size = shape
    pool = Pool(dim + group, group=group, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype)
    check_decode(paged, pool, [0, 37, -1, 64], None, dim**-0.5, None)


@on_the_device
@pytest.mark.parametrize(("window", "softcap"), combined([1, 20, 300, 1000], [None, 2.0]))
def test_decode_sees_its_window_alone_and_caps_its_scores(paged, window, softcap):
    check_decode(paged, Pool(window, dim=48, value_dim=32), [0, 19, 20, 63, 330, -1], window, 0.5, softcap)


@on_the_device
def test_decode_is_right_at_every_edge_of_a_part_and_merges_more_parts_than_it_takes_at_once(paged, monkeypatch):
    split = 64 if INTERPRETED else SPLIT
    monkeypatch.setattr(decode_parts, "SPLIT", split)
    pool = Pool(1, kv_heads=1, num_blocks=20 * split // 16)
    check_decode(paged, pool, [split - 2, split - 1, split, 2 * split - 1, 2 * split, 9 * split + 5], None, 0.3, None)


@on_the_device
def test_large_scores_do_not_overflow(paged):
    pool = Pool(4, kv_heads=1)
    row = pool.row(301)
    query = pool.query(1)
    for softcap in (None, 30.0):
        out = decode(paged, pool, query, pool.table([row]), [300], scaling=300.0, softcap=softcap)
        exact = pool.attention(query[0], row, 300, None, 300.0, softcap)
        # Scores are thousands: float32 holds them to a thousandth, which is what a weight is off by.
        torch.testing.assert_close(out[0].cpu().double(), exact, atol=1e-2, rtol=1e-2)


@on_the_device
def test_nan_stays_with_the_sequence_that_has_it(paged):
    pool = Pool(5)
    rows = [pool.row(300) for _ in range(3)]
    pool.keys[rows[1][2]] = torch.nan
    out = decode(paged, pool, pool.query(3), pool.table(rows), [299] * 3)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@on_the_device
@pytest.mark.parametrize("dtype", DTYPES[-1:])
def test_a_sequence_gets_the_same_bits_alone_and_among_many(paged, dtype):
    pool = Pool(6, dtype=dtype)
    positions = [300, 3, -1, 270, 255]
    rows = [pool.row(position + 1) for position in positions]
    query = pool.query(5)
    together = decode(paged, pool, query, pool.table(rows, width=40), positions)
    for row in (0, 3, 4):
        only = slice(row, row + 1)
        alone = decode(paged, pool, query[only], pool.table(rows[only]), positions[only])
        assert torch.equal(alone[0], together[row])


@on_the_device
def test_bits_depend_neither_on_the_number_of_programs_nor_on_room_in_the_list(paged, monkeypatch):
    monkeypatch.setattr(decode_parts, "SPLIT", 16)
    pool = Pool(17)
    positions = [27, -1, 60, 16]
    rows = [pool.row(position + 1) for position in positions]
    query, table = pool.query(4), pool.table(rows)
    expected = decode(paged, pool, query, table, positions)
    for room, programs in ((8, 3), (8, 100), (30, 5)):
        monkeypatch.setattr(triton_paged, "_programs", lambda _, count=programs: count)
        found = decode(paged, pool, query, table, positions, room=room)
        assert torch.equal(found, expected)


# --- prefill ----------------------------------------------------------------------------------------------------------


def prefill(
    paged: TritonPaged,
    pool: Pool,
    query: Tensor,
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    counts: Sequence[int],
    window: int | None = None,
    scaling: float = 0.3,
    softcap: float | None = None,
) -> Tensor:
    begins = torch.tensor([0, *counts]).cumsum(0).int()
    arguments = (query, pool.keys, pool.values, pool.table(rows), begins, torch.tensor(starts))
    return paged.prefill(
        *[argument.to(DEVICE) for argument in arguments], window=window, scaling=scaling, softcap=softcap
    )


def check_prefill(
    paged: TritonPaged,
    pool: Pool,
    starts: Sequence[int],
    counts: Sequence[int],
    window: int | None = None,
    softcap: float | None = None,
    scaling: float = 0.3,
) -> None:
    rows = [
        pool.row(start + count, first=start + 1 - (window or start + 1))
        for start, count in zip(starts, counts, strict=True)
    ]
    query = pool.query(sum(counts))
    out = prefill(paged, pool, query, rows, starts, counts, window, scaling, softcap)
    assert out.dtype == pool.dtype
    exact = [
        pool.attention(query[sum(counts[:row]) + step], rows[row], starts[row] + step, window, scaling, softcap)
        for row in range(len(rows))
        for step in range(counts[row])
    ]
    assert_close(out, torch.stack(exact), pool.dtype)


@on_the_device
@pytest.mark.parametrize(("shape", "dtype"), combined(SHAPES, DTYPES))
def test_prefill_equals_float64_for_every_head_size_and_grouping(paged, shape, dtype):
    group, kv_heads, dim, block_size = shape
    pool = Pool(dim + group, group=group, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype)
    check_prefill(paged, pool, [0, 21, 40], [19, 1, 6], scaling=dim**-0.5)


@on_the_device
@pytest.mark.parametrize(("window", "softcap"), combined([1, 7, 40, 1000], [2.0, None]))
def test_prefill_sees_each_querys_window_and_caps_its_scores(paged, window, softcap):
    check_prefill(paged, Pool(window), [0, 130, 3], [45, 20, 1], window, softcap)


@on_the_device
@pytest.mark.parametrize("window", [30] if INTERPRETED else [None, 30])
def test_a_query_gets_the_same_bits_however_the_prompt_is_cut(paged, window):
    pool = Pool(9, group=3, kv_heads=1)
    row, other = pool.row(90), pool.row(30)
    query = pool.query(90)
    whole = prefill(paged, pool, query, [row], [0], [90], window)
    noise = pool.query(30)
    # Tiles of 10 tokens here: numpy's matrix product, but no GPU's, rounds a row differently in another place of the matrix.
    for cut in (20, 50) if INTERPRETED else (1, 20, 50):
        head = prefill(paged, pool, query[:cut], [row], [0], [cut], window)
        packed = torch.cat([noise, query[cut:]])
        tail = prefill(paged, pool, packed, [other, row], [0, cut], [30, 90 - cut], window)
        assert torch.equal(torch.cat([head, tail[30:]]), whole)


@on_the_device
def test_prefill_leaves_what_is_behind_the_last_chunk_alone(paged):
    pool = Pool(10)
    row = pool.row(10)
    query = pool.query(12)
    expected = prefill(paged, pool, query[:10], [row], [0], [10])
    arguments = (
        query, pool.keys, pool.values, pool.table([row, []]), torch.tensor([0, 10, 10]), torch.tensor([0, 0]),
    )  # fmt: skip
    padded = paged.prefill(*[argument.to(DEVICE) for argument in arguments], scaling=0.3)
    assert padded.shape[0] == 12
    assert torch.equal(padded[:10], expected)


# --- the cache write --------------------------------------------------------------------------------------------------


@on_the_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "dim", "value_dim"), [(3, 80, 96), (1, 128, 64)])
def test_the_write_fills_its_slots_in_the_type_of_the_cache_and_touches_no_other(
    paged, kv_heads, dim, value_dim, dtype
):
    pool = Pool(12, kv_heads=kv_heads, dim=dim, value_dim=value_dim, dtype=dtype, num_blocks=9, block_size=4)
    # As the model makes them: heads first.
    key, value = (torch.randn(kv_heads, 5, size, generator=pool.random).transpose(0, 1) for size in (dim, value_dim))
    if INTERPRETED and dtype == torch.bfloat16:
        # The interpreter cuts float32 off where a GPU rounds it.
        key, value = key.bfloat16(), value.bfloat16()
    index = torch.tensor([35, 0, -1, 6, 13])
    keys, values = pool.keys.to(DEVICE), pool.values.to(DEVICE)
    paged.write(key.to(DEVICE), value.to(DEVICE), keys, values, index.to(DEVICE))
    for cache, new in ((keys, key), (values, value)):
        expected = torch.full(cache.shape, torch.nan, dtype=dtype).flatten(0, 1)
        expected[index[index >= 0]] = new[index >= 0].to(dtype)
        torch.testing.assert_close(cache.cpu().flatten(0, 1), expected, equal_nan=True, atol=0, rtol=0)


# --- nothing to do, the workspace, and graphs -------------------------------------------------------------------------


@on_the_device
def test_a_step_of_no_rows_launches_nothing(paged):
    pool = Pool(13)
    empty = pool.query(0).to(DEVICE)
    keys, values = pool.keys.to(DEVICE), pool.values.to(DEVICE)
    ids, table = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(0, 4, dtype=torch.int32, device=DEVICE)
    assert paged.decode(empty, keys, values, table, DecodeParts(ids, 0), scaling=1.0).shape == (0, 4, 16)
    assert paged.prefill(empty, keys, values, table, torch.zeros_like(ids), ids, scaling=1.0).shape == (0, 4, 16)
    paged.write(keys[0, :0], values[0, :0], keys, values, ids)
    assert keys.isnan().all()


@on_the_device
def test_a_workspace_that_grew_keeps_the_old_one_for_graphs_until_it_is_cleared(paged):
    own = TritonPaged(paged._kernels)
    pool = Pool(14)
    row = pool.row(20)
    query = pool.query(3)
    small = decode(own, pool, query[:1], pool.table([row]), [19])
    address = own._buffers[0].data_ptr()
    decode(own, pool, query, pool.table([row] * 3, width=70), [19] * 3)
    again = decode(own, pool, query[:1], pool.table([row]), [19])
    assert torch.equal(again, small)
    assert [buffer.data_ptr() for buffer in own._buffers].index(address) == 0
    own.clear()
    assert torch.equal(decode(own, pool, query[:1], pool.table([row]), [19]), small)


@on_the_device
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_captured_decode_follows_its_buffers(paged):
    pool = Pool(15, kv_heads=2, dim=64, dtype=torch.float16)
    positions = [280, 300, 290]
    rows = [pool.row(position + 1) for position in positions]
    query, keys, values, table, where = (
        tensor.to(DEVICE)
        for tensor in (pool.query(3), pool.keys, pool.values, pool.table(rows), torch.tensor(positions))
    )

    def step() -> Tensor:
        return paged.decode(query, keys, values, table, DecodeParts(where, 30), scaling=0.2)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for moved in ([280, 300, 290], [275, -1, 290], [-1, 299, 272]):
        where.copy_(torch.tensor(moved))
        query.copy_(pool.query(3))
        graph.replay()
        assert torch.equal(captured, step())


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
