"""Order of an engine's steps behind what callers queue on the device, whatever their streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout.engine.memory.kv_transfer import CudaStream, Stream


class StreamOrder:
    """Work of callers, such as new weights or the KV that a resume copies back, and the steps that have to come after it.

    Without effect on a device without streams.

    Attributes:
        stream: the current stream of the calling thread; None: the device has none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.stream: Callable[[], Stream] | None = None
        if device.type == "cuda":
            self.stream = lambda: CudaStream(torch.cuda.current_stream(device))

    def mark(self) -> None:
        """Have later steps wait for what is queued on the caller's stream: an optimizer may run on one of its own."""
        if self.stream is not None:
            self._marks.append(self.stream().mark())

    def follow(self) -> None:
        """Let later work of the caller's stream wait for what was marked since the last call."""
        if self.stream is not None and self._marks:
            for mark in self._marks:
                self.stream().after(mark)
            self._marks.clear()

    def wait(self) -> None:
        """Block the host until what was marked since the last `follow` is done."""
        for mark in self._marks:
            mark.synchronize()

    def settle(self) -> None:
        """Block the host until the device has done what is queued on all of its streams."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
