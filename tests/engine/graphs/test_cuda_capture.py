"""Tests that a failed capture leaves no trace: on a model of torch's CUDA state, and on a GPU."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rollout.engine.graphs.cuda_capture import WARM_UP_RUNS, CudaDevice

GIB = 2**30


class Cuda:
    """The state of torch 2.11 during a capture: stream, open captures, references to memory pools, the generator.

    As there, ending an invalidated capture raises before anything else is done, and a graph drops the reference to its pool
    only if its capture has ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams = ["default"]
        self.capturing = self.invalid = self.generator_captures = False
        self.allocating: set[int] = set()
        self.references: Counter[int] = Counter()
        self.free = 10 * GIB
        self.workspaces_cleared = 0
        self.instantiates = True
        self._handles = 0
        cuda = {
            "Stream": lambda device: Stream(), "current_stream": lambda: Stream(), "stream": self.stream,
            "device": self.nothing, "synchronize": self.never, "empty_cache": self.empty_cache,
            "current_device": lambda: 0, "mem_get_info": lambda: (self.free, 80 * GIB), "CUDAGraph": lambda: Graph(self),
            "graph_pool_handle": self.handle,
        }  # fmt: skip
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        private = {
            "_cuda_endAllocateToPool": self.end_allocate, "_cuda_releasePool": self.release,
            "_cuda_clearCublasWorkspaces": self.clear_workspaces,
        }  # fmt: skip
        for name, value in private.items():
            monkeypatch.setattr(torch._C, name, value, raising=False)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append("private")
        try:
            yield
        finally:
            self.streams.pop()

    @contextmanager
    def nothing(self, device: Any) -> Iterator[None]:
        yield

    def never(self) -> None:
        raise AssertionError("the device is waited for: another engine's capture would fail")

    def handle(self) -> int:
        self._handles += 1
        return self._handles

    def empty_cache(self) -> None:
        assert not self.capturing

    def clear_workspaces(self) -> None:
        assert not self.capturing
        self.workspaces_cleared += 1

    def end_allocate(self, device: int, pool: int) -> None:
        if pool not in self.allocating:
            raise RuntimeError("not currently recording to this pool")
        self.allocating.remove(pool)

    def release(self, device: int, pool: int) -> None:
        if not self.references[pool]:
            raise RuntimeError("no such pool")
        self.references[pool] -= 1

    def draw(self) -> None:
        if self.generator_captures:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def synchronising(self) -> None:
        """An operation that waits for the device."""
        if self.capturing:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def assert_untouched(self) -> None:
        assert self.streams == ["default"]
        assert not self.capturing
        assert not self.allocating
        self.draw()


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._pool: int | None = None
        self._ended = False

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        cuda = self._cuda
        assert not cuda.capturing
        assert capture_error_mode == "thread_local"
        assert cuda.streams[-1] == "private"
        self._pool = cuda.handle() if pool is None else pool
        cuda.capturing, cuda.invalid, cuda.generator_captures = True, False, True
        cuda.allocating.add(self._pool)
        cuda.references[self._pool] += 1

    def capture_end(self) -> None:
        cuda = self._cuda
        assert cuda.capturing
        cuda.capturing = False
        if cuda.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        cuda.end_allocate(0, self._pool)
        cuda.generator_captures = False
        self._ended = True
        if not cuda.instantiates:
            raise torch.OutOfMemoryError("no memory to instantiate")
        cuda.free -= GIB

    def pool(self) -> int | None:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def replay(self) -> None:
        self._cuda.draw()

    def __del__(self) -> None:
        if self._ended:
            self._cuda.release(0, self._pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **options: real(*shape, **options))
    return Cuda(monkeypatch)


def failing_in_capture(cuda: Cuda, exception: BaseException | None = None) -> Callable[[], None]:
    """Work that runs and cannot be captured."""
    runs = [0]

    def work() -> None:
        runs[0] += 1
        if runs[0] <= WARM_UP_RUNS:
            assert not cuda.capturing
        elif exception is None:
            cuda.synchronising()
        else:
            raise exception

    return work


def drop(device: CudaDevice, *graphs: Any) -> None:
    """Drop all graphs, then their memory, as the engine does."""
    del graphs
    gc.collect()
    device.forget()


def test_a_capture_runs_the_work_to_warm_up_and_once_more(cuda: Cuda) -> None:
    device, seen = CudaDevice(torch.device("cuda", 0)), []
    replay = device.capture(lambda: seen.append((cuda.capturing, cuda.streams[-1], gc.isenabled())))
    assert seen == [(False, "private", True)] * WARM_UP_RUNS + [(True, "private", False)]
    assert gc.isenabled()
    replay()
    assert device.graph_bytes == GIB
    assert cuda.workspaces_cleared == 2, "before and after: that of the capture is in the graph's pool"
    cuda.assert_untouched()
    del replay
    drop(device)
    assert device.graph_bytes == 0
    assert not +cuda.references


def test_after_a_capture_that_was_invalidated_training_goes_on_and_no_memory_is_kept(cuda: Cuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    before = device.capture(lambda: None)
    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(failing_in_capture(cuda))
    cuda.assert_untouched()
    before()
    after = device.capture(lambda: None)
    after()
    del before, after
    drop(device)
    assert not +cuda.references, "a pool is still referenced"


@pytest.mark.parametrize("exception", [torch.OutOfMemoryError("full"), KeyboardInterrupt(), ValueError("no")])
def test_after_an_exception_in_a_capture_that_could_be_ended_nothing_is_released_twice(
    cuda: Cuda, exception: BaseException
) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    kept = device.capture(lambda: None)
    with pytest.raises(type(exception)):
        device.capture(failing_in_capture(cuda, exception))
    exception.__traceback__ = None
    gc.collect()
    device.forget()
    assert sum(cuda.references.values()) == 1, "the graph that is kept holds its pool"
    cuda.assert_untouched()
    kept()


def test_no_memory_to_instantiate_a_graph_releases_it_once(cuda: Cuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    kept = device.capture(lambda: None)
    cuda.instantiates = False
    with pytest.raises(torch.OutOfMemoryError):
        device.capture(lambda: None)
    gc.collect()
    device.forget()
    assert sum(cuda.references.values()) == 1
    cuda.assert_untouched()
    kept()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
