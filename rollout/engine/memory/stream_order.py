"""Order of an engine's steps behind what callers queue on the device, whatever their streams.

The host never waits for a whole device: while any thread of the process captures a CUDA graph, that is an error in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout.engine.memory.kv_transfer import CudaStream, Stream

_used: set[torch.cuda.Stream] = set()
"""Streams on which an engine of this process has run steps since the last `wait_for_steps`."""


def wait_for_steps(device: torch.device) -> None:
    """Block the host until the steps of all engines on a CUDA device, and the caller's stream, have done what is queued."""
    streams = {stream for stream in tuple(_used) if stream.device == device}
    for stream in {*streams, torch.cuda.current_stream(device)}:
        stream.record_event().synchronize()
    _used.difference_update(streams)


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
            self.stream = self._current

    def mark(self) -> None:
        """Have later steps wait for what is queued on the caller's stream: an optimizer may run on one of its own."""
        if self.stream is not None:
            self._marks.append(self.stream().mark())

    def follow(self) -> None:
        """Before a step: let later work of the caller's stream wait for what was marked since the last call."""
        if self._device.type == "cuda":
            _used.add(torch.cuda.current_stream(self._device))
        if self.stream is not None and self._marks:
            for mark in self._marks:
                self.stream().after(mark)
            self._marks.clear()

    def wait(self) -> None:
        """Block the host until what was marked since the last `follow` is done."""
        for mark in self._marks:
            mark.synchronize()

    def settle(self) -> None:
        """Block the host until the device has done what engines have queued, on whichever stream."""
        if self._device.type == "cuda":
            wait_for_steps(self._device)

    def _current(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self._device))
