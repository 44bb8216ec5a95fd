"""What a tensor-parallel group computes together in one step, and its encoding. No process group, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.multimodal.step_images import StepImages
from rollout.errors import SerializationError
from rollout.requests.codec import refuse, unpack_msgpack

FORWARD, ENCODE, BEAT, CHECK, END = "forward", "encode", "beat", "check", "end"
_FIELDS = 11


@dataclass(frozen=True, eq=False)
class ForwardWork:
    """Input of one forward, and the changes of the KV cache that precede it.

    Attributes:
        ids: [P] int64 token ids.
        rows: positions and block tables of the P positions.
        keep: [K] int64 packed positions whose logits are wanted.
        copies: (source, destination) blocks to copy before the forward, in this order.
        zeroed_blocks, zeroed_slots: to fill with zeros before that.
        images: those of the step; None: it has none.

    Blocks are pages where the layers are in groups (`memory.layer_groups`).
    """

    ids: NDArray[np.int64]
    rows: PagedRows
    keep: NDArray[np.int64]
    copies: Sequence[tuple[int, int]] = ()
    zeroed_blocks: Sequence[int] = ()
    zeroed_slots: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
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
            SerializationError: not what `serialize` makes.
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


def pack(kind: str, content: Any = None) -> bytes:
    """A message of the group."""
    packed: bytes = msgpack.packb([kind, content], use_bin_type=True)
    return packed


def unpack(message: bytes) -> tuple[str, Any]:
    """Kind and content of a message.

    Raises:
        SerializationError: no message of the group.
    """
    plain = unpack_msgpack("message of a tensor-parallel group", message)
    if not isinstance(plain, list) or len(plain) != 2 or plain[0] not in (FORWARD, ENCODE, BEAT, CHECK, END):
        refuse("message of a tensor-parallel group", plain, "[kind, content]")
    return plain[0], plain[1]
