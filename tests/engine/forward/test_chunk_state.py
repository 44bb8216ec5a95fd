"""Tests of `ChunkState`: chunks of a step where captured kernels read them, with padding that nothing reads or writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.engine.forward.chunk_state import MOST_CHUNKS, SIZES, ChunkState, padded_tokens
from rollout.engine.kernels.rows import PagedRows

CPU = torch.device("cpu")
BLOCK = 4


def chunks(counts: list[int], starts: list[int], groups: int = 1, seed: int = 0) -> PagedRows:
    offsets = np.cumsum([0, *counts])
    positions = np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)])
    tables = np.random.default_rng(seed).integers(1, 900, (groups, len(counts), int(positions.max()) // BLOCK + 1))
    return PagedRows(offsets, positions, tables[0], BLOCK, others=tuple(tables[1:]))


@pytest.mark.parametrize("groups", [1, 2])
def test_chunks_lie_at_fixed_addresses_and_padding_reaches_no_cache(groups: int) -> None:
    state, addresses = ChunkState(32, 16, CPU, groups), set()
    for seed, (counts, starts) in enumerate([([9, 1, 7], [0, 20, 3]), ([20], [0]), ([3, 4], [40, 0])]):
        rows, total = chunks(counts, starts, groups, seed), sum(counts)
        ids, keep = np.arange(7, 7 + total), np.array([total - 1])
        state.send(ids, rows, keep, rows.positions + 1)
        inputs = state.inputs(24)
        padding = 24 - total
        assert inputs.ids.tolist() == [*ids, *[0] * padding]
        assert inputs.positions.tolist() == [*(rows.positions + 1), *[0] * padding]
        assert inputs.begins.tolist() == [*rows.offsets, *[total] * (MOST_CHUNKS - len(counts))]
        assert inputs.starts.tolist() == [*starts, *[0] * (MOST_CHUNKS - len(counts))]
        assert inputs.keep.tolist() == [total - 1, *[0] * (MOST_CHUNKS - 1)]
        for (slots, tables), group in zip(inputs.groups, rows.groups(), strict=True):
            assert slots.tolist() == [*group.slots, *[-1] * padding]
            assert tables[: len(counts), : group.tables.shape[1]].tolist() == group.tables.tolist()
        where = (inputs.begins, inputs.starts, *(each for group in inputs.groups for each in group))
        addresses.add(tuple(each.data_ptr() for each in where))
    assert len(addresses) == 1


def test_steps_it_has_no_room_for_are_refused() -> None:
    state, none = ChunkState(32, 16, CPU), np.zeros(0, np.int64)
    assert state.serves(chunks([20, 12], [0, 0]), none)
    assert not state.serves(chunks([20, 13], [0, 0]), none)
    assert not state.serves(chunks([1], [16 * BLOCK]), none), "wider tables"
    assert not state.serves(chunks([3], [0]), np.arange(MOST_CHUNKS + 1))
    rows = chunks([3], [0])
    object.__setattr__(rows, "seen", rows.positions)
    assert not state.serves(rows, none), "an image that sees itself in both directions"
    assert [padded_tokens(count) for count in (1, 256, SIZES[-1], SIZES[-1] + 1)] == [256, 256, 4096, 0]


def test_padding_adds_at_most_a_half_and_a_fifth_on_average() -> None:
    counts = np.arange(256, SIZES[-1] + 1)
    ratios = np.array([padded_tokens(count) for count in counts]) / counts
    assert ratios.max() <= 1.5
    assert ratios.mean() <= 1.2
