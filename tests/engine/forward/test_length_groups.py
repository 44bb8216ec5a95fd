"""Tests of the batches of one length that a step of a model with recurrent states runs in."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.engine.forward.recurrent_forward import length_groups
from rollout.engine.kernels.rows import PagedRows

COUNTS, STARTS = [1, 1, 3, 2, 3], [7, 4, 0, 5, 6]


def rows_of(counts: list[int], starts: list[int]) -> PagedRows:
    offsets = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    return PagedRows(offsets, positions, np.arange(len(counts))[:, None], 100)


@pytest.mark.parametrize("keep", [[0, 1, 4, 6, 7, 8, 9], [], [9, 3]])
def test_every_position_runs_once_and_every_kept_one_is_found(keep):
    rows, kept = rows_of(COUNTS, STARTS), np.array(keep, np.int64)
    found, ran = {}, []
    for group, shape in zip(length_groups(rows, kept), [(2, 1), (1, 2), (2, 3)], strict=True):
        assert group.positions.shape == shape
        assert (rows.positions[group.positions] == group.rows.positions.reshape(shape)).all()
        assert (group.rows.tables[:, 0] == group.members).all()
        ran += group.positions.ravel().tolist()
        for place, row, column in zip(group.places, group.row, group.column, strict=True):
            found[int(place)] = group.positions[row, group.columns[column]]
    assert sorted(ran) == list(range(10))
    assert [found[place] for place in range(len(kept))] == keep
