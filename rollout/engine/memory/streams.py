"""Streams of a device. Orders an engine's steps after work that callers queued on their streams.

The host never waits for a whole device, because that is an error while any thread of the process captures a CUDA graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

_used: set[torch.cuda.Stream] = set()
"""Streams on which an engine of this process has run steps since the last `wait_for_steps`."""


def wait_for_steps(device: torch.device) -> None:
    """Block the host until the queued work of all engines on a CUDA device, and of the caller's stream, is done."""
    streams = {stream for stream in tuple(_used) if stream.device == device}
    for stream in {*streams, torch.cuda.current_stream(device)}:
        stream.record_event().synchronize()
    _used.difference_update(streams)


class StreamOrder:
    """Orders steps after callers' work, such as new weights.

    Attributes:
        stream: returns the calling thread's current stream; None: the device has no streams, and nothing has to wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.stream: Any = partial(torch.cuda.current_stream, device) if device.type == "cuda" else None

    def mark(self) -> None:
        """Let later steps wait for work queued on the caller's stream; an optimizer may run on its own stream."""
        if self.stream is not None:
            self._marks.append(self.stream().record_event())

    def follow(self) -> None:
        """Let the step's work wait for everything marked since the last call; called before a step."""
        if self._device.type == "cuda":
            _used.add(torch.cuda.current_stream(self._device))
        for mark in self._marks:
            self.stream().wait_event(mark)
        self._marks.clear()

    def settle(self) -> None:
        """Block the host until all work that engines have queued on any stream is done."""
        if self._device.type == "cuda":
            wait_for_steps(self._device)
