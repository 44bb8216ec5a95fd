"""Tests of `DecodeState`: what the device has after every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollout.engine.graphs import decode_step
from rollout.engine.graphs.decode_step import DecodeState
from rollout.engine.kernels.rows import PagedRows

CPU = torch.device("cpu")
BLOCK = 4
COLUMNS = 16


class Sequences:
    """Sequences that grow, end and are replaced, as a scheduler has them run."""

    def __init__(self, seed: int, lines: int = 8) -> None:
        self.random = np.random.default_rng(seed)
        self.blocks = self.random.permutation(np.arange(1, 4000)).tolist()
        self.lines = lines
        self.tables: dict[int, np.ndarray[Any, Any]] = {}
        self.position: dict[int, int] = {}

    def start(self, line: int) -> None:
        self.tables[line] = np.array([self.blocks.pop() for _ in range(COLUMNS)])
        self.position[line] = int(self.random.integers(0, 20))

    def step(self) -> PagedRows:
        for line in list(self.tables):
            self.position[line] += 1
            if self.random.random() < 0.1 or self.position[line] >= COLUMNS * BLOCK:
                del self.tables[line], self.position[line]
        for line in set(range(self.lines)) - set(self.tables):
            if self.random.random() < 0.3 or not self.tables:
                self.start(line)
        if self.random.random() < 0.3:
            # A block that another sequence computed too takes the place of one behind the row.
            line = self.random.choice(list(self.tables))
            self.tables[line][0] = self.blocks.pop()
        order = self.random.permutation(list(self.tables))
        return self.rows(order)

    def rows(self, order: Any) -> PagedRows:
        positions = np.array([self.position[line] for line in order])
        width = int(positions.max()) // BLOCK + 1
        tables = np.stack([self.tables[line][:width] for line in order])
        return PagedRows(np.arange(len(order) + 1), positions, tables, BLOCK)


def assert_has(state: DecodeState, rows: PagedRows, ids: np.ndarray[Any, Any], padded: int = 8) -> None:
    inputs, count = state.inputs(padded), len(ids)
    padding = [-1] * (padded - count)
    assert inputs.ids.tolist() == [*ids, *[0] * (padded - count)]
    assert inputs.positions.tolist() == [*rows.positions, *[0] * (padded - count)]
    assert inputs.seen.tolist() == [*rows.positions, *padding]
    assert inputs.slots.tolist() == [*rows.slots, *padding]
    for own, expected, position in zip(inputs.tables.tolist(), rows.tables.tolist(), rows.positions, strict=False):
        held = position // BLOCK + 1
        assert own[:held] == expected[:held]


def test_after_any_step_the_device_has_what_the_rows_say(monkeypatch) -> None:
    """Rows change places, end and begin; one copy in each step."""
    sent: list[int] = []
    monkeypatch.setattr(decode_step, "staged", lambda array, device: sent.append(array.size) or torch.from_numpy(array))
    sequences, state = Sequences(1), DecodeState(8, COLUMNS, BLOCK, CPU)
    addresses = [each.data_ptr() for each in (state.ids, state.positions, state.seen, state.tables)]
    for _ in range(60):
        rows = sequences.step()
        ids = sequences.random.integers(0, 1000, len(rows))
        state.send(ids, rows)
        assert_has(state, rows, ids)
        assert sent.pop() == 3 * state.rows + len(ids) * COLUMNS
        assert not sent
    assert addresses == [each.data_ptr() for each in (state.ids, state.positions, state.seen, state.tables)]


def test_rows_are_padding_at_first_and_after_a_clear() -> None:
    sequences, state = Sequences(7), DecodeState(8, COLUMNS, BLOCK, CPU)
    assert state.inputs(8).seen.tolist() == [-1] * 8
    sequences.start(0)
    state.send(np.array([3]), sequences.rows(np.array([0])))
    state.clear()
    assert state.inputs(8).seen.tolist() == [-1] * 8
    assert state.inputs(8).slots.tolist() == [-1] * 8, "a warm-up writes nothing"


def test_rotary_positions_are_apart_from_those_of_the_cache() -> None:
    sequences, state = Sequences(1), DecodeState(2, COLUMNS, BLOCK, CPU)
    sequences.start(0)
    state.send(np.array([3]), sequences.rows(np.array([0])), np.array([40]))
    assert state.inputs(1).positions.tolist() == [40]
    assert state.inputs(1).seen.tolist() == [sequences.position[0]]
