"""Inputs of captured decode steps: one buffer on the device, at a fixed address, filled by one copy per step.

A step sends three numbers and the block tables of each row. The slot mapping follows from these on the device, inside the
graph. A step that only moves every row to its next position, in a block that its table names, needs `advance` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.decode_parts import DecodeParts
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import staged

_FIELDS = 3
_ALIGNED = 16
"""Rows are a multiple of this, so that every part of the buffer begins at a multiple of 64 bytes."""


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
    """Tensors of each group of layers: [B] int32 slot mapping, -1 in padding; [B, columns] int32 block tables."""
    parts: DecodeParts
    """Parts of the keys of each row, for the Triton kernels."""


class DecodeState:
    """Rows of decode steps on the device.

    Args:
        rows: most rows of a step.
        columns: of the block tables; a multiple of 16, as Triton compiles another kernel for other strides.
        groups: of layers, which have a block table each.

    Attributes:
        ids, positions: [R] int32, token and rotary position of each row; 0 in padding.
        seen: [R] int32, position of each row in its sequence; -1 in padding.
        tables: [R, groups, columns] int32 block ids.
    """

    def __init__(self, rows: int, columns: int, block_size: int, device: torch.device, groups: int = 1) -> None:
        self.rows, self.columns = -(-rows // _ALIGNED) * _ALIGNED, columns
        self._block_size = block_size
        self._device = device
        header = _FIELDS * self.rows
        # A tensor created in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._flat = torch.zeros(header + self.rows * groups * columns, dtype=torch.int32, device=device)
        fields = self._flat[:header].view(_FIELDS, self.rows)
        self.ids, self.positions, self.seen = fields
        self._moving = fields[1:]
        self.tables = self._flat[header:].view(self.rows, groups, columns)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Device memory that it takes."""
        return self._flat.nbytes

    def clear(self) -> None:
        """Make every row padding, for which nothing is written: the warm-up of a capture runs on it."""
        self._flat.zero_()
        self.seen.fill_(-1)

    def send(self, ids: NDArray[np.int64], rows: PagedRows, rotary: NDArray[np.int64] | None = None) -> None:
        """Have these rows, of one position each, be those of the next step, by one asynchronous copy.

        Args:
            ids: [B] token ids, B at most `rows`.
            rotary: [B] rotary positions, which differ after an image; None: `rows.positions`.
        """
        count, header = len(ids), _FIELDS * self.rows
        message = np.zeros(header + self.tables[:count].numel(), np.int32)
        own_ids, positions, seen = message[:header].reshape(_FIELDS, self.rows)
        seen[count:] = -1
        own_ids[:count], positions[:count] = ids, rows.positions if rotary is None else rotary
        seen[:count] = rows.positions
        tables = message[header:].reshape(self.tables[:count].shape)
        for group, each in enumerate((rows.tables, *rows.others)):
            width = min(each.shape[1], self.columns)
            tables[:, group, :width] = each[:, :width]
        self._flat[: len(message)].copy_(staged(message, self._device), non_blocking=True)

    def advance(self, tokens: Tensor) -> None:
        """Move the first B rows on to their next positions, in blocks that their tables name, without the host.

        Args:
            tokens: [B] int64, on the device.
        """
        self.ids[: len(tokens)].copy_(tokens)
        self._moving[:, : len(tokens)].add_(1)

    def inputs(self, count: int, capacity: int = 0) -> DecodeInputs:
        """The step's first `count` rows; a graph's first kernels.

        Args:
            capacity: see `DecodeParts`.
        """
        seen, size = self.seen[:count], self._block_size
        last = seen.clamp(min=0).long()
        groups = []
        for tables in self.tables[:count].unbind(1):
            blocks = tables.gather(1, (last // size)[:, None])[:, 0]
            groups.append((torch.where(seen < 0, -1, blocks * size + (last % size).int()), tables))
        ids, positions = self.ids[:count].long(), self.positions[:count].long()
        return DecodeInputs(ids, positions, seen, groups, DecodeParts(seen, capacity))
