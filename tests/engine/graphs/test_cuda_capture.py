"""Tests that a failed capture leaves no trace: with what torch tells of captures, and on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.engine.graphs.cuda_capture import WARM_UP_RUNS, CudaDevice
from tests.interpreter import on_a_gpu

GIB = 2**30


class Cuda:
    """Captures as in torch 2.11. One that has waited for the device cannot be ended: the allocator assumes that it runs on,
    its pool is never released, and no random number can be drawn.
    """

    def __init__(self) -> None:
        self.streams = ["default"]
        self.running: Any = None
        self.waited = self.draws_fail = False
        self.instantiates = True
        self.free = 10 * GIB
        self.pools = 0
        self.allocating: list[int] = []
        self.released: list[int] = []
        self.workspaces_cleared = 0

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append("private")
        try:
            yield
        finally:
            self.streams.pop()

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def clear_workspaces(self) -> None:
        assert self.running is None
        self.workspaces_cleared += 1

    def end_allocate(self, device: int, pool: int) -> None:
        if pool not in self.allocating:
            raise RuntimeError("not currently recording to this pool")
        self.allocating.remove(pool)

    def wait(self) -> None:
        if self.running is not None:
            self.waited = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def assert_untouched(self) -> None:
        assert (self.streams, self.running, self.allocating, self.draws_fail) == (["default"], None, [], False)


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self._pool, self._ended = cuda, 0, False

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        cuda = self._cuda
        assert (cuda.running, capture_error_mode, cuda.streams[-1]) == (None, "thread_local", "private")
        self._pool = pool or cuda.new_pool()
        cuda.running, cuda.waited, cuda.draws_fail = self, False, True
        cuda.allocating.append(self._pool)

    def capture_end(self) -> None:
        cuda = self._cuda
        assert cuda.running is self
        cuda.running = None
        if cuda.waited:
            raise RuntimeError("operation failed due to a previous error during capture")
        cuda.end_allocate(0, self._pool)
        cuda.draws_fail, self._ended = False, True
        if not cuda.instantiates:
            raise torch.OutOfMemoryError("no memory to instantiate")
        cuda.free -= GIB

    def pool(self) -> int:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def replay(self) -> None:
        assert not self._cuda.draws_fail


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found, zeros = Cuda(), torch.zeros
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    replaced = {
        "zeros": lambda *shape, device=None, **options: zeros(*shape, **options),
        "cuda.Stream": lambda device: stream, "cuda.current_stream": lambda: stream, "cuda.stream": found.stream,
        "cuda.device": nullcontext, "cuda.synchronize": lambda: pytest.fail("another engine's capture would fail"),
        "cuda.empty_cache": lambda: None, "cuda.current_device": lambda: 0,
        "cuda.mem_get_info": lambda: (found.free, 80 * GIB), "cuda.CUDAGraph": lambda: Graph(found),
        "cuda.graph_pool_handle": found.new_pool, "_C._cuda_endAllocateToPool": found.end_allocate,
        "_C._cuda_releasePool": lambda device, pool: found.released.append(pool),
        "_C._cuda_clearCublasWorkspaces": found.clear_workspaces,
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(f"torch.{name}", value, raising=False)
    return found


def test_a_capture_runs_the_work_to_warm_up_and_once_more(cuda: Cuda) -> None:
    device, seen = CudaDevice(torch.device("cuda", 0)), []
    replay = device.capture(lambda: seen.append((cuda.running is not None, cuda.streams[-1], gc.isenabled())))
    assert seen == [(False, "private", True)] * WARM_UP_RUNS + [(True, "private", False)]
    assert gc.isenabled()
    replay()
    assert device.graph_bytes == GIB
    assert cuda.workspaces_cleared == 2, "before and after: that of the capture is in the graph's pool"
    cuda.assert_untouched()
    device.forget()
    assert (device.graph_bytes, cuda.released) == (0, []), "a graph drops the reference to its pool"


FAILURES: dict[str, type[BaseException]] = {
    "a wait for the device": RuntimeError, "out of memory": torch.OutOfMemoryError, "Ctrl-C": KeyboardInterrupt,
    "another error": ValueError, "no memory to instantiate": torch.OutOfMemoryError,
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_failed_capture_training_goes_on_and_all_memory_is_released_once(cuda: Cuda, failure: str) -> None:
    device, error = CudaDevice(torch.device("cuda", 0)), FAILURES[failure]

    def work() -> None:
        if failure == "a wait for the device":
            cuda.wait()
        elif cuda.running is not None and cuda.instantiates:
            raise error

    before = device.capture(lambda: None)
    cuda.instantiates = "instantiate" not in failure
    with pytest.raises(error):
        device.capture(work)
    cuda.instantiates = True
    cuda.assert_untouched()
    before()
    device.capture(lambda: None)()
    device.forget()
    # The graph of a capture that has ended releases its pool itself.
    assert cuda.released == ([1] if failure == "a wait for the device" else [])
    device.forget()
    assert len(cuda.released) <= 1


@on_a_gpu
@pytest.mark.parametrize("error", ["wait", "raise"])
def test_on_a_device_a_failed_capture_leaves_generator_stream_and_pools_as_they_were(error: str) -> None:
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    buffer = torch.zeros(2**22, device="cuda")

    def good() -> None:
        buffer.copy_(buffer + 1)

    def bad() -> None:
        total = (buffer * 2).sum()
        if torch.cuda.is_current_stream_capturing():
            if error == "raise":
                raise ValueError("no")
            total.item()

    def private_segments() -> int:
        return sum(tuple(each.get("segment_pool_id", (0, 0))) != (0, 0) for each in torch.cuda.memory_snapshot())

    segments = private_segments()
    replay = device.capture(good)
    with pytest.raises((RuntimeError, ValueError)):
        device.capture(bad)
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(8, device="cuda")
    torch.nn.functional.dropout(torch.ones(8, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.ones(1000, device="cuda").sum().item()
    replay()
    torch.cuda.synchronize()
    del replay
    gc.collect()
    device.forget()
    torch.cuda.empty_cache()
    assert private_segments() == segments
