"""Reward functions that other processes import."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any


def lengths(samples: Sequence[Any]) -> list[float]:
    """Number of the tokens of a sample that are above its index."""
    return [float(sum(token > 40 + each.sample_index for token in each.generated_tokens)) for each in samples]


def of_columns(prompts: Sequence[str], completions: Sequence[str], weight: Sequence[float]) -> list[float]:
    """The interface of TRL: lengths by a column, in one process per prompt."""
    assert len(set(prompts)) == 1
    return [weight[row] * len(each) for row, each in enumerate(completions)]


def hangs(samples: Sequence[Any]) -> list[float]:
    """Never returns of every second group."""
    while samples[0].metadata % 2:
        time.sleep(0.01)
    return lengths(samples)


def dies(samples: Sequence[Any]) -> list[float]:
    """Ends its process."""
    os._exit(3)


def fails(samples: Sequence[Any]) -> list[float]:
    """Raises."""
    raise KeyError("no such answer")
