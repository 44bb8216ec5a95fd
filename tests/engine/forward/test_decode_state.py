"""Tests of `DecodeState`: what the device has after every step, and how little is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.forward import decode_state, prefix_sharing
from rollout.engine.forward.cuda_switches import VARIABLE, switched_on
from rollout.engine.forward.decode_state import DecodeState
from rollout.engine.forward.prefix_sharing import PrefixSharing
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.triton_attention import PrefixGroups

CPU = torch.device("cpu")
BLOCK = 4
COLUMNS = 16


class Sequences:
    """Sequences that grow, end and are replaced, as a scheduler has them run."""

    def __init__(self, seed: int, groups: int = 1, lines: int = 8) -> None:
        self.random = np.random.default_rng(seed)
        self.blocks = self.random.permutation(np.arange(1, 4000)).tolist()
        self.groups, self.lines = groups, lines
        self.tables: dict[int, np.ndarray[Any, Any]] = {}
        self.position: dict[int, int] = {}

    def start(self, line: int) -> None:
        self.tables[line] = np.array([[self.blocks.pop() for _ in range(COLUMNS)] for _ in range(self.groups)])
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
            self.tables[line][:, 0] = self.blocks.pop()
        order = self.random.permutation(list(self.tables))
        return self.rows(order)

    def wide(self, group: int) -> np.ndarray[Any, Any]:
        return np.stack([self.tables[line][group] for line in sorted(self.tables)])

    def rows(self, order: Any) -> PagedRows:
        positions = np.array([self.position[line] for line in order])
        width = int(positions.max()) // BLOCK + 1
        tables = [np.stack([self.tables[line][group, :width] for line in order]) for group in range(self.groups)]
        return PagedRows(np.arange(len(order) + 1), positions, tables[0], BLOCK, others=tuple(tables[1:]), lines=order)


def assert_has(state: DecodeState, rows: PagedRows, ids: np.ndarray[Any, Any], padded: int = 8) -> None:
    inputs, count = state.inputs(padded, COLUMNS), len(ids)
    padding = [-1] * (padded - count)
    assert inputs.ids.tolist() == [*ids, *[0] * (padded - count)]
    assert inputs.positions.tolist() == [*rows.positions, *[0] * (padded - count)]
    assert inputs.seen.tolist() == [*rows.positions, *padding]
    for (slots, tables), group in zip(inputs.groups, rows.groups(), strict=True):
        assert slots.tolist() == [*group.slots, *padding]
        for own, expected, position in zip(tables.tolist(), group.tables.tolist(), rows.positions, strict=False):
            held = position // BLOCK + 1
            assert own[:held] == expected[:held]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("most", [0, 6, 1000])
def test_after_any_step_the_device_has_what_the_rows_say(groups: int, most: int, monkeypatch) -> None:
    """Few changes go one by one, many as whole tables; rows change places, end, begin, and know their line or not."""
    monkeypatch.setattr(decode_state, "MOST_CHANGES", most)
    sequences, state = Sequences(groups + most, groups), DecodeState(8, COLUMNS, BLOCK, CPU, groups)
    addresses = [each.data_ptr() for each in (state.ids, state.positions, state.seen, state.lines, state.tables)]
    for turn in range(60):
        rows = sequences.step()
        if turn % 7 == 3:
            rows = rows.select(np.arange(len(rows)))[0]
            object.__setattr__(rows, "lines", None)
        ids = sequences.random.integers(0, 1000, len(rows))
        state.send(ids, rows)
        assert_has(state, rows, ids)
    assert addresses == [
        each.data_ptr() for each in (state.ids, state.positions, state.seen, state.lines, state.tables)
    ]


def test_a_step_sends_its_new_blocks_alone_although_rows_have_changed_places(monkeypatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(
        decode_state, "staged", lambda array, device: sent.append(array.size) or torch.from_numpy(array)
    )
    sequences, state = Sequences(0), DecodeState(8, COLUMNS, BLOCK, CPU)
    for line in (2, 5, 7):
        sequences.start(line)
        sequences.position[line] = 11
    header = 7 * state.rows
    state.send(np.arange(3), sequences.rows(np.array([2, 5, 7])))
    assert sent.pop() == header + 2 * 3 * 3
    state.send(np.arange(3), sequences.rows(np.array([2, 5, 7])))
    assert sent.pop() == header
    del sequences.tables[2]
    sequences.position[5] = 12
    state.send(np.arange(2), sequences.rows(np.array([5, 7])))
    assert sent.pop() == header + 2 * 2, "a block of row 5, and what lies behind row 7's last"
    assert not sent, "one copy in each step"


def test_rotary_positions_are_apart_from_those_of_the_cache() -> None:
    sequences, state = Sequences(1), DecodeState(2, COLUMNS, BLOCK, CPU)
    sequences.start(0)
    state.send(np.array([3]), sequences.rows(np.array([0])), np.array([40]))
    assert state.inputs(1, COLUMNS).positions.tolist() == [40]
    assert state.inputs(1, COLUMNS).seen.tolist() == [sequences.position[0]]


def test_rows_move_on_to_what_they_drew_without_the_host_and_padding_stays() -> None:
    sequences, state = Sequences(5, groups=2), DecodeState(8, COLUMNS, BLOCK, CPU, 2)
    for line in range(3):
        sequences.start(line)
    rows = sequences.rows(np.arange(3))
    wide = replace(rows, tables=sequences.wide(0), others=(sequences.wide(1),))
    state.send(np.arange(3), wide)
    for step in range(1, 10):
        state.advance(torch.arange(3) + step)
        assert_has(state, replace(wide, positions=rows.positions + step), np.arange(3) + step)
    state.send(np.arange(3), replace(wide, positions=rows.positions + 10))
    assert_has(state, replace(wide, positions=rows.positions + 10), np.arange(3))


def test_after_a_copy_that_failed_the_next_step_sends_what_was_lost(monkeypatch) -> None:
    sequences, state = Sequences(2), DecodeState(2, COLUMNS, BLOCK, CPU)
    sequences.start(0)
    rows = sequences.rows(np.array([0]))
    with monkeypatch.context() as broken:
        broken.setattr(decode_state, "staged", lambda array, device: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            state.send(np.array([3]), rows)
    state.send(np.array([3]), rows)
    assert_has(state, rows, np.array([3]), 1)


def test_groups_of_rows_lie_at_fixed_addresses_and_empty_ones_follow_them() -> None:
    sequences, state = Sequences(4), DecodeState(8, COLUMNS, BLOCK, CPU)
    for line in range(5):
        sequences.start(line)
    rows, ids = sequences.rows(np.arange(5)), np.arange(5)
    groups = PrefixGroups(np.array([1, 2, 3, 4]), np.array([0, 2, 4]), np.array([0, 8, 8, 4, 4]))
    for shared in (groups, None, groups):
        state.send(ids, rows, None, shared)
        assert state.inputs(8, COLUMNS).shared is None
        if shared is not None:
            found = state.inputs(8, COLUMNS, shares=True).shared
            assert found is not None
            assert found.members.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
            assert found.begins.tolist() == [0, 2, 4, 4, 4]
            assert found.lengths.tolist() == [0, 8, 8, 4, 4, 0, 0, 0]
            assert found.members.data_ptr() == state.members.data_ptr()


def test_prefixes_are_looked_for_anew_when_rows_or_their_first_blocks_change(monkeypatch) -> None:
    searches: list[int] = []
    find = prefix_sharing.shared_prefixes
    monkeypatch.setattr(prefix_sharing, "WORTHWHILE", 256 * 10)
    monkeypatch.setattr(
        prefix_sharing, "shared_prefixes", lambda rows, count: searches.append(count) or find(rows, count)
    )
    sharing, blocks = PrefixSharing(10), 256 // BLOCK
    tables = np.arange(3 * 100).reshape(3, 100)
    tables[1:, :blocks] = tables[0, :blocks]

    def of(positions: list[int], lines: Any = (0, 1, 2), own: Any = tables) -> list[int] | None:
        count = len(positions)
        lines = None if lines is None else np.array(lines)
        rows = PagedRows(np.arange(count + 1), np.array(positions), own[:count], BLOCK, lines=lines)
        groups = sharing.of(rows)
        return None if groups is None else groups.members.tolist()

    assert of([300, 301, 302]) == of([301, 302, 303]) == [0, 1, 2]
    assert len(searches) == 1
    assert of([301, 302, 200]) == [0, 1], "row 2 still writes into its blocks"
    assert of([302, 303, 300], (0, 1, 5)) == [0, 1, 2]
    other = tables.copy()
    other[0, 3] = 999
    assert of([303, 304, 301], (0, 1, 5), other) == [1, 2]
    assert len(searches) == 4
    assert of([304, 305, 302], None, other) == of([305, 306, 303], None, other) == [1, 2]
    assert len(searches) == 6, "not knowing its rows, it looks in every step"
    monkeypatch.setattr(prefix_sharing, "WORTHWHILE", 256 * 10 + 1)
    assert of([304, 305, 302], None, other) is None, "too little is saved"
    assert of([304]) is None
    assert PrefixSharing(0).of(PagedRows(np.arange(4), np.array([300, 301, 302]), tables, BLOCK)) is None


@pytest.mark.parametrize("before", [20, 400, 900])
def test_prefixes_of_a_batch_in_the_lines_of_the_one_before_are_found(before: int, monkeypatch) -> None:
    """The batch before shared nothing, and ended at once."""
    monkeypatch.setattr(prefix_sharing, "WORTHWHILE", 1)
    sharing, lines = PrefixSharing(10), np.arange(8)
    tables = np.arange(8 * 300).reshape(8, 300)
    for step in range(3):
        rows = PagedRows(np.arange(9), np.full(8, before + step), tables, BLOCK, lines=lines)
        assert sharing.of(rows) is None
    tables = tables.copy()
    tables[:, : 512 // BLOCK] = tables[0, : 512 // BLOCK]
    rows = PagedRows(np.arange(9), np.arange(560, 568), tables, BLOCK, lines=lines)
    groups = sharing.of(rows)
    assert groups is not None
    assert groups.lengths.tolist() == [512] * 8


def test_parts_are_switched_off_by_name() -> None:
    assert switched_on("tables", {})
    assert not switched_on("tables", {VARIABLE: " tables,"})
    sequences, state = Sequences(3), DecodeState(8, COLUMNS, BLOCK, CPU, resident=False)
    for _ in range(5):
        rows = sequences.step()
        state.send(np.arange(len(rows)), rows)
        assert_has(state, rows, np.arange(len(rows)))
