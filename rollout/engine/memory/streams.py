"""Streams of a device. Orders an engine's steps after work that callers queued on their streams.

The host never waits for a whole device, because that is an error while any thread of the process captures a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

_used: set[torch.cuda.Stream] = set()
"""Streams on which an engine of this process has run steps since the last `wait_for_steps`."""


class Stream(Protocol):
    """A stream: a queue of device work, run in order and asynchronously to the host."""

    def run(self, work: Callable[[], object]) -> None:
        """Queue the device work of `work`."""

    def mark(self) -> Any:
        """Return an event at the end of the work queued so far."""

    def after(self, mark: Any) -> None:
        """Let all work queued from now on wait for `mark`, an event of any stream."""

    def finish(self) -> None:
        """Block the host until all queued work is done."""


class CudaStream:
    """A `Stream` over a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def after(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def finish(self) -> None:
        self._stream.synchronize()


class HostStream:
    """The `Stream` of a device without streams, and its events: work is done when it is queued."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> HostStream:
        return self

    def after(self, mark: HostStream) -> None: ...

    def finish(self) -> None: ...

    def synchronize(self) -> None: ...


def current_stream(device: torch.device) -> Stream:
    """Return the current stream of the calling thread."""
    return CudaStream(torch.cuda.current_stream(device)) if device.type == "cuda" else HostStream()


def wait_for_steps(device: torch.device) -> None:
    """Block the host until the queued work of all engines on a CUDA device, and of the caller's stream, is done."""
    streams = {stream for stream in tuple(_used) if stream.device == device}
    for stream in {*streams, torch.cuda.current_stream(device)}:
        stream.record_event().synchronize()
    _used.difference_update(streams)


class StreamOrder:
    """Orders steps after callers' work, such as new weights or the KV that a resume copies back.

    Without effect on a device without streams.

    Attributes:
        stream: see `current_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.stream: Callable[[], Stream] = partial(current_stream, device)

    def mark(self) -> None:
        """Let later steps wait for work queued on the caller's stream; an optimizer may run on its own stream."""
        self._marks.append(self.stream().mark())

    def follow(self) -> None:
        """Let the step's work wait for everything marked since the last call; called before a step."""
        if self._device.type == "cuda":
            _used.add(torch.cuda.current_stream(self._device))
        for mark in self._marks:
            self.stream().after(mark)
        self._marks.clear()

    def wait(self) -> None:
        """Block the host until everything marked since the last `follow` is done."""
        for mark in self._marks:
            mark.synchronize()

    def settle(self) -> None:
        """Block the host until all work that engines have queued on any stream is done."""
        if self._device.type == "cuda":
            wait_for_steps(self._device)
