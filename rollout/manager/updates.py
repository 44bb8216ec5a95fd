"""The manager's actions around weight updates: pause, suspend, resume, and the announcement of new weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from rollout.engine.parts.context import MemoryMove
from rollout.engine.parts.holds import BLOCK, DIRECT, PAUSE, SUSPEND, UPDATE, HoldLevel
from rollout.errors import EngineStateError, JournalError
from rollout.manager.rounds import Rounds
from rollout.observe.recorder import Span, active
from rollout.state import EngineState, Mode


class Updates:
    """The manager's methods to call between `generate` calls. Every rank must call them; some wait for all ranks."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._step_began: float | None = None
        """Time of the last `before_optimizer_step`, in seconds since the epoch; `weights_updated` resets it to None."""

    @contextmanager
    def _together(self, call: str) -> Iterator[None]:
        self._rounds.player.refuse_inside(call)
        yield
        self._rounds.backend.barrier(call)

    def pause(self) -> None:
        """Stop generating; `generate` raises until `unpause`."""
        with self._together("pause"):
            self._rounds.engine.holds.hold(PAUSE, HoldLevel.PAUSED)

    def unpause(self) -> None:
        """Allow generation again; raise `EngineStateError` after an explicit `suspend`, which only `resume` reverses."""
        holds = self._rounds.engine.holds
        with self._together("unpause"):
            if SUSPEND in holds:
                raise EngineStateError("unpause() while suspended: call resume() first")
            holds.release(PAUSE, *[DIRECT] * (holds.level(DIRECT) is HoldLevel.PAUSED))

    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Take the KV cache off the device; `generate` raises until `resume`.

        Args:
            mode: `persist`, `offload` or `recompute`; None means the configured mode.
            keep_prefix_cache: whether to keep cached blocks that no request uses. Pass False if the weights will change.
        """
        with self._together("suspend"):
            return self._rounds.suspend(SUSPEND, mode, keep_prefix_cache=keep_prefix_cache)

    def resume(self) -> MemoryMove:
        """Restore the KV cache and allow generation again, even after `pause`. This has no effect on a running engine."""
        with self._together("resume"):
            return self._rounds.release(SUSPEND, PAUSE, UPDATE, DIRECT)

    def suspended(self, mode: Mode = None) -> AbstractContextManager[None]:
        """Take the KV cache off the device for a `with` block; the next `generate` restores it.

        Cached blocks that no request uses are dropped, because the weights are about to change. `generate` also works after
        an exception in the block.
        """
        self._rounds.player.refuse_inside("suspended")
        return self._suspended(mode)

    @contextmanager
    def _suspended(self, mode: Mode) -> Iterator[None]:
        self._rounds.make_way(mode)
        with self._rounds.engine.holds.held(BLOCK, HoldLevel.SUSPENDED, mode):
            yield

    def before_optimizer_step(self, mode: Mode = None) -> None:
        """Suspend the KV cache before the weights change; the next `generate` resumes it. The optimizer hook calls this.

        If `generate` runs on another thread, wait until it has returned.

        Args:
            mode: `persist`, `offload` or `recompute`; None means the configured mode.
        """
        with self._rounds.turn("before_optimizer_step"):
            self._rounds.make_way(mode)
        self._step_began = time.time()

    def weights_updated(self) -> int:
        """Announce that the weights have changed, which increases the policy version by 1.

        The optimizer hook calls this method. Without a hook, call it yourself.

        Returns:
            The policy version; unchanged if the manager is closed or its engine is dead.
        """
        rounds, engine = self._rounds, self._rounds.engine
        rounds.player.refuse_inside("weights_updated")
        began, self._step_began = self._step_began, None
        if began is not None and (recorder := active()) is not None:
            recorder.add(Span("trainer", "optimizer.step", max(began, recorder.started), recorder.clock(), {}))
        if engine.state is not EngineState.STOPPED:
            with engine.locked():
                engine.weights_updated()
                # Ignore a failed write to the journal: the weights have changed in any case, and the next call tries again.
                with suppress(JournalError):
                    rounds.loop.take_ended()
            rounds.loop.sync_metrics()
        return engine.policy_version

    @contextmanager
    def adapter_switch(self, what: str | None = None) -> Iterator[None]:
        """Enclose a change of the model's active adapters. Prefer `trainer_hooks.peft.adapter`, which calls this method.

        Args:
            what: name of the change, equal on all ranks, which then wait for each other. If None, this rank does not wait.

        Raises:
            DeadlineError: some ranks have not made the same change; the message names them.
            EngineStateError: some ranks have made another change; the message names them.
        """
        self._rounds.player.refuse_inside("adapter_switch")
        with self._rounds.engine.parts.control.adapter_switch():
            yield
        if what is not None:
            self._rounds.backend.barrier(what)
