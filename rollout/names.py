"""Errors for unknown names, with the nearest known one: `did_you_mean`, and `NamedOptions` for dataclasses of options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Self

from rollout.errors import ConfigError


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return a question that gives the known names nearest to `name`, or `otherwise` if none is near.

    Args:
        most: how many names to give.
        cutoff: least similarity, in [0, 1], as in `difflib.get_close_matches`.
    """
    near = get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


class NamedOptions:
    """Base of dataclasses of options.

    Raises:
        ConfigError: a keyword argument is none of the options; gives the nearest one.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the names; values are checked by `__init__`."""
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                cure = did_you_mean(name, known, f"the options are {', '.join(known)}")
                raise ConfigError(f"{cls.__name__}.{name}: there is no such option; {cure}")
        return super().__new__(cls)
