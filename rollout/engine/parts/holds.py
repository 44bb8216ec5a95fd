"""Named holds on one engine. The engine is kept at the highest level that any holder requests.

    holds.hold(UPDATE, HoldLevel.SUSPENDED)     pauses and suspends the engine, unless it is suspended already
    holds.hold(COORDINATOR, HoldLevel.PAUSED)   changes nothing: SUSPENDED is the higher level
    holds.release(UPDATE)                       resumes the engine, which stays paused because of the coordinator's hold

Users may also call the engine's own methods, such as `engine.pause()`. If such a call moves the engine above the level of
every hold, the new level becomes a hold named `DIRECT`, until `engine.unpause()` or a release of `DIRECT`. If the call moves
the engine below the level of a hold, the lower level lasts until the next change of any hold.
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
    """The degree to which a hold stops an engine. A higher level includes the lower ones."""

    RUNNING = 0
    PAUSED = 1
    """The engine runs no steps. The KV cache stays in device memory."""
    SUSPENDED = 2
    """The engine runs no steps. The KV cache is kept, offloaded or dropped according to the KV cache mode."""


COORDINATOR = "coordinator"
"""The holder name of the job's coordinator, which holds the engine through control calls."""
UPDATE = "weight update"
"""The holder name of a weight update. The optimizer hook or `suspended()` places the hold, which lasts until the new weights
are announced or until the next `generate`."""
BLOCK = "suspended()"
"""The holder name of an open `with suspended():` block."""
PAUSE = "pause()"
"""The holder name of `RolloutManager.pause`."""
SUSPEND = "suspend()"
"""The holder name of `RolloutManager.suspend`."""
DIRECT = "engine"
"""The holder name that stands for direct calls of the engine's own methods, such as `engine.pause()`."""

_LEVELS = {
    EngineState.RUNNING: HoldLevel.RUNNING,
    EngineState.PAUSED: HoldLevel.PAUSED,
    EngineState.SUSPENDED: HoldLevel.SUSPENDED,
}


class HeldEngine(Protocol):
    """The engine methods that `Holds` calls. `EngineControl` and `Lifecycle` document them."""

    @property
    def state(self) -> EngineState: ...
    def locked(self) -> AbstractContextManager[None]: ...
    def pause(self) -> None: ...
    def unpause(self) -> None: ...
    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove: ...
    def resume(self) -> MemoryMove: ...


class Holds:
    """The levels at which named holders hold one engine. Every change moves the engine to the highest level.

    Any thread may call any method. Methods that move the engine wait until its current step has finished.
    """

    def __init__(self, engine: HeldEngine) -> None:
        self._engine = engine
        self._asked: dict[str, HoldLevel] = {}
        self._depth: Counter[str] = Counter()

    def __contains__(self, holder: str) -> bool:
        return holder in self._asked

    def level(self, holder: str) -> HoldLevel:
        """Return the level that a holder requests. For `DIRECT`, derive the level from the engine's current state."""
        if holder == DIRECT:
            with self._engine.locked():
                self._note_direct()
        return self._asked.get(holder, HoldLevel.RUNNING)

    def describe(self) -> str:
        """Describe the holders and the levels that they request, without taking a lock."""
        asked = [f"{holder} ({level.name.lower()})" for holder, level in tuple(self._asked.items())]
        return ", ".join(asked) or "none"

    @property
    def forbid_steps(self) -> bool:
        """Whether a holder other than `DIRECT` requests a level above RUNNING. Reading it takes no lock."""
        return any(holder != DIRECT for holder in tuple(self._asked))

    def hold(self, holder: str, level: HoldLevel, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Replace the level that `holder` requests by `level`, and move the engine to the highest level requested.

        Args:
            holder: name of the holder, such as `COORDINATOR`.
            level: the level that the holder requests from now on.
            mode, keep_prefix_cache: see `EngineControl.suspend`. They apply only if this call suspends the engine.

        Returns:
            The result of the suspend or resume, empty if the engine did neither.

        Raises:
            ConfigError: `mode` is not the name of a KV cache mode.
            EngineStateError, EngineDeadError: the engine is stopped.
            Exception: suspending or resuming failed. After any error, all holds are as they were before this call.
        """
        return self._change({holder: level}, mode, keep_prefix_cache)

    def release(self, *holders: str) -> MemoryMove:
        """Release these holders' holds, ignoring names without a hold. The result and the exceptions are those of `hold`."""
        return self._change(dict.fromkeys(holders, HoldLevel.RUNNING), None, True)

    @contextmanager
    def held(self, holder: str, level: HoldLevel, mode: Mode = None) -> Iterator[None]:
        """Open a block in which `holder` requests `level`.

        Blocks of one holder may nest or overlap: the hold is released when the last one exits. A stopped engine is not held.
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
