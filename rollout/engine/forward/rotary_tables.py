"""Cosines and sines of a model's rotary embedding, the same bits for every reader.

A vectorised cosine may round an element of a short tensor otherwise than the same element of a long one, so tables are
computed in parts of a fixed size, by the module's own embedding, and kept as long as the module.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

PART = 64
"""Positions per call: few enough that torch computes them on one thread."""


class _Tables(NamedTuple):
    frequencies: Tensor
    """A copy of those that the tables were computed from."""
    key: tuple[float, torch.dtype]
    """Scaling, dtype."""
    cosines: Tensor
    sines: Tensor


_kept: WeakKeyDictionary[nn.Module, _Tables] = WeakKeyDictionary()


def rotary_tables(rotary: Any, dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [at least max(`length`, 1), D] of positions from 0 on, contiguous, in `dtype`, on the CPU.

    On whichever device the module is, they are computed on the CPU: the same bits for all.
    """
    frequencies, scaling = rotary.inv_freq, rotary.attention_scaling
    kept = _kept.get(rotary)
    cosines, sines, start = [], [], 0
    if kept is not None and kept.key == (scaling, dtype) and torch.equal(kept.frequencies, frequencies):
        cosines, sines, start = [kept.cosines], [kept.sines], len(kept.cosines)
        if start >= length:
            return kept.cosines, kept.sines
    with torch.inference_mode(False), torch.no_grad():
        like = torch.empty(1, 1, 1, dtype=dtype, device="cpu")
        for first in range(start, max(length, 1), PART):
            part = rotary(like, torch.arange(first, first + PART, device="cpu")[None])
            cosines.append(part[0][0])
            sines.append(part[1][0])
        whole = torch.cat(cosines), torch.cat(sines)
        _kept[rotary] = _Tables(frequencies.clone(), (scaling, dtype), *whole)
    return whole
