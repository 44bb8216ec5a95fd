"""Orders an engine's steps after work that callers queued on their CUDA streams.

The host waits for streams, never for a whole device, which would raise an error while any thread captures a CUDA graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

_used: set[torch.cuda.Stream] = set()
"""The streams on which an engine of this process has run steps since the last `wait_for_steps`."""


def wait_for_steps(device: torch.device) -> None:
    """Block the host until a CUDA device has finished all work that engines queued, and all work on the caller's stream."""
    streams = {stream for stream in tuple(_used) if stream.device == device}
    for stream in {*streams, torch.cuda.current_stream(device)}:
        stream.record_event().synchronize()
    _used.difference_update(streams)


class StreamOrder:
    """Orders steps after work that callers queued, such as an update of the weights.

    Attributes:
        stream: function that returns the calling thread's current stream; None if the device has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.stream: Any = partial(torch.cuda.current_stream, device) if device.type == "cuda" else None

    def mark(self) -> None:
        """Make later steps wait for the work queued on the caller's stream, which may be an optimizer's own stream."""
        if self.stream is not None:
            self._marks.append(self.stream().record_event())

    def follow(self) -> None:
        """Make the current stream wait for the work that `mark` recorded since the last call. Every step calls this."""
        if self._device.type == "cuda":
            _used.add(torch.cuda.current_stream(self._device))
        for mark in self._marks:
            self.stream().wait_event(mark)
        self._marks.clear()

    def settle(self) -> None:
        """Block the host until the device has finished all work that engines queued on any of its streams."""
        if self._device.type == "cuda":
            wait_for_steps(self._device)
