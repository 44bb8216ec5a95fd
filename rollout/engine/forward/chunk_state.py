"""What captured steps with prefill chunks read: token ids, positions and block tables of the chunks, at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import staged

SIZES = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Tokens that steps are padded to. A larger one keeps a device busy for longer than Python takes to launch it."""
MOST_CHUNKS = 64
"""Chunks of a step, and positions of theirs whose logits are wanted."""
_ROOM = 16
"""Numbers behind the last begin, so that what follows lies at a multiple of 64 bytes."""


@dataclass(frozen=True, eq=False)
class ChunkInputs:
    """Inputs of a step of P positions in `MOST_CHUNKS` chunks, on the device; behind the last chunk there is padding."""

    ids: Tensor
    """[P] int64 token ids; 0 in padding."""
    positions: Tensor
    """[P] int64 rotary positions; 0 in padding."""
    groups: list[tuple[Tensor, Tensor]]
    """Of each group of layers: [P] int32 slot mapping, -1 in padding; [MOST_CHUNKS, columns] int32 block tables."""
    begins: Tensor
    """[MOST_CHUNKS + 1] int32, offset of each chunk; empty ones follow the last."""
    starts: Tensor
    """[MOST_CHUNKS] int32, position of each chunk's first token in its sequence."""
    keep: Tensor
    """[MOST_CHUNKS] int64, positions whose logits are computed; 0 in padding."""


class ChunkState:
    """The chunks of a step on the device.

    Args:
        tokens: most positions of a step.
        columns: of the block tables; a multiple of 16.
        groups: of layers, which have a block table each.
    """

    def __init__(self, tokens: int, columns: int, device: torch.device, groups: int = 1) -> None:
        self.tokens, self.columns = tokens, columns
        self._groups = groups
        self._device = device
        self._sizes = [tokens, tokens, groups * tokens, MOST_CHUNKS + _ROOM, MOST_CHUNKS, MOST_CHUNKS]
        self._fixed = sum(self._sizes)
        # A tensor created in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._flat = torch.zeros(self._fixed + MOST_CHUNKS * groups * columns, dtype=torch.int32, device=device)
        fields = torch.split(self._flat[: self._fixed], self._sizes)
        self._ids, self._positions, self._slots, self._begins, self._starts, self._keep = fields
        self._tables = self._flat[self._fixed :].view(MOST_CHUNKS, groups, columns)

    @property
    def nbytes(self) -> int:
        """Device memory that it takes."""
        return self._flat.nbytes

    def serves(self, rows: PagedRows, keep: NDArray[np.int64]) -> bool:
        """Whether there is room for a step of these chunks; not for images that see themselves in both directions."""
        room = len(rows.positions) <= self.tokens and rows.tables.shape[1] <= self.columns
        return room and max(len(rows), len(keep)) <= MOST_CHUNKS and rows.seen is None

    def send(self, ids: NDArray[np.int64], rows: PagedRows, keep: NDArray[np.int64], rotary: NDArray[np.int64]) -> None:
        """Have these chunks be those of the next step, by one asynchronous copy.

        Args:
            ids, rotary: [P] token ids and rotary positions.
            keep: positions whose logits are wanted.
        """
        count, chunks, groups = len(ids), len(rows), rows.groups()
        message = np.zeros(self._fixed + chunks * self._groups * self.columns, np.int32)
        fields = np.split(message, np.cumsum(self._sizes))
        own_ids, positions, slots, begins, starts, kept, tables = fields
        own_ids[:count], positions[:count] = ids, rotary
        by_group = slots.reshape(self._groups, self.tokens)
        by_group[:, count:] = -1
        by_group[:, :count] = [each.slots for each in groups]
        begins[:] = count
        begins[: chunks + 1] = rows.offsets
        starts[:chunks] = rows.positions[rows.offsets[:-1]]
        kept[: len(keep)] = keep
        by_row = tables.reshape(chunks, self._groups, self.columns)
        for group, each in enumerate(groups):
            by_row[:, group, : each.tables.shape[1]] = each.tables
        self._flat[: len(message)].copy_(staged(message, self._device), non_blocking=True)

    def inputs(self, tokens: int) -> ChunkInputs:
        """The step's first `tokens` positions."""
        slots = self._slots.view(self._groups, self.tokens)[:, :tokens]
        groups = [(slots[group], self._tables[:, group]) for group in range(self._groups)]
        return ChunkInputs(
            self._ids[:tokens].long(), self._positions[:tokens].long(), groups, self._begins[: MOST_CHUNKS + 1],
            self._starts, self._keep.long(),
        )  # fmt: skip


def padded_tokens(count: int) -> int:
    """Tokens that a step of `count` is padded to; 0: it is larger than any of `SIZES`."""
    return next((size for size in SIZES if size >= count), 0)
