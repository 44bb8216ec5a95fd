"""The collective calls of the ranks. The coordinator's barriers synchronise them, even if a rank is disconnected for a time.

Every rank counts the collective calls that it has completed. The count is the number of the next call's barrier. It is
also published in the job's store. A rank that was disconnected at the end of a call reads there that the call has
finished, instead of waiting forever at its barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

from rollout.distributed.job.member import JobMember
from rollout.distributed.job.world import LOOK_S, World
from rollout.errors import ConnectionLostError, DeadlineError, EngineStateError
from rollout.state import CoordinatorState


class CollectiveCalls:
    """The collective calls of one rank, such as `generate`, which every rank must make in the same order.

    Args:
        member: this rank's membership in the job.
        world: the ranks of the job.
        on_event: called from any thread when a barrier was passed or refused, or the connection was lost. Must not block.
    """

    def __init__(self, member: JobMember, world: World, on_event: Callable[[], None]) -> None:
        self._member = member
        self._world = world
        self._on_event = on_event
        self._timeout_s = member.engine.config.advanced.control_timeout_s
        self._gathered = 0
        self._ended = 0
        """The number of collective calls that this rank has completed."""
        self._barrier: Future[None] | None = None
        """A future that is done when the current call's barrier was passed; None before this rank has arrived there."""
        self._finishing = False
        """Whether this rank has arrived at the barrier at the end of the current `generate`."""
        self._sessions_left = 0
        """The number of this rank's sessions that had ended by the end of the last call. If more have ended by now, the
        barrier's reply may have been sent to one of them, so it may be lost."""

    def meet(self, call: str, timeout_s: float | None = None) -> None:
        """Wait at a barrier until all ranks have made the same call.

        Raises:
            DeadlineError: some ranks did not arrive in time; the message names them.
            EngineStateError: the ranks are in different calls or have different policy versions.
            ConfigError: a rank has failed to join the job.
        """
        if self._passed():
            # Complete the interrupted earlier call first: all ranks, including this rank, have arrived at its barrier.
            self._end()
        self._barrier, self._finishing = None, False
        limit = self._timeout_s if timeout_s is None else timeout_s
        while not self.ended_elsewhere:
            if (why := self._member.lost) is not None:
                self.recover(why)
            try:
                arrived = self._arrive(call, limit)
                while wait([arrived], LOOK_S).not_done:
                    self._world.refuse_when_failed()
                arrived.result()
            except DeadlineError as exc:
                late = "some ranks"
                with suppress(ConnectionLostError, DeadlineError):
                    late = ", ".join(self._member.status()["barrier_waits_for"]) or late
                raise DeadlineError(
                    f"{call}: {late} did not do the same within {limit} s; every rank must (if one only needs longer: "
                    "Advanced.control_timeout_s)"
                ) from exc
            except ConnectionLostError:
                continue
            except EngineStateError:
                self._end()
                raise
            break
        self._end()

    def gather(self, what: str, value: bytes) -> list[bytes] | None:
        """Collect one value per rank. Return all values in rank order on rank 0, and None on the other ranks.

        Raises the same errors as `meet`."""
        world, self._gathered = self._world, self._gathered + 1
        keys = [f"{what}/{self._gathered}/{rank}" for rank in range(world.size)]
        world.publish(keys[world.rank], value)
        self.meet(f"{what}()")
        return None if world.rank else [world.wait_for(key, self._timeout_s) for key in keys]

    def try_finish(self) -> bool:
        """Arrive at the barrier at the end of `generate` without waiting; return whether all ranks have arrived.

        Raises the same errors as `meet`.
        """
        if self.ended_elsewhere:
            self._barrier = None
            self._end()
            return True
        if self._member.lost is not None:
            return False
        if self._barrier is None or not (self._finishing or self._passed()):
            self._barrier = self._arrive("generate()", self._timeout_s)
            self._finishing = True
        if not self._barrier.done():
            return False
        barrier, self._barrier = self._barrier, None
        # Return False, so that the caller tries again. Before that, its `wait` reconnects or reports missing ranks.
        if isinstance(barrier.exception(), ConnectionLostError | DeadlineError):
            self._on_event()
            return False
        self._end()
        barrier.result()
        return True

    def give_up(self) -> None:
        """Report that `generate` failed on this rank, so that the barrier does not check whether this rank made the
        same call as the other ranks."""
        if self._finishing and not self._passed():
            self._member.loop.start(self._give_up(self._ended))
            self._finishing = False

    async def _give_up(self, index: int) -> None:
        with suppress(ConnectionLostError):
            self._member.client.give_up_barrier(index)

    def recover(self, why: Exception) -> None:
        """Reconnect after the connection was lost with the error `why`. If this starts a new session, this rank must
        arrive at the barrier again."""
        before = self._member.sessions_left
        try:
            self._member.recover(why)
        finally:
            if self._member.sessions_left != before:
                self._barrier = None

    @property
    def ended_elsewhere(self) -> bool:
        """Whether the current call has finished on the other ranks while this rank was disconnected."""
        cut_off = self._member.sessions_left != self._sessions_left or self._member.lost is not None
        return cut_off and self._world.calls_ended() > self._ended

    def refuse_if_ranks_are_missing(self) -> None:
        """After a long wait without events, raise `DeadlineError` unless a rank computes samples or the job is
        paused."""
        try:
            status = self._member.status()
        except (ConnectionLostError, DeadlineError):
            # Ignore the error: once the session counts as lost, the next call reconnects.
            return
        computing = (rank["running"] and rank["since_progress_s"] < self._timeout_s for rank in status["ranks"])
        if status["state"] != CoordinatorState.RUNNING or any(computing):
            return
        name = self._member.name
        if self.ended_elsewhere:
            raise DeadlineError(
                f"{name}: nothing has happened for {self._timeout_s} s (control_timeout_s). This rank was cut off from the "
                "coordinator for longer than heartbeat_timeout_s. The others have ended this generate() without it and "
                "continued, and no engine computes what is still open here; make heartbeat_timeout_s longer than a rank "
                "may stall"
            )
        idle = [rank["name"] for rank in status["ranks"] if rank["assigned_samples"]]
        late = [each for each in dict.fromkeys((*status["barrier_waits_for"], *idle)) if each != name]
        raise DeadlineError(
            f"{name}: nothing has happened for {self._timeout_s} s (control_timeout_s), waiting for "
            f"{', '.join(late) or 'no rank in particular'} in generate(); every rank must call it, with an empty list if "
            "it has no prompts"
        )

    def _passed(self) -> bool:
        barrier = self._barrier
        return barrier is not None and barrier.done() and not (barrier.cancelled() or barrier.exception())

    def _arrive(self, call: str, timeout_s: float) -> Future[None]:
        barrier = self._member.client.barrier(
            self._ended, timeout_s, what=call, policy_version=self._member.engine.policy_version
        )
        arrived = self._member.loop.start(barrier)
        arrived.add_done_callback(lambda _: self._on_event())
        return arrived

    def _end(self) -> None:
        self._ended += 1
        self._finishing = False
        self._sessions_left = self._member.sessions_left
        self._world.publish_calls_ended(self._ended)
