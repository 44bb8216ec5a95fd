"""Tests of a step's attention through the Triton kernels: row assignment, shared prefixes, tokens of a whole engine.

The kernels run in Triton's interpreter, in a process of its own (tests/engine/test_in_tritons_interpreter.py), and on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.forward.cuda_graphs import GraphedDecode
from rollout.engine.forward.decode_kernels import TritonDecode
from rollout.engine.kernels import triton_paged
from rollout.engine.kernels.decode_parts import SPLIT, SharedPrefixes
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention, Workspace, write_slots
from rollout.engine.kernels.triton_attention import TABLE_STEP, TritonPagedAttention, shared_prefixes
from rollout.engine.kernels.triton_paged import TritonPaged, load
from rollout.engine.memory.buffers import ALIGNMENT, packed, upload_together
from tests.capturable import Capturable
from tests.engines import assert_greedy, finish, greedily, make_engine, pass_suspended, steps, token_ids
from tests.interpreter import INTERPRETED, combined
from tests.models import make_model

try:
    import triton
    import triton.backends.compiler
    import triton.compiler
    import triton.language
except ImportError:
    triton = None

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BLOCK = 16


def on_the_device(function):
    if INTERPRETED:
        return function
    function = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(function)
    return pytest.mark.gpu(function)


def step(counts: list[int], ends: list[int], prefixes: list[list[int]], seed: int = 0) -> PagedRows:
    """Rows whose first blocks are `prefixes`, and whose others are their own."""
    width = -(-max(ends) // BLOCK) + 1
    # What is behind a row's blocks is never read: an id that does not exist would show it.
    tables = np.full((len(ends), width), 10**6)
    free = np.random.default_rng(seed).permutation(np.arange(100, 900)).tolist()
    for row, (end, prefix) in enumerate(zip(ends, prefixes, strict=True)):
        blocks = prefix + [free.pop() for _ in range(-(-end // BLOCK) - len(prefix))]
        tables[row, : len(blocks)] = blocks
    offsets = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
    return PagedRows(offsets.astype(np.int64), positions, tables, BLOCK)


def prefix(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + blocks))


def groups_of(ends: list[int], prefixes: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Members of each group, and each row's shared tokens."""
    found = shared_prefixes(step([1] * len(ends), ends, prefixes), len(ends))
    borders = found.begins.tolist()
    members = [found.members[low:high].tolist() for low, high in pairwise(borders)]
    return members, found.lengths.tolist()


# --- which rows share -------------------------------------------------------------------------------------------------


def test_the_samples_of_a_prompt_share_its_whole_parts() -> None:
    assert groups_of([700, 530, 600], [prefix(33)] * 3) == ([[0, 1, 2]], [512] * 3)


