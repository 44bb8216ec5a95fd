"""Operations that cannot be captured in a CUDA graph, refused on a CPU: for stand-ins that run what a device captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = frozenset(
    {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique_consecutive", "unique_dim",
     "_unique2", "bincount", "allclose"}
)  # fmt: skip
"""The host waits for their results, or for the sizes of these."""


class Capturable(TorchDispatchMode):
    """Raises as CUDA does in a capture: where the host waits for the device, and where it copies numbers there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        masks = [each for each in _indices(name, args) if each.dtype in (torch.bool, torch.uint8)]
        unsized = func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        # A tensor made of numbers of Python; those without dimensions may be arguments of a kernel.
        copied = name == "lift_fresh" and args[0].dim() > 0
        if name in WAITS or masks or unsized or copied:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({func})")
        return func(*args, **kwargs)


class Rerun:
    """A device whose records are the work itself."""

    graph_bytes = replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.replays += 1
            work()

        work()
        with Capturable():
            work()
        return replay

    def forget(self) -> None:
        pass


def _indices(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    return (
        [each for each in tree_leaves(args[1]) if each is not None]
        if name in ("index", "index_put", "index_put_")
        else []
    )
