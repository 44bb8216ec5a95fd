"""Which groups are worth training on: `rewards_differ`, and how many others a call may discard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from rollout.errors import ConfigError

MOST_DISCARDED = 4
"""A call discards at most this many times the groups it returns, if `max_discarded` is None."""


class Scored(Protocol):
    """An episode, or a `ScoredSample`."""

    @property
    def reward(self) -> float | None:
        """None: it failed."""

    @property
    def error(self) -> str | None:
        """Why it failed."""


def rewards_differ(group: Sequence[Scored]) -> bool:
    """Whether a group teaches GRPO anything: what did not fail in it has different rewards. For `keep=`."""
    return len({each.reward for each in group if each.error is None}) > 1


def most_discarded(groups: int | None, asked: int | None) -> float:
    """How many groups a call may discard: `asked`, or four times the groups it returns.

    Raises:
        ConfigError: `asked` is neither None nor an integer of at least 0.
    """
    if asked is None:
        return math.inf if groups is None else MOST_DISCARDED * groups
    if type(asked) is not int or asked < 0:
        raise ConfigError(f"max_discarded={asked!r}: must be None or an integer of at least 0")
    return asked
