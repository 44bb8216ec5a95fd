"""Pause and suspend state of the manager's engine: which call stopped it, and what resumes it.

    stopped by                  goes on with
    pause()                     unpause() or resume()
    suspend()                   resume()
    suspended(), the hook       the next generate, by itself

What a caller stopped explicitly stays stopped whatever the hook does in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rollout.engine.context import MemoryMove
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import EngineStateError
from rollout.manager.telemetry import RolloutMetrics
from rollout.state import EngineState, KVCacheManagementMode, Mode
from rollout.threads.interrupts import interrupt_deferred


class Suspension:
    """Pause and suspend of one engine, by the trainer's calls and by the optimizer hook.

    Args:
        held_elsewhere: whether the coordinator has paused or suspended the engine, and will resume it.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, metrics: RolloutMetrics, held_elsewhere: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._held_elsewhere = held_elsewhere
        self._metrics = metrics
        self._stopped_by: Literal["pause", "suspend"] | None = None
        self._blocks_open = 0

    def pause(self) -> None:
        """Stop until `unpause`."""
        self._engine.pause()
        self._stopped_by = self._stopped_by or "pause"

    def unpause(self) -> None:
        """Undo `pause`.

        Raises:
            EngineStateError: it was `suspend` that stopped it.
        """
        if self._stopped_by == "suspend" or self._engine.state is not EngineState.SUSPENDED:
            self._engine.unpause()
        self._stopped_by = None

    def suspend(self, mode: Mode, *, keep_prefix_cache: bool) -> MemoryMove:
        """Take the KV cache off the device until `resume`."""
        move = self._put_away(mode, keep_prefix_cache)
        self._stopped_by = "suspend"
        return move

    def resume(self) -> MemoryMove:
        """Undo `suspend` and `pause`. An engine that the coordinator holds too stays as it is."""
        self._stopped_by = None
        if self._held_elsewhere():
            return MemoryMove()
        was_suspended = self._engine.state is EngineState.SUSPENDED
        with self._metrics.phase("resume"), interrupt_deferred():
            move = self._engine.resume()
            self._engine.unpause()
        if was_suspended:
            self._metrics.resumed(move)
        return move

    def make_way(self, mode: Mode) -> None:
        """Take the KV cache off the device until the next `ensure_running`; nothing to do where it is off already."""
        if self._engine.state is not EngineState.STOPPED:
            self._put_away(mode, keep_prefix_cache=False)

    @contextmanager
    def suspended(self, mode: Mode) -> Iterator[None]:
        """`make_way`, and no `ensure_running` inside."""
        self.make_way(mode)
        self._blocks_open += 1
        try:
            yield
        finally:
            self._blocks_open -= 1

    def ensure_running(self) -> None:
        """Ready to generate: brings back what `make_way` took.

        Raises:
            EngineStateError: stopped explicitly, or inside `suspended`; names the cure.
        """
        if self._blocks_open:
            raise EngineStateError("generating inside `with rollout.suspended():`: leave the block first")
        if self._stopped_by == "suspend":
            raise EngineStateError("generating while suspended: call rollout.resume() first")
        if self._held_elsewhere():
            return
        if self._stopped_by == "pause" or self._engine.state is EngineState.PAUSED:
            raise EngineStateError("generating while paused: call rollout.unpause() first")
        if self._engine.state is EngineState.SUSPENDED:
            self.resume()

    def _put_away(self, mode: Mode, keep_prefix_cache: bool) -> MemoryMove:
        chosen = KVCacheManagementMode.parse(mode)
        self._engine.release_weights()
        if self._engine.state is EngineState.SUSPENDED:
            return MemoryMove()
        with self._metrics.phase("suspend"), interrupt_deferred():
            was_running = self._engine.state is EngineState.RUNNING
            self._engine.pause()
            try:
                move = self._engine.suspend(chosen, keep_prefix_cache=keep_prefix_cache)
            except BaseException:
                if was_running:
                    self._engine.unpause()
                raise
        self._metrics.enter_phase("train")
        self._metrics.suspended(move)
        return move
