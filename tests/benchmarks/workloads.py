"""Workloads of the race as plain data: prompts, turns and forced lengths. No torch.

A workload is a number of conversations that advance together, turn by turn. Most have one turn. Everything is seeded: the
same command gives every peer, and every run, the same token ids and the same forced lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Tokens = list[int]

ALL = "all tokens"
DECODE = "decode"
"""The two rates: tokens over wall time, and without the time of the first token."""


@dataclass(frozen=True)
class Turn:
    """The new parts of one turn: user tokens and forced completion length (in tokens), one each per conversation."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Conversations of one or more turns."""

    name: str
    """The name on the command line."""
    case: str
    """The difference from other workloads of the same name."""
    turns: tuple[Turn, ...]
    decode: bool = False
    """Whether to report the decode alone, too: a run of one new token is subtracted. Only where all lengths are equal."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of the reported metrics."""
        return (ALL, DECODE) if self.decode else (ALL,)

    @property
    def sequences(self) -> int:
        """Conversations side by side."""
        return len(self.turns[0].lengths)

    @property
    def new_tokens(self) -> int:
        """Forced tokens of all turns."""
        return sum(sum(turn.lengths) for turn in self.turns)

    @property
    def kv_tokens(self) -> int:
        """Tokens of all conversations at their end, prompts included, if nothing is shared."""
        return self.new_tokens + sum(len(prompt) for turn in self.turns for prompt in turn.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation at its end."""
        totals = [0] * self.sequences
        for turn in self.turns:
            for index, (prompt, length) in enumerate(zip(turn.prompts, turn.lengths, strict=True)):
                totals[index] += len(prompt) + length
        return max(totals)


@dataclass(frozen=True)
class Scale:
    """Shrinks token counts, for a quick look."""

    factor: float = 1.0

    def tokens(self, count: int, at_least: int = 1) -> int:
        """`count` tokens, scaled."""
        return max(at_least, round(count * self.factor))


def _random(rng: np.random.Generator, vocab: int, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocab, count).tolist())


def steady(vocab: int, scale: Scale, sequences: Sequence[int]) -> Iterator[Workload]:
    """Raw decode: 256 + 256 tokens, everybody the same."""
    for count in sequences:
        rng = np.random.default_rng(count)
        prompts = tuple(_random(rng, vocab, scale.tokens(256)) for _ in range(count))
        turn = Turn(prompts, (scale.tokens(256, at_least=2),) * count)
        yield Workload("steady", f"{count} sequence{'s' * (count > 1)}", (turn,), decode=True)


def long_tail(rng: np.random.Generator, count: int, mean: int, longest: int) -> tuple[int, ...]:
    """`count` log-normal lengths of about this mean (in tokens), none above `longest`, and one that reaches it."""
    sigma = 1.0
    lengths = np.minimum(longest, np.ceil(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count))).astype(int)
    lengths[int(lengths.argmax())] = longest
    return tuple(lengths.tolist())


def grpo(vocab: int, scale: Scale, sequences: Sequence[int]) -> Iterator[Workload]:
    """Groups with a long tail: 8 prompts of 512 tokens, 8 samples each, lengths log-normal around 128, longest 1,024."""
    rng = np.random.default_rng(8)
    prompts = [_random(rng, vocab, scale.tokens(512)) for _ in range(8)]
    mean = scale.tokens(128)
    samples = tuple(prompt for prompt in prompts for _ in range(8))
    yield Workload("grpo", "8 × 8 samples", (Turn(samples, long_tail(rng, 64, mean, 8 * mean)),))


def prefix(vocab: int, scale: Scale, sequences: Sequence[int]) -> Iterator[Workload]:
    """One system prompt of 1,024 tokens before 64 questions of 32 tokens; 32 new tokens each."""
    rng = np.random.default_rng(1024)
    system = _random(rng, vocab, scale.tokens(1024))
    prompts = tuple(system + _random(rng, vocab, scale.tokens(32)) for _ in range(64))
    yield Workload("prefix", "64 questions", (Turn(prompts, (scale.tokens(32),) * 64),))


def multiturn(vocab: int, scale: Scale, sequences: Sequence[int]) -> Iterator[Workload]:
    """16 conversations of 4 turns with 64 new tokens each: after 64 user tokens, and after 256 (what a tool answers)."""
    for user in (64, 256):
        rng = np.random.default_rng(16)
        asked, lengths = scale.tokens(user), (scale.tokens(64),) * 16
        turns = tuple(Turn(tuple(_random(rng, vocab, asked) for _ in lengths), lengths) for _ in range(4))
        yield Workload("multiturn", f"16 × 4 turns, {asked} + {lengths[0]}", turns)


CONVERSATIONS = {"steady": steady, "grpo": grpo, "prefix": prefix, "multiturn": multiturn}
"""Workloads that any peer runs as batches of prompts and forced lengths, by name."""


@dataclass(frozen=True)
class Room:
    """The room that a peer must have: the largest of all workloads it will be given."""

    sequences: int
    longest: int
    kv_tokens: int

    @classmethod
    def of(cls, workloads: Sequence[Workload]) -> Room:
        """The smallest room that fits each of `workloads`."""
        return cls(
            sequences=max((each.sequences for each in workloads), default=1),
            longest=max((each.longest for each in workloads), default=64),
            kv_tokens=max((each.kv_tokens for each in workloads), default=64),
        )
