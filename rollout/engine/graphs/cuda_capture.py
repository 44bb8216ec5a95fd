"""Captures device work into CUDA graphs, and cleans up after a failed capture.

Always true after `capture` has raised: the previous stream is current again, no capture is open, the allocator has left
capture mode, and random numbers can be drawn on the device. `forget` releases the memory of the failed capture.
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
"""The number of runs before a capture. They create kernels, library handles and workspaces, which a capture cannot do."""
_log = logging.getLogger(__name__)


class CudaDevice:
    """A device with a private stream for capturing graphs. Only one graph runs at a time, so all share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._leaked: list[Any] = []
        """The pools of failed captures. Each failed capture holds a reference to its pool, which only `forget` can drop."""
        self._bytes = 0

    @property
    def graph_bytes(self) -> int:
        """The device memory, in bytes, taken by captures since the last `forget`, for the graphs and their shared pool."""
        return self._bytes

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` `WARM_UP_RUNS` times, then record it without running it. Return the function that replays it.

        Exceptions raised by `work` propagate and leave the device usable.
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
            # Empty the cache before the capture, during which the allocator cannot release cached memory.
            self._stream.synchronize()
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            with _own_cublas_workspace(), _no_collection():
                graph = self._record(work)
            self._bytes += max(0, free - torch.cuda.mem_get_info()[0])
            return graph.replay

    def forget(self) -> None:
        """Release the memory of all captures, including failed ones. Captured graphs must not be replayed afterwards."""
        leaked, self._leaked = self._leaked, []
        for pool in leaked:
            # Drop the failed graph's reference to its pool. A graph whose capture has finished does this itself, and then
            # the call raises.
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
                # Use mode thread_local, so that other threads (data loaders, for example) may allocate device memory.
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
        # Tell the allocator that the unfinished capture is over. Otherwise, it would never reclaim memory used by another
        # stream. This needs a private function, which raises if the allocator has already left capture mode.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._index(), self._pool)
        self._leaked.append(self._pool)
        self._pool = None
        # Capture and finish a trivial graph, which resets the default generator. Up to torch 2.12, the generator stays in
        # capture mode after a failed capture, and any dropout in the trainer would raise.
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
    """Return whether the graph's capture is complete. If so, it cleans up after itself, even if instantiating it failed."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextmanager
def _own_cublas_workspace() -> Iterator[None]:
    """Make a capture in the `with` block allocate its cuBLAS workspace in the graph's pool.

    A workspace allocated elsewhere could be freed while graphs still write to it, for example by
    `torch.compile(mode="reduce-overhead")` in the trainer.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection, which would break a capture by destroying a graph or freeing another stream's memory."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def no_kept_casts() -> Iterator[None]:
    """Make autocast drop the cast copy of a weight after each module that runs in the `with` block.

    Otherwise, if the model's forward pass enters autocast itself (as with accelerate), cast copies of all weights would
    stay in the graph's memory pool.
    """
    hook = register_module_forward_hook(lambda *_: torch.clear_autocast_cache())
    try:
        yield
    finally:
        hook.remove()
        torch.clear_autocast_cache()
