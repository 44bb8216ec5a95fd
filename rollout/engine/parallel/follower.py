"""Further ranks of a tensor-parallel group: compute what the first broadcasts, until it ends the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rollout.engine.multimodal.family import ImageItem
from rollout.engine.parallel.group import TensorParallelGroup
from rollout.engine.parallel.work import CHECK, ENCODE, END, FORWARD, ForwardWork, unpack
from rollout.errors import EngineDeadError


def follow(
    group: TensorParallelGroup, compute: Callable[[ForwardWork], object], encode: Callable[[ImageItem], object]
) -> Any:
    """Compute forwards, and encode images, until the first rank ends its call; returns what it sends then.

    A forward that raises here must have raised on the first rank too, which then asks.

    Raises:
        EngineDeadError: the first rank is gone, or goes on where this one has failed.
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
        elif kind in (FORWARD, ENCODE):
            work: Callable[[], object]
            if kind == FORWARD:
                work = partial(compute, ForwardWork.deserialize(content))
            else:
                work = partial(encode, ImageItem.deserialize(content))
            try:
                work()
            except Exception as exc:  # noqa: BLE001 - decided upon when the first rank has told how it fared
                failed = exc
