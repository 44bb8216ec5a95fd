"""Holds of a manager's calls on its engine, and what ends them.

    held by                     until
    pause()                     unpause() or resume()
    suspend()                   resume()
    suspended(), the hook       the next generate, by itself

What a caller stopped explicitly stays stopped whatever the hook does in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.context import MemoryMove
from rollout.engine.parts.holds import BLOCK, DIRECT, PAUSE, SUSPEND, UPDATE, HoldLevel
from rollout.errors import EngineStateError
from rollout.manager.telemetry import RolloutMetrics
from rollout.state import EngineState, KVCacheManagementMode, Mode
from rollout.threads.interrupts import interrupt_deferred


class Suspension:
    """Pause and suspend of one engine, by the trainer's calls and by the optimizer hook."""

    def __init__(self, engine: DynamicInferenceEngine, metrics: RolloutMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def pause(self) -> None:
        """Stop until `unpause`."""
        self._engine.holds.hold(PAUSE, HoldLevel.PAUSED)

    def unpause(self) -> None:
        """Undo `pause`, and a direct `engine.pause()`.

        Raises:
            EngineStateError: it was `suspend` that stopped it.
        """
        if SUSPEND in self._engine.holds:
            raise EngineStateError("unpause() while suspended: call resume() first")
        direct = self._engine.holds.level(DIRECT) is HoldLevel.PAUSED
        self._engine.holds.release(PAUSE, *[DIRECT] * direct)

    def suspend(self, mode: Mode, *, keep_prefix_cache: bool) -> MemoryMove:
        """Take the KV cache off the device until `resume`."""
        return self._suspend(SUSPEND, mode, keep_prefix_cache)

    def resume(self) -> MemoryMove:
        """Undo `suspend`, `pause`, and what was called on the engine directly."""
        return self._release(SUSPEND, PAUSE, UPDATE, DIRECT)

    def make_way(self, mode: Mode) -> None:
        """Take the KV cache off the device until the next `ensure_running`; nothing to do where it is off already."""
        if self._engine.state is not EngineState.STOPPED:
            self._suspend(UPDATE, mode, keep_prefix_cache=False)

    @contextmanager
    def suspended(self, mode: Mode) -> Iterator[None]:
        """`make_way`, and no `ensure_running` inside."""
        self.make_way(mode)
        with self._engine.holds.held(BLOCK, HoldLevel.SUSPENDED, mode):
            yield

    def ensure_running(self) -> None:
        """End the holds of `make_way`. The engine may be held by the coordinator still.

        Raises:
            EngineStateError: stopped explicitly, or inside `suspended`; names the cure.
        """
        holds = self._engine.holds
        if BLOCK in holds:
            raise EngineStateError("generating inside `with manager.suspended():`: leave the block first")
        if SUSPEND in holds:
            raise EngineStateError("generating while suspended: call manager.resume() first")
        if PAUSE in holds or holds.level(DIRECT) is HoldLevel.PAUSED:
            raise EngineStateError("generating while paused: call manager.unpause() first")
        if self._engine.state is not EngineState.STOPPED:
            self._release(UPDATE, DIRECT)

    def _suspended(self) -> bool:
        return self._engine.state is EngineState.SUSPENDED

    def _release(self, *holders: str) -> MemoryMove:
        if not self._suspended():
            return self._engine.holds.release(*holders)
        with self._metrics.phase("resume"), interrupt_deferred():
            move = self._engine.holds.release(*holders)
            if not self._suspended():
                # Otherwise the time would not be that of the copies, and they would count as generating.
                self._engine.parts.control.wait_until_restored()
        if not self._suspended():
            self._metrics.resumed(move)
        return move

    def _suspend(self, holder: str, mode: Mode, keep_prefix_cache: bool) -> MemoryMove:
        chosen = KVCacheManagementMode.parse(mode)
        self._engine.guard.release()
        if self._suspended():
            return self._engine.holds.hold(holder, HoldLevel.SUSPENDED)
        with self._metrics.phase("suspend"), interrupt_deferred():
            move = self._engine.holds.hold(holder, HoldLevel.SUSPENDED, chosen, keep_prefix_cache=keep_prefix_cache)
        self._metrics.enter_phase("train")
        self._metrics.suspended(move)
        return move