def test_rows_with_less_than_a_part_in_common_share_nothing() -> None:
    assert groups_of([300, 300], [prefix(SPLIT // BLOCK - 1)] * 2) == ([], [0, 0])
    assert groups_of([300, 300], [[], []]) == ([], [0, 0])
    assert groups_of([900], [prefix(40)]) == ([], [0])
    none = shared_prefixes(step([5], [5], [[]]), 0)
    assert [len(array) for array in none.arrays] == [0, 0, 0]


def test_a_block_that_is_still_written_to_is_not_shared() -> None:
    # Position 256 begins block 16; at position 255 block 15 is not complete.
    assert groups_of([257, 300], [prefix(16)] * 2) == ([[0, 1]], [256, 256])
    assert groups_of([256, 300], [prefix(16)] * 2) == ([], [0, 0])


def test_samples_stay_together_rather_than_with_all_that_have_their_system_prompt() -> None:
    system, one, other = prefix(16), prefix(32), [*prefix(16), *prefix(16, first=50)]
    ends = [600] * 6
    members, lengths = groups_of(ends, [one, one, one, other, other, system])
    assert members == [[0, 1, 2], [3, 4]]
    assert lengths == [512] * 5 + [0]
    assert groups_of(ends, [system] * 6) == ([[0, 1, 2, 3, 4, 5]], [256] * 6)
    members, lengths = groups_of(ends, [system, system, one, one, system, system])
    assert members == [[0, 1], [2, 3], [4, 5]]
    assert lengths == [256, 256, 512, 512, 256, 256]


def test_groups_that_follow_each_other_are_two() -> None:
    members, lengths = groups_of([600] * 5, [prefix(32), prefix(32), [], prefix(32, 40), prefix(32, 40)])
    assert members == [[0, 1], [3, 4]]
    assert lengths == [512, 512, 0, 512, 512]


@settings(max_examples=200, deadline=None)
@given(
    depths=st.lists(st.integers(0, 48), max_size=8),
    ends=st.lists(st.integers(1, 1000), min_size=9, max_size=9),
    seed=st.integers(0, 99),
)
def test_whatever_is_shared_is_the_same_in_every_table_of_a_group(depths, ends, seed):
    rows = [prefix(min(depth, -(-end // BLOCK))) for depth, end in zip(depths, ends, strict=False)]
    if not rows:
        return
    made = step([1] * len(rows), ends[: len(rows)], rows, seed)
    found = shared_prefixes(made, len(rows))
    assert sorted(set(found.members.tolist())) == found.members.tolist()
    assert set(np.flatnonzero(found.lengths).tolist()) == set(found.members.tolist())
    for low, high in pairwise(found.begins):
        members = found.members[low:high]
        assert len(members) >= 2
        (length,) = set(found.lengths[members].tolist())
        assert length % SPLIT == 0
        assert length <= made.positions[members].min()
        tables = made.tables[members, : length // BLOCK]
        assert (tables == tables[0]).all()


def test_arrays_go_up_together_each_at_an_aligned_place() -> None:
    arrays = [np.arange(size, dtype=np.int32) for size in (3, 16, 0, 17)] + [np.arange(6, dtype=np.int32).reshape(2, 3)]
    flat, begins = packed(arrays)
    assert all(begin * 4 % ALIGNMENT == 0 for begin in begins)
    for array, begin in zip(arrays, begins, strict=True):
        assert np.array_equal(flat[begin : begin + array.size].reshape(array.shape), array)
    for array, tensor in zip(arrays, upload_together(arrays, torch.device("cpu")), strict=True):
        assert np.array_equal(tensor.numpy(), array)


# --- without a device: which kernel is asked for what -----------------------------------------------------------------


class Asked:
    """Stands in for the kernels and says what it was asked."""

    shares = True

    def __init__(self, *, chunks: bool = True) -> None:
        self.chunks = chunks
        self.calls: list[tuple[str, int, int, bool]] = []

    def decode_with_lse(
        self, query, keys, values, table, positions, window, scaling, *, softcap, chunk, sinks, shared, parts
    ):
        assert len(table) == len(positions) == len(query)
        self.calls.append(("decode", len(query), table.shape[1], isinstance(shared, SharedPrefixes)))
        return torch.zeros_like(query), torch.zeros(0)

    def prefill(self, query, keys, values, table, begins, starts, window, scaling, *, softcap, chunk, sinks):
        assert len(table) == len(starts) == len(begins) - 1
        assert int(begins[-1]) == len(query)
        self.calls.append(("prefill", len(query), table.shape[1], False))
        return torch.ones_like(query)


def asked(rows: PagedRows, *, dim: int = 16, chunks: bool = True, **rules: int) -> tuple[list[tuple], torch.Tensor]:
    kernels, cpu = Asked(chunks=chunks), torch.device("cpu")
    plain = TorchPagedAttention(rows, cpu, Workspace())
    attend = TritonPagedAttention(kernels, rows, cpu, plain)  # type: ignore[arg-type]
    query = torch.randn(len(rows.positions), 4, dim)
    cache = torch.randn(1000, BLOCK, 2, dim)
    own = cache.flatten(0, 1)[torch.from_numpy(rows.slots)]
    return kernels.calls, attend(query, own, own, cache, cache, scaling=0.3, **rules)


def test_leading_rows_of_one_position_decode_and_all_others_prefill() -> None:
    calls, out = asked(step([1, 1, 40, 1], [20, 100, 300, 7], [[]] * 4))
    assert calls == [("decode", 2, TABLE_STEP, False), ("prefill", 41, 2 * TABLE_STEP, False)]
    assert (out[:2] == 0).all()
    assert (out[2:] == 1).all()
    assert asked(step([1, 1], [20, 100], [[]] * 2))[0] == [("decode", 2, TABLE_STEP, False)]
    assert asked(step([9], [20], [[]]))[0] == [("prefill", 9, TABLE_STEP, False)]


def test_chunks_are_left_to_torch_where_prefill_does_not_work_and_decodes_are_not() -> None:
    rows = step([1, 1, 40, 7, 1], [20, 100, 300, 7, 9], [[]] * 5)
    torch.manual_seed(0)
    calls, out = asked(rows, chunks=False)
    assert calls == [("decode", 2, TABLE_STEP, False)]
    torch.manual_seed(0)
    query, cache = torch.randn(50, 4, 16), torch.randn(1000, BLOCK, 2, 16)
    own = cache.flatten(0, 1)[torch.from_numpy(rows.slots)]
    plain = TorchPagedAttention(rows, torch.device("cpu"), Workspace())(query, own, own, cache, cache, scaling=0.3)
    assert (out[:2] == 0).all()
    torch.testing.assert_close(out[2:], plain[2:])
    assert asked(step([1, 1], [20, 100], [[]] * 2), chunks=False)[0] == [("decode", 2, TABLE_STEP, False)]


def test_prefixes_are_shared_but_not_by_layers_with_a_window_or_chunks() -> None:
    rows = step([1, 1], [700, 700], [prefix(40)] * 2)
    assert asked(rows)[0] == [("decode", 2, 3 * TABLE_STEP, True)]
    assert asked(rows, window=64)[0] == [("decode", 2, 3 * TABLE_STEP, False)]
    assert asked(rows, chunk=64)[0] == [("decode", 2, 3 * TABLE_STEP, False)]


def test_heads_the_kernels_do_not_take_are_left_to_torch() -> None:
    calls, out = asked(step([1, 3], [20, 30], [[]] * 2), dim=8)
    assert calls == []
    assert out.shape == (4, 4, 8)
    assert out.isfinite().all()


# --- compiled for a device that is not there ---------------------------------------------------------------------------


def compiled(
    kernel: Callable[..., None], types: dict[str, str], constants: dict[str, object], warps: int, stages: int
) -> str:
    """PTX for an H200, as for addresses and strides that 16 divides."""
    names = list(inspect.signature(kernel).parameters)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name.endswith("stride")]
    source = triton.compiler.ASTSource(
        triton.jit(kernel), signature, {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages}).asm["ptx"])


@pytest.mark.skipif(INTERPRETED, reason="an interpreter compiles nothing")
@pytest.mark.skipif(triton is None, reason="Triton is not installed: pip install triton")
def test_caches_found_by_their_address_are_read_as_fast_as_others(monkeypatch, tmp_path):
    """A pointer made of a number is one that no power of two is known to divide, unless the kernel says so.

    Then every element was loaded by itself and nothing came ahead of its use, with the right result.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from rollout.engine.kernels import triton_kernels  # needs Triton

    plan = triton_paged._plan("decode", 6, 128, torch.bfloat16)
    types = {"scale": "fp32", "out": "*fp32", "lse": "*fp32", "cells": "*i64"}
    types |= dict.fromkeys(("query", "keys", "values"), "*bf16")
    lists = ("begins", "owners", "slots", "members", "bounds", "lengths")
    types |= dict.fromkeys(("table", "positions", *lists), "*i32")
    constants = {
        "mode": "decode", "kv_heads": 2, "group": 6, "tokens": 1, "rows": plan.rows,
        "span": plan.span, "split": SPLIT, "block_size": BLOCK, "window": 0, "chunk": 0, "cap": 0.0, "dim": 128,
        "value_dim": 128, "padded_dim": 128, "padded_value_dim": 128,
    }  # fmt: skip
    loads = []
    for moves in (False, True):
        ptx = compiled(triton_kernels.attend_parts, types, constants | {"moves": moves}, plan.warps, plan.stages)
        loads.append([ptx.count(kind) for kind in ("cp.async.cg", "ld.global.v4", "ld.global.b16")])
    assert loads[0] == loads[1]
    assert loads[0][0] > 0
    assert loads[0][2] == 0


# --- in the interpreter, and on a device ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paged() -> TritonPaged:
    kernels = load(DEVICE)
    assert kernels is not None
    if INTERPRETED:
        one = torch.zeros(1, 1, 16)
        try:
            kernels.decode_with_lse(one, one[None], one[None], torch.zeros(1, 1), torch.zeros(1), None, 1.0)
        except Exception as exc:
            if "0-dimensional" in str(exc):
                pytest.exit("this Triton's interpreter cannot loop with this numpy", 77)
            raise
    return kernels


RULES = [(None, None, None, False), (50, 2.0, None, False), (None, None, None, True), (None, None, 90, False),
         (50, 2.0, None, True)]  # fmt: skip
"""Window, softcap, chunk, sinks."""
LAYOUTS = {
    "alone": ([1, 1, 1, 37, 1], [700, 40, 300, 100, 1], [[]] * 5),
    "shared": ([1, 1, 1, 1, 9], [530, 600, 517, 20, 300], [prefix(32)] * 3 + [[], prefix(18)]),
    "decodes": ([1, 1, 1], [600, 600, 530], [prefix(32)] * 3),
    "chunks": ([64, 3], [64, 270], [[], []]),
}
"""Tokens of the step, lengths and prefixes of its rows."""


@on_the_device
@pytest.mark.parametrize(("layout", "rules"), combined(list(LAYOUTS), RULES))
def test_a_paged_step_equals_float64(paged, layout, rules):
    (counts, ends, prefixes), (window, softcap, chunk, sunk) = LAYOUTS[layout], rules
    rows = step(counts, ends, prefixes)
    generator = torch.Generator().manual_seed(len(ends))
    cpu = torch.device("cpu")
    keys, values = (torch.randn(900, BLOCK, 2, 32, generator=generator) for _ in range(2))
    query, key, value = (torch.randn(sum(counts), heads, 32, generator=generator) for heads in (6, 2, 2))
    slots = torch.from_numpy(rows.slots)
    on_device = [tensor.to(DEVICE) for tensor in (key, value, keys, values, slots)]
    paged.write(*on_device)
    write_slots(key, value, keys, values, slots)
    for ours, expected in zip(on_device[2:4], (keys, values), strict=True):
        assert torch.equal(ours.cpu(), expected)
    sinks = torch.linspace(-2, 4, 6, device=DEVICE) if sunk else None
    how = {"scaling": 0.2, "window": window, "softcap": softcap, "chunk": chunk}
    exact = TorchPagedAttention(rows, cpu, Workspace())(
        *[tensor.double() for tensor in (query, key, value, keys, values)],
        **how,
        sinks=None if sinks is None else sinks.cpu(),
    )
    plain = TorchPagedAttention(rows, DEVICE, Workspace())
    ours = TritonPagedAttention(paged, rows, DEVICE, plain)(query.to(DEVICE), *on_device[:4], **how, sinks=sinks)
    torch.testing.assert_close(ours.cpu().double(), exact, atol=1e-5, rtol=1e-5)


@on_the_device
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "llama4"])
def test_an_engine_on_the_paged_kernels_gives_the_tokens_of_generate(paged, name):
    # One layer of each kind.
    layers = {"num_hidden_layers": 1 if name == "qwen3" else 2} if INTERPRETED else {}
    model = make_model(name, **layers).to(DEVICE)
    tokens = 2 if INTERPRETED else 40
    engine = make_engine(model, fused_forward=False, max_tokens_per_step=16, block_size_tokens=8)
    if INTERPRETED:
        engine.controller.runner.paged = paged
    assert engine.controller.runner.paged is not None
    for seed in range(3):
        engine.add_request(token_ids(7 + 6 * seed, seed), greedily(tokens))
    done = finish(engine)
    assert len(done) == 3
    for request in done.values():
        assert_greedy(model if INTERPRETED else name, request, tolerance=1e-4 if INTERPRETED else 1e-3)


class Rerun:
    """A device whose records are the work itself."""

    graph_bytes = 0

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        with Capturable():
            work()
        return work

    def forget(self) -> None:
        pass


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
def test_the_paged_kernels_of_graphs_find_a_pool_that_has_moved(paged):
    def elsewhere(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pools.append(torch.zeros(numel, dtype=dtype))
        return pools[-1]

    pools: list[torch.Tensor] = []
    model = make_model("qwen3", num_hidden_layers=1)
    engine = make_engine(model, fused_forward=False, allocate=elsewhere)
    runner, device = engine.controller.runner, Rerun()
    runner.graphs = GraphedDecode(
        runner.model, runner.layout, engine.cache, 8, device, TritonDecode(paged, engine.cache)
    )
    for seed in range(3):
        engine.add_request(token_ids(7 + seed, seed), greedily(4))
    steps(engine, 2)
    pass_suspended(engine, "offload")
    pools[0].fill_(torch.nan)
    done = finish(engine)
    assert len(pools) == 2
    assert device.captures == 1
    assert len(done) == 3
    for request in done.values():
        assert_greedy(model, request, tolerance=1e-4)
