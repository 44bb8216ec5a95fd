"""Group-relative advantages: GRPO (mean and std), RLOO (leave-one-out), Dr. GRPO (mean only)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rollout.algorithms.importance import check_above_zero, check_integer, wide


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    kind: Literal["grpo", "rloo", "dr_grpo"] = "grpo",
    valid: Tensor | None = None,
    eps: float = 1e-4,
) -> Tensor:
    """Return the advantage of each sample relative to its group, the n samples of one prompt with rewards r.

        grpo     (r − mean) / (std + eps), std with n − 1 in the denominator, as in TRL and verl
                 Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2
        rloo     r − mean of the other rewards = (r − mean) · n / (n − 1)
                 Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024,
                 arXiv:2402.14740
        dr_grpo  r − mean
                 Liu et al. 2025, Dr. GRPO, arXiv:2503.20783

    A group of one sample gets 0. A group of equal rewards gets exactly 0.

    Args:
        rewards: [N], the reward of each of N samples, of any numeric dtype.
        group_ids: integer [N], in any order; samples with equal ids are one group, of any size.
        kind: the formula.
        valid: bool [N], the samples that count. None means all. The other samples get 0 and do not affect their group; their
            rewards may be NaN.
        eps: a small number above 0 that keeps the division finite; TRL uses 1e-4.

    Returns:
        The advantages, float32 [N], detached from autograd.

    Raises:
        ValueError: shapes or dtypes do not match, `eps` is not a number above 0, or a valid sample's reward is not finite.
    """
    _check_rows(rewards, group_ids, valid)
    if kind not in ("grpo", "rloo", "dr_grpo"):
        raise ValueError(f"kind={kind!r}: must be 'grpo', 'rloo' or 'dr_grpo'")
    check_above_zero("eps", eps)
    rewards = wide(rewards.detach())
    counts = torch.ones_like(rewards) if valid is None else valid.to(rewards.dtype)
    rewards = torch.where(counts > 0, rewards, 0)
    _check_finite(rewards)
    _, group = torch.unique(group_ids, return_inverse=True)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(values)).index_add(0, group, values)[group]

    n = total(counts)
    # Subtract the group's lowest reward first, so that equal rewards give exactly 0, however large they are.
    lowest = torch.where(counts > 0, rewards, math.inf)
    lowest = rewards.new_full((len(rewards),), math.inf).scatter_reduce(0, group, lowest, "amin")[group]
    above = torch.where(counts > 0, rewards - lowest, 0)
    advantages = torch.where(counts > 0, above - total(above) / n.clamp(min=1), 0)
    others = (n - 1).clamp(min=1)
    if kind == "grpo":
        advantages = advantages / ((total(advantages.square()) / others).sqrt() + eps)
    elif kind == "rloo":
        advantages = advantages * n / others
    return torch.where(n > 1, advantages, 0)


def _check_rows(rewards: Tensor, group_ids: Tensor, valid: Tensor | None) -> None:
    if rewards.ndim != 1:
        raise ValueError(f"rewards have shape {list(rewards.shape)}: must be [N], one per sample")
    if group_ids.shape != rewards.shape:
        raise ValueError(
            f"group_ids have shape {list(group_ids.shape)}, rewards {list(rewards.shape)}: must be equal, one per sample; "
            "a prompt's n samples share its id"
        )
    check_integer("group_ids", group_ids)
    if valid is not None and (valid.shape != rewards.shape or valid.dtype != torch.bool):
        raise ValueError(
            f"valid is {valid.dtype} {list(valid.shape)}: must be torch.bool {list(rewards.shape)}, one per sample"
        )


def _check_finite(rewards: Tensor) -> None:
    bad = (~rewards.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        raise ValueError(
            f"rewards[{bad[0]}]={rewards[bad[0]].item()}: must be finite, or its whole group is lost; leave the row out by "
            "valid="
        )
