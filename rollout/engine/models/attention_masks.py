"""Reads a layer's attention window from transformers' mask functions, or rejects the mask.

Some models apply a window only in the mask. While a model is probed, `probe_mask` creates the masks and attaches to each
the mask function that defines it. `window_of` evaluates this function to find the window, however large it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from rollout.engine.models.attention import rollout_attention

PROBE = "rollout_probe"
"""The name of the attention implementation that is used while a model is probed. `probe_mask` creates its masks."""
_DENSE = 64

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of broadcastable index tensors (batch, head, query, key) that returns whether the query attends to the key."""


class OtherMask(Exception):  # noqa: N818 - describes a mask; the caller decides what follows
    """Raised for a mask that is neither causal nor causal in a sliding window."""


def probe_mask(*args: Any, **arguments: Any) -> Tensor:
    """Return a causal mask with transformers' mask function attached. It is registered as mask implementation `PROBE`."""
    length = int(arguments["q_length"])
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=arguments.get("device")).tril()
    mask.rollout_mask_function = arguments["mask_function"]  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(PROBE, rollout_attention)
AttentionMaskInterface.register(PROBE, probe_mask)


def function_of(mask: Tensor) -> MaskFunction | None:
    """Return the function that `probe_mask` attached to a mask or, for a view, to its base; None if there is none."""
    function: MaskFunction | None = getattr(mask, "rollout_mask_function", None)
    return function if function is not None or mask._base is None else function_of(mask._base)


def window_of(function: MaskFunction, length: int, device: torch.device) -> int | None:
    """Return the window of a mask function over sequences of `length` tokens.

    The window is the number of last positions, including its own, that each position attends to. None means all positions up
    to its own. The check compares all keys for some queries, and the keys at both edges of the window for every query.

    Args:
        device: device of the tensors that the mask function may use.

    Raises:
        OtherMask: the mask is not a causal window; the message shows the first position that differs from one.
    """
    positions = torch.arange(length, device=device)
    window = int(_seen(function, positions[-1], positions).sum())
    firsts = (positions + 1 - window).clamp(min=0)

    def expect(expected: Tensor, queries: Tensor, keys: Tensor) -> None:
        differ = (_seen(function, queries, keys) != expected).nonzero()
        if len(differ):
            at = int(differ[0])
            query, key = (int(each.expand(len(expected))[at]) for each in (queries, keys))
            raise OtherMask(
                f"position {query} {'does not see' if expected[at] else 'sees'} position {key}, which is neither causal "
                f"attention nor a window of the last {window}"
            )

    dense = range(min(length, _DENSE))
    for query in sorted({*dense, length // 2, length - 1}):
        # Check all keys for a few queries only: a row may have a million positions.
        keys = positions if query in (0, length // 2, length - 1) else positions[: max(dense.stop, query + 2)]
        expect((keys <= query) & (keys >= firsts[query]), positions[query], keys)
    before = (firsts - 1).clamp(min=0)
    expect(before == firsts, positions, before)
    for keys in (firsts, positions):
        expect(torch.ones_like(positions, dtype=torch.bool), positions, keys)
    return None if window == length else window


def _seen(function: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    zero = keys.new_zeros(())
    try:
        seen = function(zero, zero, queries, keys)
    except Exception as exc:
        raise OtherMask(
            f"its mask function does not take position {int(queries.max())} ({type(exc).__name__}: {exc})"
        ) from exc
    return seen.expand(max(queries.numel(), keys.numel()))
