"""Completion lengths of earlier epochs per prompt, to start long prompts first.

A batch ends with its longest sample, and one of four thousand tokens that starts last is computed nearly alone. In
training the same prompts come back epoch after epoch, and their lengths with them. An expected length decides which
prompt of a call starts first, never what is sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

NEWEST_SHARE = 0.5
"""Of the newest length in a prompt's running mean: the policy changes, and the lengths with it."""


class LengthBook:
    """Running mean of completion lengths, per prompt and over all.

    Args:
        capacity: prompts remembered; the least recently seen go first.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._means: OrderedDict[Hashable, float] = OrderedDict()
        self._overall: float | None = None

    def observe(self, prompt: Hashable, length: int) -> None:
        """Add the completion length of an ended sample to its prompt's mean; `prompt` is its `key`."""
        before = self._means.pop(prompt, None)
        self._means[prompt] = length if before is None else before + NEWEST_SHARE * (length - before)
        self._overall = length if self._overall is None else self._overall + 0.01 * (length - self._overall)
        if len(self._means) > self._capacity:
            self._means.popitem(last=False)

    def longest_first(self, prompts: Sequence[Hashable]) -> list[int]:
        """Positions of prompts, the longest expected first; equal ones, and all where nothing is known, in their order.

        A prompt never seen before counts as the mean of all.
        """
        overall = self._overall or 0.0
        expected = np.array([self._means.get(prompt, overall) for prompt in prompts], dtype=float)
        order: list[int] = np.argsort(-expected, kind="stable").tolist()
        return order


def key(prompt: Any) -> Hashable:
    """Hash of a prompt: equal for equal prompts; a collision only affects the order of starting."""
    if isinstance(prompt, str):
        return hash(prompt)
    if isinstance(prompt, Mapping):
        prompt = np.ravel(prompt.get("input_ids", ()))
    try:
        return hash(tuple(prompt.tolist() if hasattr(prompt, "tolist") else prompt))
    except TypeError:
        return hash(repr(prompt))
