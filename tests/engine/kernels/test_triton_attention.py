"""Tests of a step's attention through the Triton kernels: row assignment, tokens of a whole engine.

The kernels run in Triton's interpreter, in a process of its own (tests/engine/test_in_tritons_interpreter.py), and on a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention, write_slots
from rollout.engine.kernels.triton_attention import TABLE_STEP, TritonPagedAttention
from rollout.engine.kernels.triton_paged import TritonPaged, load
from rollout.engine.memory.buffers import ALIGNMENT, packed, upload_together
from tests.interpreter import INTERPRETED, combined

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

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def decode(self, query, keys, values, table, parts, **rules):
        assert len(table) == len(parts.positions) == len(query)
        self.calls.append(("decode", len(query), table.shape[1]))
        return torch.zeros_like(query)

    def prefill(self, query, keys, values, table, begins, starts, **rules):
        assert len(table) == len(starts) == len(begins) - 1
        assert int(begins[-1]) == len(query)
        self.calls.append(("prefill", len(query), table.shape[1]))
        return torch.ones_like(query)


def asked(rows: PagedRows, *, dim: int = 16) -> tuple[list[tuple], torch.Tensor]:
    kernels, cpu = Asked(), torch.device("cpu")
    plain = TorchPagedAttention(rows, cpu)
    attend = TritonPagedAttention(kernels, rows, cpu, plain)  # type: ignore[arg-type]
    query = torch.randn(len(rows.positions), 4, dim)
    cache = torch.randn(1000, BLOCK, 2, dim)
    return kernels.calls, attend(query, cache, cache, scaling=0.3)


def test_leading_rows_of_one_position_decode_and_all_others_prefill() -> None:
    calls, out = asked(step([1, 1, 40, 1], [20, 100, 300, 7], [[]] * 4))
    assert calls == [("decode", 2, TABLE_STEP), ("prefill", 41, 2 * TABLE_STEP)]
    assert (out[:2] == 0).all()
    assert (out[2:] == 1).all()
    assert asked(step([1, 1], [20, 100], [[]] * 2))[0] == [("decode", 2, TABLE_STEP)]
    assert asked(step([9], [20], [[]]))[0] == [("prefill", 9, TABLE_STEP)]


def test_heads_the_kernels_do_not_take_are_left_to_torch() -> None:
    calls, out = asked(step([1, 3], [20, 30], [[]] * 2), dim=8)
    assert calls == []
    assert out.shape == (4, 4, 8)
    assert out.isfinite().all()


# --- in the interpreter, and on a device ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paged() -> TritonPaged:
    kernels = load(DEVICE)
    assert kernels is not None
    return kernels


RULES = [(None, None, False), (50, 2.0, False), (None, None, True), (50, 2.0, True)]
"""Window, softcap, sinks."""
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
    (counts, ends, prefixes), (window, softcap, sunk) = LAYOUTS[layout], rules
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
    how = {"scaling": 0.2, "window": window, "softcap": softcap}
    exact = TorchPagedAttention(rows, cpu)(
        *[tensor.double() for tensor in (query, keys, values)],
        **how,
        sinks=None if sinks is None else sinks.cpu(),
    )
    plain = TorchPagedAttention(rows, DEVICE)
    ours = TritonPagedAttention(paged, rows, DEVICE, plain)(query.to(DEVICE), *on_device[2:4], **how, sinks=sinks)
    torch.testing.assert_close(ours.cpu().double(), exact, atol=1e-5, rtol=1e-5)
