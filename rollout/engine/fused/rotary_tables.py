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
    """Scaling, dtype asked for."""
    cosines: Tensor
    sines: Tensor


_kept: WeakKeyDictionary[nn.Module, dict[str | None, _Tables]] = WeakKeyDictionary()


def rotary_numbers(rotary: Any, layer_type: str | None = None) -> tuple[Tensor, float]:
    """Frequencies and scaling that a rotary embedding reads for layers of a type; None: all layers have the same."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    return getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")


def rotary_tables(rotary: Any, dtype: torch.dtype, length: int, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines [at least max(`length`, 1), D] of positions from 0 on, contiguous, on the CPU.

    On whichever device the module is, they are computed on the CPU: the same bits for all.

    Args:
        dtype: of the hidden states, and of the tables unless the module keeps them in float32.
        layer_type: of the layers that they are for; None: all layers have the same.
    """
    frequencies, scaling = rotary_numbers(rotary, layer_type)
    of_types = _kept.setdefault(rotary, {})
    kept = of_types.get(layer_type)
    cosines, sines, start = [], [], 0
    if kept is not None and kept.key == (scaling, dtype) and torch.equal(kept.frequencies, frequencies):
        cosines, sines, start = [kept.cosines], [kept.sines], len(kept.cosines)
        if start >= length:
            return kept.cosines, kept.sines
    types = () if layer_type is None else (layer_type,)
    with torch.inference_mode(False), torch.no_grad():
        like = torch.empty(1, 1, 1, dtype=dtype, device="cpu")
        for first in range(start, max(length, 1), PART):
            part = rotary(like, torch.arange(first, first + PART, device="cpu")[None], *types)
            cosines.append(part[0][0])
            sines.append(part[1][0])
        whole = torch.cat(cosines), torch.cat(sines)
        of_types[layer_type] = _Tables(frequencies.clone(), (scaling, dtype), *whole)
    return whole
