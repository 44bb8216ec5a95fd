"""Log-probs of scores, from a log-sum-exp in two parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Total(NamedTuple):
    """Log-sum-exp of scores, as peak + log_sum: in a single number a large peak would absorb the rest."""

    peak: Tensor
    """[R, 1] float32, the largest score."""
    log_sum: Tensor
    """[R, 1] float64, logarithm of the summed exponentials of score - peak; NaN where the peak is not finite."""


def log_probs(scores: Tensor, total: Total) -> Tensor:
    """Log-probs [R, C] float32 of scores [R, C]; without columns where `total` has none."""
    return ((scores.to(torch.float64) - total.peak) - total.log_sum).to(torch.float32)
