"""Base class of the configuration dataclasses: rules that the values of options are checked against at construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from enum import Enum
from typing import Any, ClassVar, Self

from rollout.errors import ConfigError
from rollout.names import NamedOptions

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is allowed, and what is, for the message."""

Rules = Mapping[Rule, tuple[str, ...]]
"""Rule → names of the options it is for."""


def is_int(value: object) -> bool:
    """Whether a value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is an integer or a float; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """Whether a value is a string that is not empty."""
    return isinstance(value, str) and bool(value)


def or_none(rule: Rule) -> Rule:
    """Return the rule that also allows None."""
    return lambda value: value is None or rule[0](value), f"None or {rule[1]}"


def one_of(*choices: str | None) -> Rule:
    """Return the rule that allows these values alone."""
    return lambda value: value in choices, f"one of {', '.join(map(repr, choices))}"


AT_LEAST_1: Rule = (lambda value: is_int(value) and value >= 1, "an integer of at least 1")
ABOVE_0: Rule = (lambda value: is_number(value) and value > 0, "a number above 0")
FINITE: Rule = (lambda value: is_number(value) and 0 < value < math.inf, "a finite number above 0")
SEED: Rule = (lambda value: is_int(value) and 0 <= value < 2**63, "an integer in [0, 2**63)")
ADDRESS: Rule = (is_text, "an address")


class Options(NamedOptions):
    """Validation shared by the configuration dataclasses: booleans and enums by their default, the rest by `_rules`."""

    _rules: ClassVar[Rules] = {}

    def __post_init__(self) -> None:
        for (holds, rule), names in self._rules.items():
            for name in names:
                self._check(name, holds(getattr(self, name)), rule)
        for option in fields(self):  # type: ignore[arg-type]
            if isinstance(option.default, bool):
                self._check(option.name, isinstance(getattr(self, option.name), bool), "True or False")
            elif isinstance(option.default, Enum):
                self._choose(option.name, type(option.default))

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{type(self).__name__}.{name}={getattr(self, name)!r}: must be {rule}")

    def _choose(self, name: str, kind: type[Enum]) -> None:
        try:
            object.__setattr__(self, name, kind(getattr(self, name)))
        except ValueError as exc:
            choices = ", ".join(repr(member.value) for member in kind)
            raise ConfigError(
                f"{type(self).__name__}.{name}={getattr(self, name)!r}: must be one of {choices}"
            ) from exc

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated again."""
        return replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all options, in definition order."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
