"""Decides when `run` has played enough, which groups it keeps, and when it begins others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import length_hint
from typing import Any

from rollout.manager.episodes.episode import Episode
from rollout.manager.episodes.player import EpisodePlayer


class PlayGoal:
    """The goal of one `run`.

    Args:
        tasks: drawn from while fewer than `most` groups are in play.
        begin: begins a group.
        least: kept groups that must have ended; None: all that are in play.
        keep: whether a group that has ended counts; otherwise it is dropped. None: each does.
        most_discarded: so many groups are dropped, then each counts.
        discard: called for each that is dropped.
        too_old: ids of groups that must have ended too; None: not known yet.
    """

    def __init__(
        self,
        player: EpisodePlayer,
        tasks: Iterator[Any],
        begin: Callable[[Any], None],
        most: float,
        least: int | None,
        keep: Callable[[Sequence[Episode]], bool] | None,
        most_discarded: float,
        discard: Callable[[], None],
        too_old: Callable[[], set[int] | None],
    ) -> None:
        self._player = player
        self._tasks = tasks
        self._begin = begin
        self._most = most
        self._least = least
        self.number = least or len(player) + length_hint(tasks)
        self._keep = keep
        self._discards_left = most_discarded
        self._discard = discard
        self._too_old = too_old
        self._kept: set[int] = set()

    def ended(self) -> int:
        """How many groups have ended."""
        return len(self._player) - len(self._player.unfinished)

    def reached(self) -> bool:
        """Apply deadlines, drop and begin groups; then whether enough has ended.

        Raises:
            BrokenEnvironmentError: an environment cannot be played.
        """
        if (broken := self._player.take_broken()) is not None:
            raise broken
        self._player.look_at_the_clock()
        if self._keep is not None:
            self._drop(self._keep)
        self._draw()
        if not self._player.unfinished:
            return True
        if self._least is None or self.ended() < self._least:
            return False
        must = self._too_old()
        return must is not None and must.isdisjoint(self._player.unfinished)

    def _drop(self, keep: Callable[[Sequence[Episode]], bool]) -> None:
        if self.ended() == len(self._kept):
            return
        for number in self._player.ended():
            if number not in self._kept:
                if self._discards_left == 0 or keep(self._player.episodes(number)):
                    self._kept.add(number)
                else:
                    self._discards_left -= 1
                    self._player.drop([number])
                    self._discard()

    def _draw(self) -> None:
        while len(self._player) < self._most:
            try:
                task = next(self._tasks)
            except StopIteration:
                return
            self._begin(task)
