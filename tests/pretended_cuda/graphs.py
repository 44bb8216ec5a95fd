"""Graphs of the pretended device: what was recorded is done again, into the tensors that the recording made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Capture(TorchDispatchMode):
    """The operations of a capture, in their order. They are run, as their results' shapes are needed."""

    def __init__(self, pool: object) -> None:
        super().__init__()
        self.pool = pool
        self.invalid = False
        self.work: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        aliases = [each.alias_info for each in func._schema.returns]
        made = [
            each if alias is None else None
            for each, alias in zip(result if isinstance(result, tuple) else (result,), aliases, strict=False)
        ]
        views = any(each is not None and not each.is_write for each in aliases)
        if not views and func not in _NOTHING:
            self.work.append(lambda: _again(func, args, kwargs, made))
        return result


_NOTHING = {torch.ops.aten.detach.default, torch.ops.aten.lift_fresh.default}


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Any]) -> None:
    result = func(*args, **kwargs)
    for old, new in zip(made, result if isinstance(result, tuple) else (result,), strict=False):
        if isinstance(old, Tensor):
            old.copy_(new)
        elif isinstance(old, list):
            for one, other in zip(old, new, strict=True):
                one.copy_(other)


open_captures: list[Capture] = []
"""At most one."""


def capturing() -> bool:
    """Whether a capture is open."""
    return bool(open_captures)


def refuse(why: str) -> None:
    """Invalidate the capture and raise what torch raises."""
    open_captures[-1].invalid = True
    raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({why})")


class CUDAGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Record from now on."""
        if open_captures:
            raise RuntimeError("CUDA error: a capture is open")
        if pool is not None and not (isinstance(pool, tuple) and len(pool) == 2):
            raise TypeError(f"pool: a handle is a tuple of two integers, not {pool!r}")
        open_captures.append(Capture(pool or (0, 1)))
        open_captures[-1].__enter__()

    def capture_end(self) -> None:
        """Stop recording."""
        capture = open_captures.pop()
        capture.__exit__(None, None, None)
        if capture.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._capture = capture

    def pool(self) -> object:
        """The handle of its memory pool."""
        if self._capture is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture")
        return self._capture.pool

    def replay(self) -> None:
        """Do what was recorded."""
        assert self._capture is not None
        assert not open_captures
        # Beyond all modes; results that were made in inference mode can be written in it alone.
        with torch._C.DisableTorchFunction(), torch.inference_mode(), torch.autocast("cpu", enabled=False):
            for work in self._capture.work:
                work()

    def reset(self) -> None:
        """Drop what was recorded."""
        self._capture = None
