"""Named holds on one engine, which is kept at the highest level that any holder requests.

    holds.hold(UPDATE, HoldLevel.SUSPENDED)     the engine is paused and suspended, unless it is already
    holds.hold(COORDINATOR, HoldLevel.PAUSED)   the engine stays suspended, the higher level
    holds.release(UPDATE)                       resumed, but paused: the coordinator still requests it

A level above every hold that the engine's own verbs (`engine.pause()`) lead to counts as a hold of `DIRECT`, until
`engine.unpause()` or a release of `DIRECT`. A level below the holds lasts until the next change of a hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import Protocol

from rollout.engine.parts.context import MemoryMove
from rollout.state import EngineState, KVCacheManagementMode, Mode


class HoldLevel(IntEnum):
    """The level at which an engine is held."""

    RUNNING = 0
    PAUSED = 1
    """The engine makes no steps; the KV cache stays."""
    SUSPENDED = 2
    """The engine makes no steps; the KV cache is handled according to the mode."""


COORDINATOR = "coordinator"
"""Holder: the job's coordinator, by a control call."""
UPDATE = "weight update"
"""Holder: the optimizer hook or `suspended()`, until the weights are announced or until the next `generate`."""
BLOCK = "suspended()"
"""Holder: an open `with suspended():` block."""
PAUSE = "pause()"
"""Holder: `RolloutManager.pause`."""
SUSPEND = "suspend()"
"""Holder: `RolloutManager.suspend`."""
DIRECT = "engine"
"""Holder: the engine's own methods, called directly."""

_LEVELS = {
    EngineState.RUNNING: HoldLevel.RUNNING,
    EngineState.PAUSED: HoldLevel.PAUSED,
    EngineState.SUSPENDED: HoldLevel.SUSPENDED,
}


class HeldEngine(Protocol):
    """Lifecycle verbs of an engine, documented in `EngineControl`."""

    @property
    def state(self) -> EngineState: ...
    def locked(self) -> AbstractContextManager[None]: ...
    def pause(self) -> None: ...
    def unpause(self) -> None: ...
    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove: ...
    def resume(self) -> MemoryMove: ...


class Holds:
    """Levels requested by named holders; the engine is moved to the highest one at every change.

    All methods may be called by any thread; those that move the engine wait for its step boundary.
    """

    def __init__(self, engine: HeldEngine) -> None:
        self._engine = engine
        self._asked: dict[str, HoldLevel] = {}
        self._depth: Counter[str] = Counter()

    def __contains__(self, holder: str) -> bool:
        return holder in self._asked

    def level(self, holder: str) -> HoldLevel:
        """Return the level that a holder requests; `DIRECT`'s follows from the engine's state at its step boundary."""
        if holder == DIRECT:
            with self._engine.locked():
                self._note_direct()
        return self._asked.get(holder, HoldLevel.RUNNING)

    def describe(self) -> str:
        """Return the holders and the levels they request; takes no lock."""
        asked = [f"{holder} ({level.name.lower()})" for holder, level in tuple(self._asked.items())]
        return ", ".join(asked) or "none"

    @property
    def forbid_steps(self) -> bool:
        """Whether a holder other than `DIRECT` requests more than RUNNING; takes no lock."""
        return any(holder != DIRECT for holder in tuple(self._asked))

    def hold(self, holder: str, level: HoldLevel, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Request `level` in place of the earlier request of `holder`, and move the engine accordingly.

        Args:
            mode, keep_prefix_cache: see `EngineControl.suspend`; used if this call suspends the engine.

        Returns:
            Result of the suspend or resume that it led to.

        Raises:
            ConfigError: there is no such mode.
            EngineStateError, EngineDeadError: the engine is stopped.
            Exception: suspending or resuming failed. After any error the earlier request is in force.
        """
        return self._change({holder: level}, mode, keep_prefix_cache)

    def release(self, *holders: str) -> MemoryMove:
        """End holds, ignoring those that do not exist. Returns and raises as `hold`."""
        return self._change(dict.fromkeys(holders, HoldLevel.RUNNING), None, True)

    @contextmanager
    def held(self, holder: str, level: HoldLevel, mode: Mode = None) -> Iterator[None]:
        """Open a block in which `holder` requests `level`; the last of nested and overlapping blocks to end releases.

        Does nothing on a stopped engine.
        """
        with self._engine.locked():
            if self._engine.state is not EngineState.STOPPED:
                self.hold(holder, level, mode, keep_prefix_cache=False)
            self._depth[holder] += 1
        try:
            yield
        finally:
            with self._engine.locked():
                self._depth[holder] -= 1
                if not self._depth[holder] and self._engine.state is not EngineState.STOPPED:
                    self.release(holder)

    def _change(self, asked: dict[str, HoldLevel], mode: Mode, keep_prefix_cache: bool) -> MemoryMove:
        chosen = KVCacheManagementMode.parse(mode)
        with self._engine.locked():
            self._note_direct()
            before = dict(self._asked)
            self._asked |= asked
            self._asked = {holder: level for holder, level in self._asked.items() if level > HoldLevel.RUNNING}
            try:
                return self._move(chosen, keep_prefix_cache)
            except BaseException:
                self._asked = before
                if self._highest() is HoldLevel.RUNNING and self._engine.state is EngineState.PAUSED:
                    self._engine.unpause()
                raise

    def _move(self, mode: KVCacheManagementMode | None, keep_prefix_cache: bool) -> MemoryMove:
        engine, level, move = self._engine, self._highest(), MemoryMove()
        if level < HoldLevel.SUSPENDED and engine.state is EngineState.SUSPENDED:
            move = engine.resume()
        if level is HoldLevel.RUNNING:
            engine.unpause()
        else:
            engine.pause()
        if level is HoldLevel.SUSPENDED and engine.state is not EngineState.SUSPENDED:
            move = engine.suspend(mode, keep_prefix_cache=keep_prefix_cache)
        return move

    def _highest(self) -> HoldLevel:
        return max(self._asked.values(), default=HoldLevel.RUNNING)

    def _note_direct(self) -> None:
        if (standing := _LEVELS.get(self._engine.state)) is None:
            return
        named = max((level for holder, level in self._asked.items() if holder != DIRECT), default=HoldLevel.RUNNING)
        direct = standing if standing > named else min(standing, self._asked.get(DIRECT, HoldLevel.RUNNING))
        self._asked.pop(DIRECT, None)
        if direct > HoldLevel.RUNNING:
            self._asked[DIRECT] = direct
