"""What a manager does around weight updates: pause, suspend, resume, and the announcement of new weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from rollout.engine.parts.context import MemoryMove
from rollout.errors import JournalError
from rollout.manager.rounds import Rounds
from rollout.observe.recorder import Span, active
from rollout.state import EngineState, Mode


class Updates:
    """The calls of one manager between two rounds; `RolloutManager` documents them. Other ranks wait for each other."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._suspension = rounds.suspension
        self._step_began: float | None = None
        """Seconds since the epoch at the last `before_optimizer_step` without a `weights_updated` after it."""

    @contextmanager
    def _together(self, call: str) -> Iterator[None]:
        self._rounds.player.refuse_inside(call)
        yield
        self._rounds.backend.barrier(call)

    def pause(self) -> None:
        """See `RolloutManager.pause`."""
        with self._together("pause"):
            self._suspension.pause()

    def unpause(self) -> None:
        """See `RolloutManager.unpause`."""
        with self._together("unpause"):
            self._suspension.unpause()

    def suspend(self, mode: Mode, *, keep_prefix_cache: bool) -> MemoryMove:
        """See `RolloutManager.suspend`."""
        with self._together("suspend"):
            return self._suspension.suspend(mode, keep_prefix_cache=keep_prefix_cache)

    def resume(self) -> MemoryMove:
        """See `RolloutManager.resume`."""
        with self._together("resume"):
            return self._suspension.resume()

    def suspended(self, mode: Mode) -> AbstractContextManager[None]:
        """See `RolloutManager.suspended`."""
        self._rounds.player.refuse_inside("suspended")
        return self._suspension.suspended(mode)

    def before_optimizer_step(self, mode: Mode) -> None:
        """See `RolloutManager.before_optimizer_step`."""
        with self._rounds.turn("before_optimizer_step"):
            self._suspension.make_way(mode)
        self._step_began = time.time()

    def weights_updated(self) -> int:
        """See `RolloutManager.weights_updated`."""
        rounds, engine = self._rounds, self._rounds.engine
        rounds.player.refuse_inside("weights_updated")
        began, self._step_began = self._step_began, None
        if began is not None and (recorder := active()) is not None:
            recorder.add(Span("trainer", "optimizer.step", max(began, recorder.started), recorder.clock(), {}))
        if engine.state is not EngineState.STOPPED:
            with engine.locked():
                engine.weights_updated()
                # The weights have moved, whatever becomes of a group: what cannot be written is tried again later.
                with suppress(JournalError):
                    rounds.loop.take_ended()
            rounds.loop.sync_metrics()
        return engine.policy_version

    @contextmanager
    def adapter_switch(self, what: str | None) -> Iterator[None]:
        """See `RolloutManager.adapter_switch`."""
        self._rounds.player.refuse_inside("adapter_switch")
        with self._rounds.engine.parts.control.adapter_switch():
            yield
        if what is not None:
            self._rounds.backend.barrier(what)
