"""An engine's part in a group of ranks that compute forwards together: following a first rank, or in lock-step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout.engine.control import EngineControl
from rollout.engine.multimodal.family import ImageItem
from rollout.engine.tensor_parallel.follower import follow
from rollout.engine.tensor_parallel.work import ForwardWork
from rollout.errors import EngineDeadError, EngineStateError


class GroupMember(EngineControl):
    """Following the first rank of a group, agreeing with ranks of a lock-step, and the refusal of steps without them."""

    def _refuse_alone(self) -> None:
        if self.lockstep is not None:
            self.lockstep.refuse_alone()
        elif self.leader is not None:
            self.leader.refuse_alone()
        elif self.group is not None:
            raise EngineStateError(
                f"step() on rank {self.group.ranks[self.group.place]}: in a {self.group.name} rank {self.group.ranks[0]} "
                "decides and the others follow; generate by RolloutManager or LLM, on every rank of the group"
            )

    def follow(self) -> Any:
        """Compute what the first rank of the tensor-parallel group decides, until it ends its call.

        Returns:
            What the first rank tells of the call (see `Leader.leading`).

        Raises:
            EngineDeadError: the group has ended.
        """
        assert self.group is not None

        def compute(work: ForwardWork) -> None:
            with self.locked():
                self._lifecycle.refuse_unless_running()
                self.controller.runner.compute(work)

        def encode(item: ImageItem) -> None:
            with self.locked():
                self._lifecycle.refuse_unless_running()
                self.controller.runner.encode(item)

        with self._dead_without_the_others():
            return follow(self.group, compute, encode)

    def agree(self, state: int) -> int:
        """The smallest state of the ranks that exchange tokens with this one; every one calls it (see `Lockstep`).

        Raises:
            EngineDeadError: the group has ended.
        """
        assert self.lockstep is not None
        with self._dead_without_the_others():
            return self.lockstep.agree(state)

    @contextmanager
    def _dead_without_the_others(self) -> Iterator[None]:
        try:
            yield
        except EngineDeadError as exc:
            with self.locked():
                self._failures.die(exc)
            self._moved()
            raise

    def forget_request(self, request_id: int, sample_index: int) -> None:
        """Drop a sample that was never run here, uncounted; nothing is handed out. Unknown ones are ignored."""
        with self._lock:
            for sample in self.context.scheduler.remove(lambda key: key == (request_id, sample_index)):
                self._ledger.forget(sample)
