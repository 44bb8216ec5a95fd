"""Capture of device work into CUDA graphs. A failed capture leaves no trace.

Always true after `capture` has raised: the previous stream is current again, no capture is open, the allocator assumes none,
and random numbers can be drawn on the device. After `forget`, all memory of the capture is released.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

WARM_UP_RUNS = 2
"""Runs before a capture, because compiled kernels, library handles and workspaces cannot be created during it."""
_log = logging.getLogger(__name__)


class CudaDevice:
    """Captures on a private stream; all graphs share one memory pool, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._leaked: list[Any] = []
        """Pools of failed captures. The capture holds a reference to each that only we can drop."""
        self._bytes = 0

    @property
    def graph_bytes(self) -> int:
        """Driver memory taken since the last `forget`: the graphs' pool and the instantiated graphs."""
        return self._bytes

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` `WARM_UP_RUNS` times, then record it without running it; returns the function that replays it.

        Exceptions of `work` propagate and leave the device usable.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    for _ in range(WARM_UP_RUNS):
                        work()
            finally:
                current.wait_stream(self._stream)
            # Empty the cache now: the allocator cannot release cached memory during a capture.
            self._stream.synchronize()
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            with _own_cublas_workspace(), _no_collection():
                graph = self._record(work)
            self._bytes += max(0, free - torch.cuda.mem_get_info()[0])
            return graph.replay

    def forget(self) -> None:
        """Release the memory of all captures, including failed ones, which can then not be replayed."""
        leaked, self._leaked = self._leaked, []
        for pool in leaked:
            # Drop the failed graph's reference to its pool, which the graph itself does only if its capture has
            # finished (then this call raises).
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(self._index(), pool)
        self._pool, self._bytes = None, 0

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        # Capture without `torch.cuda.graph`, which leaves its stream current if the capture cannot be finished.
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                # Use mode thread_local: other threads, such as data loaders, may allocate device memory during the
                # capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            if not _has_ended(graph):
                self._clean_up()
            raise
        return graph

    def _clean_up(self) -> None:
        # Tell the allocator that the unfinished capture is over: otherwise it would never reclaim memory used by
        # another stream. There is no public function for this. The private one raises if it is not needed.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._index(), self._pool)
        self._leaked.append(self._pool)
        self._pool = None
        # Finish an empty capture. Up to torch 2.12 the default generator also stays in capture mode, in which any
        # dropout in the trainer would raise. A finished capture resets the generator.
        number = torch.zeros((), device=self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    number.add_(1)
                finally:
                    graph.capture_end()
        except RuntimeError as exc:
            _log.warning("after a failed capture of a CUDA graph another one failed too: %s", exc)
        self._stream.synchronize()

    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Return whether the stream's capture was finished. A graph that cannot be instantiated then cleans up itself."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextmanager
def _own_cublas_workspace() -> Iterator[None]:
    """Let a capture allocate its cuBLAS workspace in the graph's pool.

    A workspace from outside could be freed (by `torch.compile(mode="reduce-overhead")` in the trainer) while the graphs
    continue to write to it.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: destroying another graph, or memory of another stream, would break the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def no_kept_casts() -> Iterator[None]:
    """Let autocast drop the cast of a weight after the module that uses it.

    A graph whose forward enters autocast itself (accelerate) would keep a cast copy of all weights in its memory pool.
    """
    hook = register_module_forward_hook(lambda *_: torch.clear_autocast_cache())
    try:
        yield
    finally:
        hook.remove()
        torch.clear_autocast_cache()
