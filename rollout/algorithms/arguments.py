"""Argument checks of the algorithms, and their masked log-prob difference.

Always true: a message names the tensor, the rule and the cure; shapes and dtypes are checked without a device sync.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)


def log_ratio(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, detach: bool) -> Tensor:
    """[N, T] Δ = `logprobs` − `rollout_logprobs`, 0 where masked out."""
    check_floating("logprobs", logprobs)
    check_floating("rollout_logprobs", rollout_logprobs)
    if mask.ndim != 2:
        raise ValueError(f"mask has shape {list(mask.shape)}: must be [N, T]; give a single row as mask[None]")
    check_mask(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    dtype = torch.promote_types(wide(logprobs).dtype, wide(rollout_logprobs).dtype)
    ours, theirs = (torch.where(mask, each.to(dtype), 0) for each in (logprobs, rollout_logprobs))
    return (ours - theirs).detach() if detach else ours - theirs


def row_mean(delta: Tensor, mask: Tensor) -> Tensor:
    return delta.sum(1) / mask.sum(1).clamp(min=1)


def check_above_zero(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}={value!r}: must be a number above 0")


def check_floating(name: str, values: Tensor) -> None:
    if not values.is_floating_point():
        raise ValueError(f"{name} has dtype {values.dtype}: must be floating; convert it with .float()")


def check_integer(name: str, values: Tensor) -> None:
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {values.dtype}: must be an integer type, as in the batch")


def check_mask(mask: Tensor, **others: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}: must be bool; convert it with .bool()")
    for name, values in others.items():
        if values.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, mask {list(mask.shape)}: must be equal, entry for entry; "
                "log-probs of logits[:, :-1] belong to mask[:, 1:]"
            )
