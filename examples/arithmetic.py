"""Arithmetic with its working shown: problems whose answers a program checks.

    47+38=   7+8=15 4+3+1=8 85      a sum, column by column from the right

The last word is the answer, and only the answer is marked. Knows problems and marks, nothing of models.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

ALPHABET = "0123456789+= "
"""Every character of a problem and of its solution."""


@dataclass(frozen=True)
class Problem:
    """A question, and the solution a teacher would write."""

    prompt: str
    solution: str

    @property
    def answer(self) -> str:
        """The last word of the solution."""
        return last_word(self.solution)


class Problems:
    """Two lots of problems that have none in common, drawn from `problems` by `seed`.

    Attributes:
        held_out: for measuring; at most a quarter of all.
        train: the rest, which `sample` draws from.
    """

    def __init__(self, problems: Iterable[Problem], *, held_out: int, seed: int) -> None:
        self._random = random.Random(seed)
        every = list(problems)
        self._random.shuffle(every)
        cut = min(held_out, len(every) // 4)
        self.held_out, self.train = every[:cut], every[cut:]

    def sample(self, count: int) -> list[Problem]:
        """`count` different problems of `train`."""
        return self._random.sample(self.train, count)


def reward(text: str | None, answer: str) -> float:
    """1 if the completion ends in the answer, else 0."""
    return float(text is not None and last_word(text) == answer)


def last_word(text: str) -> str:
    """What comes after the last space."""
    return text.rpartition(" ")[2]


def sums() -> list[Problem]:
    """All 10,000 sums of two numbers below 100."""
    return [Problem(f"{a}+{b}=", _by_columns(a, b)) for a in range(100) for b in range(100)]


def long_tailed_sums(count: int = 10_000, seed: int = 0) -> list[Problem]:
    """`count` sums whose numbers have one to eight digits: most have one or two, a few have many (log-normal)."""
    source = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        digits = min(8, max(1, round(source.lognormvariate(0.5, 0.6))))
        a, b = (source.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits) for _ in range(2))
        problem = Problem(f"{a}+{b}=", _by_columns(a, b))
        if digits > 1 or source.random() < 0.05:
            found[problem.prompt] = problem
    return list(found.values())


def _by_columns(a: int, b: int) -> str:
    total, carry, columns = a + b, 0, []
    while a or b or not columns:
        column = a % 10 + b % 10 + carry
        columns.append(f"{a % 10}+{b % 10}{'+1' * carry}={column}")
        a, b, carry = a // 10, b // 10, column // 10
    return " ".join([*columns, str(total)])
