"""Learns a layer's attention window from transformers' mask functions, or refuses the mask.

Many models pass a layer's window to its attention as an argument; some only apply it in the mask. While the model is
probed, `probe_mask` is registered with transformers' `AttentionMaskInterface`: its result keeps the mask function it was
called with, from which `window_of` reads the window, however large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from rollout.engine.forward.attention import rollout_attention

PROBE = "rollout_probe"
"""Name of the probing attention implementation, the only one for which masks are made."""
_DENSE = 64

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) → whether the query sees the key; arguments broadcast."""


class OtherMask(Exception):  # noqa: N818 - describes a mask; the caller decides what follows
    """A mask that is neither causal nor a causal sliding window."""


def probe_mask(*args: Any, **arguments: Any) -> Tensor:
    """The function registered with transformers' `AttentionMaskInterface` under `PROBE`."""
    length = int(arguments["q_length"])
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=arguments.get("device")).tril()
    mask.rollout_mask_function = arguments["mask_function"]  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(PROBE, rollout_attention)
AttentionMaskInterface.register(PROBE, probe_mask)


def function_of(mask: Tensor) -> MaskFunction | None:
    """Mask function that `mask`, or the tensor it is a view of, was made from; None if `probe_mask` did not make it."""
    function: MaskFunction | None = getattr(mask, "rollout_mask_function", None)
    return function if function is not None or mask._base is None else function_of(mask._base)


def window_of(function: MaskFunction, length: int, device: torch.device) -> int | None:
    """Number of positions, itself included, that each of the first `length` sees; None: all up to itself.

    Args:
        device: of tensors that the function may hold.

    Raises:
        OtherMask: the mask differs; the message shows the first position that does.
    """
    positions = torch.arange(length, device=device)
    last = _seen(function, positions, length - 1, length)
    window = int(last.sum())
    dense = range(min(length, _DENSE))
    edges = (window - 1, window, window + 1, length // 2, length - 1)
    for query in sorted({*dense, *(each for each in edges if 0 <= each < length)}):
        # Later positions are checked for a few queries only: a row may have a million.
        width = length if query in (0, length // 2, length - 1) else min(length, max(dense.stop, query + 2))
        keys = positions[:width]
        differ = (_seen(function, positions, query, width) != (keys <= query) & (keys > query - window)).nonzero()
        if len(differ):
            key = int(differ[0])
            raise OtherMask(
                f"position {query} {'does not see' if query - window < key <= query else 'sees'} position {key}, which is "
                f"neither causal attention nor a window of the last {window}"
            )
    return None if window == length else window


def _seen(function: MaskFunction, positions: Tensor, query: int, width: int) -> Tensor:
    zero = positions.new_zeros(())
    try:
        seen = function(zero, zero, positions[query], positions[:width])
    except Exception as exc:
        raise OtherMask(f"its mask function does not take position {query} ({type(exc).__name__}: {exc})") from exc
    return seen.expand(width)
