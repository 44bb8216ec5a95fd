"""The shared forward passes of a tensor-parallel group: the first rank broadcasts the inputs, and all ranks compute.

Always true: the first rank broadcasts only inside `Leader.leading`, while the other members are in `follow`. If a forward
pass raises on every member, the group continues. If it raises on only some of them, the group is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.multimodal.family import StepImages
from rollout.engine.parallel.group import TensorParallelGroup
from rollout.errors import EngineDeadError, EngineStateError
from rollout.requests import codec
from rollout.requests.codec import INT_ARRAY, Codec, optional
from rollout.threads.interrupts import uninterrupted

BEAT_S = 1.0
"""The minimum time without messages, in seconds, before the first rank sends one that only reports that it is alive."""

FORWARD, BEAT, CHECK, END = "forward", "beat", "check", "end"
"""The kinds of message: compute a forward pass; nothing to do; report whether the last pass failed; return from `follow`."""


@dataclass(frozen=True, eq=False)
class ForwardWork:
    """The input of one forward pass, and the changes to make to the KV cache before the pass."""

    ids: NDArray[np.int64]
    """The token ids of the P packed positions, [P]."""
    rows: PagedRows
    """The P positions and their block tables."""
    keep: NDArray[np.int64]
    """The indices of the packed positions whose logits are needed."""
    copies: Sequence[tuple[int, int]] = ()
    """The blocks to copy before the forward pass, as (source, destination), in this order."""
    zeroed_blocks: Sequence[int] = ()
    """The blocks to fill with zeros before the copies."""
    images: StepImages | None = None


def _record(kind: type, **fields: Codec) -> Codec:
    return Codec(
        lambda value: codec.encode_fields(value, fields),
        lambda plain: kind(**codec.decode_fields(kind.__name__, plain, fields)),
    )


_IMAGES = _record(
    StepImages, index=INT_ARRAY, embeddings=codec.list_of(codec.TENSOR), positions=INT_ARRAY, seen=optional(INT_ARRAY)
)
_ROWS = _record(
    PagedRows, offsets=INT_ARRAY, positions=INT_ARRAY, tables=INT_ARRAY, block_size=codec.INT, seen=optional(INT_ARRAY),
)  # fmt: skip
WORK = _record(
    ForwardWork, ids=INT_ARRAY, rows=_ROWS, keep=INT_ARRAY, copies=codec.OPAQUE, zeroed_blocks=codec.OPAQUE,
    images=optional(_IMAGES),
)  # fmt: skip


class Together:
    """Makes other ranks compute the same forward passes as this rank. In this base class, there are no other ranks."""

    def refuse_alone(self) -> None:
        """Check that the other ranks are ready to compute forward passes together with this rank.

        Raises:
            EngineStateError: the other ranks are not ready.
            EngineDeadError: the group is lost.
        """

    def run(self, work: ForwardWork, compute: Callable[[ForwardWork], Tensor]) -> Tensor:
        """Compute one forward pass together with the other ranks.

        Raises:
            EngineDeadError: another rank is lost, or the forward pass failed on only some of the ranks.
            Exception: the model raised this exception on all ranks; the group continues.
        """
        return compute(work)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Make the other ranks fill these blocks with zeros before the next forward pass."""


class Leader(Together):
    """The first rank's role in a tensor-parallel group: it sends the work of each forward pass to the other members."""

    def __init__(self, group: TensorParallelGroup, clock: Callable[[], float] = time.monotonic) -> None:
        self.group = group
        self._clock = clock
        self._sent = clock()
        self._leading = False
        self._sending = threading.Lock()
        self._blocks: list[int] = []

    @contextmanager
    def leading(self, outcome: Callable[[BaseException | None], Any]) -> Iterator[None]:
        """Make the other members, which must be in `follow`, compute the forward passes of the `with` block as well.

        Args:
            outcome: function of the exception raised in the block, or of None if there was none. When the block exits, the
                function's result is sent to the other members, and their calls of `follow` return it.
        """
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
                # Raise this error only if the `with` block succeeded. Otherwise, the block's own exception is raised.
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
        """Notify the other ranks that this rank is alive, unless it has sent a message in the last `BEAT_S` seconds."""
        if self._clock() - self._sent > BEAT_S:
            self._send(BEAT)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        self._blocks += blocks

    def run(self, work: ForwardWork, compute: Callable[[ForwardWork], Tensor]) -> Tensor:
        told = replace(work, zeroed_blocks=self._blocks)
        self._send(FORWARD, WORK.encode(told))
        self._blocks = []
        try:
            # Delay every Ctrl-C, because a member that left a forward pass would break the group.
            with uninterrupted(wholly=True):
                return compute(work)
        except Exception as exc:
            try:
                self._send(CHECK)
                # Check whether every member failed, too. If one did not (0), the group is lost: that member may have run a
                # collective operation that the failed members have skipped.
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
        message: bytes = msgpack.packb([kind, content])
        # Take a lock: several threads send messages, and the two broadcasts of a long message must not be separated.
        with uninterrupted(wholly=True), self._sending:
            self.group.send(message)
            self._sent = self._clock()


def follow(group: TensorParallelGroup, compute: Callable[[ForwardWork], object]) -> Any:
    """Compute the forward passes that the first rank broadcasts, until the first rank exits its `Leader.leading` block.

    If a forward pass raises on this rank, the group continues only if the pass has also raised on the first rank.

    Returns:
        The outcome that the first rank sends when it exits the block.

    Raises:
        EngineDeadError: the first rank is lost, or a forward pass failed on only some of the ranks.
    """
    failed: Exception | None = None
    while True:
        try:
            message = group.receive()
        except EngineDeadError as lost:
            if failed is None:
                raise
            raise group.lose_after(failed, lost) from failed
        kind, content = msgpack.unpackb(message)
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
                compute(WORK.decode(content))
        except Exception as exc:  # noqa: BLE001 - the first rank's next message decides how to react
            failed = exc
