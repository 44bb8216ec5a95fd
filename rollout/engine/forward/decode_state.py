"""What captured decode steps read of the sequences: one object on the device, at fixed addresses, advanced by small copies.

A step sends seven numbers per row and the entries of block tables that are not what the device has, in one copy. What
follows from these (a row's block table, its slot mapping) is computed on the device, inside the graph. A step that only
moves every row to its next position, in a block that its table names, needs `ids`, `positions` and `seen` written alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.decode_parts import DecodeParts, SharedPrefixes
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.triton_attention import PrefixGroups
from rollout.engine.memory.buffers import staged

MOST_CHANGES = 8192
"""Entries of block tables that a step sends one by one; with more, whole tables are the shorter message."""
_FIELDS = 7
_ALIGNED = 16
"""Rows are a multiple of this, so that every part of the header begins at a multiple of 64 bytes."""


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """Inputs of a decode step of B rows with one position each, on the device; rows without a sequence are padding."""

    ids: Tensor
    """[B] int64 token ids; 0 in padding."""
    positions: Tensor
    """[B] int64 rotary positions; 0 in padding."""
    seen: Tensor
    """[B] int32, the last position that a row attends to, its own; -1 in padding."""
    groups: list[tuple[Tensor, Tensor]]
    """Of each group of layers: [B] int32 slot mapping, -1 in padding; [B, columns] int32 block tables."""
    parts: DecodeParts
    """Of the keys of each row, for the Triton kernels."""
    keep: None = None
    """The logits of all rows are computed."""

    @property
    def shared(self) -> SharedPrefixes | None:
        """Rows that start with the same blocks, which are read once; None: they are read for each row."""
        return self.parts.shared

    @property
    def slots(self) -> Tensor:
        """Slot mapping of the first group of layers."""
        return self.groups[0][0]


class DecodeState:
    """Rows of decode steps on the device, and what the host knows of them.

    Args:
        rows: most rows of a step.
        columns: of the block tables; a multiple of 16, as Triton compiles another kernel for other strides.
        groups: of layers, which have a block table each.
        resident: keep the tables on the device; otherwise all of them are sent in every step.

    Attributes:
        ids, positions: [R] int32, token and rotary position of each row; 0 in padding.
        seen: [R] int32, position of each row in its sequence; -1 in padding.
        lines: [R] int32, where the block table of each row lies in `tables`.
        members, begins, lengths: [R] int32, the fields of `SharedPrefixes`.
        tables: [groups, R, columns] int32 block ids.
    """

    def __init__(
        self, rows: int, columns: int, block_size: int, device: torch.device, groups: int = 1, *, resident: bool = True
    ) -> None:
        self.rows, self.columns = -(-rows // _ALIGNED) * _ALIGNED, columns
        self._block_size = block_size
        self._device = device
        self._most = MOST_CHANGES if resident else -1
        self._known = np.zeros((groups, self.rows, columns), np.int64)
        # A tensor created in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._flat = torch.zeros(_FIELDS * self.rows + 2 * MOST_CHANGES, dtype=torch.int32, device=device)
            self.tables = torch.zeros(groups, self.rows, columns, dtype=torch.int32, device=device)
        fields = self._flat[: _FIELDS * self.rows].view(_FIELDS, self.rows)
        self.ids, self.positions, self.seen, self.lines, self.members, self.begins, self.lengths = fields
        self._moving = fields[1:3]

    @property
    def nbytes(self) -> int:
        """Device memory that it takes."""
        return self._flat.nbytes + self.tables.nbytes

    def send(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        rotary: NDArray[np.int64] | None = None,
        shared: PrefixGroups | None = None,
    ) -> None:
        """Have these rows, of one position each, be those of the next step, by one asynchronous copy.

        Args:
            ids: [B] token ids, B at most `rows`.
            rotary: [B] rotary positions, which differ after an image; None: `rows.positions`.
            shared: prefixes to read once, in a step whose graph does so.
        """
        count, size = len(ids), _FIELDS * self.rows
        lines = self._lines(rows)
        where, blocks = self._changed(rows, lines)
        changes = len(blocks)
        few = changes <= self._most
        message = np.zeros(size + 2 * changes * few, np.int32)
        header = message[:size].reshape(_FIELDS, self.rows)
        header[2, count:] = -1
        header[0, :count], header[1, :count] = ids, rows.positions if rotary is None else rotary
        header[2, :count], header[3, :count] = rows.positions, lines
        if shared is not None:
            # Behind the last group, empty ones.
            header[5] = len(shared.members)
            for field, values in zip(header[4:], shared.arrays, strict=True):
                field[: len(values)] = values
        if few:
            entries = message[size:].reshape(2, changes)
            entries[0], entries[1] = np.ravel_multi_index(where, self._known.shape), blocks
        self._flat[: len(message)].copy_(staged(message, self._device), non_blocking=True)
        if not few:
            whole = self._known.astype(np.int32)
            whole[where] = blocks
            self.tables.copy_(staged(whole, self._device), non_blocking=True)
        elif changes:
            places, new = self._flat[size : len(message)].view(2, changes)
            self.tables.view(-1).index_put_((places.long(),), new)
        # Last: after an exception on the way, the device is taken to have less than it has, never more.
        self._known[where] = blocks

    def advance(self, tokens: Tensor) -> None:
        """Move the first B rows on to their next positions, in blocks that their tables name, without the host.

        Args:
            tokens: [B] int64, on the device.
        """
        self.ids[: len(tokens)].copy_(tokens)
        self._moving[:, : len(tokens)].add_(1)

    def inputs(
        self, count: int, columns: int, capacity: int = 0, *, shares: bool = False, spread: bool = False
    ) -> DecodeInputs:
        """The step's first `count` rows with block tables of `columns`; a graph's first kernels.

        Args:
            shares: whether prefixes are read once.
            capacity, spread: see `DecodeParts`.
        """
        seen, size = self.seen[:count], self._block_size
        last = seen.clamp(min=0).long()
        groups = []
        for all_tables in self.tables:
            tables = all_tables[:, :columns].index_select(0, self.lines[:count])
            blocks = tables.gather(1, (last // size)[:, None])[:, 0]
            slots = torch.where(seen < 0, -1, blocks * size + (last % size).int())
            groups.append((slots, tables))
        shared = None
        if shares:
            # A group has two rows.
            shared = SharedPrefixes(self.members[:count], self.begins[: count // 2 + 1], self.lengths[:count])
        parts = DecodeParts(seen, capacity, shared, spread=spread)
        return DecodeInputs(self.ids[:count].long(), self.positions[:count].long(), seen, groups, parts)

    def _changed(
        self, rows: PagedRows, lines: NDArray[np.int64]
    ) -> tuple[tuple[NDArray[np.int64], ...], NDArray[np.int64]]:
        """(group, line, column) of the entries of block tables that the device has not, and what they are."""
        width, count = min(rows.tables.shape[1], self.columns), len(lines)
        in_order = bool((lines == np.arange(count)).all())
        found = []
        for group, each in enumerate((rows.tables, *rows.others)):
            known, table = self._known[group], each[:, :width]
            # Flat: several times as fast as looking for places in several dimensions.
            at = np.flatnonzero(table != (known[:count, :width] if in_order else known[lines, :width]))
            row, column = np.divmod(at, width)
            found.append((np.full(len(at), group), lines[row], column, table[row, column]))
        groups, places, columns, blocks = (np.concatenate(part) for part in zip(*found, strict=True))
        return (groups, places, columns), blocks

    def _lines(self, rows: PagedRows) -> NDArray[np.int64]:
        if rows.lines is None or int(rows.lines.max(initial=0)) >= self.rows:
            return np.arange(len(rows))
        return rows.lines
