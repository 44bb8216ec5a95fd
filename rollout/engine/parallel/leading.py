"""A tensor-parallel group's shared forwards: the first rank broadcasts what to compute, the others follow.

Always true: nothing is broadcast outside of `Leader.leading`, in which the other members follow. An exception that every
member raises leaves the group intact; one that only some raise ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.multimodal.family import ImageItem, StepImages
from rollout.engine.parallel.group import TensorParallelGroup
from rollout.errors import EngineDeadError, EngineStateError, SerializationError
from rollout.requests.codec import refuse, unpack_msgpack
from rollout.threads.interrupts import uninterrupted

Result = TypeVar("Result")

BEAT_S = 1.0
"""Least time between two messages that only say that this rank is alive."""

FORWARD, ENCODE, BEAT, CHECK, END = "forward", "encode", "beat", "check", "end"
_FIELDS = 11


@dataclass(frozen=True, eq=False)
class ForwardWork:
    """Input of one forward, and the changes of the KV cache that precede it.

    If the layers are in groups (`blocks.pages`), blocks are pages.
    """

    ids: NDArray[np.int64]
    """[P] token ids."""
    rows: PagedRows
    """Positions and block tables of the P positions."""
    keep: NDArray[np.int64]
    """[K] packed positions whose logits are wanted."""
    copies: Sequence[tuple[int, int]] = ()
    """(source, destination) blocks to copy before the forward, in this order."""
    zeroed_blocks: Sequence[int] = ()
    zeroed_slots: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """To fill with zeros before the copies, like `zeroed_blocks`."""
    images: StepImages | None = None

    def serialize(self) -> list[Any]:
        """Plain values for msgpack."""
        rows = self.rows
        arrays = (self.ids, rows.offsets, rows.positions, rows.tables, self.keep, self.zeroed_slots)
        packed = [np.ascontiguousarray(each, "<i8").tobytes() for each in arrays]
        others = [np.ascontiguousarray(each, "<i8").tobytes() for each in rows.others]
        images = None if self.images is None else self.images.serialize()
        copies = [list(pair) for pair in self.copies]
        return [*packed, rows.block_size, copies, list(self.zeroed_blocks), others, images]

    @classmethod
    def deserialize(cls, plain: Any) -> ForwardWork:
        """The inverse of `serialize`.

        Raises:
            SerializationError: `plain` was not made by `serialize`.
        """
        if not isinstance(plain, list) or len(plain) != _FIELDS or not all(type(each) is bytes for each in plain[:6]):
            refuse("ForwardWork", plain, "a list of eleven fields")
        images = None if plain[10] is None else StepImages.deserialize(plain[10])
        try:
            ids, offsets, positions, tables, keep, slots = (np.frombuffer(bytearray(each), "<i8") for each in plain[:6])
            count = len(offsets) - 1
            seen = None if images is None else images.seen
            others = tuple(np.frombuffer(bytearray(each), "<i8").reshape(count, -1) for each in plain[9])
            rows = PagedRows(offsets, positions, tables.reshape(count, -1), int(plain[6]), seen, others)
            return cls(ids, rows, keep, [(a, b) for a, b in plain[7]], list(plain[8]), slots, images)
        except (ValueError, TypeError) as exc:
            raise SerializationError(f"ForwardWork: arrays of other lengths than its rows have ({exc})") from exc


class Together:
    """How a step's forward involves other ranks. This implementation involves none."""

    def refuse_alone(self) -> None:
        """Raises: EngineStateError, EngineDeadError: the other ranks do not compute now, or the group has ended."""

    def run(self, work: ForwardWork, compute: Callable[[ForwardWork], Tensor]) -> Tensor:
        """Compute one forward.

        Raises:
            EngineDeadError: another rank is gone, or failed where this rank did not.
            Exception: the model raised it, on all ranks alike; the group continues.
        """
        return compute(work)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Have the other ranks fill these blocks with zeros before the next forward."""

    def zero_slots(self, slots: NDArray[np.int64]) -> None:
        """Have the other ranks fill these token slots with zeros before the next forward."""


class Leader(Together):
    """First rank of a tensor-parallel group: sends the group's messages."""

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
                # If the block has raised, that exception already says that the group has ended.
                if failed is None:
                    raise

    def refuse_alone(self) -> None:
        self.group.refuse_when_lost()
        if not self._leading:
            raise EngineStateError(
                f"step() in a {self.group.name}, whose other members do not compute now: generate by RolloutManager or LLM, "
                "on every rank of the group"
            )

    def beat(self) -> None:
        """Tell the others that this rank is alive, unless it has sent a message within `BEAT_S`."""
        if self._clock() - self._sent > BEAT_S:
            self._send(BEAT)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        self._blocks += blocks

    def zero_slots(self, slots: NDArray[np.int64]) -> None:
        self._slots.append(slots)

    def run(self, work: ForwardWork, compute: Callable[[ForwardWork], Tensor]) -> Tensor:
        told = replace(work, zeroed_blocks=self._blocks, zeroed_slots=np.concatenate([*self._slots, work.zeroed_slots]))
        self._send(FORWARD, told.serialize())
        self._blocks, self._slots = [], []
        return self._together(partial(compute, work))

    def encode(self, item: ImageItem, compute: Callable[[ImageItem], list[Tensor]]) -> list[Tensor]:
        """Run a split vision tower on an item together with the others; raises as `run` does."""
        self._send(ENCODE, item.serialize())
        return self._together(partial(compute, item))

    def _together(self, compute: Callable[[], Result]) -> Result:
        """Result of `compute`, while the others compute what they were sent."""
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
        # A message may be two broadcasts, and several threads may step one engine.
        with uninterrupted(wholly=True), self._sending:
            self.group.send(message)
            self._sent = self._clock()


def follow(
    group: TensorParallelGroup, compute: Callable[[ForwardWork], object], encode: Callable[[ImageItem], object]
) -> Any:
    """Compute forwards, and encode images, until the first rank ends its call; returns what it sends then.

    A forward that raises here must have raised on the first rank too, which then asks.

    Raises:
        EngineDeadError: the first rank is gone, or continues although this one has failed.
    """
    failed: Exception | None = None
    while True:
        try:
            message = group.receive()
        except EngineDeadError as lost:
            if failed is None:
                raise
            raise group.lose_after(failed, lost) from failed
        kind, content = unpack(message)
        if kind == CHECK:
            group.least(int(failed is not None))
            if failed is None:
                raise group.lose("its forward failed there and not here")
            failed = None
        elif failed is not None:
            raise group.lose(failed) from failed
        elif kind == END:
            return content
        try:
            if kind == FORWARD:
                compute(ForwardWork.deserialize(content))
            elif kind == ENCODE:
                encode(ImageItem.deserialize(content))
        except SerializationError:
            raise
        except Exception as exc:  # noqa: BLE001 - the first rank's next message decides what it means
            failed = exc


def pack(kind: str, content: Any = None) -> bytes:
    """A message of the group."""
    packed: bytes = msgpack.packb([kind, content], use_bin_type=True)
    return packed


def unpack(message: bytes) -> tuple[str, Any]:
    """Kind and content of a message.

    Raises:
        SerializationError: it is not a message of the group.
    """
    plain = unpack_msgpack("message of a tensor-parallel group", message)
    if not isinstance(plain, list) or len(plain) != 2 or plain[0] not in (FORWARD, ENCODE, BEAT, CHECK, END):
        refuse("message of a tensor-parallel group", plain, "[kind, content]")
    return plain[0], plain[1]
