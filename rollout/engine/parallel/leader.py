"""First rank of a tensor-parallel group: broadcasts what each forward computes, and agrees with the others on failures.

Always true: nothing is broadcast outside of `leading`, in which the other members follow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.multimodal.family import ImageItem
from rollout.engine.parallel.group import TensorParallelGroup
from rollout.engine.parallel.work import BEAT, CHECK, ENCODE, END, FORWARD, ForwardWork, pack
from rollout.errors import EngineDeadError, EngineStateError
from rollout.threads.interrupts import uninterrupted

Result = TypeVar("Result")

BEAT_S = 1.0
"""Least time between two messages that only say that this rank is alive."""


class Leader:
    """Sends the group's messages.

    Args:
        clock: seconds that never run backwards.
    """

    def __init__(self, group: TensorParallelGroup, clock: Callable[[], float] = time.monotonic) -> None:
        self.group = group
        self._clock = clock
        self._sent = clock()
        self._leading = False
        self._sending = threading.Lock()
        self._blocks: list[int] = []
        self._slots: list[NDArray[np.int64]] = []

    @contextmanager
    def leading(self, outcome: Callable[[BaseException | None], Any]) -> Iterator[None]:
        """A block in which the other members follow; at its end they get `outcome` of the exception that it raised."""
        self._leading = True
        failed: BaseException | None = None
        try:
            yield
        except BaseException as exc:
            failed = exc
            raise
        finally:
            self._leading = False
            try:
                self._send(END, outcome(failed))
            except Exception:
                # The group has ended, which the exception that is on its way says, if there is one.
                if failed is None:
                    raise

    def refuse_alone(self) -> None:
        """Raises: EngineStateError, EngineDeadError: the other members do not follow now, or the group has ended."""
        self.group.refuse_when_lost()
        if not self._leading:
            raise EngineStateError(
                f"step() in a {self.group.name}, whose other members do not compute now: generate by RolloutManager or LLM, "
                "on every rank of the group"
            )

    def beat(self) -> None:
        """Tell the others that this rank is alive, unless it has told them something within `BEAT_S`."""
        if self._clock() - self._sent > BEAT_S:
            self._send(BEAT)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Have the others fill these blocks with zeros before the next forward."""
        self._blocks += blocks

    def zero_slots(self, slots: NDArray[np.int64]) -> None:
        """Have the others fill these token slots with zeros before the next forward."""
        self._slots.append(slots)

    def run(self, work: ForwardWork, compute: Callable[[ForwardWork], Tensor]) -> Tensor:
        """Compute a forward together with the others.

        Raises:
            EngineDeadError: a member is gone, or failed where this rank did not.
            Exception: what the model raised, on all members alike; the group goes on.
        """
        told = replace(work, zeroed_blocks=self._blocks, zeroed_slots=np.concatenate([*self._slots, work.zeroed_slots]))
        self._send(FORWARD, told.serialize())
        self._blocks, self._slots = [], []
        return self._together(partial(compute, work))

    def encode(self, item: ImageItem, compute: Callable[[ImageItem], list[Tensor]]) -> list[Tensor]:
        """Run a split vision tower on an item together with the others; raises as `run` does."""
        self._send(ENCODE, item.serialize())
        return self._together(partial(compute, item))

    def _together(self, compute: Callable[[], Result]) -> Result:
        """What `compute` returns, while the others compute what they were sent."""
        try:
            # A member that leaves a forward ends the group.
            with uninterrupted(wholly=True):
                return compute()
        except Exception as exc:
            try:
                self._send(CHECK)
                # 0: a member has not failed; its collectives may be one ahead of the others'.
                agreed = self.group.least(1)
            except EngineDeadError as lost:
                raise self.group.lose_after(exc, lost) from exc
            if not agreed:
                raise self.group.lose(exc) from exc
            raise
        except BaseException as exc:
            self.group.lose(exc)
            raise

    def _send(self, kind: str, content: Any = None) -> None:
        message = pack(kind, content)
        # A message may be two broadcasts, and an `LLM`'s thread is not the only one that steps its engine.
        with uninterrupted(wholly=True), self._sending:
            self.group.send(message)
            self._sent = self._clock()
