"""Reads a layer's attention window or chunk from transformers' mask functions, or rejects the mask.

Some models apply a window only in the mask. While a model is probed, `probe_mask` makes its masks: each keeps the mask
function it was made from, from which `limits_of` reads the window or the chunk, however large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from rollout.engine.models.attention import rollout_attention

PROBE = "rollout_probe"
"""Name of the probing attention implementation, the only one for which masks are made."""
_DENSE = 64

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) → whether the query attends to the key; arguments broadcast."""


class OtherMask(Exception):  # noqa: N818 - describes a mask; the caller decides what follows
    """A mask that is neither causal nor causal in a sliding window or in chunks."""


@dataclass(frozen=True)
class Limits:
    """Positions, up to its own, that a query attends to."""

    window: int | None = None
    """Number of last positions, including its own; None: all."""
    chunk: int | None = None
    """Size of the chunks; a query attends to its own chunk. None: all."""

    def firsts(self, positions: Tensor) -> Tensor:
        """The first position that each of `positions` attends to."""
        firsts = torch.zeros_like(positions) if self.window is None else (positions + 1 - self.window).clamp(min=0)
        return firsts if self.chunk is None else torch.maximum(firsts, positions // self.chunk * self.chunk)


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


def limits_of(function: MaskFunction, length: int, device: torch.device) -> Limits:
    """Which of the first `length` positions each of them attends to.

    Args:
        device: device of tensors that the function may hold.

    Raises:
        OtherMask: it is neither a window nor chunks; the message shows the first position that differs from a window.
    """
    positions = torch.arange(length, device=device)
    window = int(_seen(function, positions[-1], positions).sum())
    try:
        _compare(function, positions, Limits(window))
    except OtherMask:
        # Positions that attend to position 0 are the first chunk.
        limits = Limits(chunk=max(1, int(_seen(function, positions, positions[0]).sum())))
        try:
            _compare(function, positions, limits)
        except OtherMask:
            pass
        else:
            return limits
        raise
    return Limits() if window == length else Limits(window)


def _compare(function: MaskFunction, positions: Tensor, limits: Limits) -> None:
    """Raise `OtherMask` unless whole rows of some positions, and the edges of all of them, have these limits."""
    length, firsts = len(positions), limits.firsts(positions)
    dense = range(min(length, _DENSE))
    for query in sorted({*dense, length // 2, length - 1}):
        # Later positions are checked for a few queries only, because a row may have a million.
        keys = positions if query in (0, length // 2, length - 1) else positions[: max(dense.stop, query + 2)]
        _expect((keys <= query) & (keys >= firsts[query]), function, positions[query], keys, limits)
    before = (firsts - 1).clamp(min=0)
    _expect(before == firsts, function, positions, before, limits)
    for keys in (firsts, positions):
        _expect(torch.ones_like(positions, dtype=torch.bool), function, positions, keys, limits)


def _expect(expected: Tensor, function: MaskFunction, queries: Tensor, keys: Tensor, limits: Limits) -> None:
    differ = (_seen(function, queries, keys) != expected).nonzero()
    if len(differ):
        at = int(differ[0])
        query, key = (int(each.expand(len(expected))[at]) for each in (queries, keys))
        raise OtherMask(
            f"position {query} {'does not see' if expected[at] else 'sees'} position {key}, which is neither causal "
            f"attention nor a window of the last {limits.window} nor chunks"
        )


def _seen(function: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    zero = keys.new_zeros(())
    try:
        seen = function(zero, zero, queries, keys)
    except Exception as exc:
        raise OtherMask(
            f"its mask function does not take position {int(queries.max())} ({type(exc).__name__}: {exc})"
        ) from exc
    return seen.expand(max(queries.numel(), keys.numel()))
