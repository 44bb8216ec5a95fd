"""Packs the real tokens of a padded batch, one sequence after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import UnsupportedModelError

SHORTEST = 0.75
"""The minimum length of a sequence relative to the longest in the same attention call. It limits the padding per call."""


@dataclass(frozen=True, eq=False)
class Packing:
    """The P real tokens of a batch [B, T], as R sequences packed one after the other."""

    tokens: Tensor | None
    """The index of each packed token in the flattened batch, int64 [P]; None if the batch has no padding."""
    rows: Tensor
    """The index of each position of the batch among the P packed tokens, int64 [B, T]; -1 at padding."""
    starts: NDArray[np.int64]
    """The index of each sequence's first packed token, and P as the last entry, [R + 1]."""
    positions: Tensor
    """The position of each packed token in its sequence, from 0, int64 [P]."""

    @property
    def longest(self) -> int:
        """The length of the longest sequence, in tokens."""
        return int(np.diff(self.starts).max(initial=0))

    def rectangles(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Group sequences of similar length into rectangles of b sequences and L columns.

        Yields:
            The index of each entry among the P packed tokens, int64 [b, L], and whether the entry is a real token, bool
            [b, L]. Entries after the end of a sequence repeat its last token.
        """
        lengths = np.diff(self.starts)
        order = np.argsort(-lengths, kind="stable")
        while len(order):
            longest = lengths[order[0]]
            count = int((lengths[order] >= SHORTEST * longest).sum())
            own, order = order[:count], order[count:]
            at = np.arange(longest)
            real = at < lengths[own, None]
            places = self.starts[own, None] + np.minimum(at, lengths[own, None] - 1)
            device = self.positions.device
            yield torch.from_numpy(places).to(device), torch.from_numpy(real).to(device)


def packing_of(ids: Tensor, attention_mask: Tensor | None) -> Packing:
    """Pack the rows of a batch without their padding.

    Args:
        ids: token ids, [B, T].
        attention_mask: 0 at padding, any other value elsewhere, [B, T]; None if the batch has no padding.

    Raises:
        UnsupportedModelError: a row has padding between its tokens, or the mask has another shape.
    """
    real = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != ids.shape:
            shown = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise UnsupportedModelError(
                f"exact: attention_mask is {shown}: must be [{ids.shape[0]}, {ids.shape[1]}] with 0 where padding; other "
                "masks than causal ones are not served"
            )
        real = attention_mask.bool()
    gaps = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0] > 1 if ids.shape[1] else real.any(1)
    if bool(gaps.any()):
        raise UnsupportedModelError(
            f"exact: attention_mask has padding between the tokens of row {int(gaps.nonzero()[0])}: pad on the left or on "
            "the right"
        )
    flat = real.flatten()
    tokens = flat.nonzero().flatten()
    rows = torch.where(flat, flat.cumsum(0) - 1, -1).view(ids.shape)
    lengths = real.sum(1).cpu().numpy()
    starts = np.append(0, np.cumsum(lengths[lengths > 0])).astype(np.int64)
    counted = np.arange(len(tokens)) - np.repeat(starts[:-1], np.diff(starts))
    return Packing(
        None if len(tokens) == flat.numel() else tokens, rows, starts, torch.from_numpy(counted).to(ids.device)
    )
