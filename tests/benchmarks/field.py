"""Runs the peers of one model in alternating rounds and fills in the ledger.

A failure of a peer does not stop the race; it is recorded in the peer's cells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.benchmarks.child import Late, NotRun, PeerFailed
from tests.benchmarks.floors import Floor
from tests.benchmarks.ledger import Cell, Row
from tests.benchmarks.peers import (
    ContinuousBatching,
    Generate,
    Ours,
    Peer,
    Reply,
)
from tests.benchmarks.remote import Interpreters, open_remote
from tests.benchmarks.subject import Subject
from tests.benchmarks.workloads import ALL, DECODE, Room, Tokens, Workload

PEERS = ("ours", "generate", "cb", "vllm", "openvino")
"""Every participant, as on the command line."""
PATIENCE = 2.0
"""A peer is cut off, or not started at all, at this many times `--limit`."""
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Measured:
    """Tokens per second by metric, and notes."""

    values: dict[str, float]
    notes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """How often and how long."""

    rounds: int
    limit_s: float
    """A peer whose first round takes longer runs no further round of this workload."""
    say: Callable[[str], None]
    """Takes a line about the progress."""

    @property
    def deadline_s(self) -> float:
        """The deadline of one round of one peer, in seconds."""
        return PATIENCE * self.limit_s


def alternate(rows: dict[str, Row], runs: dict[str, Callable[[], Measured]], rules: Rules) -> None:
    """Run everybody once per round, each round beginning with the next; `rows` are by metric."""
    active = list(runs)
    row = next(iter(rows.values()))
    what = f"{row.size} {row.dtype} · {row.workload}, {row.case}"
    for number in range(rules.rounds):
        turn = number % max(1, len(active))
        for name in active[turn:] + active[:turn]:
            rules.say(f"{what} · round {number + 1} of {rules.rounds} · {name}")
            start = time.perf_counter()
            problem = None
            try:
                measured = runs[name]()
            except Exception as exc:  # noqa: BLE001 - whatever a peer raises is its own result
                problem = _problem(exc)
            else:
                for metric, row in rows.items():
                    if metric in measured.values:
                        row.cells[name].add(measured.values[metric], measured.notes)
            if problem is not None:
                for row in rows.values():
                    row.cells[name].problem = problem
            if problem is not None or time.perf_counter() - start > rules.limit_s:
                active.remove(name)
    for row in rows.values():
        for cell in row.cells.values():
            if not cell.rounds and cell.problem is None:
                cell.problem = "not run: too few tokens to tell them from the first one"


def hopeless(rate: float | None, new_tokens: int, rules: Rules) -> str | None:
    """Why a peer need not begin, going by its tokens per second in the workload before (None: not known)."""
    if rate is None or new_tokens / rate <= rules.deadline_s:
        return None
    return (
        f"not run: too slow, about {new_tokens / rate:.0f} s a round going by the workload before ({rate:.3g} tokens/s)"
    )


class Field:
    """The peers of one model; a context manager that ends them.

    Args:
        subject: the model.
        names: who was asked for.
        room: of the largest workload.
        interpreters: of the peers that have their own.
        rules: how often and how long.
    """

    def __init__(
        self, subject: Subject, names: Sequence[str], room: Room, interpreters: Interpreters, rules: Rules
    ) -> None:
        self.subject = subject
        self.versions: dict[str, dict[str, str]] = {}
        self._names, self._room, self._interpreters, self._rules = names, room, interpreters, rules
        self._open: dict[str, Peer] = {}
        self._absent: dict[str, str] = {}
        self._rates: dict[str, float] = {}

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *exc: object) -> None:
        for peer in self._open.values():
            peer.close()

    def race(self, workload: Workload, rows: dict[str, Row]) -> None:
        """All rounds of one workload; `rows` are by metric."""
        runs: dict[str, Callable[[], Measured]] = {"floor": partial(self._floor, workload)}
        for row in rows.values():
            row.cells["floor"] = Cell()
        for name in self._names:
            peer = self._peer(name)
            problem = (
                self._absent[name]
                if peer is None
                else hopeless(self._rates.get(name), workload.new_tokens, self._rules)
            )
            for row in rows.values():
                row.cells[name] = Cell(problem=problem)
            if peer is not None and problem is None:
                runs[name] = partial(self._converse, name, peer, workload)
        alternate(rows, runs, self._rules)

    def _floor(self, workload: Workload) -> Measured:
        """Measure what the machine allows, in every round: a shared machine is not the same a minute later."""
        return Measured(Floor.measure(self.subject).of_workload(workload))

    def _peer(self, name: str) -> Peer | None:
        """`name`, opened at first use and warm; None where that failed, and `_absent` says why."""
        if name not in self._open and name not in self._absent:
            self._rules.say(f"{self.subject.size} {self.subject.dtype} · starting {name}")
            try:
                peer = self._open[name] = self._start(name)
                self.versions[name] = peer.versions
                prompts = [[1 + index] * WARM_UP_TOKENS for index in range(2)]
                peer.generate(prompts, [WARM_UP_TOKENS] * len(prompts), self._rules.deadline_s)
            except Exception as exc:  # noqa: BLE001 - whatever a peer raises is its own result
                self._absent[name] = _problem(exc)
        return None if name in self._absent else self._open[name]

    def _start(self, name: str) -> Peer:
        if name == "ours":
            return Ours(self.subject, self._room)
        if name == "generate":
            return Generate(self.subject)
        if name == "cb":
            return ContinuousBatching(self.subject)
        return open_remote(name, self.subject, self._room, self._interpreters)

    def _converse(self, name: str, peer: Peer, workload: Workload) -> Measured:
        end = time.perf_counter() + self._rules.deadline_s
        peer.forget()
        first_s = 0.0
        if workload.decode:
            prompts = [list(prompt) for prompt in workload.turns[0].prompts]
            first_s = _complete(peer, prompts, [1] * len(prompts), end).seconds
            peer.forget()
        conversations: list[Tokens] = [[] for _ in range(workload.sequences)]
        seconds = 0.0
        notes: dict[str, float] = {}
        for turn in workload.turns:
            conversations = [old + list(new) for old, new in zip(conversations, turn.prompts, strict=True)]
            try:
                reply = _complete(peer, conversations, turn.lengths, end)
            except Late:
                # It made fewer tokens than that.
                self._rates[name] = workload.new_tokens / self._rules.deadline_s
                raise
            conversations = [old + new for old, new in zip(conversations, reply.completions, strict=True)]
            seconds += reply.seconds
            for note, value in reply.notes.items():
                notes[note] = notes.get(note, 0.0) + value
        values = {ALL: workload.new_tokens / seconds}
        if workload.sequences > 1:
            self._rates[name] = values[ALL]
        if workload.decode and seconds > first_s:
            values[DECODE] = (workload.new_tokens - workload.sequences) / (seconds - first_s)
        return Measured(values, notes)


def _complete(peer: Peer, prompts: Sequence[Tokens], lengths: Sequence[int], end: float) -> Reply:
    reply = peer.generate(prompts, lengths, max(1.0, end - time.perf_counter()))
    given = [len(completion) for completion in reply.completions]
    if given != list(lengths) or reply.logprobs != sum(lengths):
        raise PeerFailed(
            f"{sum(lengths)} tokens with log-probs were asked for; {sum(given)} with {reply.logprobs} came"
        )
    return reply


def _problem(exc: Exception) -> str:
    if isinstance(exc, NotRun):
        return f"not run: {exc}"
    return f"error: {exc}" if isinstance(exc, PeerFailed) else f"error: {type(exc).__name__}: {exc}"
